"""From the events of a simulation to the spans that a Gantt view shows."""

import math
from dataclasses import dataclass

import pandas as pd

from makespan.plots._style import require_columns

__all__ = ["job_spans"]

_HELD = {"started", "reconfigured"}
_LOST = {"suspended", "interrupted", "finished"}
_SPAN_COLUMNS = ["job_id", "plan_family", "node", "gpu", "start_s", "ready_s", "end_s"]
_TRACKED = [*sorted(_HELD), *sorted(_LOST), "ready"]


def job_spans(events: pd.DataFrame) -> pd.DataFrame:
    """Return who held which GPU of which node, from when until when.

    The simulation allocates numbers of GPUs on nodes; which ones they are is chosen here, the
    lowest free ones first.

    Parameters
    ----------
    events
        Events table of a simulation, with ``nodes`` as ``node:devices`` joined by spaces.

    Returns
    -------
    pandas.DataFrame
        ``job_id, plan_family, node, gpu, start_s, ready_s, end_s``: restarting until ``ready_s``,
        running afterwards.

    Raises
    ------
    TraceError
        A column is missing or there is no event.
    """
    require_columns(events, "time_s", "seq", "kind", "job_id", "nodes", "family", figure="gantt")
    rows = events[events["kind"].isin(_TRACKED)].sort_values(["time_s", "seq"])
    spans: dict[str, _Span] = {}
    busy: dict[int, set[int]] = {}
    closed: list[tuple[object, ...]] = []
    for time, group in rows.groupby("time_s", sort=False):
        columns = (group[name].astype(str) for name in ("kind", "job_id", "nodes", "family"))
        records = list(zip(*columns, strict=True))
        for kind, job, _, _ in records:
            if job in spans and kind == "ready":
                spans[job].ready_s = float(str(time))
            elif job in spans:
                closed += _close(spans.pop(job), float(str(time)), busy)
        for kind, job, nodes, family in records:
            if kind in _HELD:
                spans[job] = _Span(job, family, float(str(time)), _take(nodes, busy))
    for span in spans.values():
        closed += _close(span, float(rows["time_s"].max()), busy)
    table = pd.DataFrame(closed, columns=_SPAN_COLUMNS)
    return table.sort_values(["start_s", "node", "gpu"], ignore_index=True)


@dataclass(slots=True)
class _Span:
    """GPUs held by a job since its last change."""

    job_id: str
    family: str
    start_s: float
    gpus: list[tuple[int, int]]
    ready_s: float = math.inf


def _take(nodes: str, busy: dict[int, set[int]]) -> list[tuple[int, int]]:
    """Choose the lowest free GPUs of each node."""
    taken: list[tuple[int, int]] = []
    for part in nodes.split():
        node, count = (int(value) for value in part.split(":"))
        used = busy.setdefault(node, set())
        free = [gpu for gpu in range(len(used) + count) if gpu not in used][:count]
        used.update(free)
        taken += [(node, gpu) for gpu in free]
    return taken


def _close(span: _Span, end_s: float, busy: dict[int, set[int]]) -> list[tuple[object, ...]]:
    ready_s = min(span.ready_s, end_s)
    for node, gpu in span.gpus:
        busy[node].discard(gpu)
    return [(span.job_id, span.family, node, gpu, span.start_s, ready_s, end_s) for node, gpu in span.gpus]
