"""Models whose processes share sequences throughout their layers compute what whole models do."""

import pytest

pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("schedules")


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def test_two_processes_compute_what_one_does():
    on_processes(2, "context_cases", "layers", "replayed", "compiled", "trained", "kept")


def test_four_processes_compute_what_one_does():
    on_processes(4, "context_cases", "meshes", "staged")
