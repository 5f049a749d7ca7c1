"""What Morphling's policies reach on the published traces, decided by the fitted model."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pandas as pd
import pytest
from missed_goals import MISSED

from makespan.claims import read_targets
from makespan.hardware import cluster
from makespan.metrics import Summary
from makespan.studies import Scenario, SimulationSpec, predicted_catalogue, predictions, run_all
from makespan.throughput import PublishedSource
from makespan.traces import read_morphling_jobs, with_perturbed_arrivals

pytestmark = [pytest.mark.claims, pytest.mark.xdist_group("policies on published traces")]

OURS = ("morphling-lookahead", "morphling-work")
DELAY_S, ROUND_S = 260.0, 60.0
SEEDS = (0, 1001, 1002)  # the file itself, and shifts of it that results are not reported on
MORE_SEEDS = (0, *range(1001, 1011))  # where guarantees make single lists jump
DELAYS_S = (0.0, 78.0, 260.0, 600.0)
ARRIVAL_STD_S = 900.0
SPEC = cluster("a800-64")

TARGETS = Path(__file__).parents[2] / "benchmarks" / "targets.csv"
GOALS = [goal for goal in read_targets(TARGETS) if goal.comparison.table == "published/morphling/table4"]


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
    return run_all([SimulationSpec(scenario, policy)])[0].metrics


def reached(directory: Path, policy: str, trace: str, seed: int = 0) -> tuple[float, float]:
    """Return average JCT and makespan [s]."""
    summary = found(directory, policy, trace, seed)
    return summary.avg_jct_s, summary.makespan_s


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.name)
def test_the_published_job_lists_are_served_as_well_as_intended_but_for_what_is_said(published_dir, goal):
    policy = next(name for name in OURS if f'policy == "{name}"' in goal.comparison.rows)
    trace = next(name for name in ("base", "bp", "mt") if f'trace == "{name}"' in goal.comparison.rows)
    jct_s, makespan_s = reached(published_dir, policy, trace)
    row = {"trace": trace, "policy": policy, "restart_delay_s": DELAY_S}
    table = pd.DataFrame([row | {"avg_jct_s": jct_s, "makespan_s": makespan_s}])
    assert goal.is_met(goal.value(table)) is (goal.name not in MISSED)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", OURS)
def test_every_guarantee_is_kept_in_truth(published_dir, policy, seed):
    assert found(published_dir, policy, "mt", seed).sla_attainment == 1.0


@pytest.mark.parametrize(("trace", "seeds"), [("base", SEEDS), ("mt", MORE_SEEDS)])
@pytest.mark.parametrize("policy", OURS)
def test_jobs_take_longer_where_restarts_do(published_dir, policy, trace, seeds):
    means = [
        mean(found(published_dir, policy, trace, seed, delay_s).avg_jct_s for seed in seeds)
        for delay_s in DELAYS_S
    ]
    assert all(longer >= 0.97 * shorter for shorter, longer in pairwise(means))


@pytest.mark.parametrize("rival", ["sia", "synergy", "antman", "gavel", "tiresias", "fifo"])
def test_rivals_that_know_as_much_take_longer_on_base(published_dir, rival):
    mine, theirs = (reached(published_dir, name, "base") for name in ("morphling-lookahead", rival))
    assert mine[0] < theirs[0] and mine[1] < theirs[1]


@pytest.mark.parametrize("rival", ["sia", "synergy", "antman", "gavel", "tiresias", "fifo"])
def test_on_mt_a_rival_that_knows_as_much_takes_longer_or_breaks_guarantees(published_dir, rival):
    mine, theirs = (found(published_dir, name, "mt") for name in ("morphling-lookahead", rival))
    assert mine.avg_jct_s < theirs.avg_jct_s or theirs.sla_attainment < 1.0
