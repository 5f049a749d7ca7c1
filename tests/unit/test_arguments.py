"""Arguments and fields of another kind are refused in one line, and numbers of numpy are numbers."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import makespan
from makespan.arguments import check_fields, check_range, typed
from makespan.easyscale import predict_recovery
from makespan.emulator import Stragglers, pipeline_time_s
from makespan.errors import InputError, MakespanError, PlanError, TraceError
from makespan.hardware import cluster, cluster_of, gpu, homogeneous, joined, read_machines
from makespan.oobleck.job import ChainJob
from makespan.oobleck.profile import random32
from makespan.oobleck.reconfiguration import reconfigure
from makespan.oobleck.trainer import Fault, LiveOptions, train_resilient
from makespan.planning import (
    Layout,
    Pricer,
    Training,
    advise,
    plan,
    read_measured,
    read_model,
    size_clusters,
    software,
    validate_rows,
)
from makespan.plans import ExecutionPlan, Placement
from makespan.sim import FailureModel, NodeEvent, NodeEventKind, Recovery, expected_goodput, restart_cost
from makespan.traces import apportion, listed_jobs, scaled
from makespan.workloads import BlockSpec, JobSpec

OTHER = (None, True, 2.5, "x", [1], {"a": 1}, np.array([1, 2]), pd.DataFrame({"a": [1]}), pd.NA, object())
"""Values that are no whole numbers."""


@dataclass(frozen=True, slots=True)
class _Record:
    count: int
    share: float = 0.5
    name: str = ""
    is_on: bool = False
    sizes: tuple[int, ...] = ()
    pairs: tuple[tuple[str, float], ...] = ()
    most: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "record", positive=("count", "most"), not_negative=("share",))


@pytest.mark.parametrize("value", OTHER, ids=lambda value: type(value).__name__)
def test_what_is_no_whole_number_is_refused_in_one_line(value):
    with pytest.raises(InputError, match=r"record: count is .*; expected a whole number") as raised:
        _Record(value)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200
    with pytest.raises(PlanError, match=r"layout: tp is .*; expected a whole number"):
        Layout(dp=1, tp=value)


def test_fields_name_what_they_accept():
    for fields, message in (
        ({"count": 0}, "count is 0; expected a whole number >= 1"),
        ({"share": float("nan")}, "share is nan; expected a number"),
        ({"share": float("inf")}, "share is inf; expected a number >= 0"),
        ({"share": -0.5}, "share is -0.5; expected a number >= 0"),
        ({"name": 5}, "name is 5; expected text"),
        ({"is_on": 1}, "is_on is 1; expected True or False"),
        ({"sizes": (1, 2.5)}, r"sizes is \(1, 2.5\); expected a list, each a whole number"),
        ({"sizes": "12"}, "sizes is '12'; expected a list"),
        ({"pairs": [("a",)]}, r"pairs is \[\('a',\)\]; expected a list, each \(text, a number\)"),
        ({"most": 0}, "most is 0; expected a whole number >= 1"),
        ({"most": "x"}, "most is 'x'; expected a whole number or None"),
    ):
        _Record(1)  # types that were sound before do not let others pass
        with pytest.raises(InputError, match=f"^record: {message}"):
            _Record(**{"count": 1, **fields})


def test_numbers_of_numpy_become_plain_and_lists_become_tuples():
    record = _Record(
        np.int64(3), np.float32(0.25), "a", np.bool_(True), [np.int8(1), 2], [["b", np.int16(1)]]
    )

    assert record == _Record(3, 0.25, "a", True, (1, 2), (("b", 1),))
    kinds = [type(value) for value in (record.count, record.share, record.is_on, *record.sizes)]
    assert kinds == [int, float, bool, int, int]
    assert type(Training(read_model("llama3-8b"), np.int64(4096), np.int32(64)).seq) is int
    assert cluster_of("h100-80", np.int64(16)).with_gpus(np.int64(8)).n_gpus == 8


def test_functions_check_what_they_are_given_and_leave_the_rest_to_python():
    @typed
    def double(
        number: int, path: Path | None = None, *, names: list[str] | None = None
    ) -> tuple[object, ...]:
        return 2 * number, path, names

    assert double(np.int64(2), "a.csv", names=("b",)) == (4, Path("a.csv"), ("b",))
    for call, message in (
        (lambda: double("2"), "^number is '2'; expected a whole number$"),
        (lambda: double(2, 5), "^path is 5; expected a path or None$"),
        (lambda: double(2, names="b"), "^names is 'b'; expected a list, each text or None$"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        double()
    with pytest.raises(TypeError, match="unexpected keyword"):
        double(1, size=2)
    with pytest.raises(InputError, match="n is 9; expected a whole number, 1 to 8"):
        check_range("n", 9, 1, 8)


@pytest.fixture(scope="module")
def pricer():
    training = Training(read_model("llama3-8b"), seq=4096, global_batch=64)
    return Pricer(training, read_machines("8xh100-80"), software("megatron-bridge"))


def test_the_planner_refuses_what_it_cannot_use(pricer, tmp_path):
    best = plan(pricer, 1).best[0]
    rows = [(pricer.training, best.layout, pricer.cluster, best.step_s)]
    (tmp_path / "rows.csv").write_text("n_gpus,layout,step_s\n")
    for call, message in (
        (lambda: plan(None), "pricer is None; expected a Pricer"),
        (lambda: plan(pricer, -1), "n_best is -1; expected a whole number >= 1"),
        (lambda: pricer.price("tp2"), "layout is 'tp2'; expected a Layout"),
        (lambda: replace(pricer, cluster="8xh100-80"), "cluster is '8xh100-80'; expected a ClusterSpec"),
        (lambda: advise(pricer, rows, n_next=-1), "n_next is -1"),
        (lambda: advise(pricer, [1]), r"measured is \[1\]; expected a list"),
        (lambda: validate_rows(pricer, rows, [1.0, 2.0]), "memory_gib has 2 values for 1 measured rows"),
        (lambda: replace(pricer.training, precision=16), "precision is 16; expected text"),
        (
            lambda: size_clusters(pricer.training, "h100-80", pricer.stack, tokens=float("inf"), most_gpus=8),
            "tokens is inf; expected a finite number above 0",
        ),
        (
            lambda: size_clusters(pricer.training, "h100-80", pricer.stack, tokens=1e9, most_gpus=0),
            "most_gpus is 0; expected a whole number, 1 to 131,072",
        ),
        (lambda: gpu(5), "name is 5; expected text"),
        (lambda: joined("none", []), "has no part"),
        (lambda: homogeneous(cluster("a800-64").node, 10**9, cluster("a800-64").network), "at most 131,072"),
        (lambda: read_measured("a\0b", pricer.training, pricer.cluster), "no such file"),
    ):
        with pytest.raises(MakespanError, match=message):
            call()


def test_simulations_refuse_what_they_cannot_use():
    scenario = makespan.scenario("naive", n_jobs=2)
    job = scenario.jobs[0]
    for call, message in (
        (lambda: makespan.scenario("naive", predictions="exactly"), "unknown predictions 'exactly'"),
        (lambda: makespan.scenario("naive", restart_delay_s="5"), "restart_delay_s is '5'; expected"),
        (lambda: replace(scenario, catalogue=None), "catalogue is None; expected a Catalogue"),
        (lambda: replace(scenario, interval_s=10**400), "interval_s is 1000.*; expected a number or None"),
        (lambda: replace(scenario, checkpoint_interval_s=math.inf), "checkpoint_interval_s is inf; expected"),
        (lambda: replace(scenario, interval_s="60"), "interval_s is '60'; expected a number or None"),
        (lambda: makespan.compare(scenario, 5), "policies is 5; expected a list of them"),
        (lambda: makespan.compare(scenario, [5]), "int is not a policy"),
        (lambda: makespan.compare(scenario, ["fifo"], baseline=[1]), r"baseline \[1\] is not among"),
        (lambda: makespan.compare(scenario, ["fifo"], n_processes="2"), "n_processes is '2'; expected"),
        (lambda: makespan.simulate(scenario, None), "NoneType is not a policy"),
        (lambda: restart_cost(True), "restart_delay_s is True"),
        (lambda: replace(job, steps=True), "steps is True; expected a whole number"),
        (lambda: restart_cost(10**400), "restart_delay_s is 1000.*; expected a finite time"),
        (lambda: replace(job, submit_time_s=10**400), "submit_time_s is 1000.*; expected a number"),
        (lambda: replace(job, submit_time_s="0"), "submit_time_s is '0'; expected a number"),
        (lambda: JobSpec(5, 0.0, "bert", 1, 1, "DP", 1), "job 5: job_id is 5; expected text"),
        (lambda: Recovery("resilient", f=True), "recovery: f is True"),
        (lambda: FailureModel("3"), "failures: per_day is '3'; expected a number"),
        (lambda: NodeEvent("0", 0, NodeEventKind.FAILED), "node event: time_s is '0'; expected a number"),
        (lambda: expected_goodput(Recovery(), 0, 60.0), "mtbf_s is 0"),
        (lambda: scaled(scenario.jobs, 10**30, 1), "copies of each job; expected"),
        (lambda: apportion("x", 5), "cannot divide 5 by weights 'x'"),
        (lambda: predict_recovery("4", 1.0, parameter_bytes=1e9), "n_devices is '4'; expected"),
        (lambda: random32(-1), "seed is -1; expected a whole number >= 0"),
    ):
        with pytest.raises(MakespanError, match=message):
            call()


def test_plans_and_emulated_times_refuse_what_they_cannot_use():
    for call, message in (
        (lambda: makespan.emulate("bert", noise="1"), "noise is '1'; expected a number"),
        (lambda: makespan.emulate(["bert"]), r"workload is \['bert'\]; expected text"),
        (lambda: Placement((2.5,)), r"placement: gpus_per_node is \(2.5,\); expected a list"),
        (lambda: Placement.parse(44), "placement is 44; expected text"),
        (lambda: ExecutionPlan(dp=True), "plan: dp is True; expected a whole number"),
        (lambda: Stragglers(0.5, float("nan")), "stragglers: mean_slowdown is nan"),
        (lambda: pipeline_time_s([1.0], [1.0], 10**30), "n_microbatches is .*; expected"),
        (
            lambda: reconfigure((), (), (), {}, 1, 1, 10**30, layer_bytes=None),
            "n_microbatches is .*; expected",
        ),
        (lambda: BlockSpec(1, "causal", 8, 8, 1, 1, 8, 1, 8), "gated is 1; expected True or False"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_tables_with_cells_of_another_kind_are_one_message():
    table = makespan.emulate("bert")
    for broken, message in (
        (table.assign(cpu_threads="x"), "table: row 1, column 'cpu_threads': found 'x'; expected a whole"),
        (table.assign(iter_time_s=-1.0), "row 1, column 'iter_time_s': found -1.0; expected a positive time"),
        (pd.concat([table, table[["clean"]]], axis=1), "has two columns 'clean'; expected each name once"),
    ):
        with pytest.raises(TraceError, match=message):
            makespan.fit(broken)
    with pytest.raises(TraceError, match=r"table 'jobs' is \{\}; expected a pandas.DataFrame"):
        listed_jobs({})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"job": "bert"}, "job is 'bert'; expected a ChainJob"),
        ({"profile": None}, "profile is None; expected a ModelProfile"),
        ({"iterations": 2.5}, "iterations is 2.5; expected a whole number"),
        ({"iterations": -1}, "iterations is -1; expected a whole number >= 0"),
        ({"run_dir": 3}, "run_dir is 3; expected text or a path"),
        ({"options": {"n_nodes": 2}}, "options is .*; expected a LiveOptions"),
        ({"watch": "events"}, "watch is 'events'; expected a function"),
    ],
)
def test_a_resilient_run_refuses_what_it_cannot_be_given_before_anything_is_written(tmp_path, changes, told):
    given = {
        "job": ChainJob("bert"), "profile": random32(0), "iterations": 1, "run_dir": tmp_path / "run",
        "options": LiveOptions(n_nodes=2, f=0, n0=2),
    }  # fmt: skip
    with pytest.raises(InputError, match=told):
        train_resilient(**given | changes)
    assert not (tmp_path / "run").exists()


def test_a_fault_names_a_phase_that_there_is_none_of():
    with pytest.raises(InputError, match=r"unknown phase 'backwards'; expected .*Did you mean 'backward'"):
        Fault("backwards", 1, 0)
