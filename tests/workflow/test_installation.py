"""What is installed suffices: the wheel with what it asks for, and the run set for the report."""

import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import small_report
from hidden_packages import hiding_all_but, with_requirements
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TINY = "--n-logical-workers 1 --micro-batch-size 2 --set data.n_samples=8"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def program(wheel):
    """Return the command of an environment that has the wheel and borrows what it asks for from this one."""
    venv = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return venv / "bin" / "makespan"


def run(program, command, extras, folder):
    """Run a command where nothing can be imported that the wheel with extras does not ask for."""
    asked = [
        *PROJECT["dependencies"],
        *(one for name in extras for one in PROJECT["optional-dependencies"][name]),
    ]
    environment = hiding_all_but(with_requirements(asked))
    return subprocess.run(
        [program, *command.split()], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    data = f"makespan-{PROJECT.get('version', '')}"
    assert {name.split("/")[0] for name in names if not name.startswith(data)} == {"makespan"}
    tracked = {
        path.relative_to(ROOT / "src") for path in (ROOT / "src/makespan").rglob("*") if path.is_file()
    }
    wanted = {str(path) for path in tracked if "__pycache__" not in path.parts}
    assert wanted <= set(names)


@pytest.mark.parametrize(
    "command",
    [
        "--version",
        "simulate --policy fifo --workload naive --quiet",
        "compare --policies fifo,srtf --workload naive --quiet",
        "explain llama7 244 8888",
    ],
)
def test_the_wheel_without_extras_simulates(program, tmp_path, command):
    done = run(program, command, (), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_wheel_without_torch_says_that_training_needs_it(program, tmp_path):
    done = run(program, f"easyscale run neumf --steps 1 {TINY}", (), tmp_path)
    assert done.returncode != 0
    assert "No module named 'torch'" in done.stderr


def test_the_wheel_with_torch_trains(program, tmp_path):
    pytest.importorskip("torch")
    done = run(program, f"easyscale run neumf --steps 1 {TINY} --run-dir run", ("torch",), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "steps.csv").is_file()


def test_the_command_of_the_wheel_is_that_of_the_wheel(program, tmp_path):
    code = "import makespan, sys; print(makespan.__file__)"
    environment = hiding_all_but(with_requirements(PROJECT["dependencies"]))
    python = program.with_name("python")
    found = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(program.parents[1])), found.stdout


def test_the_report_needs_no_package_of_the_developer_set(finished):
    """`make report` runs where requirements.txt and torch alone are installed."""
    developer = re.findall(r"^([a-z].*)==", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert not {canonicalize_name(name) for name in developer} & small_report.run_set()
    assert small_report.report(finished.root) > 10
