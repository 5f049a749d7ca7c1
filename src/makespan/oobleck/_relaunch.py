"""The baseline of resilient training: any loss ends all processes, and new ones go on from a checkpoint."""

from dataclasses import replace
from pathlib import Path

from makespan.errors import LostWorkerError
from makespan.oobleck._faults import Faults
from makespan.oobleck._live import LiveOptions, LiveResult, train_resilient
from makespan.oobleck._record import Record
from makespan.oobleck.planning import ModelProfile
from makespan.oobleck.runtime import ChainJob

__all__ = ["train_relaunching"]


def train_relaunching(
    job: ChainJob,
    profile: ModelProfile,
    iterations: int,
    run_dir: str | Path,
    options: LiveOptions,
    *,
    record: Record,
    faults: Faults | None = None,
) -> LiveResult:
    """Train as `train_resilient`, but start all over from the newest checkpoint after each loss.

    Processes are forked from one that has torch loaded, so that a relaunch is as short as it can be.
    ``record`` has what happened in all launches, the result what came of the last.
    """
    while True:
        try:
            return train_resilient(
                job, profile, iterations, run_dir, replace(options, policy="relaunch", n_replacements=0),
                record=record, faults=faults,
            )  # fmt: skip
        except LostWorkerError:
            continue
