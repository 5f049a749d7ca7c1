"""What is installed suffices: the wheel with what it asks for, and the run set for the report."""

import email
import json
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hidden_packages import hiding_all_but, with_requirements

import makespan

pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TINY = "--n-logical-workers 1 --micro-batch-size 2 --set data.n_samples=8"
READS_ALL = """
import importlib
import pkgutil

import makespan
from makespan.emulator import load_calibration
from makespan.hardware import cluster, cluster_names
from makespan.papers import PAPERS, paper_named
from makespan.perf import environment_names, load_environment
from makespan.plots.style import style_sheet
from makespan.throughput import shipped_register
from makespan.training.zoo import FAMILIES, family_sizes, family_spec
from makespan.workloads import small_workload_keys, workload, workload_keys

assert [cluster(name) for name in cluster_names()]
assert [load_environment(name) for name in environment_names()]
assert [workload(key) for key in (*workload_keys(), *small_workload_keys())]
assert [family_spec(family, size) for family in FAMILIES for size in family_sizes(family)]
assert load_calibration("L1") and shipped_register()
for name in PAPERS:
    assert paper_named(name).ledger()
    print(name)
for found in pkgutil.iter_modules(makespan.__path__):
    if found.name == "report" and not HAS_REPORT:
        continue
    importlib.import_module(f"makespan.{found.name}")
with style_sheet():
    pass
"""


def built(kind, root, folder):
    """Return the distribution of one kind, ``wheel`` or ``sdist``, built from the files below ``root``."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    (path,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Return the source distribution of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"makespan-{makespan.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Return the wheel that is built from the source distribution."""
    return built("wheel", sdist, tmp_path_factory.mktemp("wheel"))


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


def committed():
    """Return the files of the checkout that git knows, relative to its root."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git, which lists the files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    about = f"makespan-{makespan.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"makespan", about}
    assert f"{about}/licenses/LICENSE" in names
    assert {name.removeprefix("src/") for name in committed() if name.startswith("src/")} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_the_source_distribution_holds_every_committed_file_and_no_product(sdist):
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert not committed() - found
    products = ("results/", "site/", "logs/", ".venv/", ".snakemake/", "benchmarks/results/")
    assert {name for name in found if name.startswith(products) or "__pycache__" in name} == {
        "results/README.md"
    }


def test_the_metadata_of_the_wheel_are_those_of_the_project(wheel):
    with zipfile.ZipFile(wheel) as archive:
        stated = email.message_from_bytes(
            archive.read(f"makespan-{makespan.__version__}.dist-info/METADATA"),
        )
    assert stated["Version"] == makespan.__version__
    assert stated["License-Expression"] == PROJECT["license"]
    assert stated.get_all("Classifier") == PROJECT["classifiers"]
    assert stated.get_payload().startswith("# makespan")
    assert set(stated.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    "command",
    [
        "--version",
        "--help",
        "simulate --policy fifo --workload naive --quiet",
        "compare --policies fifo,srtf --workload naive --quiet",
        "explain llama7 244 8888",
        "claims --help",
        "clusters",
        "oobleck simulate --help",
    ],
)
def test_the_wheel_without_extras_simulates(program, tmp_path, command):
    done = run(program, command, (), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_wheel_without_torch_plans_pipelines(program, tmp_path):
    (tmp_path / "layers.json").write_text("[3, 3, 6, 3]")
    done = run(program, "oobleck plan --latencies layers.json --nodes 1:3", (), tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3


@pytest.mark.parametrize("extras", [(), ("report",)])
def test_the_wheel_reads_all_its_data(program, tmp_path, extras):
    """Presets, schemas, statements and styles are found where the wheel was installed."""
    asked = [
        *PROJECT["dependencies"],
        *(one for name in extras for one in PROJECT["optional-dependencies"][name]),
    ]
    environment = hiding_all_but(with_requirements(asked))
    python = program.with_name("python")
    done = subprocess.run(
        [python, "-c", f"HAS_REPORT = {bool(extras)}\n{READS_ALL}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"morphling", "easyscale", "oobleck", "slapo"}


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
