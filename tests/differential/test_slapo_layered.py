"""Verification by layers in groups of processes: the verdicts and texts are those of the whole models."""

import pytest

pytest.importorskip("torch")

from forked import forking_servers
from group_worker import on_processes

pytestmark = pytest.mark.xdist_group("schedules")


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


@pytest.mark.parametrize("n_processes", [1, 4])
def test_layers_of_sharded_models_agree(n_processes):
    on_processes(n_processes, "layered_cases", "layers_agree", "parts_between_layers")


def test_mistakes_are_found_as_in_the_whole_model():
    on_processes(
        2, "layered_cases", "layers_agree", "parts_between_layers", "families_agree", "mistakes_of_one_layer",
        "wrong_place_of_an_exchange", "cases_of_the_whole_by_layers", "parallel_cases_both_ways",
    )  # fmt: skip
