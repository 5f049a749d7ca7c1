"""Reader of the openb traces: lists of pods and nodes of a GPU-sharing cluster.

Format: the data description of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing
Workloads with Fragmentation Gradient Descent", ATC 2023. CPUs and shares of a GPU are in
thousandths, memory in MiB, times in seconds from an undisclosed origin.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from makespan.tables import Column, TableSchema
from makespan.traces._files import cell_error, is_missing, numbers, read_cells
from makespan.traces._report import ROW, Finding, ReadReport, drop, finish_report, repair
from makespan.traces._requests import RequestTrace, finish_requests
from makespan.units import GIB

__all__ = ["NODE_LIST", "read_openb_nodes", "read_openb_pods"]

_PODS = (
    "name", "cpu_milli", "num_gpu", "gpu_milli", "qos", "pod_phase",
    "creation_time", "deletion_time", "scheduled_time",
)  # fmt: skip
_PHASES = ("Succeeded", "Running", "Pending", "Failed")
_NODES = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_MILLI = 1000.0
_MIB = GIB / 1024
_SECONDS = "a time in seconds, or nothing"

NODE_LIST = TableSchema(
    "node_list",
    (
        Column("node_id", "text", "", "name of the node"),
        Column("n_gpus", "int", "1", "GPUs of the node"),
        Column("n_cpus", "int", "1", "CPUs of the node"),
        Column("memory_bytes", "float", "B", "host memory"),
        Column("gpu", "text", "", "type of its GPUs, empty if it has none"),
    ),
)


def read_openb_pods(path: str | Path) -> RequestTrace:
    """Read a pod list (``openb_pod_list_*.csv``).

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    RequestTrace
        The tenant is the class of service. Pods that were still there at the last deletion time of
        the file ran at its end and are dropped; requests for a share of a GPU get a whole one.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty, lacks a column, a cell cannot be read, or no job is left.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _PODS, findings)
    _check_phase(cells, where)
    frame = _pods(cells, where)
    frame = drop(frame, frame["start_s"].isna() & frame["submit_time_s"].notna(), "never scheduled", findings)
    last = frame["end_s"].max()
    open_end = (
        (frame["status"] == "Running") & (frame["end_s"] == last) & (frame["end_s"].duplicated(keep=False))
    )
    frame = drop(frame, open_end, "running at the end of the trace", findings)
    shared = (frame["n_gpus"] == 1) & (frame["share"] < 1.0)
    repair(frame, shared, "asks for a part of a GPU; rounded up to a whole one", findings)
    early = frame["start_s"] < frame["submit_time_s"]
    repair(frame, early, "starts before its submission; submission set to the start", findings)
    frame = frame.assign(
        submit_time_s=frame["submit_time_s"].mask(early, frame["start_s"]),
        duration_s=frame["end_s"] - frame["start_s"],
    )
    return finish_requests(frame.drop(columns=["start_s", "end_s", "share"]), findings, where, len(cells))


def _check_phase(cells: pd.DataFrame, where: str) -> None:
    unknown = ~cells["pod_phase"].isin(_PHASES)
    for row, phase in zip(cells[ROW][unknown], cells["pod_phase"][unknown], strict=True):
        raise cell_error(where, int(row), "pod_phase", phase, ", ".join(_PHASES))


def _pods(cells: pd.DataFrame, where: str) -> pd.DataFrame:
    cpus = numbers(cells, "cpu_milli", where, "thousandths of a CPU, 0 or more", least=0).fillna(0)
    share = numbers(cells, "gpu_milli", where, "thousandths of a GPU, 0 or more", least=0)
    return pd.DataFrame(
        {
            "job_id": cells["name"],
            "submit_time_s": numbers(cells, "creation_time", where, _SECONDS, least=0),
            "start_s": numbers(cells, "scheduled_time", where, _SECONDS, least=0),
            "end_s": numbers(cells, "deletion_time", where, _SECONDS, least=0),
            "n_gpus": numbers(cells, "num_gpu", where, "a number of GPUs, 0 or more", least=0).fillna(0),
            "n_cpus": np.ceil(cpus / _MILLI),
            "share": share / _MILLI,
            "tenant": cells["qos"],
            "status": cells["pod_phase"],
            ROW: cells[ROW],
        }
    )


def read_openb_nodes(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read a node list (``openb_node_list_*.csv``).

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    tuple
        Schema `NODE_LIST`, and the report: nodes without GPU are kept.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty, a cell cannot be read, or a node occurs twice with different resources.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _NODES, findings)
    accepted = "a number, 0 or more"
    table = pd.DataFrame(
        {
            "node_id": cells["sn"],
            "n_gpus": numbers(cells, "gpu", where, accepted, least=0).fillna(0),
            "n_cpus": np.floor(numbers(cells, "cpu_milli", where, accepted, least=0).fillna(0) / _MILLI),
            "memory_bytes": numbers(cells, "memory_mib", where, accepted, least=0).fillna(0) * _MIB,
            "gpu": cells["model"].mask(is_missing(cells["model"]), ""),
            ROW: cells[ROW],
        }
    )
    same = table.drop(columns=ROW).duplicated()
    kept = drop(table, same, "node occurs again with the same resources", findings)
    again = kept["node_id"].duplicated()
    for row, name in zip(kept[ROW][again], kept["node_id"][again], strict=True):
        raise cell_error(where, int(row), "sn", name, "one row a node, or equal ones")
    report = finish_report(where, len(cells), len(kept), findings)
    return NODE_LIST.validate(kept.drop(columns=ROW), where), report
