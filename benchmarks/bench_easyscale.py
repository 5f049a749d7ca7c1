"""Time of steps of the elastic runtime, over that of steps of stock training with the same bits.

Run with ``pytest benchmarks/bench_easyscale.py --benchmark-only -s``. As a program, the module is a process
of a case. The steps of both take turns in one process group, one thread a process, and the numbers are
medians over the ratios of such pairs: other load on the machine then affects both. Beside them are the bytes
that a process sends per byte of gradients, with the least that an all-reduce of M processes can send,
2 (M - 1) / M, and the bytes that each way copies. One process is compared with accumulated micro-batches,
several with DistributedDataParallel. ``loop_ratio`` is the time of a mini-batch of a job's own loop over that
of the same mini-batch of functions given by name, and ``shards_ratio`` that of one with the optimizer in
shards over that of one without.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from makespan.cleanup import temporary_directory
from makespan.easyscale.hosting import HostedESTs
from makespan.easyscale.job import RankMapping
from makespan.easyscale.kernels import DeterminismLevel
from makespan.easyscale.loop_parts import LoopParts
from makespan.easyscale.loop_turns import LoopESTs, LoopMiniBatch
from makespan.easyscale.optimizer_shards import OptimizerShards
from makespan.easyscale.parts import TrainedParts
from makespan.easyscale.randomness import parameter_sha
from makespan.easyscale.reduction import Reduction, Steps, over_links
from makespan.easyscale.user_state import UserState
from makespan.runtime import (
    Identity,
    Launch,
    LocalLauncher,
    RunDirectory,
    end_worker,
    join,
    keep_freed,
    linked,
    run_worker,
)

CASES = {
    "one worker a process": ("0/1", {1: 1.20, 5: 1.05, 25: 1.05, 100: 1.05}),
    "two workers a process": ("0,1/2,3", {1: None, 5: 1.25, 25: 1.25}),
    "four workers in one process": ("0,1,2,3", {1: 1.20, 5: 1.20, 25: 1.20}),
}
"""Mapping, and the goal for the ratio by gradients [MB]."""
N_LAYERS, BATCH = 4, 32
N_STEPS = {1: 60, 5: 40, 25: 20, 100: 8}
N_WARMUP = 5
Step = Callable[[], None]
Over = Callable[[Steps[Any]], Any]
"""Carries out steps together with the other processes, as those of a run do."""


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that operators write which only copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count what it copies."""
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.cat, torch.ops.aten.clone):
            self.count += result.nbytes
        return result


