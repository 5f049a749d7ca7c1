"""Clipping of scheduled models against torch's own of the whole model, in groups of processes."""

import pytest

torch = pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("schedules")


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.mark.parametrize("n_processes", [2, 4])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(n_processes):
    cases = ("tensor_parallel", "data_parallel", "stages", "shards_in_stages")
    on_processes(n_processes, "clipping_cases", *cases)
