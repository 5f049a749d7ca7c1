"""Accuracy at the end of training by the number of devices: schemes that rescale a job, and EasyScale."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from makespan.cleanup import temporary_directory
from makespan.easyscale.job import ElasticJob, RankMapping
from makespan.easyscale.kernels import CANONICAL, DeterminismLevel, kernels_of, try_kernel_sets
from makespan.easyscale.reference import StockRun, train_stock
from makespan.easyscale.trainer import ElasticTrainer, run_together
from makespan.errors import TraceError
from makespan.papers.easyscale.tables import FIG9, FIG9_SUMMARY, GAP, GAP_CURVES, GAP_SPREAD
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory, local_launcher
from makespan.training.zoo import StandIn

# ------------------------------------------------------------------------------------------------
# Accuracy at the end of training by the number of devices: schemes that rescale a job, and EasyScale.

_SCORING = "makespan.easyscale.scoring_worker"
_ELASTIC = "easyscale"
_RATES: Mapping[str, Callable[[float], float]] = {"linear": lambda share: share, "adaptive": math.sqrt}
"""Learning rate of a scheme, relative to that for all logical workers, by the share of these that train."""
_ALL, _WORST = "all", "worst"


@dataclass(frozen=True, slots=True)
class GapProtocol:
    """What is trained, and how often.

    Parameters
    ----------
    model, width, noise
        Stand-in of a classifier, its width, and the noise of its task.
    samples, held_out_samples, task_seed
        Samples of an epoch, those that tell the accuracy, and the seed of the task.
    logical_workers, micro_batch_size
        Workers and samples of each for which the job is written.
    learning_rate, momentum
        Of plain SGD, for all logical workers.
    epochs, decay_epoch
        Length of a run, and epochs before the learning rate decays.
    gammas
        Factors by which it does; the first one counts for accuracy.
    devices, seeds
        Numbers of devices, and seeds of weights, order of samples and random states.
    """

    model: str
    width: int
    noise: float
    samples: int
    held_out_samples: int
    task_seed: int
    logical_workers: int
    micro_batch_size: int
    learning_rate: float
    momentum: float
    epochs: int
    decay_epoch: int
    gammas: tuple[float, ...]
    devices: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def spec(self) -> StandIn:
        """What is trained."""
        return StandIn(self.model, width=self.width)


class _Run(NamedTuple):
    """One training run of the experiment."""

    scheme: str
    devices: int
    seed: int
    gamma: float

    def n_workers(self, protocol: GapProtocol) -> int:
        """Workers among which the samples of a step are dealt."""
        return protocol.logical_workers if self.scheme == _ELASTIC else self.devices

    def learning_rate(self, protocol: GapProtocol) -> float:
        """Learning rate before it decays."""
        share = self.n_workers(protocol) / protocol.logical_workers
        return protocol.learning_rate * (_RATES[self.scheme](share) if self.scheme in _RATES else 1.0)

    def steps_per_epoch(self, protocol: GapProtocol) -> int:
        """Optimizer steps that an epoch takes."""
        return protocol.samples // (self.n_workers(protocol) * protocol.micro_batch_size)

    def trained_as(self, protocol: GapProtocol) -> "_Run":
        """Return the run that trains this one too: with all devices nothing is scaled."""
        is_whole = self.scheme in _RATES and self.devices == protocol.logical_workers
        return self._replace(scheme=next(iter(_RATES))) if is_whole else self

    def job(self, protocol: GapProtocol) -> ElasticJob:
        """Return the job that is trained, as one of so many logical workers."""
        decay = protocol.decay_epoch * self.steps_per_epoch(protocol)
        rate = {"lr": self.learning_rate(protocol), "momentum": protocol.momentum}
        data = {"n_samples": protocol.samples, "noise": protocol.noise, "seed": protocol.task_seed}
        return ElasticJob(
            protocol.model,
            lr_scheduler="step",
            options={
                "model": {"width": protocol.width}, "data": data, "optimizer": rate,
                "lr_scheduler": {"step_size": decay, "gamma": self.gamma},
            },
            n_logical_workers=self.n_workers(protocol), micro_batch_size=protocol.micro_batch_size,
            determinism="D1", seed=self.seed, n_loaders=0, fold="ring",
        )  # fmt: skip


def gap_experiment(
    cells: Mapping[str, pd.DataFrame], *, protocol: Mapping[str, Any], n_processes: int = 2
) -> dict[str, pd.DataFrame]:
    """Train under every scheme on every number of devices, and compare what comes of it.

    Parameters
    ----------
    cells
        The paper's cells by artifact, see `read_published`.
    protocol
        Fields of `GapProtocol`.
    n_processes
        Cores to make use of, beyond those of the processes that train together.

    Returns
    -------
    dict
        Tables ``gap``, ``gap_spread`` and ``gap_curves``, schemas `GAP`, `GAP_SPREAD` and `GAP_CURVES`.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed.
    """
    given = GapProtocol(**protocol)
    runs = _runs(given)
    with temporary_directory("gap") as folder:
        rows = _trained(runs, given, Path(folder), max(1, n_processes))
        scored = [run for run in runs if run.gamma == given.gammas[0]]
        gap = _gap(scored, given, _scores(scored, given, Path(folder), n_processes))
        curves = pd.concat(
            [
                _curve(run, given, rows[run.trained_as(given)])
                for run in runs
                if run.seed == given.seeds[0] and run.scheme != "adaptive"
            ]
        )
    return {
        "gap": gap,
        "gap_spread": spreads(gap, cells["gap"]),
        "gap_curves": GAP_CURVES.validate(curves, where="gap_curves"),
    }


def _runs(protocol: GapProtocol) -> list[_Run]:
    """Every scheme with every seed, and with one of them the other gammas where curves are compared."""
    first, *others = protocol.gammas
    plain = [
        _Run(scheme, devices, seed, first)
        for scheme in (*_RATES, _ELASTIC)
        for devices in protocol.devices
        for seed in protocol.seeds
    ]
    return plain + [
        _Run(scheme, devices, protocol.seeds[0], gamma)
        for scheme in ("linear", _ELASTIC)
        for devices in protocol.devices
        for gamma in others
    ]


def _trained(
    runs: Sequence[_Run], protocol: GapProtocol, folder: Path, n_at_once: int
) -> dict[_Run, pd.DataFrame]:
    """Train; runs with the same processes share them, and groups of processes run beside each other."""
    groups: dict[tuple[int, bool], list[_Run]] = {}
    for run in dict.fromkeys(run.trained_as(protocol) for run in runs):
        groups.setdefault((run.devices, run.scheme == _ELASTIC), []).append(run)
    with ThreadPoolExecutor(n_at_once) as pool:
        waiting = [
            pool.submit(
                _elastic if is_elastic else _stock_training,
                group,
                protocol,
                folder / f"{devices}-{is_elastic}",
            )
            for (devices, is_elastic), group in sorted(groups.items())
        ]
        return {run: rows for one in waiting for run, rows in one.result().items()}


def _stock_training(runs: Sequence[_Run], protocol: GapProtocol, folder: Path) -> dict[_Run, pd.DataFrame]:
    """Train with stock data parallelism, on as many processes as there are devices."""
    per_epoch = runs[0].steps_per_epoch(protocol)
    found = train_stock(
        [run.job(protocol) for run in runs], protocol.epochs * per_epoch, hash_every=per_epoch,
        models=[_model_path(run, folder) for run in runs], run_dir=folder / "processes",
    )  # fmt: skip
    return {run: one.steps for run, one in zip(runs, found, strict=True)}


def _elastic(runs: Sequence[_Run], protocol: GapProtocol, folder: Path) -> dict[_Run, pd.DataFrame]:
    """Train all logical workers on so many devices."""
    per_epoch = runs[0].steps_per_epoch(protocol)
    trainers = {}
    for number, run in enumerate(runs):
        values = run.job(protocol).values() | {"fold": "auto"}
        trainers[run] = ElasticTrainer(**values, run_dir=folder / str(number))
    mapping = str(RankMapping.even(protocol.logical_workers, runs[0].devices))
    steps = protocol.epochs * per_epoch
    found = run_together(list(trainers.values()), steps, mapping, hash_every=per_epoch)
    for run, trainer in trainers.items():
        trainer.export(_model_path(run, folder))
    return {run: one.steps for run, one in zip(runs, found, strict=True)}


def _model_path(run: _Run, folder: Path) -> Path:
    return folder.parent / f"{run.scheme}-{run.devices}-{run.seed}-{run.gamma:g}.pt"


def _scores(runs: Sequence[_Run], protocol: GapProtocol, folder: Path, n_processes: int) -> dict[str, Any]:
    """Count what each trained model gets right of the held-out samples of each class."""
    request = {
        "model": asdict(protocol.spec),
        "seed": protocol.task_seed,
        "n_samples": protocol.held_out_samples,
        "noise": protocol.noise,
        "paths": [str(_model_path(run.trained_as(protocol), folder / "any")) for run in runs],
    }
    launch = Launch(_SCORING, request, n_processes, folder / "scoring")
    LocalLauncher().run(launch)
    found: dict[str, Any] = RunDirectory(launch.run_dir).result()
    return found


def _gap(runs: Sequence[_Run], protocol: GapProtocol, found: Mapping[str, Any]) -> pd.DataFrame:
    """Tabulate accuracy over all held-out samples and over those of each class."""
    records = []
    for run, score in zip(runs, found["scores"], strict=True):
        shared = {
            "scheme": run.scheme, "devices": run.devices, "seed": run.seed,
            "batch_size": run.n_workers(protocol) * protocol.micro_batch_size,
            "learning_rate": run.learning_rate(protocol), "param_sha": score["param_sha"],
        }  # fmt: skip
        counts = list(zip(score["right"], found["samples"], strict=True))
        parts = {_ALL: tuple(map(sum, zip(*counts, strict=True)))}
        parts |= {str(number): count for number, count in enumerate(counts) if count[1]}
        for name, (right, samples) in parts.items():
            accuracy = 100.0 * right / samples
            records.append(shared | {"class": name, "samples": samples, "accuracy_pct": accuracy})
    return GAP.validate(pd.DataFrame(records), where="gap")


def spreads(gap: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Compare what devices change with what seeds change; one row more for the class that spreads most."""

    def spread(values: "pd.Series[float]") -> float:
        return float(values.max() - values.min())

    key = ["scheme", "class"]
    over_devices = (
        gap.groupby([*key, "seed"], sort=False)["accuracy_pct"].agg(spread).groupby(key, sort=False)
    )
    over_seeds = (
        gap.groupby([*key, "devices"], sort=False)["accuracy_pct"].agg(spread).groupby(key, sort=False)
    )
    table = pd.DataFrame(
        {
            "spread_pct": over_devices.mean(),
            "max_spread_pct": over_devices.max(),
            "seed_spread_pct": over_seeds.mean(),
        }
    ).reset_index()
    single = table[table["class"] != _ALL].sort_values(["spread_pct", "seed_spread_pct"])
    worst = single.groupby("scheme").tail(1).sort_index().assign(**{"class": _WORST})
    cells = published.drop(columns="source", errors="ignore")
    whole = pd.concat([table, worst], ignore_index=True).merge(
        cells, on=key, how="left", validate="one_to_one"
    )
    return GAP_SPREAD.validate(whole, where="gap_spread")


def _curve(run: _Run, protocol: GapProtocol, rows: pd.DataFrame) -> pd.DataFrame:
    """Losses by epoch, and the hash of the parameters at its end."""
    epoch = ((rows["step"] - 1) // run.steps_per_epoch(protocol) + 1).rename("epoch")
    last = rows.sort_values("step").groupby(epoch)["parameter_sha"].last()
    curve = pd.DataFrame({"loss": rows.groupby(epoch)["loss"].mean(), "param_sha": last}).reset_index()
    has_decayed = curve["epoch"] > protocol.decay_epoch
    curve["learning_rate"] = run.learning_rate(protocol) * has_decayed.map({True: run.gamma, False: 1.0})
    return curve.assign(scheme=run.scheme, devices=run.devices, gamma=run.gamma)


# ------------------------------------------------------------------------------------------------
# Fig. 9: elastic runs at every determinism level beside stock training, mini-batch by mini-batch.


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
