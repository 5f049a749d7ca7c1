"""What elastic jobs may run as, planned when somebody asks: from GPUs of each type to the time of a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from makespan.easyscale._planner import IntraJobPlanner
from makespan.errors import InputError, unknown_name
from makespan.hardware import ClusterSpec
from makespan.plans import Placement
from makespan.sim import Configuration, Devices
from makespan.workloads import JobSpec

__all__ = ["PLAN", "JobKind", "PlannedCatalogue"]

PLAN = "ga"
"""Plan of all configurations: logical workers that share a GPU take turns, as in gradient accumulation."""

_FAMILY = "EasyScale"
_CPU_THREADS = 1
_EXTRA_STEPS = 1  # that the engine adds to every job
_ALL_WASTE = 1.0

Times = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class JobKind:
    """What a job is to the planner.

    Parameters
    ----------
    key
        Name as a workload.
    n_logical_workers, home
        Logical workers (maxP), and type of GPU of the gang that stands for the request.
    micro_batch_s
        Time of a micro-batch on each type of GPU on which the job may run [s], by name of the type.
    mini_batches
        Work, a real number: mini-batches of all logical workers together.
    mixed_micro_batch_s
        The same where the job holds several types at once [s]; empty if that makes no difference.
    """

    key: str
    n_logical_workers: int
    home: str
    micro_batch_s: Times
    mini_batches: float
    mixed_micro_batch_s: Times = ()

    def __post_init__(self) -> None:
        """Check the numbers."""
        types = dict(self.micro_batch_s)
        wrong = [time_s for _, time_s in (*self.micro_batch_s, *self.mixed_micro_batch_s) if not time_s > 0]
        if self.home not in types or wrong or not self.mini_batches > 0:
            raise InputError(
                f"job kind {self.key!r}: home {self.home!r}, micro-batches {types} s, work "
                f"{self.mini_batches}; accepted: positive times, one on the home type, and positive work"
            )

    @property
    def steps(self) -> int:
        """Whole steps of the job in simulations, one at least, beside the one that the engine adds."""
        return max(round(self.mini_batches), 1 + _EXTRA_STEPS) - _EXTRA_STEPS

    @property
    def mini_batches_per_step(self) -> float:
        """Mini-batches of a step, about one: the work is spread evenly over whole steps."""
        return self.mini_batches / (self.steps + _EXTRA_STEPS)


class PlannedCatalogue:
    """A `makespan.sim.Catalogue` behind which the intra-job planner stands.

    A configuration is planned for the GPUs of each type, those of one type on one node, once and only when
    somebody asks for it.

    Parameters
    ----------
    kinds
        What jobs are, by their names as workloads.
    cluster
        What must hold the configurations; None for no limit but the number of logical workers.
    is_elastic
        Whether jobs may run on other GPUs than their gang.
    """

    __slots__ = ("_fitting", "_is_elastic", "_kinds", "_limits", "_made")

    def __init__(
        self, kinds: Iterable[JobKind], cluster: ClusterSpec | None = None, *, is_elastic: bool = True
    ) -> None:
        self._is_elastic = is_elastic
        self._kinds = {kind.key: kind for kind in kinds}
        self._limits = None if cluster is None else _largest_nodes(cluster)
        self._made: dict[tuple[str, Devices], Configuration] = {}
        self._fitting: dict[ClusterSpec, PlannedCatalogue] = {}

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names of all kinds of job, sorted."""
        return tuple(sorted(self._kinds))

    def on(self, cluster: ClusterSpec) -> "PlannedCatalogue":
        """Return the catalogue of what fits an empty cluster."""
        if cluster not in self._fitting:
            self._fitting[cluster] = PlannedCatalogue(
                self._kinds.values(), cluster, is_elastic=self._is_elastic
            )
        return self._fitting[cluster]

    def gangs(self) -> "PlannedCatalogue":
        """Return the catalogue of the same jobs on their gangs alone."""
        return PlannedCatalogue(self._kinds.values(), is_elastic=False)

    def all(self, workload_key: str) -> tuple[Configuration, ...]:
        """Return the configurations on all GPUs that the kind of job may hold; this plans them all."""
        kind = self._kind(workload_key)
        if not self._is_elastic:
            return self._gang(kind)
        types = [name for name, _ in kind.micro_batch_s]
        available = [self._limit(name, kind) for name in types]
        plans = _planner(kind.micro_batch_s, kind.n_logical_workers).companions(available, _ALL_WASTE)
        vectors = (zip(types, plan.nums, strict=True) for plan in plans)
        found = [self._configuration(kind, _devices(vector)) for vector in vectors]
        return tuple(sorted(found, key=lambda item: (item.n_gpus, item.n_nodes, item.counts, item.gpu_types)))

    def holding(self, workload_key: str, devices: Devices) -> tuple[Configuration, ...]:
        """Return the one configuration on these devices, or none."""
        kind = self._kind(workload_key)
        if not self._is_elastic:
            return tuple(item for item in self._gang(kind) if item.devices == devices)
        found = self._made.get((workload_key, devices))
        if found is not None:
            return (found,)
        may_run = dict(kind.micro_batch_s)
        fits = all(name in may_run and 0 < count <= self._limit(name, kind) for name, count in devices)
        if not fits or not 1 <= sum(count for _, count in devices) <= kind.n_logical_workers:
            return ()
        return (self._configuration(kind, devices),)

    def requested(self, job: JobSpec) -> Configuration:
        """Return the gang of a job: a GPU of its home type for each logical worker, or all that there are."""
        gang = self._gang(self._kind(job.workload))
        if not gang:
            home = self._kind(job.workload).home
            raise InputError(f"job {job.job_id!r}: no GPU of type {home!r}; accepted: a cluster that has one")
        return gang[0]

    def as_requested(self, job: JobSpec) -> tuple[Configuration, ...]:
        """Return the gang of a job alone: nothing else keeps type and number of its GPUs."""
        return (self.requested(job),)

    def accepts(self, configuration: Configuration) -> bool:
        """Whether a configuration was planned here."""
        return self._made.get((configuration.workload, configuration.devices)) is configuration

    def find(
        self, workload_key: str, plan: str, placement: str, cpu_threads: int, gpu_types: tuple[str, ...] = ()
    ) -> Configuration | None:
        """Return the configuration of these labels, or None if it may not run."""
        counts = Placement.parse(placement).gpus_per_node
        if (plan, cpu_threads, len(set(gpu_types))) != (PLAN, _CPU_THREADS, len(counts)):
            return None
        found = self.holding(workload_key, _devices(zip(gpu_types, counts, strict=True)))
        return found[0] if found else None

    def _kind(self, workload_key: str) -> JobKind:
        if workload_key not in self._kinds:
            raise unknown_name("workload in the catalogue", workload_key, self._kinds)
        return self._kinds[workload_key]

    def _gang(self, kind: JobKind) -> tuple[Configuration, ...]:
        """Return the configuration of a job that gets all that it asks for, or all of that type there is."""
        n_gpus = min(kind.n_logical_workers, self._limit(kind.home, kind))
        return (self._configuration(kind, ((kind.home, n_gpus),)),) if n_gpus else ()

    def _limit(self, gpu_type: str, kind: JobKind) -> int:
        return kind.n_logical_workers if self._limits is None else self._limits.get(gpu_type, 0)

    def _configuration(self, kind: JobKind, devices: Devices) -> Configuration:
        """Return the configuration of a kind of job on devices that it may hold."""
        key = (kind.key, devices)
        if key not in self._made:
            pairs = sorted((count, name) for name, count in devices)
            time_s = _step_time_s(kind, dict(devices))
            self._made[key] = Configuration(
                workload=kind.key,
                plan=PLAN,
                family=_FAMILY,
                placement=Placement(tuple(count for count, _ in pairs)),
                cpu_threads=_CPU_THREADS,
                host_memory_bytes_per_gpu=0.0,
                iter_time_s=time_s,
                predicted_iter_time_s=time_s,
                provenance="published",
                gpu_types=tuple(name for _, name in pairs),
                key=key,
            )
        return self._made[key]


def _devices(pairs: Iterable[tuple[str, int]]) -> Devices:
    return tuple(sorted((name, count) for name, count in pairs if count))


def _largest_nodes(cluster: ClusterSpec) -> Mapping[str, int]:
    """Return the devices of the largest node of each type."""
    limits: dict[str, int] = {}
    for node in cluster.nodes:
        limits[node.gpu_type] = max(limits.get(node.gpu_type, 0), node.n_gpus)
    return limits


def _step_time_s(kind: JobKind, devices: Mapping[str, int]) -> float:
    times = kind.mixed_micro_batch_s if len(devices) > 1 and kind.mixed_micro_batch_s else kind.micro_batch_s
    plan = _planner(times, kind.n_logical_workers).plan([devices.get(name, 0) for name, _ in times])
    return plan.step_time_s * kind.mini_batches_per_step


@cache
def _planner(micro_batch_s: Times, n_logical_workers: int) -> IntraJobPlanner:
    """Planner of all jobs with these times, which share what it has worked out."""
    return IntraJobPlanner([1.0 / time_s for _, time_s in micro_batch_s], n_logical_workers)
