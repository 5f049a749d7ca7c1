"""Lists of nodes and of their failures, of the user and of public traces, read into one table."""

import math
from itertools import chain
from pathlib import Path

import pandas as pd

from makespan.arguments import typed
from makespan.errors import TraceError
from makespan.tables import FAILURES
from makespan.traces.cells import (
    ROW,
    Finding,
    ReadReport,
    finish_report,
    first_cells,
    is_missing,
    names,
    numbers,
    one_of,
    read_cells,
    reject,
)
from makespan.traces.readers import (
    NODE_LIST,
    NODES,
    PAI_MACHINE,
    PHILLY_MACHINE,
    SPOT_NODES,
    finish_nodes,
    read_helios_quota,
    read_openb_nodes,
    read_spot_nodes,
)
from makespan.units import GIB

_HELIOS_GPUS = 8  # of each node (Hu et al., SC 2021, table 1)
_QUOTA = ("date", "total")
_WHOLE = "a whole number, 0 or more"
_OWN, _OWN_MORE = ("node_id", "n_gpus", "gpu"), ("n_cpus", "memory_bytes")
_FORMS = {
    "own": _OWN,
    "openb": NODES,
    "PAI": PAI_MACHINE,
    "Philly": PHILLY_MACHINE,
    "spot": SPOT_NODES,
}


@typed
def read_nodes(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read a list of nodes: schema `NODE_LIST`, and the report.

    The columns identify the form: that of the schema (``n_cpus`` and ``memory_bytes`` may be missing), the
    nodes of openb or of Alibaba's spot trace, the machines of PAI or Philly, with or without header line, or
    the quotas of Helios. Of quotas the last day is used; each virtual cluster gets nodes of eight GPUs, and
    one node with the rest. CPUs and memory that a list does not state are 0, GPU types are empty. Philly
    states the memory of its GPUs in place of their type.

    Raises
    ------
    MissingDataError, TraceError
        See `makespan.traces`; or the columns are of no known form.
    """
    known = [*_QUOTA, *chain.from_iterable(_FORMS.values()), *_OWN_MORE]
    first = first_cells(path, known, "a list of nodes")
    columns_found = {name.lower() for name in first}
    if set(_QUOTA) <= columns_found:
        quota, quota_report = read_helios_quota(path)
        day = quota["date"].max()
        held = quota[(quota["date"] == day) & (quota["n_gpus"] > 0)]
        rows = [
            (f"{tenant}-{number}", min(_HELIOS_GPUS, n_gpus - number * _HELIOS_GPUS), 0, 0.0, "")
            for tenant, n_gpus in zip(held["tenant"], held["n_gpus"].tolist(), strict=True)
            for number in range(math.ceil(n_gpus / _HELIOS_GPUS))
        ]
        where = f"{path}, quotas of {day}"
        table = NODE_LIST.validate(pd.DataFrame(rows, columns=NODE_LIST.names), where)
        return table, finish_report(where, len(rows), len(rows), quota_report.findings)
    for form, columns in _FORMS.items():
        if {name.lower() for name in columns} <= columns_found:
            return _read(path, form, has_header=True)
    by_length = {len(PAI_MACHINE): "PAI", len(PHILLY_MACHINE): "Philly"}
    if len(first) in by_length and any(cell.isdigit() for cell in first[1:]):
        return _read(path, by_length[len(first)], has_header=False)
    forms = "; ".join(f"{form}: {', '.join(columns)}" for form, columns in _FORMS.items())
    raise TraceError(
        f"{path}: columns {', '.join(first)} are of no known list of nodes; expected {forms}; "
        "Helios: date, one column per virtual cluster, total"
    )


@typed
def read_node_events(path: str | Path) -> pd.DataFrame:
    """Read failures and returns of nodes: schema `makespan.tables.FAILURES`, and the ``row`` of the file.

    Raises
    ------
    MissingDataError, TraceError
        See `makespan.traces`.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, FAILURES.names, findings)
    columns: dict[str, pd.Series] = {}
    for name, accepted, is_whole in (
        ("time_s", "a time in s, 0 or more", False),
        ("node_id", f"the number of a node, {_WHOLE}", True),
    ):
        values = numbers(cells, name, where, accepted, least=0, is_whole=is_whole, findings=findings)
        reject(cells, values.isna(), name, accepted, where)
        columns[name] = values
    columns["kind"] = one_of(cells, "kind", ("failed", "joined"), where)
    finish_report(where, len(cells), len(cells), findings)
    return FAILURES.validate(pd.DataFrame(columns | {"row": cells[ROW]}), where)


def _read(path: str | Path, form: str, *, has_header: bool) -> tuple[pd.DataFrame, ReadReport]:
    if form == "openb":
        return read_openb_nodes(path)
    if form == "spot":
        spot, spot_report = read_spot_nodes(path)
        return spot.assign(memory_bytes=spot["memory_bytes"].fillna(0.0)), spot_report
    where, findings = str(path), list[Finding]()
    columns = _FORMS[form]
    more = _OWN_MORE if form == "own" else ()
    # Published files of PAI and Philly come without header line.
    cells = read_cells(path, columns, findings, header=None if has_header else columns, optional=more)
    cells = cells.assign(**{name: "" for name in more if name not in cells})

    def number(name: str, scale: float = 1.0) -> "pd.Series[float]":
        return (
            numbers(cells, name, where, "a number, 0 or more", least=0, findings=findings).fillna(0) * scale
        )

    def count(name: str) -> "pd.Series[float]":
        return numbers(cells, name, where, _WHOLE, least=0, is_whole=True, findings=findings).fillna(0)

    def text(name: str) -> "pd.Series[str]":
        return cells[name].mask(is_missing(cells[name]), "")

    if form == "own":
        (node, gpus, gpu), (cpus, memory) = _OWN, _OWN_MORE
        parts = count(gpus), count(cpus), number(memory), text(gpu)
    elif form == "PAI":
        node, kind, cap_cpu, cap_mem, cap_gpu = columns
        parts = count(cap_gpu), number(cap_cpu) // 1, number(cap_mem, GIB), text(kind)
    else:
        node, gpus, gpu_memory = columns
        nothing = pd.Series(0.0, index=cells.index)
        parts = count(gpus), nothing, nothing, text(gpu_memory)
    values = (names(cells, node, where), *parts)
    table = pd.DataFrame(dict(zip(NODE_LIST.names, values, strict=True)))
    return finish_nodes(table, cells, node, where, findings)
