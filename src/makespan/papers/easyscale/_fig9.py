"""Fig. 9: elastic runs at every determinism level beside stock training, mini-batch by mini-batch."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from makespan.easyscale._trainer import ElasticTrainer, run_together
from makespan.easyscale.runtime import (
    CANONICAL,
    DeterminismLevel,
    StockRun,
    kernels_of,
    train_stock,
    try_kernel_sets,
)
from makespan.errors import TraceError
from makespan.leftovers import temporary_directory
from makespan.papers.easyscale._tables_accuracy import FIG9, FIG9_SUMMARY
from makespan.runtime import Launcher, local_launcher

__all__ = ["STAGES", "Stage", "fig9", "fig9_experiment", "fig9_summary"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a run with one mapping; devices are the first or the second of two kernel sets that differ."""

    mapping: str
    places: tuple[int, ...]

    def devices(self, pair: Sequence[str]) -> list[str]:
        """Kernel set of each process, from the two that differ."""
        return [pair[place] for place in self.places]


STAGES = (Stage("0/1/2/3", (0, 0, 0, 0)), Stage("0,1/2,3", (0, 0)), Stage("0,1/2/3", (0, 1, 1)))
"""Four logical workers: each on a device of its own; on two; on three of two types."""

_BY_KERNELS = {"ddp-homo": ("D0", "D1"), "ddp-heter": ("D0+D2", "D1+D2")}
"""Levels by their reference: kernels are left to the devices, or pinned."""
_KEY = ["model", "setting"]


def fig9_experiment(
    cells: Mapping[str, pd.DataFrame],
    *,
    models: Sequence[str],
    steps_per_stage: int,
    loader_processes: int,
    device: Literal["auto", "cpu", "cuda"],
    job: Mapping[str, Any],
) -> dict[str, pd.DataFrame]:
    """Train under every determinism level through the stages, and with stock training.

    Parameters
    ----------
    cells
        The paper's cells by artifact, see `read_published`.
    models
        Stand-ins, by name.
    steps_per_stage
        Mini-batches of each stage; all processes end with a stage, and new ones go on from its checkpoint.
    loader_processes
        Processes that load samples for each process.
    device
        Where to train; ``auto`` takes GPUs where there is one for each of four processes.
    job
        Further fields of `ElasticJob`, the same for all runs.

    Returns
    -------
    dict
        Tables ``fig9`` and ``fig9_summary``, schemas `FIG9` and `FIG9_SUMMARY`.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed.
    """
    launcher = local_launcher(device, len(STAGES[0].places))
    pair, steps = _two_types(launcher), len(STAGES) * steps_per_stage
    runs: dict[tuple[str, str], pd.DataFrame] = {}
    references: dict[tuple[str, str], tuple[str, pd.DataFrame]] = {}
    with temporary_directory("fig9") as folder:
        for reference, levels in _BY_KERNELS.items():
            trainers = {
                (model, level): ElasticTrainer(
                    model, determinism=level, run_dir=Path(folder) / f"{model}-{level}", **job
                )
                for model in models
                for level in levels
            }
            options = _options(loader_processes, launcher)
            for number, stage in enumerate(STAGES, start=1):
                done, devices = number * steps_per_stage, stage.devices(pair)
                found = run_together(list(trainers.values()), done, stage.mapping, devices, **options)
            runs |= zip(trainers, (one.steps for one in found), strict=True)
            stock = _stock([trainers[model, levels[0]] for model in models], steps, pair[0], launcher)
            for model, one in zip(models, stock, strict=True):
                name = f"{reference}, hooked" if one.is_hooked else reference
                references |= {(model, level): (name, one.steps) for level in levels}
    table = fig9(runs, references, steps_per_stage)
    return {"fig9": table, "fig9_summary": fig9_summary(table, pair, cells["fig9"])}


def _options(loader_processes: int, launcher: Launcher) -> dict[str, Any]:
    # Several types of device at a time change bits without D2, which is what the figure shows.
    return {"loader_processes": loader_processes, "launcher": launcher, "mixes_devices": True}


