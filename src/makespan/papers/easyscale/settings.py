"""Blocks ``easyscale.fig9`` and ``easyscale.gap``: training whose bits and accuracy are compared."""

from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from makespan.easyscale.kernels import KERNEL_SETS
from makespan.errors import MakespanError
from makespan.hardware import cluster_names
from makespan.policies import policy_names
from makespan.settings import Block, Count, PaperSettings, option, taken_from, unlike
from makespan.training.zoo import STAND_INS, StandIn

# ------------------------------------------------------------------------------------------------
# Blocks ``easyscale.fig9`` and ``easyscale.gap``: training whose bits and accuracy are compared.

_CLASSIFIERS = ("shufflenetv2", "resnet50", "vgg19", "swintransformer")
_StandInName = Annotated[str, taken_from(lambda: STAND_INS)]
_Positive = Annotated[float, Field(gt=0)]
_of_fig9 = partial(option, changes="fig9, fig9_summary")
_accuracy_option = partial(_of_fig9, source="a choice")
_of_gap = partial(option, changes="gap, gap_spread, gap_curves")
_ours = partial(_of_gap, source="a choice")


class Fig9(Block):
    """Bits of elastic training and of stock training."""

    device: Literal["auto", "cpu", "cuda"] = _accuracy_option(
        "where to train; auto uses GPUs if there is one for each of four processes"
    )
    models: Annotated[tuple[_StandInName, ...], unlike("each model once")] = _of_fig9(
        "stand-ins that are trained", source="EasyScale artifact: ResNet50, VGG19", min_length=1
    )
    width: Count = _accuracy_option("channels of their first layers")
    samples: Count = _accuracy_option("samples of an epoch", unit="samples")
    micro_batch_size: Count = _of_fig9(
        "samples of a logical worker and mini-batch", unit="samples", source="a choice; the artifact: 64"
    )
    steps_per_stage: Count = _of_fig9(
        "mini-batches of each of three stages", unit="steps", source="a choice; EasyScale, Fig. 9: 100"
    )
    loaders: Count = _of_fig9("loaders of each logical worker", source="a choice; the artifact: 4")
    loader_processes: Count = _accuracy_option(
        "processes that load for each training process; no bit depends on them"
    )
    learning_rate: float = _accuracy_option("learning rate of SGD", gt=0)
    momentum: float = _accuracy_option("its momentum", ge=0, lt=1)
    seed: int = _accuracy_option("seed of weights, samples and random states", ge=0)

    def experiment(self) -> dict[str, Any]:
        """Return the options of `fig9_experiment`."""
        direct = ("device", "steps_per_stage", "loader_processes")
        parts = {
            "model": {"width": self.width},
            "data": {"n_samples": self.samples},
            "optimizer": {"lr": self.learning_rate, "momentum": self.momentum},
        }
        job = {"micro_batch_size": self.micro_batch_size, "n_loaders": self.loaders, "seed": self.seed}
        return {name: getattr(self, name) for name in direct} | {
            "models": list(self.models),
            "job": job | {"n_logical_workers": 4, "options": parts},
        }

    @model_validator(mode="after")
    def _stages_end_amid_epochs(self) -> "Fig9":
        per_epoch = -(-self.samples // (4 * self.micro_batch_size))
        ends = [number * self.steps_per_stage for number in (1, 2)]
        if per_epoch < 2 or any(end % per_epoch == 0 for end in ends) or per_epoch >= ends[1]:
            found = f"epochs of {per_epoch} mini-batches, stages that end after {ends[0]} and {ends[1]}"
            raise ValueError(f"stages that end amid epochs, and an epoch that ends amid stages ({found})")
        return self


class Gap(Block):
    """Accuracy of elastic schemes by the number of devices."""

    model: Annotated[str, taken_from(lambda: _CLASSIFIERS)] = _ours("stand-in of a classifier")
    width: Count = _ours("channels of its first layers")
    noise: float = _ours("what hides the classes, relative to the signal", ge=0, le=10)
    samples: Count = _ours("samples of an epoch", unit="samples")
    held_out_samples: Count = _ours("samples that tell the accuracy", unit="samples")
    task_seed: int = _ours("seed of the task, the same for all runs", ge=0)
    logical_workers: Count = _of_gap("workers for which the job is written", source="EasyScale, Fig. 9: 4")
    micro_batch_size: Count = _ours("samples of one worker and step", unit="samples")
    learning_rate: float = _ours("learning rate of SGD for all workers together", gt=0)
    momentum: float = _ours("its momentum", ge=0, lt=1)
    epochs: int = _ours("length of a run", unit="epochs", ge=2)
    decay_epoch: Count = _of_gap(
        "epochs before the learning rate decays", unit="epochs", source="a choice; EasyScale: 20"
    )
    gammas: Annotated[tuple[_Positive, ...], unlike("each factor once")] = _of_gap(
        "factors by which it decays; accuracy is that with the first",
        source="EasyScale: 0.1, 0.3 and 0.5",
        min_length=1,
    )
    devices: Annotated[tuple[Count, ...], unlike("each number once")] = _ours(
        "numbers of devices", min_length=2
    )
    seeds: Annotated[tuple[int, ...], unlike("each seed once")] = _ours(
        "seeds of weights, order of samples and random states", min_length=2
    )

    def experiment(self) -> dict[str, Any]:
        """Return the options of `gap_experiment`."""
        values = self.model_dump()
        return {
            "protocol": {key: list(one) if isinstance(one, tuple) else one for key, one in values.items()}
        }

    @model_validator(mode="after")
    def _epochs_and_batches_fit(self) -> "Gap":
        try:
            StandIn(self.model, width=self.width)
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


# ------------------------------------------------------------------------------------------------
# Block ``easyscale``: options of the paper, checked when a configuration is read.

PolicyName = Annotated[str, taken_from(policy_names)]
Time = Annotated[float, Field(ge=0)]
PositiveTime = Annotated[float, Field(gt=0)]
Samples = Annotated[float, Field(gt=0)]
Charge = Literal["every", "first_only"]
_of_all = partial(option, changes="fig14, fig15, sensitivity")
_paper_option = partial(_of_all, source="a choice")
_varied = partial(option, source="a choice", changes="sensitivity")
_beside = partial(option, source="a choice", changes="serving")
_MEASURED = ("fig10", "fig11", "fig12", "fig13")
_of_steps = partial(option, changes="fig10, fig11, fig12, fig13")
_of_models = partial(_of_steps, source="a choice: what a core trains in 50 to 100 ms")
_of_sharing = partial(option, changes="fig10")
_TABLES = ("fig14", "fig14_jobs", "fig15", "sensitivity", "serving", "serving_rounds")
_TRAINED = ("fig9", "fig9_summary", "gap", "gap_spread", "gap_curves")


class JobList(Block):
    """The job list, where it is generated."""

    jobs: int = _of_all("jobs", source="EasyScale artifact: 68", ge=2)
    seed: int = _paper_option("seed of all that is drawn", ge=0)


class Simulation(Block):
    """Cluster experiments."""

    cluster: Annotated[str, taken_from(cluster_names)] = _of_all(
        "cluster whose devices are simulated as one pool a type",
        source="EasyScale artifact: 32 V100, 16 P100, 16 T4",
    )
    job_list: JobList = option("generated job list; the published source has the authors' own")
    dedup: Literal["rename", "artifact"] = _paper_option(
        "what becomes of names that occur again in the authors' list: rename keeps every row, artifact does "
        "as the released simulator"
    )
    samples_per_epoch: dict[str, Samples] = _of_all(
        "samples of an epoch by model, a real number",
        unit="samples",
        source="EasyScale artifact: 1 % of the real data sets",
        min_length=1,
    )
    interval_s: float = _of_all("length of a round", unit="s", source="EasyScale artifact: 60 s", gt=0)
    restart_delay_s: float = _of_all(
        "time without progress after a start or change", unit="s", source="EasyScale artifact: 20 s", ge=0
    )
    charge: Charge = _paper_option(
        "what the delay follows: every, each start and change; first_only, the first start, as in the "
        "released simulator"
    )
    infeasible: Literal["clamp", "reject"] = _paper_option(
        "what becomes of a gang that is larger than the cluster has GPUs of its type: clamp, it runs on all "
        "of them; reject, it is left out"
    )
    d2_penalty: bool = _paper_option("whether jobs on several types at once pay the printed price of D2")
    gang_policies: tuple[PolicyName, ...] = _of_all(
        "policies that run every job on all GPUs that it asks for",
        source="EasyScale, Fig. 14: YARN-CS",
        min_length=1,
    )
    elastic_policies: tuple[PolicyName, ...] = _of_all(
        "policies that may run jobs on other GPUs", source="EasyScale, Fig. 14", min_length=1
    )
    intervals_s: tuple[PositiveTime, ...] = _varied("lengths of a round", unit="s")
    restart_delays_s: tuple[Time, ...] = _varied("times without progress", unit="s")

    def experiments(self) -> dict[str, Any]:
        """Return the options of `cluster_experiments`."""
        lists = ("gang_policies", "elastic_policies", "intervals_s", "restart_delays_s")
        plain = self.model_dump(include={"interval_s", "restart_delay_s", "charge"})
        jobs = self.model_dump(include={"samples_per_epoch", "infeasible", "d2_penalty"})
        listed = {name: list(getattr(self, name)) for name in lists}
        return plain | listed | {"cluster_name": self.cluster, "jobs": jobs}


class Demand(Block):
    """What serving needs of the GPUs."""

    mean_share: float = _beside("share of the GPUs on average over a day", ge=0, le=1)
    amplitude: float = _beside("how far that rises and falls in a day", ge=0, le=1)
    noise_std: float = _beside("standard deviation of the share in a round", ge=0, le=1)
    headroom_share: float = _beside(
        "share of the GPUs of each type that serving has beyond its need", ge=0, le=1
    )
    hold_rounds: int = _beside("rounds for which serving keeps GPUs that it needed", unit="rounds", ge=1)
    seed: int = _beside("seed of the noise", ge=0)


class Serving(Block):
    """Training beside online serving."""

    policies: tuple[PolicyName, ...] = _beside("elastic policies", min_length=1)
    copies: int = _beside("how often the job list is submitted, at equal distances", ge=1)
    hours: float = _beside("time over which that is spread and measured", unit="h", gt=0)
    demand: Demand = option("what serving needs")


class Procedure(Block):
    """How often something is timed."""

    warmup_steps: int = option(
        "mini-batches that are not timed", source="EasyScale artifact: 4", changes="fig11, fig12, fig13", ge=0
    )
    steps: int = option(
        "mini-batches that are timed",
        source="a choice; the artifact: 16",
        changes="fig11, fig12, fig13",
        ge=1,
    )
    repetitions: int = _of_steps("how often all of a figure is measured, in turn", source="a choice", ge=1)
    seed: int = _of_steps("seed of weights, samples and random states", source="a choice", ge=0)


class SizedModel(Block):
    """A stand-in, and how large it is."""

    name: Annotated[str, taken_from(lambda: STAND_INS)] = _of_models("name of the stand-in")
    width: Count = _of_models("channels of the first layers, or features of an embedding")
    depth: Count = _of_models("blocks at each resolution, or layers")
    extent: Count = _of_models("pixels a side, or tokens a sequence")
    n_rows: Count = _of_models("rows of an embedding")
    micro_batch_size: Count = _of_models("samples a micro-batch", unit="samples")

    @model_validator(mode="after")
    def _can_be_built(self) -> "SizedModel":
        try:
            StandIn(**self.model_dump(include={one.name for one in fields(StandIn)}))
        except MakespanError as error:
            raise ValueError(f"sizes of a stand-in ({error})") from None
        return self


class TimedModel(SizedModel):
    """A stand-in whose steps are timed."""

    small_micro_batch_size: Count = _of_models(
        "samples a micro-batch in Fig. 12", unit="samples", changes="fig12"
    )


class Sharing(Block):
    """Device sharing against packed processes."""

    warmup_steps: int = _of_sharing("mini-batches that are not timed", source="EasyScale artifact: 2", ge=0)
    steps: int = _of_sharing("mini-batches that are timed", source="a choice; the artifact: 8", ge=1)
    models: tuple[SizedModel, ...] = _of_sharing(
        "stand-ins, with memories in the ratio of those of the paper to its device",
        source="EasyScale, Fig. 10: ResNet50 and ShuffleNetv2",
        min_length=1,
    )
    workers: Annotated[tuple[Count, ...], unlike("each number once")] = _of_sharing(
        "how many share the device; the smallest number is what throughput is relative to",
        source="EasyScale artifact: 1 to 16",
        min_length=1,
    )
    memory_mib: float = _of_sharing(
        "memory of the device: what exceeds it is recorded as out of memory",
        unit="MiB",
        source="a choice; a V100 of the paper has 32 GB",
        gt=0,
    )


class Overheads(Block):
    """Memory and time of logical workers, measured here."""

    procedure: Procedure = option("how often something is timed")
    models: tuple[TimedModel, ...] = _of_models(
        "stand-ins of Figs 11 to 13", changes="fig11, fig12, fig13", min_length=1
    )
    logical_workers: Count = option(
        "logical workers of one process", source="EasyScale artifact: 8", changes="fig11, fig12"
    )
    ranks: int = option(
        "stock processes, each on a core of its own, and as many logical workers on one core",
        source="EasyScale artifact: 8",
        changes="fig13",
        ge=2,
    )
    devices: Annotated[
        tuple[Annotated[str, taken_from(lambda: KERNEL_SETS)], ...], unlike("each kernel set once")
    ] = option(
        "kernel sets that play types of GPU", source="EasyScale, Fig. 12", changes="fig12", min_length=1
    )
    sharing: Sharing = option("device sharing against packed processes")

    def experiment(self, figure: str) -> dict[str, Any]:
        """Return the options of `measure_overheads` for one of its figures."""
        options: dict[str, Any] = {"procedure": self.procedure.model_dump()}
        if figure == "fig10":
            own = self.sharing.model_dump()
            options["procedure"] |= {name: own.pop(name) for name in ("warmup_steps", "steps")}
        else:
            also = {"fig11": {"logical_workers"}, "fig12": {"logical_workers", "devices"}, "fig13": {"ranks"}}
            own = self.model_dump(include={"models", *also[figure]})
        return {"figures": {figure: options | own}}


class EasyScale(PaperSettings):
    """Experiments of the EasyScale paper."""

    unjudged = frozenset({"fig9_summary", "fig14_jobs", "serving_rounds"})
    judged_on_profile = frozenset({*_TRAINED, *_MEASURED})
    untimed = frozenset({*_TABLES, *_TRAINED, *_MEASURED})
    judged_cells = _MEASURED
    contents = {
        "fig9": "losses and hashes of elastic and of stock training, step by step",
        "fig9_summary": "steps and losses that differ, by level and stage, with the paper's values",
        "gap": "accuracy of elastic schemes on several numbers of devices, overall and by class",
        "gap_spread": "how far it spreads over devices and over seeds, with the paper's values",
        "gap_curves": "losses by epoch where the learning rate decays by several factors",
        "fig10": "memory and time of packed processes and of logical workers that share a device",
        "fig11": "micro-batches with and without context switches",
        "fig12": "micro-batches of stock training, under D1 and under D1+D2, by kernel set",
        "fig13": "steps of stock processes, and of logical workers with and without the sum",
        "jobs": "the job list of the cluster experiments",
        "fig14": "completion time and makespan under each policy, with the paper's values",
        "fig14_jobs": "submission, start and completion of every job",
        "fig15": "GPUs of each type that jobs hold after every round, with the paper's values",
        "sensitivity": "completion time and makespan with other rounds and restart delays",
        "serving": "GPUs in use by serving alone and with training beside it, and what training gave back",
        "serving_rounds": "GPUs of serving and of training, every tenth minute",
        "claims": "the statements of the paper, judged by this source alone",
    }

    simulation: Simulation = option("cluster experiments")
    serving: Serving = option("training beside online serving")
    fig9: Fig9 = option("bits of elastic training and of stock training")
    gap: Gap = option("accuracy of elastic schemes by the number of devices")
    overheads: Overheads = option("memory and time of logical workers, measured here")

    def beside_serving(self) -> dict[str, Any]:
        """Return the options of `serving_experiment`."""
        shared = self.simulation.experiments()
        names = ("cluster_name", "interval_s", "restart_delay_s", "jobs")
        own = self.serving.model_dump() | {"policies": list(self.serving.policies)}
        return {name: shared[name] for name in names} | own

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built: real training, or simulations, which rest on printed cells."""
        return list((*_TRAINED, *_MEASURED) if source == "measured" else _TABLES)

    def published_datasets(self) -> tuple[str, ...]:
        """Return the name of the authors' job list."""
        return ("easyscale-workload",)
