"""From files to the scenarios of the experiments."""

from collections.abc import Mapping

from makespan.hardware import cluster
from makespan.papers.morphling._steering import steered_catalogue
from makespan.studies import Scenario, read_job_lists
from makespan.tables import STEERING, THROUGHPUT, read_csv
from makespan.throughput import ReferenceTimes

__all__ = ["read_scenarios", "read_times"]


def read_scenarios(
    tables: Mapping[str, str], knowledge: str, lists: Mapping[str, str], cluster_name: str
) -> dict[str, Scenario]:
    """Read a scenario for each job list, without restart delay and rounds.

    Parameters
    ----------
    tables
        Path of the throughput table by workload.
    knowledge
        Path of a table of `makespan.papers.morphling.steering`.
    lists
        Path of each job list by name.
    cluster_name
        Where jobs run.
    """
    frames = {key: read_csv(path, THROUGHPUT) for key, path in tables.items()}
    hardware = cluster(cluster_name)
    catalogue = steered_catalogue(frames, read_csv(knowledge, STEERING), hardware.nodes[0])
    jobs = read_job_lists(lists)
    return {name: Scenario(name, jobs[name], hardware, catalogue) for name in jobs}


def read_times(tables: Mapping[str, str]) -> ReferenceTimes:
    """Read the iteration times of requests from throughput tables by workload."""
    return ReferenceTimes({key: read_csv(path, THROUGHPUT) for key, path in tables.items()})
