"""Accuracy at the end of training by the number of devices: schemes that rescale a job, and EasyScale."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
from pydantic import Field, model_validator

from makespan.cleanup import temporary_directory
from makespan.easyscale.job import ElasticJob, RankMapping
from makespan.easyscale.kernels import CANONICAL, DeterminismLevel, kernels_of, try_kernel_sets
from makespan.easyscale.reference import StockRun, train_stock
from makespan.easyscale.requests import SCORING, ScoringRequest
from makespan.easyscale.trainer import ElasticTrainer, run_together
from makespan.errors import MakespanError, TraceError
from makespan.papers.experiment import Experiment, Explore, Figure, Given
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory, local_launcher
from makespan.settings import Count, one_of, option
from makespan.tables import schemas_of
from makespan.training.zoo import STAND_INS, StandIn

# ------------------------------------------------------------------------------------------------
# Accuracy at the end of training by the number of devices: schemes that rescale a job, and EasyScale.

_SCORING = "makespan.easyscale.scoring_worker"
_ELASTIC = "easyscale"
_RATES: Mapping[str, Callable[[float], float]] = {"linear": lambda share: share, "adaptive": math.sqrt}
"""Learning rate of a scheme, relative to that for all logical workers, by the share of these that train."""
_ALL, _WORST = "all", "worst"


_GROUPS_AT_ONCE = 2  # runs with the same processes are a group
_CLASSIFIERS = ("shufflenetv2", "resnet50", "vgg19", "swintransformer")
_Positive = Annotated[float, Field(gt=0)]
_of_gap = partial(option, changes="gap, gap_spread, gap_curves")
_ours = partial(_of_gap, source="a choice")


class Gap(Experiment):
    """Train under every scheme on every number of devices, and compare the accuracies at the end.

    Raises `makespan.errors.WorkerError` if a process fails.
    """

    name = "gap"
    tables = {
        "gap": "accuracy of elastic schemes on several numbers of devices, overall and by class",
        "gap_spread": "how far it spreads over devices and over seeds, with the paper's values",
        "gap_curves": "losses by epoch where the learning rate decays by several factors",
    }
    cells = ("gap",)
    sources = ("measured",)
    on_profile = True
    trains = True
    minutes, mem_mb = 120, 4000
    figures = (
        Figure(
            "gap",
            "Accuracy by the number of devices",
            "Held-out accuracy of schemes that scale batch and learning rate with "
            "the number of devices, and of EasyScale: means of {seeds: values "
            "gap.seed}, with lines with caps for the range over seeds. Right: how "
            "far accuracy spreads over the numbers of devices, overall and in "
            "each class, with black dots for the spread over seeds. Flat bars at "
            "the bottom stand for a spread of exactly 0. Source {source}.",
            tables=("gap", "gap_spread"),
            sources=("measured",),
        ),
        Figure(
            "gap_curves",
            "Decay of the learning rate",
            "Mean loss of every epoch on each number of devices, source "
            "{source}, one run per line. At the grey line the learning rate is "
            "multiplied by gamma. Where training does not depend on devices, the "
            "lines of one gamma coincide.",
            tables=("gap_curves",),
            sources=("measured",),
            explore=Explore(
                "lines",
                ("epoch",),
                ("loss",),
                ("scheme", "devices"),
                ("gamma",),
                unit_x="epoch",
                unit_y="mean loss",
            ),
        ),
    )

    model: Annotated[str, one_of(lambda: _CLASSIFIERS)] = _ours("stand-in of a classifier", "shufflenetv2")
    width: Count = _ours("channels of its first layers", 8)
    noise: float = _ours("what hides the classes, relative to the signal", 0.9, ge=0, le=10)
    samples: Count = _ours("samples of an epoch", 512, unit="samples")
    held_out_samples: Count = _ours("samples that tell the accuracy", 2000, unit="samples")
    task_seed: int = _ours("seed of the task, the same for all runs", 1, ge=0)
    logical_workers: Count = _of_gap("workers for which the job is written", 4, source="EasyScale, Fig. 9: 4")
    micro_batch_size: Count = _ours("samples of one worker and step", 16, unit="samples")
    learning_rate: float = _ours("learning rate of SGD for all workers together", 0.2, gt=0)
    momentum: float = _ours("its momentum", 0.9, ge=0, lt=1)
    epochs: int = _ours("length of a run", 6, unit="epochs", ge=2)
    decay_epoch: Count = _of_gap(
        "epochs before the learning rate decays", 4, unit="epochs", source="a choice; EasyScale: 20"
    )
    gammas: tuple[_Positive, ...] = _of_gap(
        "factors by which it decays; accuracy is that with the first",
        (0.1, 0.3, 0.5),
        source="EasyScale: 0.1, 0.3 and 0.5",
        min_length=1,
    )
    devices: tuple[Count, ...] = _ours("numbers of devices", (1, 2, 4), min_length=2)
    seeds: tuple[int, ...] = _ours(
        "seeds of weights, order of samples and random states", (1, 2, 3), min_length=2
    )

    @model_validator(mode="after")
    def _epochs_and_batches_fit(self) -> "Gap":
        try:
            _ = self.spec
        except MakespanError as error:
            raise ValueError(f"sizes of a stand-in ({error})") from None
        if any(self.logical_workers % number for number in self.devices):
            raise ValueError(f"devices that divide logical_workers, {self.logical_workers}")
        whole = self.logical_workers * self.micro_batch_size
        if self.samples % whole:
            raise ValueError(f"samples in whole mini-batches of {whole}")
        if not self.decay_epoch < self.epochs <= 2 * self.decay_epoch:
            raise ValueError("a learning rate that decays once: decay_epoch < epochs <= 2 decay_epoch")
        return self

    @property
    def spec(self) -> StandIn:
        """Stand-in that is trained."""
        return StandIn(self.model, width=self.width)

    def n_threads(self, all_cores: int) -> int:
        """Return a core per device of the largest default number."""
        return 4

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per run and class, per scheme and class, and per epoch of the compared curves."""
        runs = _runs(self)
        with temporary_directory("gap") as folder:
            rows = _trained(runs, self, Path(folder))
            scored = [run for run in runs if run.gamma == self.gammas[0]]
            gap = _gap(scored, self, _scores(scored, self, Path(folder)))
            curves = pd.concat(
                [
                    _curve(run, self, rows[run.trained_as(self)])
                    for run in runs
                    if run.seed == self.seeds[0] and run.scheme != "adaptive"
                ]
            )
        return {"gap": gap, "gap_spread": spreads(gap, given.cells["gap"]), "gap_curves": curves}


