"""The intra-job planner: how the logical workers of a job share GPUs of several types.

EasyScale, equations (1a) to (1e): a GPU of type i runs up to A_i logical workers one after another, so a
mini-batch takes f, the largest of A_i / C_i, on the slowest GPU. Throughput is then maxP / f, and what the
GPUs could do beyond that is waste. Equal GPUs whose number does not divide maxP waste, too.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from makespan.errors import InputError

__all__ = ["IntraJobPlanner", "Plan"]

_ROUNDING = 1e-9  # of micro-batches, where a time is a multiple of a rate only up to rounding

Nums = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the logical workers of a job use GPUs; all tuples are by type of GPU, ``(n_types,)``.

    Parameters
    ----------
    nums, executors, threads
        GPUs of each type, processes on each GPU, and logical workers that each process can run (A).
    waste
        Share of the capability of the GPUs that is not used, at least 0 and below 1 (w).
    throughput
        Micro-batches a second (perf).
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
    """Plans of one job: the best for any GPUs, all that are worth a look, and who runs on which GPU.

    Parameters
    ----------
    rates
        Micro-batches a second of one GPU of each type, ``(n_types,)``; 0 where the job may not run.
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
                f"rates {tuple(rates)}; accepted: finite micro-batches a second, 0 or more, not all of them 0"
            )
        if n_logical_workers < 1:
            raise InputError(f"{n_logical_workers} logical workers; accepted: 1 or more")
        self.rates = tuple(float(rate) for rate in rates)
        self.n_logical_workers = n_logical_workers
        self._levels: dict[tuple[bool, ...], list[Nums]] = {}

    def plan(self, nums: Sequence[int]) -> Plan:
        """Return the fastest plan on so many GPUs of each type, ``(n_types,)``.

        Raises
        ------
        InputError
            No GPU, more GPUs than logical workers, or GPUs of a type on which the job may not run.
        """
        given = self._checked(nums)
        levels = self._capacities(tuple(count > 0 for count in given))
        # More logical workers fit the longer a mini-batch may take, so the first time that suffices is found
        # by bisection.
        position = bisect_left(levels, self.n_logical_workers, key=lambda level: _capacity(given, level))
        threads = levels[position]
        step_s = max(count / rate for count, rate in zip(threads, self.rates, strict=True) if count)
        throughput = self.n_logical_workers / step_s
        capability = sum(count * rate for count, rate in zip(given, self.rates, strict=True))
        waste = max(1.0 - throughput / capability, 0.0)
        executors = tuple(int(count > 0) for count in given)
        return Plan(given, executors, threads, waste, throughput, step_s)

    def companions(self, available: Sequence[int], max_waste: float, min_gpus: int = 0) -> Iterator[Plan]:
        """Yield the plans on all GPUs that a cluster has which waste little, and on each single GPU.

        Parameters
        ----------
        available
            GPUs of each type that there are, ``(n_types,)``.
        max_waste, min_gpus
            Share of capability that a plan may waste, except on the one GPU of a start; least number of GPUs.
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

        Slots beyond the number of logical workers are taken away one by one, from whichever GPU would take
        longest, so every GPU keeps one and none takes longer than planned.
        """
        rates = [rate for rate, count in zip(self.rates, plan.nums, strict=True) for _ in range(count)]
        own = [slots for slots, count in zip(plan.threads, plan.nums, strict=True) for _ in range(count)]
        for _ in range(sum(own) - self.n_logical_workers):
            shared = (gpu for gpu, slots in enumerate(own) if slots > 1)
            own[max(shared, key=lambda gpu: (own[gpu] / rates[gpu], gpu))] -= 1
        ends = list(itertools.accumulate(own))
        return tuple(tuple(range(end - count, end)) for end, count in zip(ends, own, strict=True))

    def _checked(self, nums: Sequence[int]) -> Nums:
        given = tuple(nums)
        if len(given) != len(self.rates) or min(given) < 0 or not 1 <= sum(given) <= self.n_logical_workers:
            raise InputError(
                f"GPUs {given}; accepted: {len(self.rates)} numbers, in all from 1 to the "
                f"{self.n_logical_workers} logical workers"
            )
        if any(count and not rate for count, rate in zip(given, self.rates, strict=True)):
            raise InputError(f"GPUs {given}; accepted: none where the rate is 0, rates are {self.rates}")
        return given

    def _capacities(self, used: tuple[bool, ...]) -> list[Nums]:
        """Return logical workers a GPU of each type, by the time of a mini-batch; none where one has none."""
        if used not in self._levels:
            rates = [rate if is_used else 0.0 for rate, is_used in zip(self.rates, used, strict=True)]
            counts = range(1, self.n_logical_workers + 1)
            times = sorted({count / rate for rate in rates if rate for count in counts})
            found = (tuple(math.floor(time_s * rate + _ROUNDING) for rate in rates) for time_s in times)
            enough = [
                level
                for level in found
                if all(count or not rate for count, rate in zip(level, rates, strict=True))
            ]
            self._levels[used] = list(dict.fromkeys(enough))
        return self._levels[used]


def _capacity(nums: Nums, threads: Nums) -> int:
    return sum(count * slots for count, slots in zip(nums, threads, strict=True))
