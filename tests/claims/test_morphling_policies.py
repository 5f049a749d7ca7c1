"""What Morphling's policies must reach on the published traces, file and perturbed arrivals."""

from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from makespan.hardware import cluster
from makespan.policies import REGISTRY
from makespan.sim import Catalogue, simulate, validate_schedule
from makespan.traces import PublishedSource, read_morphling_jobs, with_perturbed_arrivals

pytestmark = pytest.mark.claims

DELAY_S, ROUND_S = 260.0, 60.0
SEEDS = (1, 2, 3, 4, 5)
ARRIVAL_STD_S = 900.0
SPEC = cluster("a800-64")

# policy, trace: average JCT [s] and makespan [s] that must be reached
MUST = {
    ("morphling-work", "base"): (1300.0, 67_000.0),
    ("morphling-work", "bp"): (1300.0, 67_000.0),
    ("morphling-work", "mt"): (3000.0, 70_500.0),
    ("morphling", "base"): (3000.0, 68_000.0),
}


@cache
def catalogue(directory: Path) -> Catalogue:
    """Return what was measured."""
    source = PublishedSource(directory, default_cpu_threads=SPEC.nodes[0].cpu_threads // SPEC.nodes[0].n_gpus)
    keys = ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30")
    return Catalogue.from_tables([source.load(key) for key in keys], node=SPEC.nodes[0])


@cache
def reached(directory: Path, policy: str, trace: str, seed: int = 0) -> tuple[float, float]:
    """Return average JCT and makespan [s] of a schedule that the validator accepts."""
    jobs = read_morphling_jobs(directory / "morphling" / "workloads" / f"workload-{trace}.csv").jobs
    if seed:
        jobs = with_perturbed_arrivals(jobs, ARRIVAL_STD_S, seed)
    known = catalogue(directory)
    chosen = REGISTRY[policy]
    result = simulate(jobs, SPEC, known, chosen, restart_delay_s=DELAY_S, interval_s=ROUND_S)
    violations = validate_schedule(
        result.events,
        jobs,
        SPEC,
        known.on(SPEC),
        DELAY_S,
        interval_s=ROUND_S,
        keeps_guarantees=chosen.honours_guarantees,
        outcomes=result.outcomes,
    )
    assert violations == []
    outcomes = result.outcomes
    jct_s = float((outcomes["finish_time_s"] - outcomes["submit_time_s"]).mean())
    return jct_s, float(outcomes["finish_time_s"].max() - outcomes["submit_time_s"].min())


@pytest.mark.parametrize(("policy", "trace"), list(MUST))
def test_the_published_trace_is_served_as_well_as_it_must_be(published_dir, policy, trace):
    jct_s, makespan_s = reached(published_dir, policy, trace)
    assert jct_s <= MUST[policy, trace][0]
    assert makespan_s <= MUST[policy, trace][1]


@pytest.mark.parametrize(("policy", "trace"), list(MUST))
def test_perturbed_arrivals_are_served_as_well_on_average(published_dir, policy, trace):
    runs = [reached(published_dir, policy, trace, seed) for seed in SEEDS]
    assert mean(jct_s for jct_s, _ in runs) <= MUST[policy, trace][0]
    assert mean(makespan_s for _, makespan_s in runs) <= MUST[policy, trace][1]


@pytest.mark.parametrize(
    ("ablation", "least"), [("morphling-work-e", 1.7), ("morphling-work-r", 1.35), ("morphling-work-n", 1.6)]
)
def test_an_ablation_costs_as_much_as_stated(published_dir, ablation, least):
    full, _ = reached(published_dir, "morphling-work", "base")
    assert reached(published_dir, ablation, "base")[0] >= least * full


@pytest.mark.parametrize(("rival", "least"), [("synergy", 4.5), ("sjf", 2.0), ("srtf", 1.55)])
def test_rivals_take_as_much_longer_as_stated(published_dir, rival, least):
    full, _ = reached(published_dir, "morphling-work", "base")
    assert reached(published_dir, rival, "base")[0] >= least * full