class _Run(NamedTuple):
    """One training run of the experiment."""

    scheme: str
    devices: int
    seed: int
    gamma: float

    def n_workers(self, protocol: Gap) -> int:
        """Return the workers among which the samples of a step are divided."""
        return protocol.logical_workers if self.scheme == _ELASTIC else self.devices

    def learning_rate(self, protocol: Gap) -> float:
        """Return the learning rate before it decays."""
        share = self.n_workers(protocol) / protocol.logical_workers
        return protocol.learning_rate * (_RATES[self.scheme](share) if self.scheme in _RATES else 1.0)

    def steps_per_epoch(self, protocol: Gap) -> int:
        """Return the optimizer steps of an epoch."""
        return protocol.samples // (self.n_workers(protocol) * protocol.micro_batch_size)

    def trained_as(self, protocol: Gap) -> "_Run":
        """Return the run that trains this one too: with all devices nothing is scaled."""
        is_whole = self.scheme in _RATES and self.devices == protocol.logical_workers
        return self._replace(scheme=next(iter(_RATES))) if is_whole else self

    def job(self, protocol: Gap) -> ElasticJob:
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


def _runs(protocol: Gap) -> list[_Run]:
    """Return every scheme with every seed, and with the first seed the other gammas of compared curves."""
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


def _trained(runs: Sequence[_Run], protocol: Gap, folder: Path) -> dict[_Run, pd.DataFrame]:
    """Train all runs: those on as many devices share processes, and two groups run at the same time."""
    groups: dict[tuple[int, bool], list[_Run]] = {}
    for run in dict.fromkeys(run.trained_as(protocol) for run in runs):
        groups.setdefault((run.devices, run.scheme == _ELASTIC), []).append(run)
    with ThreadPoolExecutor(_GROUPS_AT_ONCE) as pool:
        pending = [
            pool.submit(
                _elastic if is_elastic else _stock_training,
                group,
                protocol,
                folder / f"{devices}-{is_elastic}",
            )
            for (devices, is_elastic), group in sorted(groups.items())
        ]
        return {run: rows for group in pending for run, rows in group.result().items()}


