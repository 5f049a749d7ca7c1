"""The verbs that list what there is, rows as JSON and CSV, and what a shell completes."""

import csv
import io
import json

import pandas as pd
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from makespan.cli import main
from makespan.hardware import cluster, cluster_names
from makespan.policies import policy_names
from makespan.tables import JOINED_CLAIMS, write_csv
from makespan.workloads import small_workload_keys, workload_keys


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def ledger(tmp_path):
    rows = [
        ("One", "Table 1", "it is fast", "2x", "", "holds", "", "2.1x", "holds"),
        ("One", "Table 1", "it is small", "1 kB", "", "fails", "larger \x1b[2J here", "3 kB", "fails"),
        ("Two", "Fig. 2", "it is new", "", "", "not run", "nobody tried", "", "not run"),
    ]
    names = [*JOINED_CLAIMS.names, "reproduced_emulated", "verdict_emulated"]
    write_csv(pd.DataFrame(rows, columns=names), tmp_path / "claims.csv", JOINED_CLAIMS)
    return ("--ledger", str(tmp_path / "claims.csv"))


def test_claims_are_printed_by_artifact_with_what_was_reproduced(ledger):
    shown = run("claims", *ledger)
    assert shown.exit_code == 0, shown.output
    for text in ("One, Table 1", "holds     it is fast", "published: 2x; emulated: 2.1x", "nobody tried"):
        assert text in shown.output
    assert shown.output.count("One, Table 1") == 1 and "\x1b" not in shown.output
    assert shown.output.endswith("1 holds, 1 fails, 0 undecided, 1 not run\n")


def test_claims_of_one_paper_or_those_that_fail(ledger):
    assert "it is" in run("claims", *ledger, "--paper", "two").output
    assert "it is small" not in run("claims", *ledger, "--paper", "two").output
    fails = json.loads(run("claims", *ledger, "--fails", "--json").output)
    assert [row["statement"] for row in fails] == ["it is small"]
    unknown = run("claims", *ledger, "--paper", "three")
    assert unknown.exit_code == 2 and "expected One, Two" in unknown.output
    missing = run("claims", "--ledger", "gone.csv")
    assert missing.exit_code == 2 and "gone.csv: no such file" in missing.output


@pytest.mark.parametrize(
    ("verb", "column", "names"),
    [
        (["policies"], "policy", policy_names()),
        (["clusters"], "cluster", cluster_names()),
        (["workloads"], "workload", (*workload_keys(), *small_workload_keys())),
        (["compare", "--policies", "fifo,sjf", "--predictions", "exact"], "policy", ("fifo", "sjf")),
        (["simulate", "--policy", "fifo", "--predictions", "exact"], "policy", ("fifo",)),
    ],
)
def test_rows_as_json_and_csv_are_alone_on_the_output_and_equal(verb, column, names):
    made, listed = (run(*verb, form) for form in ("--json", "--csv"))
    assert made.exit_code == listed.exit_code == 0, made.output
    rows, cells = json.loads(made.stdout), list(csv.DictReader(io.StringIO(listed.stdout)))
    assert {row[column] for row in rows} == set(names) and len(rows) == len(cells)
    for row, texts in zip(rows, cells, strict=True):
        assert list(row) == list(texts)
        for name, value in row.items():
            assert name.endswith("wall_s") or texts[name] == ("" if value is None else str(value))


def test_an_explanation_as_rows_adds_up_or_says_why_it_cannot_run():
    rows = json.loads(run("explain", "llama7", "244", "8888", "--json").output)
    times = {row["name"]: row["value"] for row in rows if row["part"] == "time"}
    assert sum(times.values()) == pytest.approx(2 * times["iteration"])
    assert any(row["part"] == "memory" and row["unit"] == "B" for row in rows)
    exact = json.loads(run("explain", "llama7", "244", "8888", "--exact", "--json").output)
    assert [row["name"] for row in exact[len(rows) :]] == ["closed form", "event schedule"]
    rows = json.loads(run("explain", "llama7", "ga", "8", "--json").output)
    assert rows[0]["part"] == "reason" and "131.2 GB" in rows[0]["name"]


def test_clusters_and_workloads_say_what_they_are():
    found = {row["cluster"]: row for row in json.loads(run("clusters", "--json").output)}
    for name, row in found.items():
        assert (row["n_nodes"], row["n_gpus"]) == (cluster(name).n_nodes, cluster(name).n_gpus)
    assert found["a800-64"]["has_fitted_model"] and not found["p3dn-64"]["has_fitted_model"]
    assert "8 node(s), 64 x a800-80" in run("clusters").output
    assert "bert-large" in run("workloads").output


@pytest.mark.parametrize(
    ("arguments", "incomplete", "offered"),
    [
        (["simulate", "--policy"], "tir", ["tiresias", "tiresias-pollux"]),
        (["compare", "--policies"], "fifo,ga", ["fifo,gavel", "fifo,gavel-ftf", "fifo,gavel-makespan"]),
        (["emulate", "--cluster"], "p3", ["p3dn-64"]),
        (["simulate", "--cluster"], "p3", ["p3dn-64", "p3"]),  # the last one stands for files
        (["emulate", "--workload"], "rob", ["roberta"]),
        (["explain"], "gp", ["gpt2"]),
        (["simulate", "--workload"], "na", ["naive", "na"]),  # the last one stands for files
        (["claims", "--paper"], "morph", ["morphling"]),
    ],
)
def test_shells_complete_names(arguments, incomplete, offered):
    found = ShellComplete(main, {}, "makespan", "_MAKESPAN_COMPLETE").get_completions(arguments, incomplete)
    assert [item.value for item in found] == offered


@pytest.mark.parametrize(
    ("words", "file", "advice"),
    [
        ("claims", "results/claims.csv", "snakemake --cores all claims"),
        ("slapo tune", "config/published/slapo_fig10.csv", "--grid"),
        (
            "oobleck simulate --trace 1h --system varuna --model GPT-2",
            "config/published/oobleck_throughput.csv",
            "--throughput",
        ),
        ("report --results .", "config/config.yaml", "go to a checkout"),
    ],
)
def test_a_default_file_of_the_checkout_that_is_not_here_says_what_to_do(
    tmp_path, monkeypatch, words, file, advice
):
    monkeypatch.chdir(tmp_path)
    done = run(*words.split())
    assert done.exit_code == 2
    assert f"Error: {file}: no such file in {tmp_path}; " in done.stderr and advice in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("oobleck profile gpt", "--output"),
        ("oobleck plan --latencies none.json --nodes 1", "--output"),
        ("oobleck export", "--output"),
        ("easyscale export", "--output"),
        ("report --results .", "--output"),
        ("plan llama3-8b 8xh100-80", "--plot"),
        ("validate-public none.csv", "--predictions"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_refused_before_the_work(
    tmp_path, monkeypatch, words, option
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    done = run(*words.split(), option, "file/new.png")
    assert done.exit_code == 2
    assert f"Error: {option} file/new.png: {tmp_path}/file is no directory" in done.stderr
