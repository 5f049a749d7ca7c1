"""Process that times training steps: ``python -m makespan.easyscale.timing_worker <run directory>``.

The request lists series. A series is one model and several variants of its training. The variants take turns
step by step, so that other load of the machine affects all of them alike. A variant is stock
DistributedDataParallel over all processes of the run, or ESTs that the first process hosts while the others
wait.
"""

import gc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo  # optimizers load it; workers that are forked after this one inherit it
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from makespan.easyscale.hosting import HostedESTs
from makespan.easyscale.job import RankMapping
from makespan.easyscale.kernels import DeterminismLevel, kernels_of
from makespan.easyscale.parts import TrainedParts, scan_module, use_kernels
from makespan.easyscale.reduction import Reduction, over_group, trained_parameters
from makespan.easyscale.requests import TIMING, TimedVariant, TimingSeries
from makespan.runtime import (
    Identity,
    RunDirectory,
    end_worker,
    join,
    keep_freed,
    resident_bytes,
    run_worker,
)
from makespan.training.zoo import StandIn, build_stand_in, stand_in_data, stand_in_loss

_CPU = torch.device("cpu")
_DISTINCT = 64  # samples that are generated; a batch repeats them, because only its size matters here
_LEARNING_RATE, _MOMENTUM = 1e-3, 0.9
Computing = AbstractContextManager[object]
Batch = tuple[Any, Any]
Step = Callable[[], list[float]]
"""Function that runs one mini-batch; returns the time of each micro-batch, then of the rest [s]."""


def _batch(spec: StandIn, size: int, seed: int) -> Batch:
    samples = stand_in_data(spec, min(size, _DISTINCT), seed)
    batch = default_collate([samples[index] for index in range(len(samples))])
    index = torch.arange(size) % len(samples)
    inputs, targets = tree_map(lambda values: values[index], tuple(batch))
    return inputs, targets


