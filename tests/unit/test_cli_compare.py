"""The verb ``compare``: the table, the processes behind it, and the progress."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from makespan.cli import main
from makespan.cli.progress import Countdown, PolicyProgress, quiet_option
from makespan.policies import policy_names
from makespan.tables import COMPARISON, read_csv


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


def test_compare_prints_and_writes_the_table(tmp_path: Path) -> None:
    names = "morphling-lookahead, sjf,fifo,sjf"
    path = tmp_path / "new" / "table.csv"
    result = run("--policies", names, "--workload", "mt", "--jobs", "60", "--output", str(path))
    assert result.exit_code == 0, result.output
    table = read_csv(path, COMPARISON)
    assert table["policy"].tolist() == ["morphling-lookahead", "sjf", "fifo"]
    assert table["jobs"].tolist() == [60, 60, 60]
    assert (table["trace"] == "mt").all() and (table["interval_s"] == 60).all()
    assert table["jct_ratio"].iloc[0] == 1.0
    assert list(path.parent.iterdir()) == [path]
    for row in table.itertuples():
        line = next(line for line in result.output.splitlines() if line.startswith(f"{row.policy} "))
        cells = line.split()
        assert cells[1] == f"{row.avg_jct_s:.0f}" and cells[4] == f"{row.makespan_s:.0f}"
        assert cells[7] == f"{row.sla_attainment:.1%}"
    assert "schedules: 3 of 3 possible" in result.output


def test_the_baseline_is_the_first_policy_or_the_one_named_and_quiet_shows_no_progress() -> None:
    for options, column in (((), "sjf"), (("--baseline", "fifo"), "fifo")):
        result = run("--policies", "sjf,fifo", "--quiet", *options)
        assert result.exit_code == 0
        assert "average JCT" not in result.output
        lines = {
            name: line
            for line in result.output.splitlines()
            for name in ("fifo", "sjf")
            if line.startswith(name)
        }
        assert lines[column].split()[8:10] == ["1.00", "1.00"]
        assert f"/B: over that of {column}" in result.output


def test_all_means_all() -> None:
    result = run("--policies", "all", "--workload", "naive", "--jobs", "4", "--interval", "60")
    assert result.exit_code == 0, result.output
    assert f"schedules: {len(policy_names())} of {len(policy_names())} possible" in result.output


def test_processes_give_the_same_table(tmp_path: Path) -> None:
    tables = []
    for workers in ("1", "2"):
        path = tmp_path / f"{workers}.csv"
        result = run(
            "--policies", "fifo,sia,morphling-lookahead", "--workers", workers, "--output", str(path)
        )
        assert result.exit_code == 0, result.output
        assert "3/3" in result.output
        tables.append(read_csv(path, COMPARISON).drop(columns="wall_s"))
    pd.testing.assert_frame_equal(*tables)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "fifo,siaa"), "unknown policy 'siaa'"),
        (("--policies", ""), "unknown policy ''"),
        (("--workload", "bass"), "unknown workload or file 'bass'"),
        (
            ("--baseline", "sia", "--policies", "fifo,sjf"),
            "--baseline 'sia' is not among the policies; expected fifo, sjf",
        ),
        (("--workers", "0"), "Invalid value for '--workers'"),
        (("--delay", "nan"), "Invalid value for '--delay': 'nan'"),
        (("--output", "."), ".: is a directory; expected a file"),
    ],
)
def test_mistakes_give_one_message_and_leave_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("--output", "table.csv", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["morphling-work", "tiresias", "fifo"]
)  # with rounds of its own, and without
def test_simulate_and_compare_have_one_result(name: str, tmp_path: Path) -> None:
    assert run("--policies", name, "--quiet", "--output", str(tmp_path / "table.csv")).exit_code == 0
    table = read_csv(tmp_path / "table.csv", COMPARISON)
    done = CliRunner().invoke(main, ["simulate", "--policy", name, "--quiet"])
    rounds = f"rounds of {table['interval_s'].iloc[0]:g} s"
    assert f"restart delay 260 s, {rounds}, knowledge: sampled" in done.output
    line = next(line for line in done.output.splitlines() if line.startswith("average JCT"))
    assert line.split()[2] == f"{table['avg_jct_s'].iloc[0]:.1f}"


# --- failures, and comparisons that compare nothing ------------------------------------------------

RAISES = """
from makespan.policies import policy
from makespan.sim import Decision


