"""Speed and memory of the simulation engine under FIFO, whose own share is small.

Run with ``pytest benchmarks/bench_sim.py --benchmark-only``. The limits are those of the project: 20,000
jobs in 10 s, 100,000 jobs on 6,500 GPUs in 60 s and in 1 GiB. Times depend on the machine, so only the
memory, which does not, is asserted.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from toy_cluster import toy_catalogue, toy_nodes

from makespan.policies import policy
from makespan.runtime import resident_bytes
from makespan.sim import Scenario, simulate
from makespan.workloads import JobSpec

RESTART_DELAY_S = 78.0
LOAD = 0.9
MEMORY_LIMIT_BYTES = 2**30
REQUESTS = [("roberta", "ga", size) for size in (1, 2, 4, 8)] + [
    ("t5", "zero-dp", 4),
    ("t5", "zero-dp", 8),
    ("gpt2", "tp+ga", 8),
]
# name: jobs, nodes of 8 GPUs, length of a round
CASES = {
    "406-jobs-64-gpus-rounds": (406, 8, 60.0),
    "20000-jobs-512-gpus": (20_000, 64, 0.0),
    "100000-jobs-6500-gpus": (100_000, 813, 0.0),
}


def trace(n_jobs: int, n_gpus: int, rng: np.random.Generator) -> list[JobSpec]:
    """Return jobs with heavy-tailed run times that arrive as a Poisson process at the given load."""
    catalogue = toy_catalogue()
    chosen = rng.integers(len(REQUESTS), size=n_jobs)
    lengths_s = np.minimum(rng.lognormal(7.0, 1.3, size=n_jobs), 2e5)
    sizes = np.array([REQUESTS[index][2] for index in chosen])
    gap_s = float(np.sum(sizes * (lengths_s + RESTART_DELAY_S))) / (n_jobs * n_gpus * LOAD)
    submit_s = np.cumsum(rng.exponential(gap_s, size=n_jobs))
    jobs = []
    for number, (index, length_s, at_s) in enumerate(zip(chosen, lengths_s, submit_s, strict=True)):
        key, plan, size = REQUESTS[index]
        job = JobSpec(f"job-{number}", float(at_s), key, size, 4 * size, plan, 1)
        steps = max(int(length_s / catalogue.requested(job).iter_time_s), 1)
        jobs.append(JobSpec(job.job_id, job.submit_time_s, key, size, 4 * size, plan, steps))
    return jobs


def scenario_of(name: str) -> Scenario:
    """Return the scenario of a case."""
    n_jobs, n_nodes, interval_s = CASES[name]
    spec = toy_nodes(n_nodes, 8)
    jobs = trace(n_jobs, spec.n_gpus, np.random.default_rng(1))
    return Scenario(name, tuple(jobs), spec, toy_catalogue(), RESTART_DELAY_S, interval_s)


@pytest.mark.parametrize("name", CASES)
def test_engine(benchmark, name: str) -> None:  # noqa: ANN001 - a fixture without a public type
    """Time one simulation, and note events a second and the share of the policy."""
    scenario = scenario_of(name)
    rounds = 5 if len(scenario.jobs) < 1000 else 1
    result = benchmark.pedantic(simulate, (scenario, policy("fifo")), rounds=rounds, warmup_rounds=rounds > 1)
    benchmark.extra_info.update(
        events=len(result.events),
        decisions=result.n_decisions,
        policy_wall_s=result.policy_wall_s,
        events_per_s=len(result.events) / (result.wall_s - result.policy_wall_s),
    )
    assert len(result.outcomes) == CASES[name][0]


def test_memory(benchmark) -> None:  # noqa: ANN001 - a fixture without a public type
    """Simulate the largest case in a process of its own, which has the memory of nothing else."""
    command = [sys.executable, __file__, list(CASES)[-1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = benchmark.pedantic(
        subprocess.run, (command,), {"env": environment, "stdout": subprocess.PIPE, "check": True}
    )
    peak_bytes = int(done.stdout)
    benchmark.extra_info.update(peak_memory_bytes=peak_bytes)
    assert peak_bytes < MEMORY_LIMIT_BYTES


if __name__ == "__main__":
    simulate(scenario_of(sys.argv[1]), policy("fifo"))
    sys.stdout.write(str(resident_bytes(peak=True)))
