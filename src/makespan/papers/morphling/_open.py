"""From files to what simulations share."""

from collections.abc import Mapping

from makespan.hardware import cluster
from makespan.papers.morphling._bench import Bench
from makespan.papers.morphling._lists import read_job_lists
from makespan.papers.morphling._predictions import predicted_catalogue
from makespan.tables import PREDICTIONS, THROUGHPUT, read_csv
from makespan.throughput import ReferenceTimes

__all__ = ["read_bench", "read_times"]


def read_bench(
    tables: Mapping[str, str], knowledge: str, lists: Mapping[str, str], cluster_name: str, n_processes: int
) -> Bench:
    """Read what simulations share.

    Parameters
    ----------
    tables
        Path of the throughput table by workload.
    knowledge
        Path of a table of `makespan.papers.morphling.predictions`.
    lists
        Path of each job list by name.
    cluster_name
        Where jobs run.
    n_processes
        Simulations that run at the same time.
    """
    frames = {key: read_csv(path, THROUGHPUT) for key, path in tables.items()}
    hardware = cluster(cluster_name)
    catalogue = predicted_catalogue(frames, read_csv(knowledge, PREDICTIONS), hardware.nodes[0])
    return Bench(hardware, catalogue, read_job_lists(lists), n_processes)


def read_times(tables: Mapping[str, str]) -> ReferenceTimes:
    """Read the iteration times of requests from throughput tables by workload."""
    return ReferenceTimes({key: read_csv(path, THROUGHPUT) for key, path in tables.items()})