class Late:
    name, title, interval_s = "late", "Raises late", None
    is_clairvoyant = honours_guarantees = False
    references = ()

    def initial_state(self, cluster, catalogue):
        return policy("fifo").initial_state(cluster, catalogue)

    def decide(self, view, state):
        if view.time_s > 1000:
            raise KeyError("x")
        return policy("fifo").decide(view, state)


POLICIES = (Late(),)
"""


@pytest.mark.parametrize("workers", ["1", "3"])
@pytest.mark.parametrize("baseline", ["fifo", "late"])
def test_what_others_reached_is_kept_when_a_policy_fails(
    workers: str, baseline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(RAISES, encoding="utf-8")
    options = ("--baseline", baseline, "--workers", workers, "--output", "table.csv", "--delay", "30")
    result = run("--policies", "fifo,./late.py,sjf", *options)
    assert result.exit_code == 1
    table = read_csv("table.csv", COMPARISON)
    assert table["policy"].tolist() == ["fifo", "sjf"]
    assert table["jct_ratio"].isna().all() == (baseline == "late")
    assert "schedules: 2 of 2 possible" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("Error: policy 'late' on 'naive': late.py, line 16")
    assert "late: failed" in result.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_interrupt_prints_what_is_done_and_writes_nothing(
    workers: str, form: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(progress: PolicyProgress, shares: Any, done: Any) -> None:
        if done[0] is not None:
            raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PolicyProgress, "__call__", interrupt)
    options = ("--workers", workers, "--output", "table.csv", "--jobs", "60", "--workload", "base")
    result = run("--policies", "fifo,morphling-lookahead,sia", *options, *form)
    assert result.exit_code == 130 and "Aborted!" in result.stderr
    shown = result.stderr if form else result.stdout
    row = next(line for line in shown.splitlines() if line.startswith("fifo ")).split()
    assert row[7:9] == ["1.00", "1.00"] or row[8:10] == ["1.00", "1.00"]
    assert "of 3 policies are done; nothing is written" in result.stderr
    assert not (form and result.stdout) and list(tmp_path.iterdir()) == []


def test_only_failures_are_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(RAISES, encoding="utf-8")
    result = run("--policies", "./late.py", "--output", "table.csv", "--quiet")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: policy 'late' on 'naive': late.py, line 16")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["late.py"]


def test_waiting_time_and_load_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    options = ("--workload", "base", "--jobs", "30", "--nodes", "2", "--load", "4", "--output", str(path))
    result = run("--policies", "fifo,sjf", "--quiet", *options)
    assert result.exit_code == 0
    table = pd.read_csv(path)
    row = next(line for line in result.stdout.splitlines() if line.startswith("fifo ")).split()
    head = next(line for line in result.stdout.splitlines() if line.startswith("policy ")).split()
    assert head[-2:] == ["wait", "wall"] and row[-2] == f"{table['avg_waiting_time_s'][0]:.0f}"
    assert table["avg_waiting_time_s"][0] > 600
    assert f"load {table['offered_load'][0]:.2f}, at most " in result.stdout
    assert "Warning" not in result.output


def test_a_comparison_in_which_nobody_waits_is_said_to_compare_nothing() -> None:
    idle = run("--policies", "fifo,sjf", "--jobs", "3", "--load", "0.01", "--quiet")
    assert idle.exit_code == 0
    (warning,) = (line for line in idle.stderr.splitlines() if line.startswith("Warning: "))
    assert "no job waited for longer than a round under any policy" in warning
    assert "of 64 GPUs at a time" in warning and "--load" in warning
    busy = run("--policies", "fifo,sjf", "--jobs", "30", "--load", "100", "--quiet")
    assert "Warning" not in busy.output and "of 64 GPUs requested at a time" in busy.stdout


# --- progress -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def done(avg_jct_s: float) -> Any:
    return SimpleNamespace(metrics=SimpleNamespace(avg_jct_s=avg_jct_s))


def test_progress_in_a_terminal_is_a_bar_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    now = [0.0]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("makespan.cli.progress.time.perf_counter", lambda: now[0])
    progress = PolicyProgress(["fifo", "morphling-lookahead", "sia"])
    now[0] = 60.0
    progress([0.5, 1.0, 0.0], [None, done(1234.4), None])
    lines = stream.getvalue().splitlines()
    assert "fifo                 [###############---------------]  50%" in lines[0]
    assert "morphling-lookahead  [##############################] done, average JCT 1234 s" in lines[1]
    assert "sia                  [------------------------------] waiting" in lines[2]
    assert "0:01:00 passed  about 0:01:00 left" in lines[3]
    progress.close()
    assert stream.getvalue().endswith("\x1b[4F\x1b[J\x1b[?25h")


def test_progress_elsewhere_is_a_line_now_and_then_and_one_for_each_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("makespan.cli.progress.time.perf_counter", lambda: now[0])
    progress = PolicyProgress(["fifo", "sia"])
    progress([0.0, 0.25], [None, None])
    assert stream.getvalue() == ""
    now[0] = 20.0
    for _ in range(2):
        progress([0.0, 0.25], [None, None])
    assert stream.getvalue().endswith("  0/2 policies done; sia 25%; about 0:02:20 left\n")
    assert stream.getvalue().count("\n") == 1
    for _ in range(2):
        progress([0.0, 1.0], [None, done(99.6)])
    assert stream.getvalue().endswith("  1/2 sia: average JCT 100 s\n")
    assert stream.getvalue().count("\n") == 2


def test_the_time_left_follows_from_the_last_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, now = io.StringIO(), [100.0]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("makespan.cli.progress.time.perf_counter", lambda: now[0])
    countdown = Countdown("runs")
    for passed_s, done in ((0, 10), (5, 11), (12, 10), (13, 12), (32, 30), (300, 0), (320, 10)):
        now[0] = 100.0 + passed_s
        countdown(done, 70)
    countdown.close()
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()] == [
        "10/70 runs",  # after 12 s: nothing is done yet
        "30/70 runs, about 0:00:40 left",
        "0/70 runs",  # another one begins
        "10/70 runs, about 0:02:00 left",
    ]
    with click.Context(click.Command("any")) as context:
        quiet_option().handle_parse_result(context, {"quiet": True}, [])
        now[0] += 60.0
        Countdown("runs")(1, 2)
        PolicyProgress(["fifo"])([0.5], [None])
    assert stream.getvalue().count("\n") == 4
    slow_start = Countdown("runs")
    for done in range(31):
        slow_start(done, 100)
        now[0] += 60.0 if done == 0 else 1.0
    slow_start(31, 100)
    assert stream.getvalue().endswith("31/100 runs, about 0:01:09 left\n")  # a run a second


def test_the_time_left_is_one_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, now = Terminal(), [0.0]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("makespan.cli.progress.time.perf_counter", lambda: now[0])
    countdown = Countdown("runs")
    for done in (0, 5, 10):
        countdown(done, 20)
        now[0] += 7.0
    text = stream.getvalue()
    assert text.startswith("\x1b[?25l0/20 runs  [------------------------------] 0:00:00\x1b[K\n")
    assert "\x1b[1F10/20 runs  [###############---------------] 0:00:14  about 0:00:14 left" in text
    countdown.close()
    assert stream.getvalue().endswith("\x1b[1F\x1b[J\x1b[?25h")
