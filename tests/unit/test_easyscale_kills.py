"""Processes of a job are killed at moments of every kind; what is trained keeps its bits."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from elastic_job import JOB, OWN, bits, trainer

from makespan.easyscale import trainer as _run_folder
from makespan.easyscale.job import TRAINING_LOCK, RankMapping
from makespan.errors import InputError

pytestmark = pytest.mark.xdist_group("training")

STEPS, EVERY = 8, 2
MAPPINGS = ("0,1/2,3", "3,1,2/0", "2/0,3/1")
N_OPERATIONS = 7  # pieces that a process sends in a mini-batch, at least: four buckets, counts and losses


def drawn(seed, mapping, files):
    """Draw a moment in a backward pass, in an exchange, and in the writing of a checkpoint.

    In a checkpoint it is a file that is torn, or a step on the way to the disk, up to the last one, after the
    checkpoint has got its name.
    """
    rng, hosted = random.Random(seed), RankMapping.parse(mapping).hosted
    steps = rng.sample(range(2, STEPS), 2)
    kinds = [
        ("backward", steps[0]),
        ("exchange", steps[1]),
        ("checkpoint", rng.choice(range(2, STEPS, EVERY))),
    ]
    for place, step in kinds:
        process, is_torn = rng.randrange(len(hosted)), rng.random() < 0.5
        n_files = len(hosted[process]) + 2 * (0 in hosted[process])
        counts = {"backward": len(hosted[process]), "exchange": N_OPERATIONS, "checkpoint": n_files}
        if place == "checkpoint" and not is_torn:
            process, counts["checkpoint"] = 0, 4 + 2 + 3  # workers, shared ones, manifest and directories
        yield {
            "place": place, "step": step, "process": process, "is_torn": is_torn, "nth": rng.randrange(100),
            "count": rng.randint(1, counts[place]), "file": str(files / place),
        }  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return bits(trainer(tmp_path_factory.mktemp("straight")).run(STEPS, "0,1/2,3"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_no_kill_costs_a_bit(straight, tmp_path, seed):
    """Four kills a run, one of each kind: the fourth is that of a process that loads samples."""
    mapping = MAPPINGS[seed % len(MAPPINGS)]
    moments = list(drawn(seed, mapping, tmp_path))
    loader = {"at": random.Random(seed).randrange(60), "file": str(tmp_path / "loader")}
    ours = trainer(
        tmp_path / "run",
        model=f"{OWN}:build_fragile",
        options={"model": {"moments": moments}, "data": {"kills": loader}},
    )
    result = ours.run(STEPS, mapping, checkpoint_every=EVERY, max_restarts=4)
    assert {path.name for path in tmp_path.iterdir()} == {
        "run",
        "backward",
        "exchange",
        "checkpoint",
        "loader",
    }
    assert bits(result) == straight
    causes = result.reconfigurations["cause"].tolist()
    assert set(causes) - {"start"} == {"failure"} and len(causes) == result.steps["stage"].nunique()


DRIVER = """
import os, sys
from pathlib import Path

Path(sys.argv[1], "driver").write_text(str(os.getpid()))
from makespan.cli import main

main(sys.argv[2:])
"""


@pytest.mark.slow
def test_when_the_run_itself_is_killed_the_same_command_goes_on(straight, tmp_path):
    """The processes that train end by themselves; they may not write beside those that come after them."""
    kills = {"too": str(tmp_path / "driver"), "process": 0, "at": 5, "file": str(tmp_path / "killed")}
    settings = {"after_reduce": {"kills": kills}}
    job = [f"--{name.replace('_', '-')}={value}" for name, value in JOB.items() if name != "model"]
    words = ["easyscale", "run", JOB["model"], *job, f"--steps={STEPS}", "--checkpoint-every=1",
             "--hash-every=1", f"--run-dir={tmp_path / 'run'}",
             f"--set=after_reduce.kills={json.dumps(kills)}"]  # fmt: skip
    program = [sys.executable, "-c", DRIVER, str(tmp_path), *words, "--mapping=0,1/2,3"]
    environment = os.environ | {"PYTHONPATH": f"{OWN.parent}:{os.environ.get('PYTHONPATH', '')}"}
    assert subprocess.run(program, env=environment, check=False).returncode == -signal.SIGKILL
    result = trainer(tmp_path / "run", options=settings).run(STEPS, "3/0,1,2")
    assert bits(result) == straight
    assert result.steps["stage"].nunique() == 2


@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_command_ends_it_with_a_checkpoint(straight, tmp_path):
    signals = {"at": 5, "number": signal.SIGTERM, "to": 0}  # to the whole group
    job = [f"--{name.replace('_', '-')}={value}" for name, value in JOB.items() if name != "model"]
    words = ["easyscale", "run", JOB["model"], *job, f"--steps={STEPS}", "--hash-every=1",
             f"--run-dir={tmp_path / 'run'}", f"--set=after_reduce.signals={json.dumps(signals)}",
             "--mapping=0,1/2,3"]  # fmt: skip
    program = [sys.executable, "-c", DRIVER, str(tmp_path), *words]
    done = subprocess.run(program, start_new_session=True, check=False)
    assert done.returncode == -signal.SIGTERM
    result = trainer(tmp_path / "run", options={"after_reduce": {"signals": signals}}).run(STEPS)
    assert bits(result) == straight
    assert result.reconfigurations["step"].tolist() == [0, 5]


def test_who_comes_after_a_killed_run_waits_for_its_processes(tmp_path, monkeypatch):
    ours = trainer(tmp_path)
    monkeypatch.setattr(_run_folder, "_PREDECESSOR_S", 0.1)
    with (tmp_path / TRAINING_LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(InputError, match="where processes of an earlier run still train"):
            ours.run(1)
    with ours.folder.hold():
        pass
