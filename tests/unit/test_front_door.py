"""The front door: what ``import makespan`` gives, and the example of the README."""

import contextlib
import inspect
import io
import re
import subprocess
import sys
from importlib import import_module

import numpy as np
import pandas as pd
import pytest

import makespan
from makespan.errors import InputError, UnknownNameError
from makespan.policies.sia import Sia
from makespan.sim import JobView
from makespan.tables import COMPARISON, JOBS, THROUGHPUT, write_csv
from makespan.traces import jobs_table

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def naive():
    return makespan.scenario("naive", n_jobs=4)


def test_the_example_of_the_readme_has_three_lines_and_one_import_and_ranks_plans(root):
    (block,) = BLOCK.findall((root / "README.md").read_text(encoding="utf-8"))
    lines = [line for line in block.splitlines() if line]
    assert len(lines) == 3
    assert [line for line in lines if "import" in line] == ["import makespan"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    header, *rows = printed.getvalue().splitlines()
    assert {"exec_plan", "iter_time_s"} <= set(header.split())
    assert len(rows) == 3 and all(" 44 " in row for row in rows)


def test_a_comparison_names_its_policies_and_the_baseline_has_the_ratio_one():
    table = makespan.compare(makespan.scenario("base", n_jobs=20), ["morphling-work", "sia", "fifo"])
    assert table["policy"].tolist() == ["morphling-work", "sia", "fifo"]
    assert table["jct_ratio"][0] == 1.0 and (table["jct_ratio"][1:] > 1.0).all()


def test_importing_loads_no_library_and_every_name_is_there_and_typed(root):
    code = "import sys, makespan; print(sorted({'numpy', 'pandas', 'makespan.studies'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for name in set(makespan.__all__) - {"__version__"}:
        found = getattr(makespan, name)
        assert found.__doc__
        if inspect.isfunction(found):
            assert all(
                item.annotation is not item.empty for item in inspect.signature(found).parameters.values()
            )
    assert {"simulate", "Scenario", "ElasticTrainer", "create_schedule"} <= set(makespan.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulte'"):
        _ = makespan.simulte


def test_simulate_keeps_the_schedule_and_compare_makes_a_table(naive):
    done = makespan.simulate(naive, "fifo")
    assert done.violations == () and len(done.result.outcomes) == done.metrics.n_jobs == 4
    table = makespan.compare(naive, ["sjf", "fifo"], baseline="fifo")
    COMPARISON.validate(table, where="compare")
    assert table["avg_jct_s"][1] == done.metrics.avg_jct_s and table["jct_ratio"][1] == 1.0
    with pytest.raises(InputError, match="baseline 'sia' is not among the policies; expected fifo"):
        makespan.compare(naive, ["fifo"], baseline="sia")
    with pytest.raises(InputError, match="at least one"):
        makespan.compare(naive, [])


def test_emulate_fit_and_rank_speak_in_tables():
    table = makespan.emulate("bert")
    THROUGHPUT.validate(table, where="emulate")
    fitted = makespan.fit(table)
    ranked = makespan.rank_plans(fitted, 8)
    assert ranked["iter_time_s"].is_monotonic_increasing and len(ranked) > 3
    assert set(ranked["placement"]) == {"8"}
    truth = table[table["placement"] == "8"].set_index("exec_plan")["iter_time_s"]
    best = ranked.iloc[0]
    assert best["iter_time_s"] == pytest.approx(truth[best["exec_plan"]], rel=0.2)
    with pytest.raises(InputError, match="table of workloads bert, vit; expected exactly one"):
        makespan.fit(pd.concat([table, makespan.emulate("vit")]))


def test_read_trace_knows_every_format_by_name(naive, tmp_path):
    write_csv(jobs_table(naive.jobs), tmp_path / "jobs.csv", JOBS)
    trace = makespan.read_trace(tmp_path / "jobs.csv")
    assert trace.jobs == naive.jobs
    assert makespan.scenario(trace.jobs).jobs == naive.jobs
    with pytest.raises(UnknownNameError, match="unknown format of a trace 'slurm'"):
        makespan.read_trace(tmp_path / "jobs.csv", "slurm")
    with pytest.raises(InputError, match="epoch_time_s"):
        makespan.read_trace(tmp_path / "jobs.csv", "easyscale")


def test_a_fit_refuses_a_table_of_several_batches():
    table = makespan.emulate("bert")
    mixed = pd.concat([table, table.assign(global_batch_size=2 * table["global_batch_size"])])
    with pytest.raises(InputError, match="table of workload 'bert' has global batches of 32, 64 samples"):
        makespan.fit(mixed)


def test_arguments_that_would_have_no_effect_are_refused(naive, tmp_path):
    path = tmp_path / "jobs.csv"
    write_csv(jobs_table(naive.jobs), path, JOBS)
    for given, message in (
        ({"tasks": path}, r"jobs\.csv: format 'auto' has no second file, got tasks .*; leave tasks out"),
        (
            {"epoch_time_s": 60.0},
            r"jobs\.csv: format 'auto' .* got epoch_time_s 60\.0; leave epoch_time_s out",
        ),
    ):
        with pytest.raises(InputError, match=message):
            makespan.read_trace(path, **given)
        with pytest.raises(InputError, match=message):
            makespan.scenario(path, **given)
        with pytest.raises(InputError, match=message.replace(r"jobs\.csv: format 'auto'", "jobs")):
            makespan.scenario(naive.jobs, **given)
        with pytest.raises(InputError, match=message.replace(r"jobs\.csv: format 'auto'", "base")):
            makespan.scenario("base", n_jobs=2, **given)
    with pytest.raises(InputError, match="jobs in Python have no file format, got file_format 'helios'"):
        makespan.scenario(naive.jobs, file_format="helios")
    for source in ("emulated", "measured"):
        with pytest.raises(
            InputError, match=f"source '{source}' reads no published files, got published_dir"
        ):
            makespan.scenario("naive", source=source, published_dir=".")
    for source in ("emulated", "published"):
        with pytest.raises(
            InputError, match=f"source '{source}' reads no tables of your own, got measured_dir"
        ):
            makespan.scenario("naive", n_jobs=2, source=source, measured_dir=tmp_path)


def test_arguments_of_another_kind_are_one_message(naive):
    for call, message in (
        (lambda: makespan.simulate("naive", "fifo"), "scenario is 'naive'; expected a Scenario, such as"),
        (lambda: makespan.compare("naive", ["fifo"]), "scenario is 'naive'; expected a Scenario, such as"),
        (lambda: makespan.compare(naive, "fifo"), r"policies is 'fifo'; expected a list of them"),
        (
            lambda: makespan.compare(naive, ["sia", Sia(power=-1.0)]),
            r"two of the policies are named 'sia'; .*replace",
        ),
        (lambda: makespan.compare(naive, ["fifo"], n_processes=0), "n_processes is 0; expected 1 or more"),
        (lambda: makespan.scenario("naive", seed=-1), "seed is -1; expected a whole number >= 0"),
        (lambda: makespan.scenario("naive", n_jobs=2.5), "n_jobs is 2.5; expected a whole number or None"),
        (lambda: makespan.fit("gpt2"), "table is 'gpt2'; expected a DataFrame"),
        (lambda: makespan.fit(makespan.emulate("gpt2").drop(columns="clean")), "lacks column.* clean; exp"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    assert makespan.scenario("naive", n_jobs=np.int64(2), seed=np.int32(3)).jobs


def test_compare_keeps_what_others_reached_when_a_policy_fails(naive):
    class Broken:
        name, title, interval_s, references = "broken", "Broken", None, ()
        is_clairvoyant = honours_guarantees = False

        def initial_state(self, cluster, catalogue):
            return None

        def decide(self, view, state):
            raise KeyError("x")

    with pytest.raises(
        makespan.ComparisonError, match=r"policy 'broken' on 'naive'.*KeyError: 'x'"
    ) as caught:
        makespan.compare(naive, ["fifo", Broken(), "sjf"])
    whole = makespan.compare(naive, ["fifo", "sjf"])
    pd.testing.assert_frame_equal(caught.value.table.drop(columns="wall_s"), whole.drop(columns="wall_s"))


def test_demand_counts_what_is_asked_for_at_a_time():
    from makespan.studies import demand
    from makespan.workloads import JobSpec

    jobs = [JobSpec(name, at_s, "bert", n, 8 * n, "ga", 100) for name, at_s, n in
            (("a", 0.0, 4), ("b", 0.0, 2), ("c", 1e6, 8))]  # fmt: skip
    given = makespan.scenario(jobs, predictions="exact")
    fitting = given.catalogue.on(given.cluster)
    work = sum(job.n_gpus * job.steps * fitting.requested(job).iter_time_s for job in jobs)
    found = demand(given)
    assert found.most_gpus == 8 and found.load == pytest.approx(work / (64 * 1e6))
    at_once = demand(makespan.scenario(jobs[:2], predictions="exact"))
    assert at_once.most_gpus == 6 and at_once.load != at_once.load


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("makespan.policies", "Room", "FreeResources"),
        ("makespan.slapo", "Place", "Divergence"),
        ("makespan.oobleck.oracle", "Oracle", "ReferenceTrainer"),
        ("makespan.oobleck.reference", "PlainTraining", "SingleProcessReference"),
    ],
)
def test_a_name_of_the_last_version_is_found_with_a_warning(module, old, new):
    home = import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {new}") as caught:
        assert getattr(home, old) is getattr(home, new)
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        home.nothing_of_that_name  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new"), [("knows", "is_time_known"), ("assures", "guarantees"), ("has_run", "has_observed")]
)
def test_a_policy_finds_attributes_of_jobs_under_their_last_names(old, new):
    job = JobView.__new__(JobView)
    with pytest.warns(DeprecationWarning, match=f"JobView.{old} is now {new}"):
        assert getattr(job, old).__func__ is getattr(JobView, new)
    with pytest.raises(AttributeError, match="'JobView' object has no attribute 'nothing'"):
        job.nothing  # noqa: B018


def test_the_divergences_of_a_report_are_found_under_their_last_name():
    from makespan.slapo import VerifyReport

    report = VerifyReport.__new__(VerifyReport)
    object.__setattr__(report, "divergences", ("one",))
    with pytest.warns(DeprecationWarning, match="VerifyReport.places is now divergences"):
        assert report.places == ("one",)
