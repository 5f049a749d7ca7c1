"""What is simulated, the policy apart."""

from collections.abc import Mapping
from dataclasses import dataclass

from makespan.hardware import ClusterSpec, cluster
from makespan.sim import Catalogue, NodeEvent, RestartCost
from makespan.studies._predictions import predicted_catalogue
from makespan.tables import PREDICTIONS, THROUGHPUT, read_csv
from makespan.throughput import ReferenceTimes
from makespan.traces import read_jobs
from makespan.workloads import JobSpec

__all__ = ["Scenario", "read_scenarios", "read_times"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a simulation needs, except the policy.

    Parameters
    ----------
    name
        For tables and messages.
    jobs
        The trace.
    cluster
        The nodes.
    catalogue
        What jobs may run as, how fast in truth, and how fast as policies believe.
    restart_delay_s
        Time without progress after each start and change [s], or a function of job, old and new allocation.
    interval_s
        Length of a round [s]; None for the policy's own, 0 to ask after each event.
    failures, checkpoint_interval_s
        Nodes that fail and join, and running time between checkpoints [s], as for `makespan.sim.simulate`.
    source
        Where iteration times come from.
    predictions
        Which iteration times policies decide by: ``exact`` or ``fitted``.
    report
        What readers or the generator say of the jobs.
    """

    name: str
    jobs: tuple[JobSpec, ...]
    cluster: ClusterSpec
    catalogue: Catalogue
    restart_delay_s: float | RestartCost = 0.0
    interval_s: float | None = None
    failures: tuple[NodeEvent, ...] = ()
    checkpoint_interval_s: float | None = None
    source: str = ""
    predictions: str = "exact"
    report: str = ""

    @property
    def title(self) -> str:
        """Name, source and size in a few words."""
        source = f" ({self.source})" if self.source else ""
        size = f"{self.cluster.n_nodes} x {self.cluster.gpus_per_node} GPUs"
        return f"{self.name}{source}, {len(self.jobs)} jobs on {size}"


def read_scenarios(
    tables: Mapping[str, str], predictions: str, lists: Mapping[str, str], cluster_name: str
) -> dict[str, Scenario]:
    """Read a scenario for each job list, without restart delay and rounds.

    Parameters
    ----------
    tables
        Path of the throughput table by workload.
    predictions
        Path of a table of `makespan.studies.predictions`.
    lists
        Path of each job list by name.
    cluster_name
        Where jobs run.
    """
    frames = {key: read_csv(path, THROUGHPUT) for key, path in tables.items()}
    hardware = cluster(cluster_name)
    catalogue = predicted_catalogue(frames, read_csv(predictions, PREDICTIONS), hardware.nodes[0])
    return {name: Scenario(name, read_jobs(path).jobs, hardware, catalogue) for name, path in lists.items()}


def read_times(tables: Mapping[str, str]) -> ReferenceTimes:
    """Read the iteration times of requests from throughput tables by workload."""
    return ReferenceTimes({key: read_csv(path, THROUGHPUT) for key, path in tables.items()})
