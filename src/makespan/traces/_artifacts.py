"""Readers of the artifacts of EasyScale (job lists) and Oobleck (availability of nodes).

The published EasyScale list repeats names, is not in order of time, and holds a stray ninth column and a
flag of 40; each is repaired and reported. Oobleck's files have no header: time [ms], ``add`` or
``remove``, name of the node; times do not fall, a node is added once, and a removed node never comes
back under its name.
"""

import heapq
from pathlib import Path
from typing import Literal

import pandas as pd

from makespan.errors import cell_error
from makespan.tables import check_length, table_schema
from makespan.traces._cells import (
    ROW,
    Finding,
    ReadReport,
    drop,
    finish_report,
    in_order,
    is_missing,
    numbers,
    read_lines,
    refuse,
    repair,
)
from makespan.traces._repairs import FLAG, NAME_NUMBERED, NAME_REPLACED, STRAY_CELLS
from makespan.units import MS

__all__ = ["EASYSCALE_JOBS", "read_easyscale_jobs", "read_oobleck_nodes"]

EASYSCALE_JOBS = table_schema(
    "easyscale_jobs",
    ("job_id", "text", "", "name of the job, unique"),
    ("submit_time_s", "float", "s", "when it enters the system"),
    ("workload", "text", "", "what it trains"),
    ("max_parallelism", "int", "1", "logical workers"),
    ("micro_batch_size", "int", "samples", "samples a logical worker and step"),
    ("epochs", "float", "1", "passes over the data"),
    ("is_heterogeneous", "bool", "", "whether it may run on mixed GPU types"),
    ("home_gpu", "text", "", "GPU type that it prefers"),
)

_COUNT = "a whole number, 1 or more"
_EASYSCALE = (
    "name", "time", "application", "max_parallelism", "batch_size", "epochs",
    "enable_heterogeneous_deterministic", "preferred_gpu",
)  # fmt: skip


def read_easyscale_jobs(
    path: str | Path, dedup: Literal["rename", "artifact"] = "rename"
) -> tuple[pd.DataFrame, ReadReport]:
    """Read an EasyScale job list: schema `EASYSCALE_JOBS`, and the report.

    ``dedup`` says what becomes of a name that occurs again: ``"rename"`` keeps every row in order of
    submission and numbers the later ones; ``"artifact"`` does as the released simulator, where a later row
    replaces the earlier one at its position and nothing is sorted.
    """
    where, findings = str(path), list[Finding]()
    cells = _easyscale_cells(path, findings)
    frame = _easyscale_frame(cells, where, findings)
    n_read = len(frame)
    again = frame["job_id"].duplicated()
    if dedup == "artifact":
        last = frame.groupby("job_id", sort=False).tail(1).set_index("job_id")
        kept = drop(frame, again, NAME_REPLACED, findings)
        frame = last.loc[kept["job_id"]].reset_index()
        report = finish_report(where, n_read, len(frame), findings)
        return EASYSCALE_JOBS.validate(frame.drop(columns=ROW), where), report
    repair(frame, again, NAME_NUMBERED, findings)
    number = (frame.groupby("job_id").cumcount() + 1).astype(str)
    frame = frame.assign(job_id=frame["job_id"].mask(again, frame["job_id"] + "#" + number))
    ordered = in_order(frame, findings).drop(columns=ROW)
    report = finish_report(where, n_read, len(frame), findings)
    return EASYSCALE_JOBS.validate(ordered, where), report


def _easyscale_cells(path: str | Path, findings: list[Finding]) -> pd.DataFrame:
    """Split the lines by hand: their lengths differ, which a CSV parser refuses."""
    lines = read_lines(path, _EASYSCALE, findings)
    where, n = str(path), len(_EASYSCALE)
    if tuple(name.lower() for name in lines[0][:n]) != _EASYSCALE:
        raise cell_error(where, 0, "header", ",".join(lines[0]), ",".join(_EASYSCALE))
    if len(lines) == 1:
        raise cell_error(where, 1, "name", "nothing", "at least one job")
    stray = [row for row, line in enumerate(lines[1:], 1) if len(line) > n]
    if stray:
        findings.append(Finding("repaired", STRAY_CELLS, tuple(stray)))
    for row, line in enumerate(lines[1:], 1):
        check_length(row, line[:n], _EASYSCALE, where)
    body = [line[:n] for line in lines[1:]]
    return pd.DataFrame(body, columns=list(_EASYSCALE)).assign(**{ROW: range(1, len(body) + 1)})


def _easyscale_frame(cells: pd.DataFrame, where: str, findings: list[Finding]) -> pd.DataFrame:
    for column in _EASYSCALE:
        refuse(cells, is_missing(cells[column]), column, "a value", where)
    accepted = "a number, 0 or more"
    flag = numbers(cells, "enable_heterogeneous_deterministic", where, "0 or 1", least=0, findings=findings)
    odd = ~flag.isin([0.0, 1.0])
    repair(cells, odd, FLAG, findings)
    return pd.DataFrame(
        {
            "job_id": cells["name"],
            "submit_time_s": numbers(cells, "time", where, accepted, least=0, findings=findings),
            "workload": cells["application"],
            "max_parallelism": numbers(
                cells, "max_parallelism", where, _COUNT, least=1, is_whole=True, findings=findings
            ),
            "micro_batch_size": numbers(
                cells, "batch_size", where, _COUNT, least=1, is_whole=True, findings=findings
            ),
            "epochs": numbers(cells, "epochs", where, accepted, least=0, findings=findings),
            "is_heterogeneous": flag > 0,
            "home_gpu": cells["preferred_gpu"].str.lower(),
            ROW: cells[ROW],
        }
    )


_OOBLECK = ("time", "event", "node")
_EVENTS = {"add": "joined", "remove": "failed"}


def read_oobleck_nodes(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read a node availability trace: a table ``time_s, node_id, kind, node``, and the report.

    ``kind`` is ``joined`` or ``failed``; ``node`` is the name in the trace and ``node_id`` the slot of the
    cluster that it takes: the lowest one free, so as many slots are used as nodes are alive at once.
    Refused: times that fall, unknown events, nodes that are added twice or removed while not there.
    """
    where, findings = str(path), list[Finding]()
    lines = read_lines(path, _OOBLECK, findings)
    rows, slots, free, before = [], dict[str, int](), list[int](), 0
    gone: set[str] = set()
    for number, line in enumerate(lines, 1):
        time_ms, event, node = _event(line, number, where)
        if time_ms < before:
            accepted = f"times that do not fall; the row above has {before}"
            raise cell_error(where, number, "time", time_ms, accepted)
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


def _event(cells: list[str], row: int, where: str) -> tuple[int, str, str]:
    check_length(row, cells, _OOBLECK, where)
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
        accepted = f"a node that is there: {', '.join(sorted(slots)) or 'none'}"
        raise cell_error(where, row, "node", node, accepted)
