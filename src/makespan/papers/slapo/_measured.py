"""What is measured here of schedules: the steps of Fig. 9, and a search whose objective is a real run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from makespan.leftovers import temporary_directory
from makespan.papers.slapo._tables_measured import TUNER
from makespan.papers.slapo._tables_modelled import FIG9
from makespan.runtime import Launch, LocalLauncher, RunDirectory

__all__ = ["fig9_steps_experiment", "tuner_experiment"]

_WORKER = "makespan.slapo._measuring_worker"
_STRATEGIES = ("frontier", "coordinate_descent", "exhaustive")
_OF_PROCESSES = ("saved_bytes", "parameter_bytes", "output_error", "gradient_error")
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """What the schedule has come to: whether kernels are better, and whether processes share the model."""

    name: str
    has_kernels: bool = False
    is_shared: bool = False
    shares_embedding: bool = False

    def options(self, compiler: str) -> Record:
        """Return the options of the schedule."""
        chosen = "dynamo" if self.is_shared else compiler
        kernels = {"attn": "sdpa", "fuse": True, "compiler": chosen} if self.has_kernels else {}
        return kernels | {"shard_embedding": self.shares_embedding}


_STEPS = (
    _Step("vanilla"),
    _Step("kernels", has_kernels=True),
    _Step("layers", has_kernels=True, is_shared=True),
    _Step("embedding", has_kernels=True, is_shared=True, shares_embedding=True),
)


def _numbers_of(step: _Step, processes: Sequence[int]) -> list[int]:
    return sorted(processes) if step.is_shared else [1]


def fig9_steps_experiment(
    printed: Mapping[str, pd.DataFrame], processes: Sequence[int], compiler: str, **asked: Any
) -> dict[str, pd.DataFrame]:
    """Verify, weigh and time a small BERT after each step of its schedule.

    Parameters
    ----------
    printed
        No cells are printed of this figure.
    processes
        Numbers of processes; the steps that split nothing run in one.
    compiler
        What compiles fused operations in one process; where several share the model they are captured only,
        because compilers of as many processes as there are cores, or more, would take minutes.
    **asked
        ``size`` and ``batch`` [samples] of the model, ``warmup_passes``, ``passes`` that are timed, ``seed``.

    Returns
    -------
    dict of pandas.DataFrame
        ``fig9``: a row a step and number of processes.

    Raises
    ------
    makespan.errors.WorkerError
        A step does not compute what the original model does, or a process failed.
    """
    found: dict[tuple[str, int], Record] = {}
    for number in sorted({1, *processes}):
        steps = [step for step in _STEPS if number in _numbers_of(step, processes)]
        ways = [{"name": step.name, "options": step.options(compiler)} for step in steps]
        request = {"task": "steps", "family": "bert", "ways": ways, **asked}
        found |= {(one["name"], number): one for one in _run(request, number)}
    rows = [
        _step_row(step.name, found[step.name, number], asked["batch"])
        for step in _STEPS
        for number in _numbers_of(step, processes)
    ]
    table = pd.DataFrame(rows)
    rates = table["throughput_samples_per_s"]
    empty = {"gpu_memory_ratio": np.nan, "largest_global_batch_size": np.nan}
    table = table.assign(speedup=rates / rates.iloc[0], **empty)
    return {"fig9": FIG9.validate(table, where="fig9")}


def tuner_experiment(printed: Mapping[str, pd.DataFrame], **asked: Any) -> dict[str, pd.DataFrame]:
    """Search for the fastest schedule of a small OPT that keeps no more than a budget of bytes.

    Each point is trained for a few steps when a strategy asks for it, and not again when another one does;
    the exhaustive search, which tells how good the others are, comes last.

    Parameters
    ----------
    printed
        No cells are printed of this search.
    **asked
        ``size`` of the model, ``batches``, ``ratios``, ``budget_bytes``, ``warmup_passes``, ``passes``,
        ``seed``.

    Returns
    -------
    dict of pandas.DataFrame
        ``tuner``: a row an evaluation of a search.

    Raises
    ------
    makespan.errors.WorkerError
        The process failed.
    """
    fixed = {"task": "search", "family": "opt", "strategies": list(_STRATEGIES)}
    found = _run(fixed | asked, 1)
    table = pd.DataFrame(found).assign(oracle="measured", budget_bytes=asked["budget_bytes"])
    return {"tuner": TUNER.validate(table, where="tuner")}


def _run(request: Record, n_processes: int) -> list[Record]:
    with temporary_directory("schedules") as path:
        LocalLauncher().run(Launch(_WORKER, request, n_processes, path))
        found: list[Record] = RunDirectory(path).result()
    return found


def _step_row(name: str, found: Record, batch: int) -> Record:
    processes = found["processes"]
    seconds = np.array([one["times_s"] for one in processes]).max(axis=0)  # until the last process is done
    rates = batch / seconds
    low, high = np.quantile(rates, [0.25, 0.75])
    largest = {name: max(one[name] for one in processes) for name in _OF_PROCESSES}
    return largest | {
        "oracle": "measured", "step": name, "n_gpus": len(processes), "global_batch_size": batch,
        "throughput_samples_per_s": float(np.median(rates)),
        "throughput_iqr_samples_per_s": float(high - low),
        "compiler": found["compiler"],
    }  # fmt: skip