def _stock(trainers: Sequence[ElasticTrainer], steps: int, device: str, launcher: Launcher) -> list[StockRun]:
    """Train the same jobs without a stop, with sums in the order that the elastic runs have settled for."""
    jobs = [replace(trainer.job, fold=_fold(trainer)) for trainer in trainers]
    return train_stock(jobs, steps, device=device, launcher=launcher)


def _fold(trainer: ElasticTrainer) -> Literal["ring", "rank"]:
    """Order of sums that the run has settled for."""
    checkpoint = trainer.folder.checkpoint()
    return "rank" if checkpoint is not None and checkpoint.values["fold"] == "rank" else "ring"


def _two_types(launcher: Launcher) -> tuple[str, str]:
    """Kernel sets that play two types of device; those of a CPU do not exist on GPUs."""
    if launcher.device == "cuda":
        return "seq", "tree"
    return try_kernel_sets(("A", "B", CANONICAL.name)).different_pair()


def fig9(
    runs: Mapping[tuple[str, str], pd.DataFrame],
    references: Mapping[tuple[str, str], tuple[str, pd.DataFrame]],
    steps_per_stage: int,
) -> pd.DataFrame:
    """Compare elastic runs with stock training, schema `FIG9`.

    Parameters
    ----------
    runs
        By model and determinism level, what every logical worker had after each mini-batch: ``step`` from 1,
        ``rank``, ``loss``, ``parameter_sha``, ``optimizer_sha`` and ``context_sha``.
    references
        For each run the name of its reference, and the same of the ranks there.
    steps_per_stage
        Mini-batches of each stage.

    Raises
    ------
    TraceError
        A run and its reference differ in their mini-batches.
    """
    tables = []
    for (model, setting), rows in runs.items():
        name, others = references[model, setting]
        own, ref = _by_step(rows), _by_step(others)
        if own.index.tolist() != ref.index.tolist():
            found = f"{model} under {setting} has {len(own)} mini-batches, {name} has {len(ref)}"
            raise TraceError(f"fig9: {found}; accepted: the same ones")
        table = own.join(ref.add_prefix("ref_")).reset_index()
        table.insert(0, "stage", (table["step"] - 1) // steps_per_stage)
        table["diff"] = table["loss"] - table["ref_loss"]
        same = [table[one] == table[f"ref_{one}"] for one in own.columns if one != "loss"]
        table["equal"] = pd.concat(same, axis=1).all(axis=1)
        tables.append(table.assign(model=model, setting=setting, reference=name))
    whole = pd.concat(tables, ignore_index=True)
    return FIG9.validate(whole[FIG9.names], where="fig9")


def _by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Join what logical workers had: the loss of the last one, and one hash for the contexts of all."""
    steps = rows.sort_values(["step", "rank"]).groupby("step")
    last = steps.last()
    return pd.DataFrame(
        {
            "loss": last["loss"],
            "loss_hex": [float(loss).hex() for loss in last["loss"]],
            "param_sha": last["parameter_sha"],
            "opt_sha": last["optimizer_sha"],
            "context_sha": steps["context_sha"].agg(_joined_sha),
        }
    )


def _joined_sha(hashes: "pd.Series[str]") -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def fig9_summary(table: pd.DataFrame, pair: Sequence[str], published: pd.DataFrame) -> pd.DataFrame:
    """Sum up every stage of `fig9`, schema `FIG9_SUMMARY`; ``pair`` are the kernel sets of the two types."""
    grouped = table.assign(size=table["diff"].abs()).groupby([*_KEY, "stage"], sort=False)
    found = grouped.agg(
        reference=("reference", "first"),
        steps=("step", "count"),
        different_steps=("equal", lambda equal: int((~equal).sum())),
        max_abs_diff=("size", "max"),
    ).reset_index()
    stages = [STAGES[number] for number in found["stage"]]
    levels = [DeterminismLevel.named(name) for name in found["setting"]]
    found["mapping"] = [stage.mapping for stage in stages]
    found["devices"] = [
        " ".join(kernels_of(name, level).name for name in stage.devices(pair))
        for stage, level in zip(stages, levels, strict=True)
    ]
    cells = published.drop(columns="source", errors="ignore")
    joined = found.merge(cells, on=[*_KEY, "stage"], how="left", validate="one_to_one")
    return FIG9_SUMMARY.validate(joined, where="fig9_summary")
