"""Elastic training whose processes are steps of an allocation, and are lost, leave and join."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from surviving_steps import STEPS, bits, trainer

from makespan.easyscale.trainer import ELASTIC_RECOVERIES
from makespan.tables import read_csv

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

SCRIPT = Path(__file__).parents[1] / "support" / "surviving_steps.py"
TWO_NODES = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=1", "--mem=4000")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the bits of a run without Slurm and without a loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{SCRIPT.parent}")
        return bits(trainer(tmp_path_factory.mktemp("straight")).run(STEPS, "0,1,2,3"))


def surviving(slurm, folder, name):
    """Run a script of changes in an allocation of two nodes; return what it found, and its recoveries."""
    slurm.allocation(f"{sys.executable} {SCRIPT} {name} {folder}", folder, TWO_NODES)
    found = json.loads((folder / "found.json").read_text())
    assert found["left"] == 0
    return found, read_csv(folder / "run" / "recoveries.csv", ELASTIC_RECOVERIES)


def test_a_lost_process_is_replaced_and_a_lost_node_costs_no_bit(straight, slurm, tmp_path):
    found, recoveries = surviving(slurm, tmp_path, "losses")
    assert found["bits"] == straight
    assert set(found["hosts"].values()) == set(slurm.nodes)
    assert recoveries["lost"].iloc[0] == "1" and "3" in set(recoveries["joined"])
    assert found["mappings"][-2:] == ["0/1/2/3", "0,1/2,3"]  # two of four steps lie on each node


def test_a_step_joins_and_leaves_and_another_one_by_a_signal_of_slurm(straight, slurm, tmp_path):
    found, recoveries = surviving(slurm, tmp_path, "changes")
    assert found["bits"] == straight
    assert list(recoveries["kind"]) == ["joined", "drained", "drained"]
    assert found["mappings"] == ["0,1/2,3", "0,1/2/3", "0,1/2,3", "0,1,2,3"]
