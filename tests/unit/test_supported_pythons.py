"""The versions of Python that are said to be supported are those that the pinned sets have files for."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STATED = SpecifierSet(PROJECT["project"]["requires-python"])
VERSIONS = [version for version in (f"3.{minor}" for minor in range(30)) if f"{version}.0" in STATED]
CANDIDATE = re.compile(r"python(3\.\d+)")
TORCH = re.search(r"torch==[\d.]+", (ROOT / "Makefile").read_text()).group()
# There is no wheel of it for any Python; its source has no other language.
BUILT_HERE = "connection-pool"
STAND_IN = """#!{python}
import sys
sys.version_info = ({major}, {minor}, 9, "final", 0)
if sys.argv[1] == "-c":
    exec(sys.argv[2])
"""


def pinned(*names):
    lines = (line for name in names for line in (ROOT / name).read_text().splitlines())
    return {line.partition("==")[0]: line for line in lines if "==" in line and not line.startswith("#")}


PINS = pinned("requirements.txt", "requirements-dev.txt")


def python(folder, version):
    """Return a program that takes itself for another version of Python, and creates nothing."""
    major, minor = version.split(".")
    program = folder / f"python{version}"
    program.write_text(STAND_IN.format(python=sys.executable, major=major, minor=minor))
    program.chmod(0o755)
    return program


def test_the_supported_versions_are_the_same_wherever_they_are_stated():
    prefix = "Programming Language :: Python :: 3."
    classified = [one for one in PROJECT["project"]["classifiers"] if one.startswith(prefix)]
    assert [one.removeprefix(prefix[:-2]) for one in classified] == VERSIONS
    listed = f"Python {', '.join(VERSIONS[:-1])} or {VERSIONS[-1]} and `make`"
    for name in ("README.md", "docs/tutorial/first-figures.md"):
        assert listed in (ROOT / name).read_text(), name
    looked_for = re.search(r"for candidate in (.+); do", (ROOT / ".ci/run").read_text()).group(1)
    assert sorted(CANDIDATE.findall(looked_for)) == VERSIONS
    oldest = VERSIONS[0]
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


@pytest.mark.parametrize("version", ["3.10", *VERSIONS, "3.14"])
def test_make_refuses_other_versions_before_it_installs_anything(tmp_path, version):
    venv = tmp_path / "venv"
    command = ["make", f"PYTHON={python(tmp_path, version)}", f"VENV={venv}", str(venv / ".stamps/venv")]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if version in VERSIONS:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        said = f"Python {version} found; {VERSIONS[0]} to {VERSIONS[-1]} are supported; try make PYTHON="
        assert said in done.stderr
        assert not venv.exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_pinned_package_takes_the_first_release_of_a_supported_version(version):
    """By what the packages that are installed here say of themselves."""
    known = {canonicalize_name(one.name): one for one in metadata.distributions()}
    checked = [
        name for name, pin in PINS.items() if name in known and pin == f"{name}=={known[name].version}"
    ]
    assert len(checked) > len(PINS) / 2
    here = default_environment() | {"python_version": version, "python_full_version": f"{version}.0"}
    for name in checked:
        stated = known[name].metadata.get("Requires-Python")
        assert stated is None or f"{version}.0" in SpecifierSet(stated), f"{name} needs Python {stated}"
        for text in known[name].requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({**here, "extra": ""}):
                assert canonicalize_name(wanted.name) in PINS, f"{name} needs {wanted.name}"


def resolved(version, lines, *options):
    """Resolve requirements for a version of Python from wheels alone and return what is to be installed."""
    pytest.importorskip("uv", reason="uv is not installed here; make setup-dev installs it")
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--python-version", version]
    command += ["--python-platform", "x86_64-unknown-linux-gnu", "--no-header", "--no-annotate", "--quiet"]
    command += ["--only-binary", ":all:", "--no-binary", BUILT_HERE, *options]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode and re.search("Failed to fetch|error sending request|timed out", done.stderr):
        pytest.skip(f"the package index does not answer: {done.stderr.splitlines()[0]}")
    return done


@pytest.mark.xdist_group("package index")
@pytest.mark.parametrize("version", VERSIONS)
def test_the_pinned_sets_resolve_to_themselves_for_a_supported_version(version):
    done = resolved(f"{version}.0", PINS.values())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(PINS.values())
    done = resolved(f"{version}.0", [TORCH], "--no-deps")
    assert done.returncode == 0, done.stderr
