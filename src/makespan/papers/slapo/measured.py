"""Measurements on this machine: steps of Fig. 9, a search with real runs, verification of schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from makespan.cleanup import temporary_directory
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.runtime import (
    Launch,
    Launcher,
    LocalLauncher,
    ProgressListener,
    RunDirectory,
    local_launcher,
)
from makespan.settings import Count, one_of, option
from makespan.training.zoo import FAMILIES, family_sizes

# ------------------------------------------------------------------------------------------------
# Timed runs: the steps of Fig. 9, and a search whose objective is a run.

_of_steps = partial(option, source="a choice", changes="fig9")
_of_search = partial(option, source="a choice", changes="tuner")
_verified = partial(option, source="a choice", changes="verify")
_Counts = tuple[Count, ...]
_Family = Annotated[str, one_of(lambda: FAMILIES)]
_Ratio = Annotated[float, Field(ge=0, le=1)]
_Value = bool | int | float | str

_MEASURING_WORKER = "makespan.slapo.measuring_worker"
_STRATEGIES = ("frontier", "coordinate_descent", "exhaustive")
_OF_PROCESSES = ("saved_bytes", "parameter_bytes", "output_error", "gradient_error")
Record = dict[str, Any]


class _Measurement(Experiment):
    """Experiment that runs models on this machine."""

    sources = ("measured",)
    on_profile = True
    trains = True
    minutes, mem_mb = 60, 4000


@dataclass(frozen=True, slots=True)
class _Step:
    """Step of a schedule: optimised kernels, and a model shared by several processes."""

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


class Fig9Steps(_Measurement):
    """Verify a small BERT after each step of its schedule, and measure its memory and time on CPU cores.

    Steps that split nothing run in one process. Fused operations are compiled only there; processes that
    share the model just capture them, because one compiler per process would take minutes.

    Raises `makespan.errors.WorkerError` if the model differs from the original after a step.
    """

    name = "fig9_steps"
    tables = {"fig9": "throughput and largest batch as BERT is optimised step by step"}
    figures = (
        Figure(
            "fig9_steps",
            "Fig. 9, measured",
            "Steps of a schedule of a small BERT on CPU cores, source {source}: "
            "median throughput of {timed passes: config slapo.fig9_steps.passes} "
            "in one run, with half the inter-quartile range either way as lines "
            "with caps, and the memory that a process holds. Every step is "
            "verified against the original model. Times on cores say nothing of "
            "GPUs.",
            tables=("fig9",),
            draw="measured_steps",
            sources=("measured",),
        ),
    )

    size: Annotated[str, one_of(lambda: family_sizes("bert"))] = _of_steps("size of the model", "small")
    batch: Count = _of_steps("samples per step", 8, unit="samples")
    processes: _Counts = _of_steps("numbers of processes that share the model", (1, 2, 4), min_length=1)
    compiler: Literal["inductor", "dynamo"] = _of_steps(
        "compiler of fused operations; dynamo only captures them", "inductor"
    )
    warmup_passes: Count = _of_steps("forward and backward passes that are not timed", 2)
    passes: Count = _of_steps("forward and backward passes that are timed", 6)
    seed: int = _of_steps("seed of weights and samples", 0, ge=0)

    def n_threads(self, all_cores: int) -> int:
        """Return all cores, because steps are timed on them."""
        return max(all_cores, *self.processes)

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per step and number of processes."""
        options = self.model_dump(exclude={"processes", "compiler"})
        records: dict[tuple[str, int], Record] = {}
        for number in sorted({1, *self.processes}):
            steps = [step for step in _STEPS if number in _numbers_of(step, self.processes)]
            variants = [{"name": step.name, "options": step.options(self.compiler)} for step in steps]
            request = {"task": "steps", "family": "bert", "variants": variants, **options}
            records |= {(record["name"], number): record for record in _run(request, number)}
        rows = []
        for step in _STEPS:
            for number in _numbers_of(step, self.processes):
                processes = records[step.name, number]["processes"]
                # A pass takes until the last process is done.
                seconds = np.array([process["times_s"] for process in processes]).max(axis=0)
                rates = self.batch / seconds
                low, high = np.quantile(rates, [0.25, 0.75])
                largest = {name: max(process[name] for process in processes) for name in _OF_PROCESSES}
                rows.append(largest | {
                    "oracle": "measured", "step": step.name, "n_gpus": len(processes),
                    "global_batch_size": self.batch, "throughput_samples_per_s": float(np.median(rates)),
                    "throughput_iqr_samples_per_s": float(high - low),
                    "compiler": records[step.name, number]["compiler"],
                })  # fmt: skip
        table = pd.DataFrame(rows)
        medians = table["throughput_samples_per_s"]
        not_measured = {"gpu_memory_ratio": np.nan, "largest_global_batch_size": np.nan}
        return {"fig9": table.assign(speedup=medians / medians.iloc[0], **not_measured)}


