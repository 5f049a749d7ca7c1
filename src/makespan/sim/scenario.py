"""Scenarios: everything that a simulation needs, except the policy, as one value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from makespan.arguments import check_fields
from makespan.errors import InputError, shown, unknown_name
from makespan.hardware import ClusterSpec
from makespan.notebook import Display, Displayed
from makespan.sim.catalogue import Catalogue, RestartCost, restart_cost
from makespan.sim.recovery import Recovery
from makespan.sim.state import NodeEvent
from makespan.workloads import JobSpec

PlacementRule = Literal["best-fit", "worst-fit"]
PLACEMENT_RULES: tuple[PlacementRule, ...] = get_args(PlacementRule)
"""Choices among nodes that can hold a share of a job: those with the fewest or the most free devices."""
DECISION_LIMIT_S = 600.0
"""Wall time that one call of a policy may take [s]; far more than any policy needs at any size tried."""


_MOST_STEPS = 1e15  # which floats count exactly
_UNNAMED = Recovery()  # of a job without a name in a mapping of recoveries


@dataclass(frozen=True, slots=True, repr=False)
class Scenario(Displayed):
    """Everything that a simulation needs, except the policy.

    Parameters
    ----------
    name, report
        For tables and messages; report of the readers or the generator of the jobs.
    jobs, cluster
        The trace, whose jobs of the same time queue in the order given, and the nodes.
    catalogue
        Configurations of the jobs, with true times and the times that policies believe.
    restart_delay_s
        Time without progress after each start and change [s], or a `RestartCost`, which has one for each.
    interval_s
        Length of a round [s]; None for the policy's own, 0 to ask after each event.
    failures, checkpoint_interval_s
        Nodes that fail and join, and capacity that is withdrawn and returned; running time between
        checkpoints [s], as an interruption loses the progress since the last one, None if nothing is lost.
    source, predictions
        Source of iteration times, and the knowledge of policies about them, one of
        `makespan.studies.PREDICTION_MODES`; with ``requests``, users state with a job how long a step takes
        as requested.
    decision_limit_s
        Wall time after which one call of a policy is interrupted [s], None or 0 for no limit; no result
        depends on it.
    kept
        Quantity that stays as in the job list on any cluster, for the title: durations or steps.
    made_for
        Cluster for whose nodes and network the times of the catalogue hold, with any number of nodes; None if
        unknown.
    extra_steps
        Work of every job beyond its request, as in the simulator released with Morphling.
    shares_devices
        Whether jobs may be guests on devices of others.
    placement
        Nodes that policies prefer: ``best-fit``, those with the fewest free devices that suffice, or
        ``worst-fit``, those with the most.
    failures_end_s
        Time from which on no more failures were generated [s]; None if ``failures`` are complete.
    recovery
        Recovery of all jobs from failures, or by name of the job, where jobs without a name have a
        ``Recovery()``, a restart; None: an interrupted job returns to the checkpoint that
        ``checkpoint_interval_s`` says, which costs nothing to write.

    Raises
    ------
    InputError
        The cluster has other nodes or another network than ``made_for``, ``predictions`` is exact but the
        catalogue predicts other times, a number is out of range, or ``recovery`` names a job that does not
        exist or comes with ``checkpoint_interval_s``.
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
    decision_limit_s: float | None = DECISION_LIMIT_S
    kept: str = ""
    made_for: ClusterSpec | None = None
    extra_steps: float = 1
    shares_devices: bool = True
    placement: PlacementRule = "best-fit"
    recovery: Recovery | Mapping[str, Recovery] | None = None
    failures_end_s: float | None = None

    def __post_init__(self) -> None:
        """Check numbers, and that the catalogue fits the cluster and the label of its predictions."""
        check_fields(self, "scenario {0.name!r:.80}")
        checkpoint_s = self.checkpoint_interval_s
        if checkpoint_s is not None and not 0 < checkpoint_s < math.inf:
            raise InputError(
                f"checkpoint_interval_s is {checkpoint_s!r}; expected a finite time in s above 0, or None"
            )
        restart_cost(self.restart_delay_s)  # raises where it is neither a time nor a cost
        if not 0 <= self.extra_steps <= _MOST_STEPS:
            raise InputError(f"extra_steps is {self.extra_steps!r}; expected a finite number >= 0")
        if not hasattr(self.catalogue, "on"):
            raise InputError(
                f"scenario {self.name!r}: catalogue is {shown(self.catalogue)}; expected a Catalogue"
            )
        if self.placement not in PLACEMENT_RULES:
            raise unknown_name("placement", str(self.placement), PLACEMENT_RULES)
        if self.recovery is not None and checkpoint_s is not None:
            raise InputError(
                f"checkpoint_interval_s is {checkpoint_s!r}, but recovery has an interval of its own; leave "
                "one of them out"
            )
        if isinstance(self.recovery, Mapping):
            unknown = sorted(self.recovery.keys() - {job.job_id for job in self.jobs})
            if unknown:
                raise InputError(
                    f"recovery: no job has the name {unknown[0]!r}; expected names of the job list"
                )
        made_for = self.made_for
        if made_for is None:
            return
        if not (set(self.cluster.kinds) <= set(made_for.kinds) and self.cluster.network == made_for.network):
            raise InputError(
                f"scenario {self.name!r}: its iteration times hold for nodes and network of cluster "
                f"{made_for.name!r}, got cluster {self.cluster.name!r}; assemble it anew by scenario(..., "
                f"cluster_name=...), or replace catalogue and made_for too"
            )
        if self.predictions == "exact" and not all(
            item.predicted_iter_time_s == item.iter_time_s
            for key in self.catalogue.workloads
            for item in self.catalogue.all(key)
        ):
            raise InputError(
                f"scenario {self.name!r}: predictions are 'exact', but its catalogue predicts other times "
                "than jobs take; change what policies know by makespan.studies.with_predictions"
            )

    def recovery_of(self, job: JobSpec) -> Recovery | None:
        """Return the recovery of a job, or None if the scenario has none."""
        if isinstance(self.recovery, Mapping):
            return self.recovery.get(job.job_id, _UNNAMED)
        return self.recovery

    def display(self) -> Display:
        """Return the title and the jobs."""
        names = ("job_id", "submit_time_s", "workload", "n_gpus", "plan", "steps", "is_guaranteed")
        return Display(self.title, [{name: getattr(job, name) for name in names} for job in self.jobs])

    @property
    def title(self) -> str:
        """Name, source, size, and the kept quantity, in a few words."""
        source = f" ({self.source})" if self.source else ""
        nodes = self.cluster.nodes
        if len({(node.n_gpus, node.gpu_type) for node in nodes}) == 1:
            size = f"{len(nodes)} x {nodes[0].n_gpus} GPUs"
        else:
            counts = dict.fromkeys(self.cluster.gpu_types, 0)
            for node in nodes:
                counts[node.gpu_type] += node.n_gpus
            size = f"{len(nodes)} nodes with {', '.join(f'{n} {kind}' for kind, n in counts.items())}"
        kept = f", {self.kept}" if self.kept else ""
        return f"{self.name}{source}, {len(self.jobs)} jobs on {size}{kept}"


