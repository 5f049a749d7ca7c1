"""Training through losses in an allocation of two nodes: of a task, then of all tasks of the other node."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROGRAM = "from makespan.cli import main\n\nmain()\n"
COMMAND = (
    f"{sys.executable} program.py oobleck run gpt --iterations 100000 --nodes 4 --f 1 --n0 1 --first 2,2 "
    "--policy degrade --microbatches 4 --set model.n_layers=2 --set model.hidden=16 --set model.ffn=32 "
    "--set model.seq=8 --set model.vocab=32 "
    "--hang 600 --launcher slurm --run-dir {run_dir}"
)
RULE = """
rule train:
    output:
        "oobleck/iterations.csv",
    resources:
        mpi="srun",
        nodes=2,
        tasks=4,
        slurm_extra="--ntasks-per-node=2",
        cpus_per_task=1,
        mem_mb=8000,
        runtime=20,
    shell:
        "{command} > job.log 2>&1"
"""
READY = re.compile(r"node (\d+) is ready, process (\d+) on (\S+)")
LIMIT_S = 3600  # against what hangs


def wait_for(log, pattern, count=1):
    """Wait until a pattern stands so often in a log; what was found."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = re.findall(pattern, log.read_text()) if log.exists() else []
        if len(found) >= count:
            return found
        time.sleep(0.2)
    pytest.fail(log.read_text() if log.exists() else "the job did not start")


def test_a_task_and_then_a_node_are_lost_and_training_goes_on(clone):
    log, run_dir = clone.root / "job.log", clone.root / "oobleck"
    (clone.root / "program.py").write_text(PROGRAM)
    (clone.root / "train.smk").write_text(RULE.format(command=COMMAND.format(run_dir="oobleck")))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(clone.snakemake, "oobleck/iterations.csv", "--snakefile", "train.smk")
        try:
            last = lose_a_task_and_a_node(log)
        finally:
            drain = [sys.executable, "program.py", "oobleck", "drain", str(run_dir)]
            environment = os.environ | {"PYTHONPATH": str(SOURCE)}
            subprocess.run(drain, cwd=clone.root, env=environment, check=False, timeout=LIMIT_S)
        job.result(LIMIT_S)
    recoveries = pd.read_csv(run_dir / "recoveries.csv")
    assert str(recoveries["nodes"].iloc[-1]) == str(last)
    assert len(list((run_dir / "checkpoints").iterdir())) == 1


def lose_a_task_and_a_node(log):
    """Kill a task, then both tasks of the other host at once; the node that is left."""
    ready = {int(node): (int(pid), host) for node, pid, host in wait_for(log, READY, 4)}
    hosts = sorted({host for _, host in ready.values()})
    assert len(hosts) == 2
    wait_for(log, "generation 1 resumes")
    first, rest = (node for node, (_, host) in ready.items() if host == hosts[0])
    os.kill(ready[first][0], signal.SIGKILL)
    wait_for(log, rf"node {first} is lost")
    wait_for(log, r"generation [2-9] resumes")
    survivors = [pid for node, (pid, _) in ready.items() if node != first]
    assert all(Path(f"/proc/{pid}").exists() for pid in survivors)
    n_resumed = len(re.findall(r"generation \d+ resumes", log.read_text()))
    for pid, host in ready.values():
        if host == hosts[1]:
            os.kill(pid, signal.SIGKILL)
    wait_for(log, r"generation \d+ resumes", n_resumed + 1)
    assert Path(f"/proc/{ready[rest][0]}").exists()
    return rest
