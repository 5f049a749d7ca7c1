"""What all tests share."""

import gc
import os
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

# Before numpy is loaded: test processes that share the cores must not also share out their small matrices.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# What tests see is computed here and now, but once for all processes of these tests.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MAKESPAN_CACHE_DIR"] = tempfile.mkdtemp(prefix="makespan-tests-")
# Tests start hundreds of processes, and each would compile what it imports again if nothing were kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pandas as pd
import pytest
from counted_lines import hide_counters_from_torch
from golden_files import HEADER, agree
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"

# How long an example takes says something about the machine, not about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing")


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.add_cleanup(partial(shutil.rmtree, os.environ["MAKESPAN_CACHE_DIR"], ignore_errors=True))


def pytest_xdist_auto_num_workers():
    """Run one more than there are cores, because tests wait for other processes a third of their time."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items):
    for item in items:
        if "small_run" in getattr(item, "fixturenames", ()):
            item.add_marker("small_run")
    # Tests of the workflow come first: they take longest, and at the end all processes would wait for one.
    items.sort(key=lambda item: item.path.parent != ROOT / "tests" / "workflow")


def pytest_collection_finish():
    hide_counters_from_torch()
    # Else each full collection looks through all modules and tests: a tenth of the time of a test process.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def published_dir() -> Path:
    """Return a directory with the published files; skip where there is none."""
    named = os.environ.get("MAKESPAN_PUBLISHED_DIR")
    if not named:
        pytest.skip("MAKESPAN_PUBLISHED_DIR names no directory with the published files")
    directory = Path(named)
    if not directory.is_dir():
        pytest.fail(f"MAKESPAN_PUBLISHED_DIR names {named}, which is no directory")
    return directory


@pytest.fixture
def golden(request):
    """Return a function that compares a text or a table with ``tests/golden/<module>/<test>[-<name>].*``."""
    folder = GOLDEN / request.path.stem.removeprefix("test_")
    test = re.sub(r"\W+", "-", request.node.name.removeprefix("test_")).strip("-")

    def compare(content, name="", rtol=1e-9):
        table = isinstance(content, pd.DataFrame)
        text = content.to_csv(index=False, lineterminator="\n") if table else content.rstrip("\n") + "\n"
        path = folder / f"{test}{name and '-'}{name}.{'csv' if table else 'txt'}"
        if request.config.getoption("--update-golden"):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(HEADER.format(rtol) + text)
        elif not path.is_file():
            pytest.fail(f"{path.relative_to(ROOT)} is missing; write it with --update-golden")
        else:
            agree(text, path.read_text(), path.relative_to(ROOT))

    return compare
