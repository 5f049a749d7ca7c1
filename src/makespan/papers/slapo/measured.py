"""What is measured here of schedules: the steps of Fig. 9, and a search whose objective is a real run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.papers.slapo.tables import FIG9, TUNER, VERIFY
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory, local_launcher

# ------------------------------------------------------------------------------------------------
# What is measured here of schedules: the steps of Fig. 9, and a search whose objective is a real run.

_MEASURING_WORKER = "makespan.slapo.measuring_worker"
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
        LocalLauncher().run(Launch(_MEASURING_WORKER, request, n_processes, path))
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


# ------------------------------------------------------------------------------------------------
# Schedules of the library against the models that they are written for, on one process and on several.

_VERIFY_WORKER = "makespan.slapo.verify_worker"
_NOT_IN_TABLE = ("report",)


def verify_schedules(
    cases: Sequence[Mapping[str, Any]],
    n_processes: int,
    launcher: Launcher,
    *,
    size: str = "tiny",
    samples: int = 2,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Verify schedules of the library, all in the same processes.

    Parameters
    ----------
    cases
        ``family`` of the zoo and ``options`` of its schedule, of each.
    n_processes, launcher
        Processes that share each model, and what starts them.
    size, samples, seed
        Size of the models, samples of a batch, seed of weights, samples and gradients of outputs.

    Returns
    -------
    list
        Of each case what `VERIFY` has of it, from ``steps`` on, and ``report``, the text of the report.

    Raises
    ------
    makespan.errors.WorkerError
        A schedule could not be applied, or a process died.
    """
    request = {"cases": [dict(case) for case in cases], "size": size, "samples": samples, "seed": seed}
    with temporary_directory("verify") as path:
        launcher.run(Launch(_VERIFY_WORKER, request, n_processes, path))
        rows: list[dict[str, Any]] = RunDirectory(path).result()
    return rows


def verify_experiment(
    cells: Mapping[str, pd.DataFrame],
    *,
    families: Sequence[str],
    processes: Sequence[int],
    schedules: Mapping[str, Mapping[str, Any]],
    left_out: Mapping[str, Sequence[str]],
    device: Literal["auto", "cpu", "cuda"],
    size: str,
    samples: int,
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Verify every schedule of every family; one launch for each number of processes.

    Parameters
    ----------
    cells
        Printed cells; none are read.
    families, processes, schedules
        Families of the zoo, numbers of processes, and options of schedules by a name for them.
    left_out
        Schedules that a family does not have.
    device
        Where models run; ``auto`` takes GPUs where there is one for each process.
    size, samples, seed
        As for `verify_schedules`.

    Returns
    -------
    dict
        ``verify``, schema `VERIFY`: a row a number of processes, family and schedule.

    Raises
    ------
    makespan.errors.WorkerError
        A schedule could not be applied, or a process died.
    """
    cases: list[dict[str, Any]] = [
        {"family": family, "schedule": name, "options": dict(options)}
        for family in families
        for name, options in schedules.items()
        if name not in left_out.get(family, ())
    ]
    rows = []
    for count in processes:
        launcher = local_launcher(device, count)
        found = verify_schedules(cases, count, launcher, size=size, samples=samples, seed=seed)
        for case, row in zip(cases, found, strict=True):
            key = {"oracle": "measured", "n_processes": count, "family": case["family"]}
            options = " ".join(f"{name}={value}" for name, value in case["options"].items())
            values = {name: value for name, value in row.items() if name not in _NOT_IN_TABLE}
            rows.append({**key, "schedule": case["schedule"], "options": options, **values})
    return {"verify": VERIFY.validate(pd.DataFrame(rows), "verify")}
