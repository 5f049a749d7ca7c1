"""Files are written whole, to files alone, and read within bounds; every mistake is one message."""

import os
import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.errors import InputError
from makespan.files import atomic_path, write_json, write_text

COMPARE = ("compare", "--policies", "fifo", "--quiet")


def child(code: str, *arguments: object, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, whose files may have ``limit`` bytes."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        preexec_fn=None if limit is None else small_files,
    )


# --- writing ------------------------------------------------------------------------------------


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def bound_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # the address may have 107 bytes
    return path


def link_to_fifo(path: Path) -> Path:
    path.symlink_to(fifo(path.with_name("pipe")))
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("make", "kind"),
    [(fifo, "a pipe"), (bound_socket, "a socket"), (link_to_fifo, "a pipe"), (folder, "a directory")],
)
def test_what_is_no_regular_file_is_refused_and_stays(make, kind, tmp_path):
    path = make(tmp_path / "target")
    before = {entry.name: stat.S_IFMT(entry.lstat().st_mode) for entry in tmp_path.iterdir()}
    with pytest.raises(InputError, match=f"target: is {kind}; accepted: a file"):
        write_text("text", path)
    assert {entry.name: stat.S_IFMT(entry.lstat().st_mode) for entry in tmp_path.iterdir()} == before


@pytest.mark.parametrize("arguments", [COMPARE, ("calibrate", "nowhere"), ("validate", "nowhere")])
def test_a_pipe_as_output_is_refused_before_the_work(arguments, tmp_path):
    path = fifo(tmp_path / "target")
    result = CliRunner().invoke(main, [*arguments, "--output", str(path)])
    assert result.exit_code == 2
    assert (
        result.stderr == f"Error: {path}: is a pipe; accepted: a file, there already or not, or - for the "
        "standard output\n"
    )
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize("verb", ["simulate", "emulate", "profile", "live"])
def test_a_directory_of_tables_is_no_stream(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [verb, "--output", "-"])
    assert result.exit_code == 2
    assert "--output -: accepted: a directory" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_symbolic_link_is_written_through(tmp_path):
    target = tmp_path / "there" / "table.csv"
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o640)
    for name, place in (("link.csv", target), ("new.csv", tmp_path / "there" / "new.csv")):
        link = tmp_path / name
        link.symlink_to(place)
        write_text(name, link)
        assert link.is_symlink()
        assert place.read_text() == name
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "link.csv") as temporary:
        assert temporary.parent == target.parent
        raise RuntimeError
    assert sorted(entry.name for entry in target.parent.iterdir()) == ["new.csv", "table.csv"]


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_the_standard_output_is_a_stream(name, tmp_path):
    code = "import sys; from makespan.files import write_text; print('a'); write_text('text', sys.argv[1])"
    assert child(code, name).stdout == "a\ntext"
    into = tmp_path / "file"
    with into.open("w") as stream:
        stream.write("before ")
        stream.flush()
        subprocess.run([sys.executable, "-c", code, name], stdout=stream, check=True)
    assert into.read_text() == "before a\ntext"


def test_a_table_on_the_standard_output_is_alone_there():
    result = CliRunner().invoke(main, [*COMPARE, "--output", "-"])
    assert result.exit_code == 0, result.output
    header, row = result.stdout.splitlines()
    assert header.startswith("trace,policy,") and row.startswith("naive,fifo,")
    assert "schedules: 1 of 1 possible" in result.stderr


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    target = tmp_path / "new" / "deeper" / "table.csv"
    code = "import sys; from makespan.files import write_text; write_text('x' * 1_000_000, sys.argv[1])"
    done = child(code, target, limit=65_536)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"OSError: [Errno 27] File too large: '{target}'"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("verb", "options", "file"),
    [
        ("simulate", ("--quiet",), "events.csv"),
        ("emulate", ("--workload", "bert"), "bert.csv"),
        ("compare", ("--quiet", "--policies", "fifo"), ""),
    ],
)
def test_a_full_disk_is_one_message_of_a_verb(verb, options, file, tmp_path):
    target = tmp_path / "new" / "out"
    code = "import sys; from makespan.cli import main; main(sys.argv[1:])"
    done = child(code, verb, *options, "--output", target, limit=128)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"Error: {target / file}: File too large"
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_a_figure_as_it_was(tmp_path, monkeypatch):
    import pandas as pd
    from matplotlib.figure import Figure

    from makespan.plots import save_figure

    table, stem = pd.DataFrame({"a": [1]}), tmp_path / "figures" / "one"
    save_figure(Figure(), table, stem)
    before = {path: path.read_bytes() for path in stem.parent.iterdir()}
    real = Figure.savefig

    def full(figure, path, **options):
        real(figure, path, **options)
        if options["format"] == "png":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*one\.\w+'"):
        save_figure(Figure(), table.assign(a=2), stem)
    assert {path: path.read_bytes() for path in stem.parent.iterdir()} == before
    with pytest.raises(OSError):
        save_figure(Figure(), table, tmp_path / "other" / "one")
    assert not (tmp_path / "other").exists()


def test_json_keeps_its_layout(tmp_path):
    write_json({"a": [1]}, tmp_path / "plain.json")
    write_json({"a": [1]}, tmp_path / "shown.json", indent=1)
    assert (tmp_path / "plain.json").read_text() == '{"a": [1]}'
    assert (tmp_path / "shown.json").read_text() == '{\n "a": [\n  1\n ]\n}\n'
