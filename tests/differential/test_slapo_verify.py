"""The verifier in groups of processes: what is right agrees, what is wrong is found where it is."""

import pytest

pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("schedules")

SOUND = ("sound", "part_by_part", "own_inputs", "errors_pass")
SABOTAGE = (
    "missing_backward_sync", "missing_forward_sync", "missing_sync_of_parameters", "wrong_axis",
    "wrong_axis_of_a_hook", "wrong_partition_of_qkv", "double_scaling", "other_steps", "one_process_alone",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.mark.parametrize("n_processes", [1, 4])
def test_a_schedule_that_is_right_agrees(n_processes):
    on_processes(n_processes, "verify_cases", "sound", "own_inputs", "errors_pass")


def test_sabotage_is_found_on_all_processes_with_its_place():
    on_processes(2, "verify_cases", *SOUND, *SABOTAGE)
