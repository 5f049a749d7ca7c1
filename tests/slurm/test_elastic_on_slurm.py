"""Elastic training in jobs of Slurm: as a rule with two GPUs, and as steps of an allocation."""

import json
import sys

import pytest

pytest.importorskip("torch")

from makespan.easyscale import ElasticTrainer
from makespan.papers.easyscale import PAPER
from makespan.tables import read_csv

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

JOB = {
    "n_logical_workers": 2, "micro_batch_size": 4,
    "options": {"model": {"width": 8}, "data": {"n_samples": 64}, "optimizer": {"lr": 0.1}},
}  # fmt: skip
STEPS = 3
COMMAND = (
    f"{sys.executable} program.py easyscale run resnet50 --steps {STEPS} --mapping 0/1 "
    "--n-logical-workers 2 --micro-batch-size 4 --set model.width=8 --set data.n_samples=64 "
    "--set optimizer.lr=0.1 --hash-every 1 --run-dir {run_dir} {more}"
)
RULE = """
rule train:
    output:
        "elastic/steps.csv",
    threads: 2
    resources:
        gpu=2,
        gpu_model="a800",
        mem_mb=3000,
        runtime=7,
    shell:
        "{command}"
"""
PROGRAM = "from makespan.cli import main\n\nmain()\n"
BITS = ["step", "rank", "loss_hex", "parameter_sha", "optimizer_sha", "context_sha"]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return what the same job has without Slurm, on one process."""
    trainer = ElasticTrainer("resnet50", run_dir=tmp_path_factory.mktemp("here"), **JOB)
    return trainer.run(STEPS, "0,1", hash_every=1).steps[BITS]


def steps_of(run_dir):
    """Return what a job of Slurm has, as it stands in its directory."""
    return ElasticTrainer("resnet50", run_dir=run_dir, **JOB).run(STEPS).steps[BITS]


def test_a_rule_with_two_gpus_trains_one_process_on_each(here, clone):
    (clone.root / "program.py").write_text(PROGRAM)
    (clone.root / "elastic.smk").write_text(RULE.format(command=COMMAND.format(run_dir="elastic", more="")))
    clone.snakemake("elastic/steps.csv", "--snakefile", "elastic.smk")
    job = clone.jobs()[-1]
    assert (job["JobState"], job["JOB_GRES"], job["NumCPUs"]) == ("COMPLETED", "gpu:a800:2", "2")
    manifest = json.loads(
        (clone.root / f"elastic/checkpoints/step-{STEPS:08d}/manifest.json").read_text(encoding="utf-8")
    )
    assert manifest["machine"]["slurm"]["SLURM_JOB_ID"] == job["JobId"]
    assert len(set(manifest["machine"]["visible_devices"].split(","))) == 2
    assert manifest["mapping"] == "0/1"
    assert here.equals(steps_of(clone.root / "elastic"))


def test_processes_are_steps_of_an_allocation(here, slurm, tmp_path):
    run_dir = tmp_path / "run"
    (tmp_path / "program.py").write_text(PROGRAM)
    _, output = slurm.allocation(COMMAND.format(run_dir=run_dir, more="--launcher slurm"), tmp_path)
    assert f"finished after {STEPS} mini-batches" in output
    assert here.equals(steps_of(run_dir))


def test_a_measured_rule_asks_for_a_gpu_for_each_logical_worker(clone):
    """Its processes take CPU cores, because the GPUs of this cluster do not exist."""
    (clone.root / "on-cpu.yaml").write_text("easyscale: {fig9: {device: cpu}}\n")
    configuration = ("config/test/easyscale.yaml", "slurm-test.yaml", "on-cpu.yaml")
    clone.snakemake("results/measured/easyscale/fig9.csv", "--configfile", *configuration)
    job = clone.jobs()[-1]
    assert (job["JobState"], job["JOB_GRES"], job["Partition"]) == ("COMPLETED", "gpu:a800:4", "a800")
    table = read_csv(clone.root / "results/measured/easyscale/fig9.csv", PAPER.schema_of("fig9"))
    assert table.loc[table["stage"] == 0, "equal"].all()