def _stock_training(runs: Sequence[_Run], protocol: Gap, folder: Path) -> dict[_Run, pd.DataFrame]:
    """Train with stock data parallelism, on as many processes as there are devices."""
    per_epoch = runs[0].steps_per_epoch(protocol)
    results = train_stock(
        [run.job(protocol) for run in runs], protocol.epochs * per_epoch, hash_every=per_epoch,
        models=[_model_path(run, folder) for run in runs], run_dir=folder / "processes",
    )  # fmt: skip
    return {run: result.steps for run, result in zip(runs, results, strict=True)}


def _elastic(runs: Sequence[_Run], protocol: Gap, folder: Path) -> dict[_Run, pd.DataFrame]:
    """Train all logical workers on so many devices."""
    per_epoch = runs[0].steps_per_epoch(protocol)
    trainers = {}
    for number, run in enumerate(runs):
        values = run.job(protocol).values() | {"fold": "auto"}
        trainers[run] = ElasticTrainer(**values, run_dir=folder / str(number))
    mapping = str(RankMapping.even(protocol.logical_workers, runs[0].devices))
    steps = protocol.epochs * per_epoch
    results = run_together(list(trainers.values()), steps, mapping, hash_every=per_epoch)
    for run, trainer in trainers.items():
        trainer.export(_model_path(run, folder))
    return {run: result.steps for run, result in zip(runs, results, strict=True)}


def _model_path(run: _Run, folder: Path) -> Path:
    return folder.parent / f"{run.scheme}-{run.devices}-{run.seed}-{run.gamma:g}.pt"


def _scores(runs: Sequence[_Run], protocol: Gap, folder: Path) -> dict[str, Any]:
    """Count the held-out samples of each class that each trained model classifies correctly."""
    request = ScoringRequest(
        model=protocol.spec,
        seed=protocol.task_seed,
        n_samples=protocol.held_out_samples,
        noise=protocol.noise,
        paths=tuple(_model_path(run.trained_as(protocol), folder / "any") for run in runs),
    )
    values = SCORING.dump_python(request, mode="json")
    launch = Launch(_SCORING, values, _GROUPS_AT_ONCE, folder / "scoring")
    LocalLauncher().run(launch)
    counts: dict[str, Any] = RunDirectory(launch.run_dir).result()
    return counts


def _gap(runs: Sequence[_Run], protocol: Gap, scores: Mapping[str, Any]) -> pd.DataFrame:
    """Tabulate accuracy over all held-out samples and over those of each class."""
    records = []
    for run, score in zip(runs, scores["scores"], strict=True):
        shared = {
            "scheme": run.scheme, "devices": run.devices, "seed": run.seed,
            "batch_size": run.n_workers(protocol) * protocol.micro_batch_size,
            "learning_rate": run.learning_rate(protocol), "param_sha": score["param_sha"],
        }  # fmt: skip
        counts = list(zip(score["right"], scores["samples"], strict=True))
        parts = {_ALL: tuple(map(sum, zip(*counts, strict=True)))}
        parts |= {str(number): count for number, count in enumerate(counts) if count[1]}
        for name, (right, samples) in parts.items():
            accuracy = 100.0 * right / samples
            records.append(shared | {"class": name, "samples": samples, "accuracy_pct": accuracy})
    return pd.DataFrame(records)


