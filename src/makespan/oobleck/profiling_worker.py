"""Process that times layers and sums: ``python -m makespan.oobleck.profiling_worker <run directory>``.

The first process times the layers alone, so that no other load disturbs it; then all time the sums.
"""

import importlib
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from makespan.oobleck.chain import Chain, load_chain, load_microbatch
from makespan.oobleck.job import ChainJob
from makespan.oobleck.requests import PROFILING, ProfilingRequest
from makespan.oobleck.stage import HeldLayers, PeerGroups, as_tuple
from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, run_worker

PRELOAD = ("torch._dynamo",)
"""Modules that models load slowly: a fork server loads them once, before it forks the first worker."""
Row = dict[str, Any]


class _LayerTimes:
    """One microbatch through all layers, each timed by itself."""

    def __init__(self, job: ChainJob, chain: Chain, device: torch.device) -> None:
        self._job, self._chain, self._device = job, chain, device
        self._held = HeldLayers(job, chain, device)
        self._held.hold(range(chain.n_layers))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def parameter_bytes(self, layer: int) -> int:
        """Return the size of the weights of a layer."""
        return sum(parameter.nbytes for parameter in self._held.modules[layer].parameters())

    def activation_bytes(self) -> list[int]:
        """Return the bytes that each layer keeps of a microbatch for the backward pass, without weights."""
        sizes = list[int]()
        state, targets = load_microbatch(self._chain, self._job, 0, 0, self._device)
        for layer in range(self._chain.n_layers):
            kept: dict[int, int] = {}  # by address, because several tensors may be views of one storage

            def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                state = self._held.apply_layer(layer, as_tuple(state), 0, 0)
                if layer == self._chain.n_layers - 1:
                    state = self._chain.loss(state, targets)
            weights = {
                parameter.untyped_storage().data_ptr() for parameter in self._held.modules[layer].parameters()
            }
            sizes.append(sum(size for place, size in kept.items() if place not in weights))
        return sizes

    def measure(self, number: int) -> list[Row]:
        """Run a microbatch forward and back; return the time of both passes by layer [s]."""
        job, last = self._job, self._chain.n_layers - 1
        state, targets = load_microbatch(self._chain, job, 0, number % job.n_microbatches, self._device)
        rows, ends = list[Row](), list[tuple[tuple[Any, ...], tuple[Any, ...]]]()

        def leaf(value: Any, of_layers: bool) -> Any:
            """Cut a tensor off the graph, so that the backward pass of each layer runs by itself."""
            if not isinstance(value, Tensor):
                return value
            detached = value.detach()
            return detached.requires_grad_(value.requires_grad) if of_layers else detached

        for layer in range(last + 1):
            inputs = tuple(leaf(value, layer > 0) for value in as_tuple(state))
            begun = self._now()
            state = self._held.apply_layer(layer, inputs, 0, number)
            if layer == last:
                state = self._chain.loss(state, targets)
            rows.append({"forward_s": self._now() - begun})
            ends.append((inputs, as_tuple(state)))
        gradients = [torch.ones_like(output) for output in ends[-1][1]]
        for layer in reversed(range(last + 1)):
            inputs, outputs = ends.pop()
            needed = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
            begun = self._now()
            if needed:
                torch.autograd.backward(needed, gradients)
            rows[layer]["backward_s"] = self._now() - begun
            leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        self._held.clear_gradients()
        return rows


def _sum_times(
    request: ProfilingRequest,
    who: Identity,
    store: Any,
    elements: list[int],
    tell: Callable[[int], None],
) -> dict[int, list[float]]:
    """Return the time of a sum of the gradients of each layer, by number of processes [s]."""
    device, dtype = torch.device(who.device), getattr(torch, request.job.dtype)
    members = list(range(who.size))
    groups = [tuple(members[:count]) for count in range(2, who.size + 1)]
    links = PeerGroups(members, who.rank, groups, store, device, who.timeout_s)
    sums_s: dict[int, list[float]] = {1: [0.0] * len(elements)}
    for number, group in enumerate(groups):
        times_s = []
        for layer, size in enumerate(elements):
            tell(number * len(elements) + layer)
            vector, seen_s = torch.zeros(max(1, size), dtype=dtype, device=device), list[float]()
            for _ in range(request.warm_ups + request.repeats):
                if who.rank in group:
                    begun = time.perf_counter()
                    links.all_reduce(vector, group).finish()
                    seen_s.append(time.perf_counter() - begun)
            times_s.append(median(seen_s[request.warm_ups :]) if seen_s else 0.0)
        sums_s[len(group)] = times_s
    links.close()
    return sums_s


def profile_layers(directory: RunDirectory, who: Identity) -> None:
    """Time the layers in the first process, then sums among the first two, three, and so on."""
    torch.set_num_threads(who.threads)
    request: ProfilingRequest = PROFILING.validate_python(directory.request())
    job, device = request.job, choose_device(who)
    chain, rows = load_chain(job), list[Row]()
    timed = _LayerTimes(job, chain, device)
    n_passes, n_sums = request.warm_ups + request.repeats, chain.n_layers * (who.size - 1)

    def tell(done: int, doing: str) -> None:
        """Write progress between measurements, never within one."""
        if who.rank == 0:
            directory.write_progress({"done": done, "total": n_passes + n_sums, "doing": doing})

    if who.rank == 0:
        seen = list[list[Row]]()
        for number in range(n_passes):
            tell(number, "timing all layers")
            seen.append(timed.measure(number))
        kept = timed.activation_bytes()
        for layer, runs in enumerate(zip(*seen[request.warm_ups :], strict=True)):
            row = {name: median(run[name] for run in runs) for name in runs[0]}
            sizes = {"parameter_bytes": timed.parameter_bytes(layer), "activation_bytes": kept[layer]}
            rows.append(row | sizes)
    # The others wait idle for the first process when groups are built.
    # The stubs of torch hide its public stores.
    store = importlib.import_module("torch.distributed").FileStore(str(directory.path / "store"), who.size)
    size = torch.empty(0, dtype=getattr(torch, job.dtype)).element_size()
    elements = [timed.parameter_bytes(layer) // size for layer in range(chain.n_layers)]
    sums = _sum_times(
        request, who, store, elements, lambda done: tell(n_passes + done, "timing sums of gradients")
    )
    if who.rank == 0:
        for layer, row in enumerate(rows):
            row["sums_s"] = {count: times[layer] for count, times in sums.items()}
        directory.write_result(rows)


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], profile_layers))
