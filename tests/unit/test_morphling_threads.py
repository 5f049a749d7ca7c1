"""The study of CPU threads: its mixes, its arms, its table, its figure and the statements on it."""

import math

import pytest
from legible_figures import assert_is_legible

from makespan.claims import Claim
from makespan.config import check_settings
from makespan.hardware import cluster
from makespan.papers.experiment import Given
from makespan.papers.morphling import PAPER
from makespan.papers.morphling.comparisons import CHOSEN, REQUESTED, threads_worth
from makespan.papers.morphling.figures import threads
from makespan.papers.morphling.studies import with_offload
from makespan.studies import generated_jobs
from makespan.throughput import EmulatedSource, ReferenceTimes

pytestmark = pytest.mark.xdist_group("CPU threads")

TESTBED = cluster("a800-64")
SOURCE = EmulatedSource(TESTBED, "L1", 0, 1.0, (8, 2, 24))
LEDGER, SETTINGS = PAPER.ledger(), check_settings({})
OPTIONS = {
    "workloads": ("roberta", "llama7"),
    "cpu_threads": (8, 2, 24),
    "policies": ("synergy",),
    "shares": (1.0,),
    "seeds": (1, 2),
    "jobs": 12,
    "delay_s": 60.0,
}


def study(**changes):
    """Return the table of the study with few jobs and options."""
    experiment = SETTINGS.morphling.experiments(SETTINGS)["threads"]
    return experiment.model_copy(update=OPTIONS | changes).run(Given("emulated"))["threads"]


@pytest.fixture(scope="module")
def studied():
    return study()


def test_every_plan_of_a_source_runs_with_all_numbers_of_threads():
    table = SOURCE.load("llama7")
    counts = table.groupby(["exec_plan", "placement"])["cpu_threads"].apply(lambda own: sorted(own))
    assert counts.apply(lambda own: own == [2, 8, 24]).all()
    alone = table[(table["exec_plan"] == "zero-offload") & (table["placement"] == "1")]
    by_threads = alone.set_index("cpu_threads")["iter_time_s"]
    assert by_threads[2] > 1.5 * by_threads[8] > 1.5 * by_threads[24]


def test_a_mix_keeps_load_and_submissions_and_offloads_its_share():
    times = ReferenceTimes(
        {key: EmulatedSource(TESTBED, "L1", 0, 1.0).load(key) for key in ("roberta", "llama7")}
    )
    jobs = generated_jobs("base", 20, 1, times).jobs
    mix = with_offload(jobs, 0.5, 1, times, 8)
    changed = [(old, new) for old, new in zip(jobs, mix, strict=True) if old is not new]
    assert len(changed) == 10 and with_offload(jobs, 0.0, 1, times, 8) == jobs
    assert mix == with_offload(jobs, 0.5, 1, times, 8) != with_offload(jobs, 0.5, 2, times, 8)
    for old, new in changed:
        assert (new.plan, new.workload, new.n_cpus) == ("zero-offload", "llama7", 8 * new.n_gpus)
        assert new.submit_time_s == old.submit_time_s
        assert new.duration_s * new.n_gpus == pytest.approx(old.duration_s * old.n_gpus)


def test_both_arms_run_the_same_mixes_and_only_one_chooses(studied):
    assert len(studied) == 4
    requested = studied[studied["threads"] == REQUESTED]
    chosen = studied[studied["threads"] == CHOSEN]
    assert requested["threads_per_gpu"].tolist() == [8.0, 8.0]
    assert (chosen["threads_per_gpu"] != 8).any()
    ratios = [a / b for a, b in zip(requested["avg_jct_s"], chosen["avg_jct_s"], strict=True)]
    assert threads_worth(studied)["ratio_mean"].tolist() == [pytest.approx(math.sqrt(ratios[0] * ratios[1]))]


def test_choosing_threads_pays_where_the_interval_says_so(studied):
    def verdict(subject, limit, factor):
        table = studied.assign(
            avg_jct_s=[{REQUESTED: factor, CHOSEN: 1.0}[one] for one in studied["threads"]]
        )
        table.loc[0, "avg_jct_s"] *= 1.001
        return LEDGER.checks["threads_pay"]({"threads": table}, Claim(subject, limit, {}, "threads"))

    assert verdict("synergy 1", 2, 1.2).holds is True
    assert verdict("synergy 1", 2, 0.8).holds is False
    assert verdict("synergy 1", 10, 1.2).holds is None
    assert verdict("synergy 0.5", 2, 1.2) is None
    assert verdict("synergy 1", 2, 1.2).reproduced.startswith("1.20x with ")


def test_the_figure_shows_every_policy_and_share(studied):
    figure, rows = threads({"threads": studied}, "emulated")
    assert_is_legible(figure)
    assert [axes.get_title() for axes in figure.axes] == ["Synergy"]
    assert len(rows) == len(studied)
