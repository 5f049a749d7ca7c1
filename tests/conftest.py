"""What all tests share."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


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