class TunerRun(_Measurement):
    """Search for the fastest schedule of a small OPT whose forward pass keeps at most a budget of bytes.

    Each point is run for a few passes when a strategy first asks for it, or fewer if it is clearly slower
    than the best one. The exhaustive search comes last; it
    finds the optimum that the others are compared with.
    """

    name = "tuner"
    tables = {"tuner": "points that searches with real runs try, in their order"}
    figures = (
        Figure(
            "tuner",
            "Tuning, measured",
            "Median throughput of at most {timed passes: config slapo.tuner.passes} of a "
            "small OPT on CPU cores over batch size and share of recomputed "
            "layers, source {source}, one run per point, and the points that "
            "searches try: stars of the search along the border of the budget, "
            "circles of coordinate descent. Grey are points whose forward pass "
            "keeps more bytes than the budget.",
            tables=("tuner",),
            draw="measured_search",
            sources=("measured",),
        ),
    )

    size: Annotated[str, one_of(lambda: family_sizes("opt"))] = _of_search("size of the model", "small")
    batches: _Counts = _of_search("batch sizes", (4, 8, 12, 16, 24, 32), unit="samples", min_length=2)
    ratios: tuple[_Ratio, ...] = _of_search(
        "shares of the layers that are recomputed", (1.0, 0.67, 0.5, 0.34, 0.0), min_length=2
    )
    budget_bytes: Count = _of_search(
        "largest size of the tensors that the forward pass keeps, in place of the memory of a device",
        8_388_608,
        unit="B",
    )
    warmup_passes: Count = _of_search("forward and backward passes that are not timed", 1)
    passes: Count = _of_search(
        "forward and backward passes that are timed, unless fewer show that a point is slower, or its speed",
        5,
    )
    seed: int = _of_search("seed of weights, samples and strategies", 0, ge=0)

    def n_threads(self, all_cores: int) -> int:
        """Return all cores, because runs are timed."""
        return all_cores

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per evaluation of a search."""
        fixed = {"task": "search", "family": "opt", "strategies": list(_STRATEGIES)}
        table = pd.DataFrame(_run(fixed | self.model_dump(mode="json"), 1))
        return {"tuner": table.assign(oracle="measured", budget_bytes=self.budget_bytes)}


def _run(request: Record, n_processes: int) -> list[Record]:
    with temporary_directory("schedules") as path:
        LocalLauncher().run(Launch(_MEASURING_WORKER, request, n_processes, path))
        records: list[Record] = RunDirectory(path).result()
    return records


# ------------------------------------------------------------------------------------------------
# Verification of the schedules of the library against their original models, on one or more processes.

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
    by_layers: bool = False,
    progress: ProgressListener | None = None,
) -> list[dict[str, Any]]:
    """Verify schedules of the library, all in one launch of processes.

    Parameters
    ----------
    cases
        Cases, each with a ``family`` of the zoo, the ``options`` of its schedule, and perhaps a ``plan`` that
        schedules it by its structure instead.
    n_processes, launcher
        Number of processes that share each model, and the launcher that starts them.
    size, samples, seed
        Size of the models, samples per batch, seed of weights, samples and gradients of outputs.
    by_layers
        Compare repeated layers one at a time, as `Verify` does.
    progress
        Is told how many parts are done, of how many, and what runs now.

    Returns
    -------
    list
        For each case the columns of ``verify.csv`` from ``steps`` on, and ``report``, the text of the report.

    Raises
    ------
    makespan.errors.WorkerError
        A schedule could not be applied, or a process died.
    """
    request = {
        "cases": [dict(case) for case in cases],
        "size": size,
        "samples": samples,
        "seed": seed,
        "by_layers": by_layers,
    }
    with temporary_directory("verify") as path:
        directory, launch = RunDirectory(path), Launch(_VERIFY_WORKER, request, n_processes, path)
        if progress is not None:
            launch = replace(launch, on_beat=partial(directory.tell, progress))
        launcher.run(launch)
        rows: list[dict[str, Any]] = directory.result()
    return rows


class Verification(_Measurement):
    """Verify every schedule of every family against the original model, one launch per number of processes.

    Raises `makespan.errors.WorkerError` if a schedule cannot be applied, or a process dies.
    """

    name = "verify"
    tables = {
        "verify": "verification of every schedule of the library against its model: outputs and gradients"
    }

    device: Literal["auto", "cpu", "cuda"] = _verified(
        "device of the models; auto uses GPUs if there is one per process", "auto"
    )
    families: tuple[_Family, ...] = _verified(
        "architectures of the zoo",
        ("bert", "roberta", "albert", "gpt", "opt", "t5", "llama", "wideresnet"),
        min_length=1,
    )
    processes: tuple[Count, ...] = _verified(
        "numbers of processes that share a model, one launch each", (1, 2, 4), min_length=1
    )
    size: str = _verified("size of the models", "tiny")
    samples: Count = _verified("samples per batch", 2, unit="samples")
    seed: int = _verified("seed of weights, samples and gradients of outputs", 0, ge=0)
    schedules: dict[str, dict[str, _Value]] = _verified(
        "options of `apply_schedule` by name of the schedule",
        {
            "tensor": {"shard_embedding": True},
            "recompute": {"attn": "sdpa", "ckpt_ratio": 0.5},
            "stages": {"shard_embedding": True, "pipeline_cuts": 2},
            "all": {
                "shard_embedding": True,
                "attn": "sdpa",
                "fuse": True,
                "compiler": "dynamo",
                "ckpt_ratio": 0.5,
                "broadcast_input": True,
            },
        },
        min_length=1,
    )
    left_out: dict[_Family, Annotated[list[str], Field(min_length=1)]] = _verified(
        "schedules that a family does not have", {"albert": ["stages"]}
    )

    @model_validator(mode="after")
    def _names_are_known(self) -> "Verification":
        for family, names in self.left_out.items():
            for name in names:
                if name not in self.schedules:
                    raise ValueError(f"left_out.{family}: {name!r}; expected {', '.join(self.schedules)}")
        return self

    def n_gpus(self) -> int:
        """Return the processes of the largest launch."""
        return max(self.processes)

    def n_threads(self, all_cores: int) -> int:
        """Return all cores, or one per process if there are more processes."""
        return max(all_cores, *self.processes)

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per number of processes, family and schedule."""
        cases: list[dict[str, Any]] = [
            {"family": family, "schedule": name, "options": dict(options)}
            for family in self.families
            for name, options in self.schedules.items()
            if name not in self.left_out.get(family, ())
        ]
        rows = []
        for count in self.processes:
            verified = verify_schedules(
                cases, count, local_launcher(self.device, count),
                size=self.size, samples=self.samples, seed=self.seed,
            )  # fmt: skip
            for case, row in zip(cases, verified, strict=True):
                key = {"oracle": "measured", "n_processes": count, "family": case["family"]}
                options = " ".join(f"{name}={value}" for name, value in case["options"].items())
                values = {name: value for name, value in row.items() if name not in _NOT_IN_TABLE}
                rows.append({**key, "schedule": case["schedule"], "options": options, **values})
        return {"verify": pd.DataFrame(rows)}
