"""Fig. 7: strategies choose by rule, the table says what it takes, and nothing else decides."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from makespan.config import check_settings
from makespan.errors import TraceError
from makespan.papers.experiment import Given
from makespan.papers.morphling import adaptation as module
from makespan.papers.morphling.adaptation import MORPHLING, Fig7Stage
from makespan.perf import fitting as learning
from makespan.plans import write_exec_plan

SETTINGS = check_settings({})
FIG7 = SETTINGS.morphling.experiments(SETTINGS)["fig7"]
STAGES = (
    Fig7Stage(name="2x4", placement="44", cpu_threads=2),
    Fig7Stage(name="1x4", placement="4", cpu_threads=2),
    Fig7Stage(name="1x1", placement="1", cpu_threads=2),
    Fig7Stage(name="1x1 2xCPU", placement="1", cpu_threads=4),
)
TIMES = [
    ("142", "44", 2, 4.0),
    ("241", "44", 2, 2.0),
    ("222", "44", 2, 1.0),
    ("412", "44", 2, 0.5),
    ("zero-offload+gc", "44", 2, 10.0),
    ("141", "4", 2, 5.0),
    ("221", "4", 2, 3.0),
    ("zero-offload+gc", "4", 2, 0.0),
    ("111", "1", 2, 0.0),
    ("111", "1", 4, 0.0),
    ("zero-offload+gc", "1", 2, 66.0),
    ("zero-offload+gc", "1", 4, 46.0),
]
PUBLISHED = pd.DataFrame(
    {
        "strategy": ["TP+DP", MORPHLING],
        "stage": ["2x4", "1x1"],
        "published_plan": ["", "offload"],
        "published_iter_time_s": [4.1, 66.0],
        "source": "test",
    }
)


def throughput(times=TIMES):
    frame = pd.DataFrame(times, columns=["exec_plan", "placement", "cpu_threads", "iter_time_s"])
    return frame.assign(
        workload="llama7_b16",
        global_batch_size=16,
        feasible=frame["iter_time_s"] > 0,
        clean=True,
        iter_time_s=frame["iter_time_s"].where(frame["iter_time_s"] > 0),
    )


def adapted(times, stages=STAGES):
    """Return the table of a job with given iteration times."""
    given = Given("emulated", times={"llama7_b16": times}, cells={"fig7": PUBLISHED})
    return FIG7.model_copy(update={"stages": stages}).run(given)["fig7"]


class Oracle:
    """A performance model with given predictions [s] that remembers what it was told."""

    def __init__(self, predicted, sampled=()):
        self.predicted, self.sampled, self.learned, self.asked = dict(predicted), list(sampled), [], {}
        self.refits = 0
        self.workload = "llama7_b16"
        self.environment = None
        self.points = SimpleNamespace(workload=SimpleNamespace(global_batch_size=16))

    def refit(self, points, measured):
        self.learned, self.refits = list(zip(points, measured, strict=True)), self.refits + 1
        return self

    def rank(self, fit, placement, hardware, cpu_threads, plans):
        self.asked[placement.text, cpu_threads] = [write_exec_plan(plan) for plan in plans]
        known = [plan for plan in plans if write_exec_plan(plan) in self.predicted]
        ranked = sorted(known, key=lambda plan: self.predicted[write_exec_plan(plan)])
        return [
            SimpleNamespace(plan=plan, iter_time_s=self.predicted[write_exec_plan(plan)]) for plan in ranked
        ]


PREDICTED = {"111": 1.0, "412": 0.4, "222": 0.9, "142": 3.9, "zero-offload+gc": 2.5, "221": 2.9, "141": 4.0}


@pytest.fixture
def install(monkeypatch):
    def install(oracle):
        def sample(rows, *_):
            kept = rows[rows["feasible"]]
            pairs = zip(kept["exec_plan"], kept["placement"], strict=True)
            return SimpleNamespace(fit=oracle, fitted=np.array([pair in oracle.sampled for pair in pairs]))

        monkeypatch.setattr(learning, "fit_table", sample)
        monkeypatch.setattr(learning, "points_from_table", lambda rows, *_: rows["exec_plan"].tolist())
        monkeypatch.setattr(learning, "measured_from_table", lambda rows: rows["iter_time_s"].tolist())
        monkeypatch.setattr(module, "load_environment", lambda name: None)
        monkeypatch.setattr(module, "rank_plans", oracle.rank)
        return oracle

    return install


@pytest.fixture
def oracle(install):
    return install(Oracle(PREDICTED))


@pytest.fixture
def table(oracle):
    return adapted(throughput())


def cell(table, strategy, stage):
    return table[(table["strategy"] == strategy) & (table["stage"] == stage)].iloc[0]


def test_every_strategy_has_every_stage_in_order(table):
    assert list(dict.fromkeys(table["strategy"])) == [
        MORPHLING,
        "TP+DP",
        "TP+PP",
        "Megatron 3D",
        "ZeRO-Offload+GC",
    ]
    for _, rows in table.groupby("strategy"):
        assert rows["stage"].tolist() == ["2x4", "1x4", "1x1", "1x1 2xCPU"]
        assert rows["gpus"].tolist() == [8, 4, 1, 1]


@pytest.mark.parametrize(
    ("strategy", "plans"),
    [
        ("TP+DP", ["142", "141", "", ""]),
        ("TP+PP", ["241", "141", "", ""]),
        ("Megatron 3D", ["222", "221", "", ""]),
        ("ZeRO-Offload+GC", ["zero-offload+gc", "", "zero-offload+gc", "zero-offload+gc"]),
    ],
)
def test_rules_of_the_fixed_strategies(table, strategy, plans):
    assert table.loc[table["strategy"] == strategy, "plan"].tolist() == plans


def test_what_cannot_run_has_no_plan_no_time_and_no_throughput(table):
    row = cell(table, "Megatron 3D", "1x1")
    assert (row["plan"], row["iter_time_s"], row["throughput_samples_per_s"]) == ("", 0.0, 0.0)
    failed = cell(table, "ZeRO-Offload+GC", "1x4")
    assert (failed["plan"], failed["iter_time_s"]) == ("", 0.0)


def test_morphling_follows_the_model_and_not_the_table(table, oracle):
    best = cell(table, MORPHLING, "2x4")
    assert (best["plan"], best["iter_time_s"], best["n_tried"]) == ("412", 0.5, 1)
    # Offload is expected to be faster with four GPUs, but it fails when it is tried.
    second = cell(table, MORPHLING, "1x4")
    assert (second["plan"], second["n_tried"]) == ("221", 2)
    assert cell(table, MORPHLING, "1x1")["plan"] == "zero-offload+gc"
    # The failed run is known, but there is nothing to fit.
    assert oracle.learned[:2] == [("412", 0.5), ("221", 3.0)]


def test_a_worse_choice_of_the_model_is_shown_as_it_is(install):
    install(Oracle({"142": 0.3, "412": 9.0}))
    row = cell(adapted(throughput(), STAGES[:1]), MORPHLING, "2x4")
    # After 142 took 4.0 s instead of 0.3 s, no other plan is expected to be faster.
    assert (row["plan"], row["iter_time_s"], row["n_tried"]) == ("142", 4.0, 1)


def test_a_plan_that_disappoints_gives_way_to_the_next(install):
    oracle = install(Oracle({"142": 0.3, "222": 3.0, "241": 3.5}))
    row = cell(adapted(throughput(), STAGES[:1]), MORPHLING, "2x4")
    assert (row["plan"], row["iter_time_s"], row["n_tried"]) == ("222", 1.0, 2)
    assert oracle.learned == [("142", 4.0), ("222", 1.0)] and oracle.refits == 2


def test_sampled_rows_are_known_from_the_start(install):
    install(Oracle({"142": 0.3, "222": 3.0}, sampled=[("142", "44")]))
    row = cell(adapted(throughput(), STAGES[:1]), MORPHLING, "2x4")
    assert (row["plan"], row["n_tried"]) == ("222", 1)


def test_a_plan_is_not_tried_twice_in_the_same_limit(install):
    oracle = install(Oracle({"142": 0.3}))
    again = (STAGES[0], STAGES[0].model_copy(update={"name": "again"}))
    table = adapted(throughput(), again)
    assert table.loc[table["strategy"] == MORPHLING, "n_tried"].tolist() == [1, 0]
    assert len(oracle.learned) == 1


def test_morphling_is_asked_about_the_plans_of_the_stage(table, oracle):
    assert set(oracle.asked["44", 2]) == {"142", "241", "222", "412", "zero-offload+gc"}
    assert set(oracle.asked["1", 4]) == {"111", "zero-offload+gc"}


def test_nothing_runs_if_the_model_finds_nothing(install):
    install(Oracle({}))
    table = adapted(throughput())
    own = table[table["strategy"] == MORPHLING]
    assert (own["throughput_samples_per_s"] == 0).all() and (own["plan"] == "").all()


def test_throughput_and_published_values(table):
    row = cell(table, "TP+DP", "2x4")
    assert row["throughput_samples_per_s"] == 16 / 4.0
    assert math.isnan(row["published_iter_time_s"])  # no stage of the paper, though a cell has its name
    assert math.isnan(cell(table, "TP+PP", "1x4")["published_iter_time_s"])
    assert cell(table, MORPHLING, "1x1")["published_plan"] == "offload"
    assert cell(table, MORPHLING, "1x1 2xCPU")["iter_time_s"] == 46.0


def test_stage_that_the_table_does_not_have(oracle):
    stages = (Fig7Stage(name="huge", placement="8888", cpu_threads=2),)
    with pytest.raises(TraceError, match=r"stage 'huge'.*no row with placement 8888 and 2 CPU.*1, 4, 44"):
        adapted(throughput(), stages)


def test_plan_that_the_table_does_not_have(oracle):
    times = [row for row in TIMES if row[0] != "241"]
    with pytest.raises(TraceError, match=r"stage '2x4': .* no row of plan 241 on placement 44; it has: 142"):
        adapted(throughput(times))


def test_failed_run_with_more_replicas_than_samples_is_no_candidate(oracle):
    times = [("zero-offload+gc", "8888", 2, 0.0), ("228", "8888", 2, 1.2), ("184", "8888", 2, 1.3)]
    times += [("481", "8888", 2, 1.4)]
    stages = (Fig7Stage(name="4x8", placement="8888", cpu_threads=2),)
    table = adapted(throughput(times), stages)
    assert "zero-offload+gc" not in oracle.asked["8888", 2]
    assert cell(table, "ZeRO-Offload+GC", "4x8")["plan"] == ""
