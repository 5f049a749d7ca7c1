"""The verb ``compare``: the table, the processes behind it, and the progress."""

import io
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from makespan.cli import _pool, _progress, main
from makespan.cli._pool import run_all
from makespan.cli._progress import Progress
from makespan.cli._setup import Request, machines, prepare
from makespan.errors import MakespanError
from makespan.policies import policy_names
from makespan.tables import TABLE4, read_csv


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


@pytest.fixture(scope="module")
def naive():
    return prepare(Request(workload="naive", source="emulated"))


def test_compare_prints_and_writes_the_table(tmp_path: Path) -> None:
    names = "morphling, sjf,fifo,sjf"
    path = tmp_path / "new" / "table.csv"
    result = run("--policies", names, "--workload", "mt", "--jobs", "60", "--output", str(path))
    assert result.exit_code == 0, result.output
    table = read_csv(path, TABLE4)
    assert table["policy"].tolist() == ["morphling", "sjf", "fifo"]
    assert table["jobs"].tolist() == [60, 60, 60]
    assert (table["trace"] == "mt").all() and (table["interval_s"] == 60).all()
    assert table["jct_ratio_to_morphling"].iloc[0] == 1.0
    assert list(path.parent.iterdir()) == [path]
    for row in table.itertuples():
        line = next(line for line in result.output.splitlines() if line.startswith(f"{row.policy} "))
        cells = line.split()
        assert cells[1] == f"{row.avg_jct_s:.0f}" and cells[4] == f"{row.makespan_s:.0f}"
        assert cells[7] == f"{row.sla_attainment:.1%}"
    assert "schedules: 3 of 3 possible" in result.output


def test_ratios_are_missing_without_morphling_and_quiet_shows_no_progress() -> None:
    result = run("--policies", "fifo,sjf", "--quiet")
    assert result.exit_code == 0
    assert "average JCT" not in result.output
    line = next(line for line in result.output.splitlines() if line.startswith("fifo"))
    assert line.split()[8:10] == ["-", "-"]


def test_all_means_all() -> None:
    result = run("--policies", "all", "--workload", "naive", "--jobs", "4", "--interval", "60")
    assert result.exit_code == 0, result.output
    assert f"schedules: {len(policy_names())} of {len(policy_names())} possible" in result.output


def test_processes_give_the_same_table(tmp_path: Path) -> None:
    tables = []
    for workers in ("1", "2"):
        path = tmp_path / f"{workers}.csv"
        result = run("--policies", "fifo,sia,morphling", "--workers", workers, "--output", str(path))
        assert result.exit_code == 0, result.output
        assert "3/3" in result.output
        tables.append(read_csv(path, TABLE4).drop(columns="wall_s"))
    pd.testing.assert_frame_equal(*tables)
    assert ended()


def test_an_error_in_a_process_is_one_message_and_ends_the_others(naive) -> None:
    impossible = replace(naive, cluster=machines("a800-64", 1, 4))
    with pytest.raises(MakespanError, match="asks for"):
        run_all(impossible, ("fifo", "sjf", "srtf"), 78.0, None, 2, True)
    assert ended()


def ended(patience_s: float = 20.0) -> bool:
    """Wait until no process is left."""
    until = time.monotonic() + patience_s
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.05)
    return not multiprocessing.active_children()


class _Killer:
    """Progress that kills a worker as soon as there is one."""

    def __init__(self, names, quiet) -> None:
        self.shares = [0.0] * len(names)

    def draw(self) -> None:
        for child in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    def finish(self, number, avg_jct_s) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_killed_process_is_told_apart(naive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "Progress", _Killer)
    with pytest.raises(MakespanError, match="was killed"):
        run_all(naive, ("fifo", "sjf") * 200, 78.0, None, 2, True)
    assert ended()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "fifo,siaa"), "unknown policy 'siaa'"),
        (("--policies", ""), "unknown policy ''"),
        (("--workload", "bass"), "unknown workload or file 'bass'"),
        (("--workers", "0"), "Invalid value for '--workers'"),
        (("--delay", "nan"), "restart_delay_s is nan"),
        (("--output", "."), "--output .: accepted: a file"),
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


# --- progress -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_in_a_terminal_is_a_bar_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress, "_FRAME_S", 0.0)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress(["fifo", "morphling", "sia"], quiet=False)
    progress.shares[0] = 0.5
    progress.finish(1, 1234.4)
    progress.draw()
    lines = stream.getvalue().splitlines()
    assert "fifo       [###############---------------]  50%" in lines[0]
    assert "morphling  [##############################] done, average JCT 1234 s" in lines[1]
    assert "sia        [------------------------------] waiting" in lines[2]
    progress.close()
    assert stream.getvalue().endswith("\x1b[3F\x1b[J\x1b[?25h")


def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress(["fifo", "sia"], quiet=False)
    progress.shares[1] = 0.25
    progress.draw()
    assert stream.getvalue() == ""
    monkeypatch.setattr(progress, "_next", 0.0)
    progress.draw()
    progress.draw()
    assert stream.getvalue().endswith("  0/2 policies done; sia 25%\n")
    assert stream.getvalue().count("\n") == 1
