"""Sharded models against whole ones, in groups of one, two and four processes."""

import pytest

pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("training")

CASES = (
    "exchanges_and_gradients", "reshard_schemes", "mlp", "fused_attention", "vocabulary", "embedding_columns",
    "bottleneck", "transposed_convolutions", "sequence_layout", "tied_vocabulary",
)  # fmt: skip
BUILDS = (
    "values_do_not_depend_on_the_group", "states_move", "programs_differ", "failing_initialiser", "replicas",
    "compiled", "groups_and_meshes",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.mark.parametrize("n_processes", [1, 2, 4])
def test_parts_compute_what_the_whole_computes(n_processes):
    on_processes(n_processes, "parallel_cases", *CASES, *BUILDS)


@pytest.mark.parametrize("n_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_schedule_computes_what_the_executor_computes(n_processes):
    on_processes(n_processes, "executor_cases", "everywhere_like_the_executor")
