"""Sharded models against whole ones, in groups of one, two and four processes."""

import pytest

pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("schedules")

CASES = (
    "exchanges_and_gradients", "reshard_schemes", "mlp", "fused_attention", "grouped_attention", "vocabulary",
    "embedding_columns", "bottleneck", "transposed_convolutions", "transposed_linear_layers",
    "sequence_layout", "tied_vocabulary",
)  # fmt: skip
BUILDS = (
    "values_do_not_depend_on_the_group", "states_move", "programs_differ", "failing_initialiser", "replicas",
    "compiled", "groups_and_meshes",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """Return the file of a state that two processes have saved."""
    path = tmp_path_factory.mktemp("state") / "state.pt"
    on_processes(2, "parallel_cases", ("saved", {"path": str(path)}))
    return path


@pytest.mark.parametrize("n_processes", [1, 2, 4])
def test_parts_compute_what_the_whole_computes_and_states_move(n_processes, state):
    on_processes(n_processes, "parallel_cases", *CASES, *BUILDS, ("loaded", {"path": str(state)}))


@pytest.mark.parametrize("n_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_schedule_computes_what_the_executor_and_torch_compute(n_processes):
    on_processes(n_processes, "oracle_cases", "everywhere_like_the_executor", "like_parallelize_module")


def test_schedules_are_copied_and_repeated_and_draw_other_masks_in_a_group():
    on_processes(2, "schedule_cases", "copies_and_replays", "masks_of_ranks")
