"""Speed of Morphling's policies on the published traces, engine included.

Run with ``pytest benchmarks/bench_policies.py --benchmark-only``; MAKESPAN_PUBLISHED_DIR must name a
directory with the published files. The aims are 0.05 s for the 406 jobs of Base, 0.1 s for MT, and
1.5 s for ten times the jobs on 512 GPUs. Times depend on the machine, so they are reported, not asserted.
"""

import os
from pathlib import Path

import pytest

from makespan.hardware import ClusterSpec, cluster, homogeneous
from makespan.policies import policy
from makespan.sim import Catalogue, Scenario, simulate
from makespan.studies import TableCatalogue
from makespan.throughput import PublishedSource
from makespan.traces import read_morphling_jobs, scaled

DELAY_S, ROUND_S = 260.0, 60.0
# name: trace, copies of every job, nodes
CASES = {
    "base-406-jobs-64-gpus": ("base", 1, 8),
    "mt-406-jobs-64-gpus": ("mt", 1, 8),
    "base-4060-jobs-512-gpus": ("base", 10, 64),
}


@pytest.fixture(scope="module")
def directory() -> Path:
    """Return a directory with the published files; skip where there is none."""
    named = os.environ.get("MAKESPAN_PUBLISHED_DIR")
    if not named:
        pytest.skip("MAKESPAN_PUBLISHED_DIR names no directory with the published files")
    return Path(named)


@pytest.fixture(scope="module")
def catalogue(directory: Path) -> Catalogue:
    """Return what was measured."""
    source = PublishedSource(directory, default_cpu_threads=12)
    keys = ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30")
    return TableCatalogue.from_tables([source.load(key) for key in keys])


def large(n_nodes: int) -> ClusterSpec:
    """Return so many nodes of the paper's testbed."""
    testbed = cluster("a800-64")
    return homogeneous(testbed.nodes[0], n_nodes, testbed.network, name=f"a800-{8 * n_nodes}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", ["morphling-work", "morphling-lookahead"])
def test_policy(benchmark, directory: Path, catalogue: Catalogue, variant: str, name: str) -> None:  # noqa: ANN001 - a fixture without a public type
    """Time one simulation, and note decisions, the policy's share and time a decision."""
    trace, copies, n_nodes = CASES[name]
    jobs = read_morphling_jobs(directory / "morphling" / "workloads" / f"workload-{trace}.csv").jobs
    if copies > 1:
        jobs = scaled(jobs, copies, seed=1)
    scenario = Scenario(trace, tuple(jobs), large(n_nodes), catalogue, DELAY_S, ROUND_S)
    result = benchmark.pedantic(
        simulate,
        args=(scenario, policy(variant)),
        rounds=5 if copies == 1 else 1,
        warmup_rounds=1 if copies == 1 else 0,
    )
    benchmark.extra_info.update(
        jobs=len(jobs),
        decisions=result.n_decisions,
        policy_share=result.policy_wall_s / result.wall_s,
        decision_wall_s=result.policy_wall_s / result.n_decisions,
    )
