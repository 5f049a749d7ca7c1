"""The schedules of all families in groups of processes, against the models that they were applied to."""

import pytest

pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("schedules")


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.mark.parametrize("n_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_schedule_leaves_outputs_and_gradients(n_processes):
    cases = ("every_family", "nothing_is_forgotten", "samples_of_the_first", "dropout_of_heads_differs")
    on_processes(n_processes, "library_cases", *cases)


def test_stages_of_parts_train_as_one_process():
    on_processes(4, "library_cases", "stages_of_parts")
