"""Reader of the node availability traces of the Oobleck artifact.

Three columns without header: time [ms], ``add`` or ``remove``, name of the node. Times do not
fall, a node is added once, and a removed node never comes back under its name.
"""

import heapq
from pathlib import Path

import pandas as pd

from makespan.traces._files import cell_error, read_raw
from makespan.traces._report import Finding, ReadReport, finish_report
from makespan.units import MS

__all__ = ["read_oobleck_nodes"]

_EVENTS = {"add": "joined", "remove": "failed"}


def read_oobleck_nodes(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read a node availability trace.

    Parameters
    ----------
    path
        CSV file.

    Returns
    -------
    tuple
        A table ``time_s, node_id, kind, node`` and the report. ``kind`` is ``joined`` or
        ``failed``; ``node`` is the name in the trace and ``node_id`` the slot of the cluster
        that it takes: the lowest one free, so as many slots are used as nodes are alive at once.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty; a time is not a whole number of ms, or falls; an event is unknown; a
        node is added twice, or removed while it is not there. Names row and column.
    """
    where, findings = str(path), list[Finding]()
    lines = [line for line in read_raw(path, findings).splitlines() if line.strip()]
    rows, slots, free, before = [], dict[str, int](), list[int](), 0
    gone: set[str] = set()
    for number, line in enumerate(lines, 1):
        time_ms, event, node = _fields(line, number, where)
        if time_ms < before:
            raise cell_error(
                where, number, "time", time_ms, f"times that do not fall; the row above has {before}"
            )
        before = time_ms
        _check_node(number, event, node, slots, gone, where)
        if event == "add":
            slots[node] = heapq.heappop(free) if free else len(slots)
        rows.append((time_ms * MS, slots[node], _EVENTS[event], node))
        if event == "remove":
            heapq.heappush(free, slots.pop(node))
            gone.add(node)
    table = pd.DataFrame(rows, columns=["time_s", "node_id", "kind", "node"])
    return table, finish_report(where, len(lines), len(table), findings)


def _fields(line: str, row: int, where: str) -> tuple[int, str, str]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 3:
        raise cell_error(where, row, "row", line, "three cells: time in ms, add or remove, node")
    time, event, node = cells
    if not (time.isascii() and time.isdigit()):
        raise cell_error(where, row, "time", time, "a whole number of ms, 0 or more")
    if event not in _EVENTS:
        raise cell_error(where, row, "event", event, "add, remove")
    if not node:
        raise cell_error(where, row, "node", node, "a name")
    return int(time), event, node


def _check_node(row: int, event: str, node: str, slots: dict[str, int], gone: set[str], where: str) -> None:
    if event == "add" and (node in slots or node in gone):
        raise cell_error(where, row, "node", node, "a node that was not added before")
    if event == "remove" and node not in slots:
        raise cell_error(
            where, row, "node", node, f"a node that is there: {', '.join(sorted(slots)) or 'none'}"
        )
