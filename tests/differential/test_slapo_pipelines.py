"""Cut models, one stage a process, against the whole models."""

import pytest

pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("schedules")

CASES = (
    "stages_add_up_to_the_whole", "outputs_without_a_loss", "failures_reach_all_stages",
    "options_are_checked", "replicas_average", "shards_in_stages", "stages_are_filled_alone",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.mark.parametrize("n_processes", [1, 2, 4])
def test_a_pipeline_trains_as_the_whole_model_does(n_processes):
    on_processes(n_processes, "pipeline_cases", *CASES)


def test_stages_hand_on_structures_of_tensors():
    on_processes(2, "pipeline_cases", "structures_are_handed_on", "caches_are_not_sent")


def test_two_processes_give_gradients_of_weights_later():
    cases = ("weights_come_later", "layers_run_again_once", "planned", "draws", "compiled")
    on_processes(2, "zero_bubble_cases", *cases, "refused_in_all_processes")


def test_four_processes_give_gradients_of_weights_later():
    on_processes(4, "zero_bubble_cases", "weights_come_later", "planned", "experts")
