"""Models that nobody wrote for schedules are scheduled step by step, in one process and in two."""

import pytest

pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("schedules")


@pytest.mark.parametrize("n_processes", [1, 2])
def test_a_mixer_and_a_vit_compute_the_same_after_every_step(n_processes):
    with forking_servers():
        on_processes(n_processes, "own_cases", "mixer", "vit")