def parts_of(megabytes: int) -> tuple[TrainedParts, tuple[Tensor, Tensor]]:
    """Return a new MLP with gradients of about so many megabytes, and its batch."""
    torch.manual_seed(0)
    width = int((megabytes * 1e6 / N_LAYERS / 4) ** 0.5) // 4 * 4
    layers = [layer for _ in range(N_LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.rand(BATCH, width), torch.rand(BATCH, width)
    return TrainedParts(model, optimizer, nn.functional.mse_loss), batch


def stock_step(parts: TrainedParts, batch: tuple[Tensor, Tensor], n: int, size: int) -> Step:
    """Return a step of ``n`` micro-batches in each process, the last of which synchronises them."""
    model: Any = parts.model
    if size > 1:
        model = nn.parallel.DistributedDataParallel(parts.model, broadcast_buffers=False)

    def step() -> None:
        for number in range(n):
            with nullcontext() if size == 1 or number == n - 1 else model.no_sync():
                loss = parts.loss(model(batch[0]), batch[1]) / n
                loss.backward()  # type: ignore[no-untyped-call]
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        loss.item()

    return step


def elastic_step(
    parts: TrainedParts,
    batch: tuple[Tensor, Tensor],
    mapping: RankMapping,
    rank: int,
    over: Over,
    shards: OptimizerShards | None = None,
) -> Step:
    """Return a mini-batch of all logical workers."""
    if shards is not None:
        shards.place(rank, mapping.n_processes * ("",))
    hosted = HostedESTs(
        parts, torch.device("cpu"), mapping, rank, Reduction(mapping.n_logical_workers),
        DeterminismLevel.named("D1"), seed=0, shards=shards,
    )  # fmt: skip
    return lambda: over(hosted.mini_batch(lambda rank: batch)) and None


class _Group:
    """What the processes of a loop do together where no run keeps copies or listens."""

    def __init__(self, over: Over) -> None:
        self.over = over

    def tell(self, phase: str) -> None:
        pass

    def replicate(self) -> None:
        pass


def loop_step(
    parts: TrainedParts, batch: tuple[Tensor, Tensor], mapping: RankMapping, rank: int, over: Over
) -> Step:
    """Return a mini-batch of all logical workers in a job's own loop."""
    given = LoopParts(parts.model, parts.optimizer, None, None, None, torch.device("cpu"))
    hosted = LoopESTs(
        given, torch.device("cpu"), mapping, rank, Reduction(mapping.n_logical_workers),
        DeterminismLevel.named("D1"), seed=0, layouts={}, user_state=UserState(parts.model, []),
        late_buffers=(), together=_Group(over), on_micro_batch=lambda: None,
    )  # fmt: skip
    hosted.open_first()

    def step() -> None:
        hosted.begin(1, lambda rank: batch, watches=False)
        mini_batch = LoopMiniBatch(hosted, 1)
        for inputs, targets in mini_batch:
            mini_batch.backward(parts.loss(parts.model(inputs), targets))
        mini_batch.step(parts.optimizer)
        hosted.finish(lambda: 0, stops=False)

    return step


def measured(
    mapping: RankMapping, megabytes: int, n_warmup: int, n_steps: int, who: Identity
) -> dict[str, Any]:
    """Run both ways in turns; return their times, and what they send and copy."""
    counted_bytes, sent = [0], dict[str, int]()
    links = linked(who)
    assert links is not None
    send = links.send

    def counted(peer: int, piece: memoryview) -> None:
        counted_bytes[0] += len(piece)
        send(peer, piece)

    links.send = counted  # type: ignore[method-assign]

    def over(steps: Steps[Any]) -> Any:
        return over_links(steps, links, range(who.size), who.rank)

    n_hosted = len(mapping.hosted[0])
    parts = {name: parts_of(megabytes) for name in ("stock", "elastic", "loop", "shards")}
    steps = {
        "stock": stock_step(*parts["stock"], n_hosted, who.size),
        "elastic": elastic_step(*parts["elastic"], mapping, who.rank, over),
        "loop": loop_step(*parts["loop"], mapping, who.rank, over),
        "shards": elastic_step(
            *parts["shards"], mapping, who.rank, over, OptimizerShards(parts["shards"][0], survives=0)
        ),
    }
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(n_warmup + n_steps):
        # The order rotates, because a step finds what the one before it has left in the caches.
        turned = [*list(steps)[number % len(steps) :], *list(steps)[: number % len(steps)]]
        for name in turned:
            dist.barrier()
            begun, spent = time.perf_counter(), time.process_time()
            steps[name]()
            taken = time.perf_counter() - begun, time.process_time() - spent
            every: list[Any] = [None] * who.size
            dist.all_gather_object(every, taken)
            if number >= n_warmup:
                # A step takes as long as its slowest process, and costs what all of them spend.
                times[name].append((max(wall for wall, _ in every), sum(cpu for _, cpu in every)))
    gradient_bytes = sum(parameter.nbytes for parameter in parts["stock"][0].model.parameters())
    copied: dict[str, float] = {}
    for name, step in steps.items():
        counted_bytes[0] = 0
        with CopiedBytes() as counter:
            step()
        sent[name] = counted_bytes[0]
        copied[name] = counter.count / gradient_bytes
    hashes = [parameter_sha(parts[name][0].model) for name in steps]
    pairs = list(zip(times["elastic"], times["stock"], strict=True))
    loops = list(zip(times["loop"], times["elastic"], strict=True))
    in_shards = list(zip(times["shards"], times["elastic"], strict=True))
    return {
        "stock_ms": 1e3 * median(wall for wall, _ in times["stock"]),
        "wall_ratio": median(own[0] / stock[0] for own, stock in pairs),
        "cpu_ratio": median(own[1] / stock[1] for own, stock in pairs),
        "loop_ratio": median(own[0] / by_name[0] for own, by_name in loops),
        "loop_cpu_ratio": median(own[1] / by_name[1] for own, by_name in loops),
        "shards_ratio": median(own[0] / whole[0] for own, whole in in_shards),
        "shards_cpu_ratio": median(own[1] / whole[1] for own, whole in in_shards),
        "sent_ratio": sent["elastic"] / gradient_bytes,
        "sent_bound": 2 * (who.size - 1) / who.size,
        "copied_ratio": copied["elastic"],
        "stock_copied_ratio": copied["stock"],
        "is_equal": hashes[0] == hashes[1],
        "is_loop_equal": hashes[1] == hashes[2],
        "are_shards_equal": hashes[1] == hashes[3],
    }


@pytest.mark.parametrize(
    ("case", "megabytes"), [(case, size) for case, (_, goals) in CASES.items() for size in goals]
)
def test_step_over_stock(benchmark: Any, case: str, megabytes: int) -> None:
    """Print the ratios of a case; where each process has one worker, both ways have the same bits."""
    text, goals = CASES[case]
    mapping = RankMapping.parse(text)

    def run() -> dict[str, Any]:
        with temporary_directory("bench") as path:
            # Untimed, one step before the last ones: DistributedDataParallel then has its final buckets.
            n_warmup, n_steps = (N_WARMUP, N_STEPS[megabytes]) if benchmark.enabled else (1, 1)
            request = {"mapping": text, "megabytes": megabytes, "n_warmup": n_warmup, "n_steps": n_steps}
            command = [sys.executable, str(Path(__file__))]
            LocalLauncher().run(Launch(command, request, mapping.n_processes, path))
            found: dict[str, Any] = RunDirectory(path).result()
        return found

    found = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info.update(found, goal=goals[megabytes])
    shown = ", ".join(f"{name} {value:.3g}" for name, value in found.items() if "equal" not in name)
    sys.stdout.write(f"\n{case}, {megabytes} MB: {shown}; goal {goals[megabytes] or 'none'}\n")
    assert found["is_loop_equal"] and found["are_shards_equal"]
    assert found["is_equal"] or max(map(len, mapping.hosted)) > 1
    # In blocks of k neighbours a chunk moves 2 (M - 1) + (k - 1) / k times, among M processes.
    n, m = mapping.n_logical_workers, mapping.n_processes
    bound = 0.0 if m == 1 else (2 * (m - 1) + (n / m - 1) / (n / m)) / m
    assert found["sent_ratio"] == pytest.approx(bound, rel=0.02)


def work(directory: RunDirectory, who: Identity) -> None:
    """Measure the case of the request."""
    join(directory, who)
    keep_freed()
    request = directory.request()
    mapping = RankMapping.parse(request["mapping"])
    found = measured(mapping, request["megabytes"], request["n_warmup"], request["n_steps"], who)
    if who.rank == 0:
        directory.write_result(found)
    dist.barrier()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], work))
