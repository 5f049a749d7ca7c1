"""Files are written whole, to files alone, and read within bounds; every mistake is one message."""

import os
import re
import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.config import check_settings
from makespan.emulator import calibration_text, load_calibration
from makespan.errors import ConfigError, InputError, MakespanError
from makespan.files import (
    atomic_path,
    open_seekable,
    read_bytes,
    read_json,
    read_yaml,
    write_json,
    write_text,
)
from makespan.perf import load_environment
from makespan.tables import JOBS, THROUGHPUT, read_csv, write_csv
from makespan.traces import jobs_table, read_jobs, read_pai_jobs, read_philly_jobs
from makespan.workloads import JobSpec

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
        # Otherwise Python would cut off the byte code that it writes beside the sources, and trust it later.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
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
    with pytest.raises(InputError, match=f"target: is {kind}; expected a file"):
        write_text("text", path)
    assert {entry.name: stat.S_IFMT(entry.lstat().st_mode) for entry in tmp_path.iterdir()} == before


@pytest.mark.parametrize("arguments", [COMPARE, ("calibrate", "nowhere"), ("validate", "nowhere")])
def test_a_pipe_as_output_is_refused_before_the_work(arguments, tmp_path):
    path = fifo(tmp_path / "target")
    result = CliRunner().invoke(main, [*arguments, "--output", str(path)])
    assert result.exit_code == 2
    assert (
        result.stderr == f"Error: {path}: is a pipe; expected a file, there already or not, or - for the "
        "standard output\n"
    )
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize("verb", ["simulate", "emulate", "profile", "live"])
def test_a_directory_of_tables_is_no_stream(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [verb, "--output", "-"])
    assert result.exit_code == 2
    assert "--output -: expected a directory" in result.stderr
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


# --- one place ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PLACES = {
    r"\btomllib\.": {"files.py"},
    r"\byaml\.(safe_)?load|SafeLoader": {"files.py"},
    r"\bpd\.read_csv\(": {"tables/io.py", "claims.py"},  # the second: data of the package
    r"\.to_csv\(": {"tables/io.py"},
    r"\.savefig\(": {"plots/style.py"},
    r"\.write_(text|bytes)\(": {"files.py", "throughput/register.py"},
    r"\bos\.replace\(|\.replace\(target\)": {"files.py"},
    r"json\.dump\(|json\.load\(": set(),
}


@pytest.mark.parametrize("pattern", PLACES)
def test_each_format_is_read_and_written_in_one_place(pattern):
    src = ROOT / "src" / "makespan"
    scripts = ROOT / "workflow" / "scripts"
    files = [*((path, str(path.relative_to(src))) for path in src.rglob("*.py"))]
    files += [(path, path.name) for path in scripts.glob("*.py")]
    found = {name for path, name in files if re.search(pattern, path.read_text("utf-8"))}
    assert found == PLACES[pattern]


# --- reading ------------------------------------------------------------------------------------

