"""Time and memory of verifying the schedule of a BERT-large, 128 tokens, outputs and all gradients.

Run with ``pytest benchmarks/bench_slapo_verify.py --benchmark-only``.
"""

import ctypes
import gc
import resource
from typing import Any

import torch

from makespan.slapo import Verify, VerifyReport, apply_schedule, create_schedule
from makespan.training.zoo import build_family

MEMORY_LIMIT_BYTES = 4 * 2**30
OPTIONS = {"attn": "sdpa", "fuse": True, "compiler": "dynamo", "ckpt_ratio": 0.5, "shard_embedding": True}


def verified(models: list[torch.nn.Module], inputs: tuple[torch.Tensor, ...]) -> VerifyReport:
    """Schedule a model that nobody else holds, and verify it."""
    with Verify(sch := create_schedule(models.pop()), inputs, input_grads=[]) as check:
        apply_schedule(sch, "bert", **OPTIONS)
    assert check.report is not None
    return check.report


def test_verify_bert_large(benchmark: Any) -> None:
    """Time the verification of one process with one thread, scheduling included, imports excluded."""
    torch.set_num_threads(1)
    tokens = torch.randint(5, 1000, (1, 128), generator=torch.Generator().manual_seed(0))

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.compiler.reset()  # what compiled graphs of the round before hold is not of this one
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # nothing holds the round before, but the allocator keeps its pages
        return ([build_family("bert", "large")], (tokens, torch.ones(1, 128))), {}

    peaks_bytes = []

    def measured(models: list[torch.nn.Module], inputs: tuple[torch.Tensor, ...]) -> VerifyReport:
        report = verified(models, inputs)
        peaks_bytes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return report

    report = benchmark.pedantic(measured, setup=fresh, rounds=3)
    benchmark.extra_info.update(peak_memory_bytes=peaks_bytes, gradients=report.count("parameter gradient"))
    assert report.is_equal
    assert max(peaks_bytes) < MEMORY_LIMIT_BYTES
