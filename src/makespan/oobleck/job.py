"""Description of a resilient training job as plain values; imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from makespan.arguments import check_choices, check_fields
from makespan.errors import InputError, unknown_name
from makespan.files import is_plain
from makespan.training.zoo import MODEL_FAMILIES, SmallModel

Optimizer = Literal["adam", "adamw", "sgd"]
Dtype = Literal["float32", "float64"]
Reduction = Literal["ordered", "allreduce"]
PassOrder = Literal["1f1b", "zero-bubble"]
_SIZES = {"n_layers": 8, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "seq": 32, "vocab": 256}


@dataclass(frozen=True, slots=True)
class ChainJob:
    """Training job: everything that decides its bits, except the plans; invalid values raise `InputError`.

    Parameters
    ----------
    model
        A family of small models, or ``file.py:function`` for a function that returns a `Chain`.
    model_options
        Sizes of the small model, or arguments of the function.
    n_microbatches
        Microbatches per iteration, over all pipelines.
    microbatch_size
        Samples per microbatch.
    seed
        Seed of the initial weights and of random draws in layers.
    data_seed
        Seed of the order of the samples.
    optimizer
        Optimizer of `torch.optim`. A chain may bring its own.
    optimizer_options
        Further arguments of the optimizer.
    learning_rate
        Learning rate of the optimizer.
    warmup_steps
        Iterations over which the learning rate grows linearly.
    clip_norm
        Largest norm of all gradients together. None for no limit.
    dtype
        Type of weights, gradients and activations.
    reduction
        Sum of gradients over pipelines: ordered, with the same bits for any number of them, or allreduce, by
        the backend. The owner of the first pipeline adds in the order of the pipelines.
    bucketed
        Send layers that have the same owners in one message.
    """

    model: str = "gpt"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    n_microbatches: int = 24
    microbatch_size: int = 2
    seed: int = 0
    data_seed: int = 0
    optimizer: Optimizer = "adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    clip_norm: float | None = None
    dtype: Dtype = "float32"
    reduction: Reduction = "ordered"
    bucketed: bool = True

    def __post_init__(self) -> None:
        """Check names and numbers."""
        check_choices(self)
        sizes = ("n_microbatches", "microbatch_size")
        check_fields(self, "", positive=sizes, not_negative=("seed", "data_seed", "warmup_steps"))
        for name in ("model_options", "optimizer_options"):
            if not is_plain(dict(getattr(self, name))):
                raise InputError(f"{name} are {getattr(self, name)!r}; expected plain values by name")
        if ":" not in self.model:
            small_model(self)
        for name in ("learning_rate", "clip_norm"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise InputError(f"{name} is {value}; expected a number > 0")

    @property
    def global_batch_size(self) -> int:
        """Samples per iteration."""
        return self.n_microbatches * self.microbatch_size

    def rate(self, iteration: int) -> float:
        """Return the learning rate of an iteration."""
        return min(1.0, (iteration + 1) / max(1, self.warmup_steps)) * self.learning_rate

    def values(self) -> dict[str, Any]:
        """Return the job as plain values."""
        return asdict(self)


def small_model(job: ChainJob) -> SmallModel:
    """Return the small model that a job names."""
    if job.model not in MODEL_FAMILIES:
        raise unknown_name("model", job.model, [*MODEL_FAMILIES, "file.py:function"])
    try:
        return SmallModel(job.model, **(_SIZES | dict(job.model_options)))
    except (TypeError, InputError) as error:
        raise InputError(f"model_options are {dict(job.model_options)}: {error}") from None
