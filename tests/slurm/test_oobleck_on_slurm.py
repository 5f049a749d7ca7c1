"""Training through losses in an allocation of two nodes: a task is killed, then all tasks of a node."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROGRAM = "from makespan.cli import main\n\nmain()\n"
COMMAND = (
    f"{sys.executable} program.py oobleck run gpt --iterations 100000 --nodes 4 --f 1 --n0 1 --first 2,2 "
    "--microbatches 4 --set n_layers=2 --set hidden=16 --set ffn=32 --set seq=8 --set vocab=32 "
    "--launcher slurm --run-dir {run_dir}"
)
READY = re.compile(r"node (\d+) is ready, process (\d+) on (\S+)")
LIMIT_S = 600


def wait_for(log, pattern, count=1):
    """Wait until a pattern stands so often in a log; what was found."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = re.findall(pattern, log.read_text()) if log.exists() else []
        if len(found) >= count:
            return found
        time.sleep(0.2)
    pytest.fail(log.read_text() if log.exists() else "the job did not start")


def test_a_task_and_then_a_node_are_lost_and_training_goes_on(slurm, tmp_path):
    script, log, run_dir = tmp_path / "job.sh", tmp_path / "job.log", tmp_path / "run"
    (tmp_path / "program.py").write_text(PROGRAM)
    script.write_text(f"#!/bin/sh\nPYTHONPATH={SOURCE} exec {COMMAND.format(run_dir=run_dir)}\n")
    size = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=1", "--mem=8000", "--time=20"]
    job = subprocess.Popen(
        ["sbatch", "--wait", f"--output={log}", *size, str(script)],
        env=slurm.environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ready = {int(node): (int(pid), host) for node, pid, host in wait_for(log, READY, 4)}
    hosts = sorted({host for _, host in ready.values()})
    assert len(hosts) == 2
    wait_for(log, "generation 1 goes on")
    first = next(node for node, (_, host) in ready.items() if host == hosts[0])
    os.kill(ready[first][0], signal.SIGKILL)
    wait_for(log, rf"node {first} is lost")
    wait_for(log, r"generation [2-9] goes on")
    rest = [pid for node, (pid, host) in ready.items() if host == hosts[0] and node != first]
    n_resumed = len(re.findall(r"generation \d+ goes on", log.read_text()))
    for pid in rest:
        os.kill(pid, signal.SIGKILL)
    wait_for(log, r"generation \d+ goes on", n_resumed + 1)
    survivors = [pid for pid, host in ready.values() if host == hosts[1]]
    assert len(survivors) == 2 and all(Path(f"/proc/{pid}").exists() for pid in survivors)
    drain = [sys.executable, "program.py", "oobleck", "drain", str(run_dir)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    assert subprocess.run(drain, cwd=tmp_path, env=environment, check=False, timeout=300).returncode == 0
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output + log.read_text()
    recoveries = pd.read_csv(run_dir / "recoveries.csv")
    last = set(map(int, re.split(r"[+/]", str(recoveries["nodes"].iloc[-1]))))
    assert last == {node for node, (_, host) in ready.items() if host == hosts[1]}
    assert len(list((run_dir / "checkpoints").iterdir())) == 1
