"""Measured tables of models that the zoo lacks, or has with another batch: a simulation needs times alone."""

from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

import makespan
from makespan.cli import main
from makespan.errors import InputError, TraceError
from makespan.hardware import cluster
from makespan.studies import Scenario, TableCatalogue
from makespan.tables import THROUGHPUT, write_csv
from makespan.throughput import MeasuredSource, ReferenceTimes
from makespan.traces import jobs_table, read_jobs
from makespan.workloads import JobSpec, workload, workload_of

TIMES = {("ga", "4"): 3.0, ("zero-dp", "4"): 3.2, ("gc", "4"): 4.1, ("tp+ga", "4"): 4.4,
         ("zero-dp", "44"): 1.7, ("ga", "2"): 5.9, ("122", "4"): 3.9, ("zero-offload", "2"): 9.0}  # fmt: skip
JOBS = [
    JobSpec("a", 0.0, "{}", 4, 32, "zero-dp", 400, tenant="x"),
    JobSpec("b", 60.0, "{}", 8, 64, "zero-dp", 300, is_guaranteed=True),
    JobSpec("c", 90.0, "{}", 2, 16, "ga", 200),
]


def table(key: str, batch: int = 96) -> pd.DataFrame:
    return THROUGHPUT.validate(
        pd.DataFrame(
            {
                "workload": key,
                "exec_plan": [plan for plan, _ in TIMES],
                "placement": [place for _, place in TIMES],
                "cpu_threads": 8,
                "global_batch_size": batch,
                "iter_time_s": list(TIMES.values()),
                **dict.fromkeys(("forward_s", "overlap_sync_s", "optimize_s"), float("nan")),
                "feasible": True,
                "clean": True,
                "flag": "",
                "provenance": "measured",
            }
        ),
        where="own",
    )


def jobs(key: str) -> list[JobSpec]:
    return [JobSpec(**{**job_fields(job), "workload": key}) for job in JOBS]


def job_fields(job: JobSpec) -> dict[str, object]:
    return {name: getattr(job, name) for name in JobSpec.__dataclass_fields__}


