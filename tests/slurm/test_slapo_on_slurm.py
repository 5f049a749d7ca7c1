"""A schedule is verified in a job of Slurm: as a rule with two GPUs, and by two tasks of an allocation."""

import sys

import pytest

pytest.importorskip("torch")

from makespan.papers.slapo import PAPER
from makespan.tables import read_csv

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

# Two processes on CPU cores, because the GPUs of this cluster do not exist.
ONE_FAMILY = "slapo: {verify: {device: cpu, families: [gpt], processes: [2]}}\n"
COMMAND = f"{sys.executable} program.py slapo verify gpt --processes 2 --set ckpt_ratio=0.5 --launcher slurm"
PROGRAM = "from makespan.cli import main\n\nmain()\n"


def test_the_rule_asks_for_two_gpus_and_verifies_on_two_tasks(clone):
    (clone.root / "one-family.yaml").write_text(ONE_FAMILY)
    target = "results/measured/slapo/verify.csv"
    clone.snakemake(target, "--configfile", "slurm-test.yaml", "one-family.yaml")
    job = clone.jobs()[-1]
    assert (job["JobState"], job["JOB_GRES"], job["Partition"]) == ("COMPLETED", "gpu:a800:2", "a800")
    table = read_csv(clone.root / target, PAPER.schema_of("verify"))
    assert table["schedule"].is_unique and "tensor" in set(table["schedule"])
    assert (table["n_processes"] == 2).all() and table["is_equal"].all(), table["fault"].tolist()


def test_the_command_verifies_on_two_tasks_of_an_allocation(slurm, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    _, output = slurm.allocation(COMMAND, tmp_path)
    assert "the model agrees with the original on 2 processes" in output
