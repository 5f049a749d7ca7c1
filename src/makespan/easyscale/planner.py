"""Intra-job planner: share GPUs of several types among logical workers, and offer plans to the simulator.

EasyScale, equations (1a) to (1e): a GPU of type i runs up to A_i logical workers one after another, so a
mini-batch takes f, the largest of A_i / C_i, on the slowest GPU. Throughput is then maxP / f; capability of
the GPUs beyond that is waste. Equal GPUs whose number does not divide maxP waste, too.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from makespan.arguments import check_fields
from makespan.errors import InputError, unknown_name
from makespan.hardware import ClusterSpec
from makespan.plans import Placement
from makespan.sim import Configuration, Devices
from makespan.workloads import JobSpec

_ROUNDING = 1e-9  # of micro-batches, where a time is a multiple of a rate only up to rounding
Nums = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Use of GPUs by the logical workers of a job; all tuples are by type of GPU, ``(n_types,)``.

    Parameters
    ----------
    nums, executors, threads
        GPUs of each type, processes on each GPU, and logical workers that each process can run (A).
    waste
        Unused share of the capability of the GPUs, at least 0 and below 1 (w).
    throughput
        Micro-batches per second (perf).
    step_time_s
        Time of one mini-batch, that is of one micro-batch of every logical worker (f) [s].
    """

    nums: Nums
    executors: Nums
    threads: Nums
    waste: float
    throughput: float
    step_time_s: float


