"""Sensitivity curves: throughput of every plan family against resources, and their envelope."""

from collections.abc import Iterable, Sequence

import pandas as pd

from makespan.hardware import cluster
from makespan.perf import envelope, fit_table, load_environment, sensitivity_families
from makespan.tables import SENSITIVITY, SENSITIVITY_FAMILIES

__all__ = ["sensitivity"]


def sensitivity(
    tables: Iterable[pd.DataFrame],
    cluster_name: str,
    form: str,
    max_gpus: int,
    cpu_threads: Sequence[int] = (),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute the sensitivity curves of several workloads.

    Parameters
    ----------
    tables
        One throughput table a workload, schema `makespan.tables.THROUGHPUT`.
    cluster_name
        Cluster on which plans run; its constants enter the performance model.
    form
        Form of the performance model.
    max_gpus
        Curves go from 1 to this many GPUs.
    cpu_threads
        CPU threads a GPU at which offload plans are computed besides the even share of a node.

    Returns
    -------
    tuple of pandas.DataFrame
        Best plan with at most g GPUs (schema `makespan.tables.SENSITIVITY`), and best plan of each
        family at each GPU count (schema `makespan.tables.SENSITIVITY_FAMILIES`).
    """
    hardware = cluster(cluster_name)
    constants = load_environment(cluster_name)
    counts = range(1, max_gpus + 1)
    curves, families = [], []
    for table in tables:
        fit = fit_table(table, str(table["workload"].iloc[0]), form, constants).fit
        of_workload = sensitivity_families(fit, hardware, counts, cpu_threads)
        families.append(of_workload)
        curves.append(envelope(of_workload, counts))
    return (
        SENSITIVITY.validate(pd.concat(curves, ignore_index=True), where="sensitivity"),
        SENSITIVITY_FAMILIES.validate(pd.concat(families, ignore_index=True), where="sensitivity_families"),
    )
