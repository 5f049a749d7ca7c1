"""Time and memory of verifying the schedule of a BERT-large, 128 tokens, outputs and all gradients.

Run with ``pytest benchmarks/bench_slapo_verify.py --benchmark-only``. As a program, the module verifies
once, with the argument ``layers`` by layers, and writes the peak memory of its process, in bytes.
"""

import ctypes
import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from makespan.runtime import resident_bytes
from makespan.slapo import Verify, VerifyReport, apply_schedule, create_schedule
from makespan.training.zoo import build_family

MEMORY_LIMIT_BYTES = {False: 4 * 2**30, True: 3e9}
"""Peak of a verification of the whole model, and of one by layers."""
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 17)}
"""Settings of glibc without which it keeps freed blocks, between 0.1 and 0.8 GB depending on the machine."""
OPTIONS = {"attn": "sdpa", "fuse": True, "compiler": "dynamo", "ckpt_ratio": 0.5, "shard_embedding": True}


def arguments() -> tuple[list[torch.nn.Module], tuple[torch.Tensor, ...]]:
    """Return a new model, in a list that alone holds it, and its inputs."""
    tokens = torch.randint(5, 1000, (1, 128), generator=torch.Generator().manual_seed(0))
    return [build_family("bert", "large")], (tokens, torch.ones(1, 128))


def verified(
    models: list[torch.nn.Module], inputs: tuple[torch.Tensor, ...], by_layers: bool
) -> VerifyReport:
    """Schedule a model that nobody else holds, and verify it."""
    sch = create_schedule(models.pop())
    with Verify(sch, inputs, input_grads=[], by_layers=by_layers) as check:
        apply_schedule(sch, "bert", **OPTIONS)
    assert check.report is not None
    return check.report


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # untimed, the other process suffices
@pytest.mark.parametrize("by_layers", [False, True], ids=["whole", "layers"])
def test_verify_bert_large(benchmark: Any, by_layers: bool) -> None:
    """Time the verification of one process with one thread, scheduling included, imports excluded."""
    torch.set_num_threads(1)

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.compiler.reset()  # drop the compiled graphs of the previous round
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # the allocator keeps the pages of the previous round
        return (*arguments(), by_layers), {}

    if benchmark.enabled:
        benchmark.pedantic(verified, setup=fresh, rounds=3)
    # In a process of its own: here, other benchmarks and earlier rounds leave memory behind.
    command = [sys.executable, __file__, *(["layers"] if by_layers else [])]
    environment = {**os.environ, **RETURN_FREED_MEMORY}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    peak_bytes, n_gradients = map(int, done.stdout.split())
    benchmark.extra_info.update(peak_memory_bytes=peak_bytes, gradients=n_gradients)
    assert peak_bytes < MEMORY_LIMIT_BYTES[by_layers]


if __name__ == "__main__":
    torch.set_num_threads(1)
    of_layers = "layers" in sys.argv
    report = verified(*arguments(), by_layers=of_layers)
    if not report.is_equal or bool(report.layers) != of_layers:
        sys.exit(str(report))
    sys.stdout.write(f"{resident_bytes(peak=True)} {report.count('parameter gradient')}")