@pytest.fixture(
    params=["mixtral-mini", "llama7"]
)  # a name of one's own, and one of the zoo with another batch
def own(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    key = str(request.param)
    (tmp_path / "times").mkdir()
    write_csv(table(key), tmp_path / "times" / f"{key}.csv", THROUGHPUT)
    write_csv(jobs_table(jobs(key)), tmp_path / "jobs.csv")
    return key


def run(verb: str, folder: Path, *arguments: str) -> Result:
    given = ("--workload", str(folder / "jobs.csv"), "--source", "measured", "--cluster", "a800-64")
    return CliRunner().invoke(main, [verb, *given, "--measured-dir", str(folder / "times"), *arguments])


def test_own_tables_are_simulated_by_their_times(own: str, tmp_path: Path) -> None:
    done = run(
        "simulate", tmp_path, "--policy", "fifo", "--quiet", "--output", str(tmp_path / "out"), "--delay", "5"
    )
    assert done.exit_code == 0, done.output
    outcomes = pd.read_csv(tmp_path / "out" / "outcomes.csv").set_index("job_id")
    assert outcomes["reference_iter_time_s"].to_dict() == {"a": 3.2, "b": 1.7, "c": 5.9}
    assert outcomes["finish_time_s"]["a"] == pytest.approx(5 + 401 * 3.2)
    expected = "exact" if own == "mixtral-mini" else "sampled"
    assert f"knowledge: {expected}" in done.output


def test_every_policy_runs_on_own_tables(own: str, tmp_path: Path) -> None:
    done = run("compare", tmp_path, "--policies", "all", "--quiet")
    assert done.exit_code == 0, done.output


def test_a_name_without_a_table_is_refused_with_row_and_names(own: str, tmp_path: Path) -> None:
    write_csv(jobs_table(jobs("mixtral-mino")), tmp_path / "jobs.csv")
    done = run("simulate", tmp_path)
    assert done.exit_code == 2
    assert "row 1, column 'workload': found 'mixtral-mino'" in done.output
    assert "a workload with measurements of its own" in done.output
    with pytest.raises(TraceError, match="found 'mixtral-mino'"):
        read_jobs(tmp_path / "jobs.csv")


def test_python_takes_jobs_and_tables_of_own_models(own: str, tmp_path: Path) -> None:
    given = makespan.scenario(jobs(own), source="measured", measured_dir=tmp_path / "times")
    assert makespan.simulate(given, "morphling-work").metrics.n_jobs == 3
    by_hand = Scenario("own", tuple(jobs(own)), cluster("a800-64"), TableCatalogue.from_tables([table(own)]))
    assert makespan.compare(by_hand, ["fifo", "sia"])["jobs"].tolist() == [3, 3]
    assert ReferenceTimes({own: table(own)}).steps(own, 8, "zero-dp", 170.0) == 100


def test_policies_can_decide_by_predictions_for_own_models(own: str, tmp_path: Path) -> None:
    given = makespan.scenario(
        jobs(own), source="measured", measured_dir=tmp_path / "times", predictions="sampled"
    )
    assert makespan.simulate(given, "sia").violations == ()
    kinds = {item.is_known for item in given.catalogue.all(own)}
    assert kinds == {True} or kinds == {True, False}


def said_of_size(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a fit said of the size of a model; what it leaves open is said, too."""
    said = [record.getMessage() for record in caplog.records]
    return [one for one in said if "parameters best" in one]


def test_a_fit_takes_own_models_and_their_size(caplog: pytest.LogCaptureFixture) -> None:
    stated = makespan.fit(table("mixtral-mini"), parameters=2.6e9)
    assert stated.predicted_s == pytest.approx(list(TIMES.values()), rel=0.3)
    spec = stated.fit.points.workload
    assert (spec.model.parameters, spec.global_batch_size) == (2_600_000_000, 96)
    assert not said_of_size(caplog)
    assert len(makespan.rank_plans(stated, 4)) > 1
    guessed = makespan.fit(table("mixtral-mini"))
    assert guessed.fit.cost <= stated.fit.cost * 1.2
    (said,) = said_of_size(caplog)
    assert f"its times fit {guessed.fit.points.workload.model.parameters:.3g} parameters best" in said


def test_a_fit_takes_models_of_the_zoo_with_another_batch(caplog: pytest.LogCaptureFixture) -> None:
    spec = makespan.fit(table("llama7")).fit.points.workload
    assert spec.model == workload("llama7").model and spec.global_batch_size == 96
    assert not said_of_size(caplog)
    with pytest.raises(InputError, match=r"'llama7' has 6738423808 parameters, got 2.6e"):
        makespan.fit(table("llama7"), parameters=2.6e9)


def test_a_table_in_which_nothing_ran_is_refused(tmp_path: Path) -> None:
    failed = table("mine").assign(feasible=False, iter_time_s=float("nan"))
    write_csv(failed, tmp_path / "mine.csv", THROUGHPUT)
    message = r"jobs: row 1, job .*: workload 'mine': no row of its table is feasible; expected one"
    with pytest.raises(InputError, match=message):
        makespan.scenario(jobs("mine"), source="measured", measured_dir=tmp_path)


def test_names_with_spaces_accents_and_dots_are_names(tmp_path: Path) -> None:
    for key in ("my model", "mod\u00e8le", "a.b"):
        write_csv(table(key), tmp_path / f"{key}.csv", THROUGHPUT)
        given = makespan.scenario(jobs(key), source="measured", measured_dir=tmp_path)
        assert makespan.simulate(given, "fifo").metrics.n_jobs == 3


def test_mistakes_in_own_tables_are_named(tmp_path: Path) -> None:
    source = MeasuredSource(tmp_path)
    write_csv(table("other"), tmp_path / "mine.csv", THROUGHPUT)
    with pytest.raises(
        TraceError, match=r"mine\.csv: row 1, column 'workload': found 'other'; expected mine"
    ):
        source.load("mine")
    write_csv(table("mine").assign(global_batch_size=[96] * 7 + [48]), tmp_path / "mine.csv", THROUGHPUT)
    with pytest.raises(TraceError, match="row 8, column 'global_batch_size': found 48; expected 96"):
        source.load("mine")
    write_csv(table("mine", 6), tmp_path / "mine.csv", THROUGHPUT)
    with pytest.raises(TraceError, match=r"global batch of 6 samples cannot be split over 4 replicas"):
        source.load("mine")
    assert source.batch_of("../mine") is None and source.batch_of("none") is None
    with pytest.raises(InputError, match=r"5 parameters; expected >= 10000"):
        workload_of("mine", 8, 5)


@pytest.mark.parametrize("parameters", [1e4, 1e6, 1.24e8, 7e9, 1.75e11, 1e12])
def test_the_shape_of_an_own_model_has_about_the_stated_size(parameters: float) -> None:
    model = workload_of("mine", 8, parameters).model
    (block,) = model.blocks
    assert model.parameters == parameters
    if parameters > 1e8:
        assert 12 * block.n_layers * block.hidden**2 == pytest.approx(parameters, rel=0.15)