class IntraJobPlanner:
    """Plans of one job: the fastest on given GPUs, all that waste little, and the mapping to GPUs.

    Parameters
    ----------
    rates
        Micro-batches per second of one GPU of each type, ``(n_types,)``; 0 where the job may not run.
    n_logical_workers
        Logical workers of the job (maxP).

    Raises
    ------
    InputError
        A rate is negative or not finite, all are 0, or there is no logical worker.
    """

    __slots__ = ("_levels", "n_logical_workers", "rates")

    def __init__(self, rates: Sequence[float], n_logical_workers: int) -> None:
        if not (all(math.isfinite(rate) and rate >= 0 for rate in rates) and any(rates)):
            raise InputError(
                f"rates {tuple(rates)}; expected finite micro-batches per second, 0 or more, not all 0"
            )
        if n_logical_workers < 1:
            raise InputError(f"{n_logical_workers} logical workers; expected 1 or more")
        self.rates = tuple(float(rate) for rate in rates)
        self.n_logical_workers = n_logical_workers
        self._levels: dict[tuple[bool, ...], list[Nums]] = {}

    def plan(self, nums: Sequence[int]) -> Plan:
        """Return the fastest plan on these numbers of GPUs of each type, ``(n_types,)``.

        Raises
        ------
        InputError
            No GPU, more GPUs than logical workers, or GPUs of a type on which the job may not run.
        """
        counts = self._checked(nums)
        levels = self._capacities(tuple(number > 0 for number in counts))
        # The longer a mini-batch may take, the more logical workers fit, so bisection finds the first time
        # at which all of them fit.
        position = bisect_left(
            levels,
            self.n_logical_workers,
            key=lambda level: sum(number * slots for number, slots in zip(counts, level, strict=True)),
        )
        threads = levels[position]
        step_s = max(number / rate for number, rate in zip(threads, self.rates, strict=True) if number)
        throughput = self.n_logical_workers / step_s
        capability = sum(number * rate for number, rate in zip(counts, self.rates, strict=True))
        waste = max(1.0 - throughput / capability, 0.0)  # rounding may give a little less than 0
        executors = tuple(int(number > 0) for number in counts)
        return Plan(counts, executors, threads, waste, throughput, step_s)

    def companions(self, available: Sequence[int], max_waste: float, min_gpus: int = 0) -> Iterator[Plan]:
        """Yield the plans on the GPUs of a cluster that waste little, and those on each single GPU.

        Parameters
        ----------
        available
            Available GPUs of each type, ``(n_types,)``.
        max_waste, min_gpus
            Share of capability that a plan may waste (that on one GPU may waste more); least number of GPUs.
        """
        most = [count if rate else 0 for count, rate in zip(available, self.rates, strict=True)]
        for nums in itertools.product(*(range(min(count, self.n_logical_workers) + 1) for count in most)):
            n_gpus = sum(nums)
            if not max(min_gpus, 1) <= n_gpus <= self.n_logical_workers:
                continue
            plan = self.plan(nums)
            if n_gpus == 1 or plan.waste <= max_waste + _ROUNDING:
                yield plan

    def mapping(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """Return the virtual ranks on each GPU, GPUs by type and index, ``(n_gpus,)``.

        Slots beyond the number of logical workers are removed one by one, from the GPU that would take
        longest, so every GPU keeps one and none takes longer than planned.
        """
        rates = [rate for rate, count in zip(self.rates, plan.nums, strict=True) for _ in range(count)]
        slots = [each for each, count in zip(plan.threads, plan.nums, strict=True) for _ in range(count)]
        for _ in range(sum(slots) - self.n_logical_workers):
            shared = (gpu for gpu, count in enumerate(slots) if count > 1)
            # Among GPUs that take equally long, the last one gives up a slot.
            slots[max(shared, key=lambda gpu: (slots[gpu] / rates[gpu], gpu))] -= 1
        ends = list(itertools.accumulate(slots))
        return tuple(tuple(range(end - count, end)) for end, count in zip(ends, slots, strict=True))

    def _checked(self, nums: Sequence[int]) -> Nums:
        counts = tuple(nums)
        if (
            len(counts) != len(self.rates)
            or min(counts) < 0
            or not 1 <= sum(counts) <= self.n_logical_workers
        ):
            raise InputError(
                f"GPUs {counts}; expected {len(self.rates)} numbers, in all from 1 to the "
                f"{self.n_logical_workers} logical workers"
            )
        if any(count and not rate for count, rate in zip(counts, self.rates, strict=True)):
            raise InputError(f"GPUs {counts}; expected none where the rate is 0, rates are {self.rates}")
        return counts

    def _capacities(self, used: tuple[bool, ...]) -> list[Nums]:
        """Return logical workers per GPU of each used type, by ascending time of a mini-batch.

        Only times at which one of the counts rises matter. Times at which a used type has no logical worker
        are left out.
        """
        if used not in self._levels:
            rates = [rate if is_used else 0.0 for rate, is_used in zip(self.rates, used, strict=True)]
            counts = range(1, self.n_logical_workers + 1)
            times = sorted({count / rate for rate in rates if rate for count in counts})
            levels = (tuple(math.floor(time_s * rate + _ROUNDING) for rate in rates) for time_s in times)
            enough = [
                level
                for level in levels
                if all(count or not rate for count, rate in zip(level, rates, strict=True))
            ]
            self._levels[used] = list(dict.fromkeys(enough))
        return self._levels[used]


# --- Catalogue: the configurations of elastic jobs, planned on demand ---

PLAN = "ga"
"""Execution plan of all configurations: logical workers take turns, as in gradient accumulation."""
_FAMILY = "EasyScale"
_CPU_THREADS = 1
_EXTRA_STEPS = 1  # that the engine adds to every job
_ALL_WASTE = 1.0
Times = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class JobKind:
    """Job as the planner sees it.

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
        Time of a micro-batch where the job holds several types at once [s]; empty if it is the same.
    """

    key: str
    n_logical_workers: int
    home: str
    micro_batch_s: Times
    mini_batches: float
    mixed_micro_batch_s: Times = ()

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_fields(self, "job kind {0.key!r:.80}", positive=("n_logical_workers", "mini_batches"))
        types = dict(self.micro_batch_s)
        not_positive = [
            time_s for _, time_s in (*self.micro_batch_s, *self.mixed_micro_batch_s) if not time_s > 0
        ]
        if self.home not in types or not_positive or not self.mini_batches > 0:
            raise InputError(
                f"job kind {self.key!r}: home {self.home!r}, micro-batches {types} s, work "
                f"{self.mini_batches}; expected positive times, one on the home type, and positive work"
            )

    @property
    def steps(self) -> int:
        """Whole steps of the job in simulations, at least one, without the step that the engine adds."""
        return max(round(self.mini_batches), 1 + _EXTRA_STEPS) - _EXTRA_STEPS

    @property
    def mini_batches_per_step(self) -> float:
        """Mini-batches per step, about one: the work is spread evenly over whole steps."""
        return self.mini_batches / (self.steps + _EXTRA_STEPS)


class PlannedCatalogue:
    """A `makespan.sim.Catalogue` whose configurations the intra-job planner makes.

    A configuration holds GPUs of each type; those of one type are on one node. Each is planned once, when it
    is first requested.

    Parameters
    ----------
    kinds
        Kinds of jobs; their keys are the names of workloads.
    cluster
        Cluster that must hold the configurations; None for no limit but the number of logical workers.
    is_elastic
        Whether jobs may run on other GPUs than their gang.
    """

    __slots__ = ("_fitting", "_is_elastic", "_kinds", "_limits", "_made")

    def __init__(
        self, kinds: Iterable[JobKind], cluster: ClusterSpec | None = None, *, is_elastic: bool = True
    ) -> None:
        self._is_elastic = is_elastic
        self._kinds = {kind.key: kind for kind in kinds}
        self._limits: dict[str, int] | None = None  # GPUs of the largest node of each type
        if cluster is not None:
            self._limits = {}
            for node in cluster.nodes:
                self._limits[node.gpu_type] = max(self._limits.get(node.gpu_type, 0), node.n_gpus)
        self._made: dict[tuple[str, Devices], Configuration] = {}
        self._fitting: dict[ClusterSpec, PlannedCatalogue] = {}

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names of all kinds of job, sorted."""
        return tuple(sorted(self._kinds))

    def on(self, cluster: ClusterSpec) -> "PlannedCatalogue":
        """Return the catalogue of the configurations that fit an empty cluster."""
        if cluster not in self._fitting:
            self._fitting[cluster] = PlannedCatalogue(
                self._kinds.values(), cluster, is_elastic=self._is_elastic
            )
        return self._fitting[cluster]

    def gangs(self) -> "PlannedCatalogue":
        """Return the catalogue of the same jobs, restricted to their gangs."""
        return PlannedCatalogue(self._kinds.values(), is_elastic=False)

    def all(self, workload_key: str) -> tuple[Configuration, ...]:
        """Return the configurations on all GPUs that a kind of job may hold; this plans them all."""
        kind = self._kind(workload_key)
        if not self._is_elastic:
            return self._gang(kind)
        types = [name for name, _ in kind.micro_batch_s]
        available = [self._limit(name, kind) for name in types]
        plans = _planner(kind.micro_batch_s, kind.n_logical_workers).companions(available, _ALL_WASTE)
        vectors = (zip(types, plan.nums, strict=True) for plan in plans)
        planned = [self._configuration(kind, _devices(vector)) for vector in vectors]
        return tuple(
            sorted(planned, key=lambda item: (item.n_gpus, item.n_nodes, item.counts, item.gpu_types))
        )

    def holding(self, workload_key: str, devices: Devices) -> tuple[Configuration, ...]:
        """Return the one configuration on these devices, or none."""
        kind = self._kind(workload_key)
        if not self._is_elastic:
            return tuple(item for item in self._gang(kind) if item.devices == devices)
        configuration = self._made.get((workload_key, devices))
        if configuration is not None:
            return (configuration,)
        may_run = dict(kind.micro_batch_s)
        fits = all(name in may_run and 0 < count <= self._limit(name, kind) for name, count in devices)
        if not fits or not 1 <= sum(count for _, count in devices) <= kind.n_logical_workers:
            return ()
        return (self._configuration(kind, devices),)

    def requested(self, job: JobSpec) -> Configuration:
        """Return the gang of a job: a GPU of its home type for each logical worker, or all of that type."""
        gang = self._gang(self._kind(job.workload))
        if not gang:
            home = self._kind(job.workload).home
            raise InputError(f"job {job.job_id!r}: no GPU of type {home!r}; expected a cluster that has one")
        return gang[0]

    def as_requested(self, job: JobSpec) -> tuple[Configuration, ...]:
        """Return only the gang of a job: other configurations change the type or the number of GPUs."""
        return (self.requested(job),)

    def accepts(self, configuration: Configuration) -> bool:
        """Return True for a configuration that this catalogue planned."""
        return self._made.get((configuration.workload, configuration.devices)) is configuration

    def find(
        self, workload_key: str, plan: str, placement: str, cpu_threads: int, gpu_types: tuple[str, ...] = ()
    ) -> Configuration | None:
        """Return the configuration of these labels, or None if it may not run."""
        counts = Placement.parse(placement).gpus_per_node
        if (plan, cpu_threads, len(set(gpu_types))) != (PLAN, _CPU_THREADS, len(counts)):
            return None
        fitting = self.holding(workload_key, _devices(zip(gpu_types, counts, strict=True)))
        return fitting[0] if fitting else None

    def _kind(self, workload_key: str) -> JobKind:
        if workload_key not in self._kinds:
            raise unknown_name("workload in the catalogue", workload_key, self._kinds)
        return self._kinds[workload_key]

    def _gang(self, kind: JobKind) -> tuple[Configuration, ...]:
        """Return the gang of a kind of job, on as many GPUs of its home type as the limit allows."""
        n_gpus = min(kind.n_logical_workers, self._limit(kind.home, kind))
        return (self._configuration(kind, ((kind.home, n_gpus),)),) if n_gpus else ()

    def _limit(self, gpu_type: str, kind: JobKind) -> int:
        return kind.n_logical_workers if self._limits is None else self._limits.get(gpu_type, 0)

    def _configuration(self, kind: JobKind, devices: Devices) -> Configuration:
        """Return the configuration of a kind of job on devices; it is planned once."""
        key = (kind.key, devices)
        if key not in self._made:
            pairs = sorted((count, name) for name, count in devices)
            nums, times = dict(devices), kind.micro_batch_s
            if len(nums) > 1 and kind.mixed_micro_batch_s:
                times = kind.mixed_micro_batch_s
            plan = _planner(times, kind.n_logical_workers).plan([nums.get(name, 0) for name, _ in times])
            time_s = plan.step_time_s * kind.mini_batches_per_step
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


@cache
def _planner(micro_batch_s: Times, n_logical_workers: int) -> IntraJobPlanner:
    """Planner that all jobs with these times share, together with its cached levels."""
    return IntraJobPlanner([1.0 / time_s for _, time_s in micro_batch_s], n_logical_workers)