DEEP = 100_000
LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"cluster: na\xefve\n", "byte 0xef at position 11 is not UTF-8"),
        (b"a: 1\nb: 2\na: 3\n", "line 3: key 'a' is given twice; expected once"),
        (b"x:\n  a: 1\n  'a': 3\n", "line 3: key 'a' is given twice"),
        (b"a: &x\n  b: *x\n", "line 1: the value contains itself"),
        (b"a: &x [1, *x]\n", "line 1: the value contains itself"),
        (LAUGHS.encode(), "more than 100000 values"),
        (b"[" * DEEP, "it is nested too deeply"),
        (b"a: 2001-13-45\n", "month must be in 1..12"),
        (b"a: !!int x\n", "invalid literal"),
        (b"a: !!python/object:os.system x\n", "could not determine a constructor"),
        (b"? [a, {b: 1}]\n: 2\n", "unhashable key"),
        (b"\0" * 100, "it has zero bytes"),
    ],
)
def test_yaml_that_cannot_be_meant_is_one_message(text, message, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text)
    result = CliRunner().invoke(main, ["config", "--root", str(Path(__file__).parents[2]), str(path)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"Error: {path}: cannot be read as ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_aliases_that_end_are_read(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text("a: &x {b: 1}\nc: *x\nd: [*x, *x]\ne: {<<: *x, f: 2}\n", encoding="utf-8-sig")
    one = {"b": 1}
    assert read_yaml(path, "x") == {"a": one, "c": one, "d": [one, one], "e": {"b": 1, "f": 2}}


def test_settings_that_contain_themselves_are_refused():
    values: dict[str, object] = {}
    values["cluster"] = values
    with pytest.raises(ConfigError, match="contains itself"):
        check_settings(values)


WRONG_TOML = [
    (b"level = 'caf\xe9'", "byte 0xe9"),
    (b"a = " + b"[" * DEEP, "nested too deeply"),
    (b"a = 1\na = 2\n", "Cannot overwrite a value"),
    (b"= 1", "Invalid statement"),
    (b"", ""),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TOML)
@pytest.mark.parametrize("read", [load_calibration, load_environment])
def test_toml_that_cannot_be_read_is_one_message(read, text, message, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_bytes(text)
    with pytest.raises(InputError) as caught:
        read(str(path))
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('level = "L1"', 'level = ["L1"]'),
        ('level = "L1"', 'level = "L9"'),
        ("n_rows", "rows"),
        ("active_bounds = ", "active_bounds = 5 #"),
        ("[constants]\n", "[constants]\nunknown = 1\n"),
        ("[constants]\n", "constants = 5\n[other]\n"),
        ("e_gemm = 0", 'e_gemm = "fast" #'),
        ("e_gemm = 0", "e_gemm = -1.0 #"),
        ("e_gemm = 0", "e_gemm = nan #"),
        ("e_gemm = 0", "e_gemm = {a = 1} #"),
        ("[constants]\n", "without = [1]\n[constants]\n"),
        ("[constants]\n", "[without.unheard]\na = 1\n[constants]\n"),
        ("[constants]\n", "anchors = {vit = 'x'}\n[constants]\n"),
        ("[constants]\n", "anchors = {vit = inf}\n[constants]\n"),
        ("[constants]\n", "anchors = 3\n[constants]\n"),
    ],
)
def test_a_malformed_calibration_is_one_message(before, after, tmp_path):
    text = calibration_text(load_calibration("L1"))
    assert before in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(before, after, 1))
    result = CliRunner().invoke(main, ["explain", "vit", "ga", "8", "--calibration", str(path)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"Error: {path}: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "[" + "1" * 5000 + "]"])
def test_json_without_end_is_one_message(text, tmp_path):
    path = tmp_path / "jobs.json"
    path.write_text(text)
    for read in (read_philly_jobs, read_json):
        with pytest.raises(InputError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 300


@pytest.fixture
def sparse(tmp_path):
    """Return a function that makes a file of a gigabyte that takes no room."""

    def make(name: str) -> Path:
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(1 << 30)
        return tmp_path / name

    return make


def test_what_is_too_large_is_refused_before_it_is_opened(sparse, monkeypatch):
    path = sparse("large.csv")
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("opened"))
    with pytest.raises(
        InputError, match=r"large\.csv: has 1\.1 GB or more; expected a table of at most 536\.9 MB"
    ):
        read_bytes(path, "a table")
    monkeypatch.undo()
    with pytest.raises(InputError, match="zero bytes"), open_seekable(path, "a table", largest=None):
        pass


def test_every_reader_refuses_a_file_that_is_too_large(sparse, tmp_path):
    calls = [
        lambda: read_jobs(sparse("jobs.csv")),
        lambda: read_philly_jobs(sparse("jobs.json")),
        lambda: read_pai_jobs(sparse("pai_job_table.csv"), sparse("pai_task_table.csv")),
        lambda: read_csv(sparse("bert.csv"), THROUGHPUT),
        lambda: load_calibration(str(sparse("calibration.toml"))),
        lambda: load_environment(str(sparse("environment.toml"))),
        lambda: read_yaml(sparse("config.yaml"), "a configuration"),
    ]
    for call in calls:
        with pytest.raises(MakespanError, match=r"has 1\.1 GB or more|has zero bytes"):
            call()


def test_a_pipe_without_end_is_refused(tmp_path):
    code = "import sys; from makespan.files import read_bytes; read_bytes('-', 'a table')"
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as endless:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdin=endless.stdout, capture_output=True, text=True)
        endless.kill()
    assert done.stderr.splitlines()[-1].endswith(
        "cannot be read as a table: it has zero bytes; expected text in UTF-8 or UTF-16, compressed or not"
    )


@pytest.mark.parametrize(("make", "kind"), [(folder, "a directory"), (bound_socket, "a socket")])
@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--quiet", "--workload"),
        ("config", "--root", str(Path(__file__).parents[2])),
        ("explain", "vit", "ga", "8", "--calibration"),
    ],
)
def test_what_holds_no_text_is_named(arguments, make, kind, tmp_path):
    path = make(tmp_path / "some.toml")
    result = CliRunner().invoke(main, [*arguments, str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {path}: is {kind}; expected a file, a pipe or -")


@pytest.fixture
def job_list(tmp_path):
    path = tmp_path / "jobs.csv"
    write_csv(jobs_table([JobSpec("a", 0.0, "roberta", 2, 16, "zero-dp", 4000)]), path, JOBS)
    return path


def test_a_workload_comes_from_standard_input(job_list):
    result = CliRunner().invoke(main, ["simulate", "--quiet", "--workload", "-"], input=job_list.read_text())
    assert result.exit_code == 0, result.output
    assert "on stdin (emulated), 1 jobs" in result.stdout


def test_pipes_of_a_shell_are_read(job_list, tmp_path):
    changes = tmp_path / "changes.yaml"
    changes.write_text("cluster: a800-64\n")
    run = f"{sys.executable} -c 'from makespan.cli import main; main()'"
    for line in (
        f"{run} simulate --quiet --workload <(cat {job_list})",
        f"{run} config --root {Path(__file__).parents[2]} <(cat {changes})",
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
