"""What Morphling's policies reach on the published traces, decided by the fitted model."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from makespan.hardware import cluster
from makespan.metrics import Summary
from makespan.papers.morphling import predicted_catalogue, predictions
from makespan.studies import Case, Scenario, run_all
from makespan.throughput import PublishedSource
from makespan.traces import read_morphling_jobs, with_perturbed_arrivals

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
def scenarios(directory: Path) -> dict[str, Scenario]:
    """Return the job lists, and what was measured as far as policies know it."""
    source = PublishedSource(directory, default_cpu_threads=SPEC.nodes[0].cpu_threads // SPEC.nodes[0].n_gpus)
    tables = {key: source.load(key) for key in ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30")}
    folder = directory / "morphling" / "workloads"
    jobs = {name: read_morphling_jobs(folder / f"workload-{name}.csv").jobs for name in ("base", "bp", "mt")}
    requests = [job for trace in jobs.values() for job in trace]
    knowledge = predictions(tables, requests, SPEC.name, "extended", "fitted")
    catalogue = predicted_catalogue(tables, knowledge, SPEC.nodes[0])
    return {name: Scenario(name, jobs[name], SPEC, catalogue, interval_s=ROUND_S) for name in jobs}


@cache
def found(directory: Path, policy: str, trace: str, seed: int = 0, delay_s: float = DELAY_S) -> Summary:
    """Return the metrics of a schedule that the validator accepts."""
    scenario = replace(scenarios(directory)[trace], restart_delay_s=delay_s)
    if seed:
        scenario = replace(scenario, jobs=with_perturbed_arrivals(scenario.jobs, ARRIVAL_STD_S, seed))
    return run_all([Case(scenario, policy)])[0].metrics


def reached(directory: Path, policy: str, trace: str, seed: int = 0) -> tuple[float, float]:
    """Return average JCT and makespan [s]."""
    summary = found(directory, policy, trace, seed)
    return summary.avg_jct_s, summary.makespan_s


GOOD = {
    ("morphling-work", "base"): (1180.0, 64_500.0),
    ("morphling-work", "bp"): (1180.0, 64_500.0),
    ("morphling-work", "mt"): (2700.0, 68_500.0),
    ("morphling", "base"): (2600.0, 66_000.0),
}


@pytest.mark.parametrize(("policy", "trace"), list(GOOD))
def test_the_published_trace_is_served_well(published_dir, policy, trace):
    jct_s, makespan_s = reached(published_dir, policy, trace)
    assert jct_s <= GOOD[policy, trace][0]
    assert makespan_s <= GOOD[policy, trace][1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["morphling", "morphling-work"])
def test_every_guarantee_is_kept_in_truth(published_dir, policy, seed):
    assert found(published_dir, policy, "mt", seed).sla_attainment == 1.0


@pytest.mark.parametrize("trace", ["base", "bp", "mt"])
@pytest.mark.parametrize("rival", ["sia", "synergy", "antman"])
def test_rivals_that_know_as_much_take_longer(published_dir, rival, trace):
    mine, theirs = (reached(published_dir, name, trace) for name in ("morphling", rival))
    assert mine[0] < theirs[0] and mine[1] < theirs[1]


def test_sia_takes_three_times_as_long_at_the_delay_that_the_paper_measured(published_dir):
    mine, theirs = (
        found(published_dir, name, "base", delay_s=78.0).avg_jct_s for name in ("morphling-work", "sia")
    )
    assert theirs >= 3 * mine


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
