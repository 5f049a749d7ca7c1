"""Reading what goes into the engine besides the trace."""

import pandas as pd

from makespan.errors import TraceError
from makespan.sim._events import NodeEvent, NodeEventKind
from makespan.tables import EVENTS, FAILURES, OUTCOMES

__all__ = ["EVENTS", "FAILURES", "OUTCOMES", "read_failures"]


def read_failures(frame: pd.DataFrame, where: str) -> tuple[NodeEvent, ...]:
    """Return the node events of a table of schema `FAILURES`.

    Raises
    ------
    TraceError
        The table does not follow the schema or a kind is unknown; names row and column.
    """
    checked = FAILURES.validate(frame, where=where)
    accepted = [kind.value for kind in NodeEventKind]
    events = []
    columns = (checked[name].tolist() for name in FAILURES.names)
    for row, (time_s, node_id, kind) in enumerate(zip(*columns, strict=True)):
        if kind not in accepted:
            raise TraceError(
                f"{where}: row {row + 1}, column 'kind': found {kind!r}; accepted: {', '.join(accepted)}"
            )
        events.append(NodeEvent(time_s, node_id, NodeEventKind(kind)))
    return tuple(events)