class _Series:
    """A timing series in this process, one of the processes of the run."""

    def __init__(self, who: Identity, request: TimingSeries, idle_bytes: int) -> None:
        self.who, self.request, self.idle_bytes = who, request, idle_bytes
        self.steps: dict[str, Step] = {}
        self.spent: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in request.variants}
        self.parts: dict[bool, TrainedParts] = {}
        self.held_bytes = self.set_bytes = self.sets_bytes = 0
        self.batch = _batch(request.spec, request.micro_batch_size, request.seed)
        self.d2_cheap = True

    @property
    def is_over(self) -> bool:
        """Return True if all processes together hold more memory than the device has."""
        budget = self.request.budget_bytes
        return budget is not None and self.held_bytes > budget

    def takes_part(self, variant: TimedVariant) -> bool:
        """Return True if this process takes part in a variant."""
        return variant.is_stock or self.who.rank == 0

    def allocate(self) -> None:
        """Allocate memory, one process after the other, so that only the last one can exceed the budget."""
        variants = [variant for variant in self.request.variants if self.takes_part(variant)]
        for turn in range(self.who.size):
            if turn == self.who.rank:
                for is_stock in {variant.is_stock for variant in variants}:
                    self.parts[is_stock] = self._build()
                if self.request.budget_bytes is not None:
                    self._forward_backward()
            self.measure_memory()
            if self.is_over:
                return
        for variant in variants:
            self.steps[variant.name] = self._step_of(variant)

    def _build(self) -> TrainedParts:
        model = build_stand_in(self.request.spec, self.request.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
        parts = TrainedParts(model, optimizer, partial(stand_in_loss, self.request.spec))
        self.d2_cheap = bool(scan_module(parts.model)["d2_cheap"])
        self.set_bytes = sum(parameter.nbytes for parameter in trained_parameters(parts.model).values())
        return parts

    def _forward_backward(self) -> None:
        inputs, targets = self.batch
        for parts in self.parts.values():
            with self._computing(self.request.variants[0]):
                parts.loss(parts.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            parts.optimizer.zero_grad(set_to_none=True)

    def _step_of(self, variant: TimedVariant) -> Step:
        batch, n = self.batch, variant.n
        computing, parts = self._computing(variant), self.parts[variant.is_stock]
        if variant.is_stock:
            model, (inputs, targets) = DistributedDataParallel(parts.model, broadcast_buffers=False), batch

            def stock_step() -> list[float]:
                times = []
                for number in range(n):
                    begun = time.perf_counter()
                    # Of several micro-batches per step only the last one synchronises.
                    with nullcontext() if number == n - 1 else model.no_sync(), computing:
                        parts.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    times.append(time.perf_counter() - begun)
                begun = time.perf_counter()
                parts.optimizer.step()
                parts.optimizer.zero_grad(set_to_none=True)
                return [*times, time.perf_counter() - begun]

            return stock_step

        hosted = HostedESTs(
            parts, _CPU, RankMapping.even(n, 1), 0, Reduction(n), DeterminismLevel.named(variant.level),
            seed=self.request.seed, computing=computing, swaps_contexts=variant.swaps_contexts,
        )  # fmt: skip

        def hosted_step() -> list[float]:
            done = over_group(hosted.mini_batch(lambda rank: batch))
            return [*done.micro_batch_s, done.sync_s]

        return hosted_step

    def _computing(self, variant: TimedVariant) -> Computing:
        level = DeterminismLevel.named(variant.level)
        return use_kernels(kernels_of(self.request.device, level), level)

    def run_step(self, variant: TimedVariant) -> list[float]:
        """Run one mini-batch of a variant; return its times, none if this process waits."""
        dist.barrier()
        self._computing(variant)  # sets the deterministic mode of the whole process
        if not self.takes_part(variant):
            return []
        begun, spent = time.perf_counter(), time.process_time()
        times = self.steps[variant.name]()
        self.spent[variant.name].append((time.process_time() - spent, time.perf_counter() - begun))
        return times

    def measure_memory(self) -> None:
        """Add up the memory of all processes beyond that of idle ones, without gradient sets."""
        variants = self.request.variants
        n_sets = max((variant.n for variant in variants if not variant.is_stock and self.steps), default=0)
        self.sets_bytes = n_sets * self.set_bytes
        total = torch.tensor(max(resident_bytes(peak=True) - self.idle_bytes, 0))
        dist.all_reduce(total)
        self.held_bytes = int(total.item()) - self.sets_bytes

    def run(self) -> dict[str, list[list[float]]]:
        """Run all steps, with the variants in rotating order; return times by variant and step.

        Memory is measured in the warm-up, while freed blocks go back to the system: the size of the heap
        depends on how often memory was freed, not on how much was needed.
        """
        variants = self.request.variants
        times: dict[str, list[list[float]]] = {variant.name: [] for variant in variants}
        measures_memory = self.request.budget_bytes is not None
        keep_freed(keeps=not measures_memory)
        self.allocate()
        for _ in range(self.request.warmup_steps):
            for variant in variants:
                if not self.is_over:
                    self.run_step(variant)
                    self.measure_memory()
        if self.is_over:
            return times
        if measures_memory:
            keep_freed()
            self._forward_backward()  # fills the heap, as the warm-up does where memory is not measured
        self.spent = {name: [] for name in times}
        for number in range(self.request.steps):
            first = number % len(variants)
            for variant in [*variants[first:], *variants[:first]]:
                times[variant.name].append(self.run_step(variant))
        return times


def measure(who: Identity, request: TimingSeries) -> dict[str, Any]:
    """Run one series and return the results of all processes.

    Returns
    -------
    dict
        ``times`` by variant, process and step, each as micro-batches and the rest of the step [s]; ``spent``
        in the same order, CPU time and time of each step [s]. Of all processes ``held_bytes``, beyond the
        memory of idle ones and without gradient sets, and ``gradient_sets_bytes``; ``is_over``, True if
        ``held_bytes`` exceeds the budget; ``d2_cheap`` of the scan of the model.
    """
    if request.budget_bytes is not None:
        # A process counts as idle once code and libraries are loaded: a run of the smallest model loads them.
        small = replace(
            request, spec=replace(request.spec, width=8, depth=1), micro_batch_size=2, warmup_steps=1,
            steps=1, budget_bytes=sys.maxsize,
        )  # fmt: skip
        _Series(who, small, 0).run()
        gc.collect()
    series = _Series(who, request, resident_bytes())
    local = series.run()
    gathered: list[Any] = [None] * who.size
    dist.all_gather_object(gathered, (local, series.spent))
    return {
        "times": {name: [times[name] for times, _ in gathered] for name in local},
        "spent": {name: [spent[name] for _, spent in gathered] for name in local},
        "held_bytes": series.held_bytes,
        "gradient_sets_bytes": series.sets_bytes,
        "is_over": series.is_over,
        "d2_cheap": series.d2_cheap,
    }


def _work(directory: RunDirectory, who: Identity) -> None:
    join(directory, who)
    results = []
    for number, request in enumerate(TIMING.validate_python(directory.request())):
        results.append(measure(who, request))
        gc.collect()
        if who.rank == 0:
            directory.write_progress(number)
    if who.rank == 0:
        directory.write_result(results)
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], _work))
