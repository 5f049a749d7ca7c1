"""Models whose processes share sequences and experts compute what whole models do."""

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
    cases = (
        "families",
        "layers",
        "compiled",
        "trained",
        "experts",
        "experts_of_own_samples",
        "other_seeds",
        "kept",
    )
    on_processes(2, "sequence_cases", *cases)


def test_four_processes_compute_what_one_does():
    cases = ("layers", "sharded", "staged", "experts", "experts_without_tokens")
    on_processes(4, "sequence_cases", *cases)


def test_experts_are_shared_by_data_parallelism_beside_tensor_parallelism():
    on_processes(4, "expert_cases", "own_samples", "verified", "refused")


def test_so_they_are_among_replicas_and_stages():
    on_processes(8, "expert_cases", "replicated", "staged")


def test_four_processes_with_samples_of_their_own_share_experts():
    cases = ("experts_of_own_samples", "replicated_experts", "staged_experts")
    on_processes(4, "sequence_cases", *cases)


@pytest.mark.parametrize("n_processes", [2, 4])
def test_experts_are_shared_by_processes_that_hold_parts_of_sequences(n_processes):
    cases = ["across_sequences", "verified_across_sequences"]
    cases += ["staged_across_sequences"] if n_processes == 4 else []
    on_processes(n_processes, "expert_cases", *cases)
