"""What Morphling's policies reach on the published traces, decided by the fitted model."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import pandas as pd
import pytest

from makespan.claims import read_targets
from makespan.hardware import cluster
from makespan.metrics import Summary
from makespan.studies import Case, Scenario, predicted_catalogue, predictions, run_all
from makespan.throughput import PublishedSource
from makespan.traces import read_morphling_jobs, with_perturbed_arrivals

pytestmark = pytest.mark.claims

DELAY_S, ROUND_S = 260.0, 60.0
SEEDS = (1, 2, 3, 4, 5)
ARRIVAL_STD_S = 900.0
SPEC = cluster("a800-64")

TARGETS = Path(__file__).parents[2] / "benchmarks" / "targets.csv"
SEEDS_OF = {"published/morphling/table4": (0,), "published/morphling/perturbed": SEEDS}
GOALS = [goal for goal in read_targets(TARGETS) if goal.table in SEEDS_OF]


@cache
def scenarios(directory: Path) -> dict[str, Scenario]:
    """Return the job lists, and what was measured as far as policies know it."""
    source = PublishedSource(directory, default_cpu_threads=SPEC.nodes[0].cpu_threads // SPEC.nodes[0].n_gpus)
    tables = {key: source.load(key) for key in ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30")}
    folder = directory / "morphling" / "workloads"
    jobs = {name: read_morphling_jobs(folder / f"workload-{name}.csv").jobs for name in ("base", "bp", "mt")}
    knowledge = predictions(tables, SPEC.name, "extended")
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


def cells(text: str) -> dict[str, str]:
    """Read ``column=value; column=value``."""
    return dict(pair.split("=") for pair in text.split("; ") if pair)


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.name)
def test_the_published_job_lists_are_served_as_well_as_intended(published_dir, goal):
    wanted = cells(goal.rows)
    rows = []
    for policy in {wanted["policy"], *cells(goal.relative_to).values()}:
        runs = [
            found(published_dir, policy, wanted["trace"], seed, float(wanted["restart_delay_s"]))
            for seed in SEEDS_OF[goal.table]
        ]
        means = {column: mean(getattr(run, column) for run in runs) for column in ("avg_jct_s", "makespan_s")}
        rows.append(wanted | {"policy": policy} | means)
    assert goal.is_met(goal.value(pd.DataFrame(rows)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["morphling-lookahead", "morphling-work"])
def test_every_guarantee_is_kept_in_truth(published_dir, policy, seed):
    assert found(published_dir, policy, "mt", seed).sla_attainment == 1.0


@pytest.mark.parametrize("trace", ["base", "bp", "mt"])
@pytest.mark.parametrize("rival", ["sia", "synergy", "antman"])
def test_rivals_that_know_as_much_take_longer(published_dir, rival, trace):
    mine, theirs = (reached(published_dir, name, trace) for name in ("morphling-lookahead", rival))
    assert mine[0] < theirs[0] and mine[1] < theirs[1]
