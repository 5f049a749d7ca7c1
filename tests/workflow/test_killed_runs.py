"""The same plain command recovers from the death of Snakemake and of jobs."""

import random

import pytest
from killed_runs import Run, check_recovery

TARGET = "results/emulated/morphling/figures/sensitivity_cpu.pdf"


@pytest.mark.parametrize("kind", ["snakemake", "both"])
def test_a_killed_run_is_finished_by_the_same_command(project, small_run, kind):
    run = Run(project.root, (TARGET, "--configfile", "config/test/morphling.yaml"))
    killed = run.kill(kind, random.Random(1))
    assert len(killed) == (1 if kind == "snakemake" else 2)
    assert list(run.root.glob(".snakemake/locks/*.lock")), "it was killed too early to matter"
    check_recovery(run, Run(small_run.root, ()).tables())
