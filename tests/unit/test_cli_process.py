"""The command line as a process: start-up, terminals and pipes."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from makespan.cli import main
from makespan.cli.group import VERBS

# A shell without job control starts what runs in the background with interrupts ignored; a terminal does not.
HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{HEED}; from makespan.cli import main; main(prog_name='makespan')"]


def test_each_verb_says_in_the_list_what_it_says_itself() -> None:
    context = click.Context(main)
    for verb, (_, text) in VERBS.items():
        command = main.get_command(context, verb)
        assert command is not None and command.name == verb
        assert command.get_short_help_str(limit=200) == text


def test_help_starts_without_the_heavy_libraries() -> None:
    code = (
        "import sys; from makespan.cli import main; main(['--help'], standalone_mode=False); "
        "heavy = {'pandas', 'numpy', 'scipy', 'pydantic', 'matplotlib'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [("jinja2", "report", "report"), ("torch", "slapo verify bert", "torch")],
)
def test_a_package_of_an_extra_that_is_missing_is_one_line(package, arguments, extra, tmp_path: Path) -> None:
    problem = f"No module named '{package}'"
    (tmp_path / f"{package}.py").write_text(f'raise ModuleNotFoundError("{problem}", name="{package}")')
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    (tmp_path / "results").mkdir()
    done = subprocess.run(
        [*COMMAND, *arguments.split()], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    expected = f"Error: {problem}; expected the extra {extra}: pip install 'makespan[{extra}]'"
    assert done.stderr.splitlines() == [expected]


def test_the_naive_workload_runs_without_any_option() -> None:
    done = subprocess.run([*COMMAND, "simulate"], capture_output=True, text=True, check=True)
    assert len(re.findall(r"\d+/10 ", done.stdout)) >= 5
    assert "generated naive workload" in done.stderr


def test_a_terminal_is_refreshed_in_place() -> None:
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    often = (
        "from makespan.cli import simulate; simulate._FRAME_S = 0.0; from makespan.cli import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", often, "simulate"], stdout=slave, env=environment)
    os.close(slave)
    written = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(master)
    assert process.wait(600) == 0
    text = written.decode()
    assert text.count("\x1b[J") >= 3
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h") < text.index("average JCT")
    assert "\x1b" not in text[text.index("average JCT") :]


@pytest.mark.parametrize(
    "arguments", [["policies"], ["explain", "bert", "ga", "8"], ["simulate"], ["simulate", "--quiet"]]
)
def test_a_closed_pipe_ends_quietly(arguments: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
    )
    os.close(writer)
    complaints = [line for line in done.stderr.splitlines() if not line.startswith("generated ")]
    assert complaints == []
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []


NOISY = """
import ctypes
import os

from makespan.policies import policy

_fifo = policy("fifo")


class Noisy:
    name = title = "noisy"
    interval_s, is_clairvoyant, honours_guarantees, references = None, True, False, ()
    initial_state = _fifo.initial_state

    def decide(self, view, state):
        os.write(1, b"native line\\n")
        ctypes.CDLL(None).printf(b"line that C keeps until the end\\n")
        return _fifo.decide(view, state)


POLICIES = (Noisy(),)
"""


@pytest.fixture
def noisy(tmp_path: Path) -> str:
    """Policy that writes to the standard output past Python, as solvers do."""
    path = tmp_path / "noisy.py"
    path.write_text(NOISY)
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--json", "--policy"],
        ["compare", "--workers", "2", "--json", "--policies"],
    ],
)
def test_what_native_code_prints_does_not_spoil_the_output(arguments: list[str], noisy: str) -> None:
    last = f"{noisy},fifo" if arguments[0] == "compare" else noisy
    done = subprocess.run([*COMMAND, *arguments, last], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)
    assert "native line" in done.stderr
    if arguments[0] == "simulate":  # workers end without a word of what C kept
        assert "line that C keeps" in done.stderr


@pytest.mark.parametrize("target", ["-", "/dev/stdout", "link"])
def test_a_table_on_the_standard_output_is_alone_there(target: str, noisy: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    arguments = ["compare", "--workers", "1", "--policies", noisy, "--output", target]
    with (tmp_path / "out").open("wb") as output, (tmp_path / "err").open("wb") as errors:
        subprocess.run([*COMMAND, *arguments], stdout=output, stderr=errors, check=True, cwd=tmp_path)
    rows = (tmp_path / "out").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["policy", "noisy"]
    assert "native line" in (tmp_path / "err").read_text()


def test_a_closed_error_stream_takes_nothing_of_the_output(noisy: str) -> None:
    command = shlex.join([*COMMAND, "simulate", "--quiet", "--json", "--policy", noisy])
    done = subprocess.run(f"{command} 2>&-", shell=True, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)
    assert done.stderr == ""


def group_ended(group: int, patience_s: float = 3600.0) -> bool:
    """Wait until no process of a group is left."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("after_s", [0.1, 3.0])  # while workers start, and while they work
def test_an_interrupt_ends_a_comparison_and_its_processes(after_s: float, tmp_path: Path) -> None:
    options = ["--workload", "base", "--jobs", "6000", "--policies", "sia,gavel", "--workers", "2"]
    process = subprocess.Popen(
        [*COMMAND, "compare", *options, "--output", str(tmp_path / "table.csv")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert "generated base workload" in process.stderr.readline()  # the jobs are there, the workers come next
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all processes hear it
    _, complaints = process.communicate(timeout=3600)
    assert process.returncode == 130
    assert "Aborted!" in complaints and "Traceback" not in complaints
    assert list(tmp_path.iterdir()) == []
    assert group_ended(process.pid)