def check_jobs(
    jobs: Sequence[JobSpec], cluster: ClusterSpec, catalogue: Catalogue, where: str = "trace"
) -> None:
    """Check that every job can run as requested on the empty cluster.

    Parameters
    ----------
    catalogue, where
        What fits on the cluster, see `Catalogue.on`; file or producer of the trace, for messages.

    Raises
    ------
    InputError
        A name occurs twice or a request cannot be met; names the row (the first is 1) and the job.
    UnknownNameError
        The catalogue lacks a workload.
    """
    rows: dict[str, int] = {}
    checked: set[tuple[str, str, int, int]] = set()
    for row, job in enumerate(jobs, start=1):
        if job.job_id in rows:
            found = f"job name {job.job_id!r} is that of row {rows[job.job_id]}"
            raise InputError(f"{where}: row {row}: {found}; expected one row per name")
        rows[job.job_id] = row
        request = (job.workload, job.plan, job.n_gpus, job.n_cpus)
        if request in checked:
            continue
        place = f"{where}: row {row}, job {job.job_id!r}"
        if job.n_gpus > cluster.n_gpus:
            raise InputError(
                f"{place}: requests {job.n_gpus} GPUs; expected at most {cluster.n_gpus}, those of "
                f"cluster {cluster.name!r}, or it would never start"
            )
        threads = cluster.max_cpu_threads(job.n_gpus)
        if job.n_cpus > threads:
            raise InputError(
                f"{place}: requests {job.n_cpus} CPU threads; expected at most {threads}, those of the "
                f"{min(job.n_gpus, cluster.n_nodes)} node(s) of {cluster.name!r} that {job.n_gpus} GPU(s) "
                "can use"
            )
        try:
            catalogue.requested(job)
        except InputError as error:
            raise type(error)(f"{place}, on cluster {cluster.name!r}: {error}") from error
        checked.add(request)
