"""Blocks ``easyscale.fig9`` and ``easyscale.gap``: training whose bits and accuracy are compared."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from makespan.errors import MakespanError
from makespan.settings import Block, Count, option, taken_from, unlike
from makespan.training.zoo import STAND_INS, StandIn

__all__ = ["Fig9", "Gap"]

_CLASSIFIERS = ("shufflenetv2", "resnet50", "vgg19", "swintransformer")
_StandInName = Annotated[str, taken_from(lambda: STAND_INS)]
_Positive = Annotated[float, Field(gt=0)]

_of_fig9 = partial(option, changes="fig9, fig9_summary")
_chosen = partial(_of_fig9, source="a choice")
_of_gap = partial(option, changes="gap, gap_spread, gap_curves")
_ours = partial(_of_gap, source="a choice")


class Fig9(Block):
    """Bits of elastic training and of stock training."""

    device: Literal["auto", "cpu", "cuda"] = _chosen(
        "where to train; auto uses GPUs if there is one for each of four processes"
    )
    models: Annotated[tuple[_StandInName, ...], unlike("each model once")] = _of_fig9(
        "stand-ins that are trained", source="EasyScale artifact: ResNet50, VGG19", min_length=1
    )
    width: Count = _chosen("channels of their first layers")
    samples: Count = _chosen("samples of an epoch", unit="samples")
    micro_batch_size: Count = _of_fig9(
        "samples of a logical worker and mini-batch", unit="samples", source="a choice; the artifact: 64"
    )
    steps_per_stage: Count = _of_fig9(
        "mini-batches of each of three stages", unit="steps", source="a choice; EasyScale, Fig. 9: 100"
    )
    loaders: Count = _of_fig9("loaders of each logical worker", source="a choice; the artifact: 4")
    loader_processes: Count = _chosen("processes that load for each training process; no bit depends on them")
    learning_rate: float = _chosen("learning rate of SGD", gt=0)
    momentum: float = _chosen("its momentum", ge=0, lt=1)
    seed: int = _chosen("seed of weights, samples and random states", ge=0)

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