def spreads(gap: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Compare the spread over devices with that over seeds; a further row has the class that spreads most."""

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
    whole = pd.concat([table, worst], ignore_index=True)
    return whole.merge(cells, on=key, how="left", validate="one_to_one")


def _curve(run: _Run, protocol: Gap, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean loss of each epoch, and the hash of the parameters at its end."""
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
        """Return the kernel set of each process, from two that differ."""
        return [pair[place] for place in self.places]


STAGES = (Stage("0/1/2/3", (0, 0, 0, 0)), Stage("0,1/2,3", (0, 0)), Stage("0,1/2/3", (0, 1, 1)))
"""Four logical workers: each on a device of its own; on two; on three of two types."""
_BY_KERNELS = {"ddp-homo": ("D0", "D1"), "ddp-heter": ("D0+D2", "D1+D2")}
"""Levels by their reference: kernels are left to the devices, or pinned."""
_KEY = ["model", "setting"]


_StandInName = Annotated[str, one_of(lambda: STAND_INS)]
_of_fig9 = partial(option, changes="fig9, fig9_summary")
_of_bits = partial(_of_fig9, source="a choice")


class Fig9(Experiment):
    """Train under every determinism level through the stages, and with stock training.

    All processes end with a stage, and new ones resume from its checkpoint. Raises
    `makespan.errors.WorkerError` if a process fails.
    """

    name = "fig9"
    tables = {
        "fig9": "losses and hashes of elastic and of stock training, step by step",
        "fig9_summary": "steps and losses that differ, by level and stage, with the paper's values",
    }
    cells = ("fig9",)
    sources = ("measured",)
    on_profile = True
    trains = True
    unjudged = frozenset({"fig9_summary"})
    minutes, mem_mb = 120, 4000
    figures = (
        Figure(
            "fig9",
            "Fig. 9",
            "Loss of the last of four logical workers minus that of stock "
            "training, source {source}, one run per line. The three stages use "
            "the kernel sets named above each; grey lines are borders of stages, "
            "the dotted line is stock training. Stages of D2 run canonical "
            "kernels everywhere. Ticks at the top mark steps after which loss, "
            "parameters, optimizer, buffers or random states have other bits.",
            tables=("fig9", "fig9_summary"),
            sources=("measured",),
        ),
    )

    device: Literal["auto", "cpu", "cuda"] = _of_bits(
        "where to train; auto uses GPUs if there is one for each of four processes", "auto"
    )
    models: tuple[_StandInName, ...] = _of_fig9(
        "stand-ins that are trained",
        ("resnet50", "vgg19"),
        source="EasyScale artifact: ResNet50, VGG19",
        min_length=1,
    )
    width: Count = _of_bits("channels of their first layers", 16)
    samples: Count = _of_bits("samples of an epoch", 244, unit="samples")
    micro_batch_size: Count = _of_fig9(
        "samples of a logical worker and mini-batch", 16, unit="samples", source="a choice; the artifact: 64"
    )
    steps_per_stage: Count = _of_fig9(
        "mini-batches of each of three stages", 5, unit="steps", source="a choice; EasyScale, Fig. 9: 100"
    )
    loaders: Count = _of_fig9("loaders of each logical worker", 2, source="a choice; the artifact: 4")
    loader_processes: Count = _of_bits(
        "processes that load for each training process; no bit depends on them", 1
    )
    learning_rate: float = _of_bits("learning rate of SGD", 0.05, gt=0)
    momentum: float = _of_bits("its momentum", 0.9, ge=0, lt=1)
    seed: int = _of_bits("seed of weights, samples and random states", 1, ge=0)

    @model_validator(mode="after")
    def _stages_end_amid_epochs(self) -> "Fig9":
        per_epoch = -(-self.samples // (4 * self.micro_batch_size))
        ends = [number * self.steps_per_stage for number in (1, 2)]
        if per_epoch < 2 or any(end % per_epoch == 0 for end in ends) or per_epoch >= ends[1]:
            found = f"epochs of {per_epoch} mini-batches, stages that end after {ends[0]} and {ends[1]}"
            raise ValueError(f"stages that end amid epochs, and an epoch that ends amid stages ({found})")
        return self

    def n_gpus(self) -> int:
        """Return a GPU per process of the first stage."""
        return len(STAGES[0].places)

    def n_threads(self, all_cores: int) -> int:
        """Return a core per process of the first stage."""
        return len(STAGES[0].places)

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per model, level and mini-batch, and per model, level and stage."""
        launcher = local_launcher(self.device, len(STAGES[0].places))
        n_steps = len(STAGES) * self.steps_per_stage
        # Two kernel sets play two types of device; those of a CPU do not exist on GPUs.
        pair: tuple[str, str] = ("seq", "tree")
        if launcher.device != "cuda":
            pair = try_kernel_sets(("A", "B", CANONICAL.name)).different_pair()
        runs: dict[tuple[str, str], pd.DataFrame] = {}
        references: dict[tuple[str, str], tuple[str, pd.DataFrame]] = {}
        with temporary_directory("fig9") as folder:
            for reference, levels in _BY_KERNELS.items():
                trainers = {
                    (model, level): self._trainer(model, level, Path(folder))
                    for model in self.models
                    for level in levels
                }
                for number, stage in enumerate(STAGES, start=1):
                    # Without D2 several types of device at a time change bits: the figure shows this.
                    results = run_together(
                        list(trainers.values()), number * self.steps_per_stage, stage.mapping,
                        stage.devices(pair), loader_processes=self.loader_processes, launcher=launcher,
                        hash_every=1, mixes_devices=True,
                    )  # fmt: skip
                runs |= zip(trainers, (result.steps for result in results), strict=True)
                first = [trainers[model, levels[0]] for model in self.models]
                for model, run in zip(self.models, _stock(first, n_steps, pair[0], launcher), strict=True):
                    name = f"{reference}, hooked" if run.is_hooked else reference
                    references |= {(model, level): (name, run.steps) for level in levels}
        table = fig9(runs, references, self.steps_per_stage)
        return {"fig9": table, "fig9_summary": fig9_summary(table, pair, given.cells["fig9"])}

    def _trainer(self, model: str, level: str, folder: Path) -> ElasticTrainer:
        parts = {
            "model": {"width": self.width},
            "data": {"n_samples": self.samples},
            "optimizer": {"lr": self.learning_rate, "momentum": self.momentum},
        }
        return ElasticTrainer(
            model, determinism=level, run_dir=folder / f"{model}-{level}",
            micro_batch_size=self.micro_batch_size, n_loaders=self.loaders, seed=self.seed,
            n_logical_workers=4, options=parts,
        )  # fmt: skip


def _stock(
    trainers: Sequence[ElasticTrainer], n_steps: int, device: str, launcher: Launcher
) -> list[StockRun]:
    """Train the same jobs without a stop, adding up in the order that the elastic runs have settled on."""
    jobs = []
    for trainer in trainers:
        checkpoint = trainer.folder.checkpoint()
        by_rank = checkpoint is not None and checkpoint.values["fold"] == "rank"
        jobs.append(replace(trainer.job, fold="rank" if by_rank else "ring"))
    return train_stock(jobs, n_steps, device=device, launcher=launcher)


def fig9(
    runs: Mapping[tuple[str, str], pd.DataFrame],
    references: Mapping[tuple[str, str], tuple[str, pd.DataFrame]],
    steps_per_stage: int,
) -> pd.DataFrame:
    """Compare elastic runs with stock training, step by step.

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
        elastic, stock = _by_step(rows), _by_step(others)
        if elastic.index.tolist() != stock.index.tolist():
            counts = f"{model} under {setting} has {len(elastic)} mini-batches, {name} has {len(stock)}"
            raise TraceError(f"fig9: {counts}; expected the same ones")
        table = elastic.join(stock.add_prefix("ref_")).reset_index()
        table.insert(0, "stage", (table["step"] - 1) // steps_per_stage)
        table["diff"] = table["loss"] - table["ref_loss"]
        same = [table[column] == table[f"ref_{column}"] for column in elastic.columns if column != "loss"]
        table["equal"] = pd.concat(same, axis=1).all(axis=1)
        tables.append(table.assign(model=model, setting=setting, reference=name))
    whole = pd.concat(tables, ignore_index=True)
    return whole[schemas_of("makespan.papers.easyscale")["fig9"].names]


def _by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the loss of the last logical worker after each step, and one hash of the contexts of all."""
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
    """Sum up every stage of `fig9`; ``pair`` are the kernel sets of the two types."""
    grouped = table.assign(size=table["diff"].abs()).groupby([*_KEY, "stage"], sort=False)
    summary = grouped.agg(
        reference=("reference", "first"),
        steps=("step", "count"),
        different_steps=("equal", lambda equal: int((~equal).sum())),
        max_abs_diff=("size", "max"),
    ).reset_index()
    stages = [STAGES[number] for number in summary["stage"]]
    levels = [DeterminismLevel.named(name) for name in summary["setting"]]
    summary["mapping"] = [stage.mapping for stage in stages]
    summary["devices"] = [
        " ".join(kernels_of(name, level).name for name in stage.devices(pair))
        for stage, level in zip(stages, levels, strict=True)
    ]
    cells = published.drop(columns="source", errors="ignore")
    return summary.merge(cells, on=[*_KEY, "stage"], how="left", validate="one_to_one")
