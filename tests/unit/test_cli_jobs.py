"""The verb ``jobs``: drawn lists are written and read back unchanged."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

import makespan
from makespan.cli import main
from makespan.errors import InputError
from makespan.tables import JOBS, read_csv
from makespan.traces import read_jobs, write_jobs
from makespan.workloads import JobSpec

HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"


def run(*arguments: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, list(arguments))


@pytest.fixture
def helios(tmp_path: Path) -> Path:
    path = tmp_path / "helios.csv"
    rows = (
        f'"{number}, ""it""",u,vc é,{gpus},{8 * gpus},1,COMPLETED,2020-05-01 00:{number:02d}:00,'
        f"2020-05-01 01:00:{number:02d},2020-05-01 02:{number:02d}:07,{3607 + 59 * number},0\n"
        for number, gpus in enumerate((1, 2, 4, 8, 3, 1, 16, 2, 1, 4))
    )
    path.write_text(HELIOS + "".join(rows), encoding="utf-8")
    return path


def events(directory: Path, *arguments: str) -> bytes:
    done = run("simulate", "--policy", "sia", "--quiet", "--output", str(directory), *arguments)
    assert done.exit_code == 0, done.output
    return (directory / "events.csv").read_bytes()


@pytest.mark.parametrize("workload", ["naive", "mt", "helios"])
def test_a_drawn_list_is_read_back_unchanged_and_gives_the_same_schedule(
    workload: str, helios: Path, tmp_path: Path
) -> None:
    drawn = ["--workload", workload, "--jobs", "9", "--seed", "3", "--load", "0.7"]
    if workload == "helios":
        drawn[1] = str(helios)
        drawn += ["--format", "helios"]
    once, again = tmp_path / "once.csv", tmp_path / "again.csv"
    assert run("jobs", *drawn, "--output", str(once)).exit_code == 0
    table = read_csv(once, JOBS)
    assert len(table) == 9 and table["submit_time_s"].is_monotonic_increasing
    assert run("jobs", "--workload", str(once), "--output", str(again)).exit_code == 0
    assert once.read_bytes() == again.read_bytes()
    file_format = "helios" if workload == "helios" else "auto"
    named = makespan.scenario(drawn[1], file_format=file_format, n_jobs=9, seed=3, load=0.7)
    assert read_jobs(once).jobs == named.jobs
    first = events(tmp_path / "first", *drawn)
    assert first == events(tmp_path / "second", "--workload", str(once))


def test_a_list_goes_to_the_standard_output_alone() -> None:
    result = run("jobs", "--workload", "naive", "--jobs", "3")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == ",".join(JOBS.names) and len(result.stdout.splitlines()) == 4
    assert "3 rows read, 3 kept" in result.stderr


def test_options_of_a_simulation_are_no_options_of_a_list() -> None:
    result = run("jobs", "--delay", "5")
    assert result.exit_code == 2 and "No such option" in result.output


def test_every_float_and_every_name_survives(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    base = JobSpec("a", 0.0, "bert", 4, 32, "zero-dp", 7)
    jobs = (
        replace(base, job_id='a,"b"; é', submit_time_s=0.1 + 0.2, tenant="nan", duration_s=1 / 3),
        replace(base, job_id="None", submit_time_s=1e6 / 7, is_guaranteed=True, steps=2**53),
        replace(base, job_id="#c", submit_time_s=5e11 / 3),
    )
    write_jobs(reversed(jobs), path)
    assert read_jobs(path).jobs == jobs
    for wrong in (" a", "a\nb", "a\u2028"):
        with pytest.raises(InputError, match="printable characters"):
            write_jobs([replace(base, job_id=wrong)], tmp_path / "wrong.csv")
    assert pd.read_csv(path)["job_id"].tolist()[0] == 'a,"b"; é'
    assert sorted(tmp_path.iterdir()) == [path]
