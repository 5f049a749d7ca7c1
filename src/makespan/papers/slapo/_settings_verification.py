"""Options of the verification of all schedules."""

from functools import partial
from typing import Annotated, Literal

from pydantic import Field, model_validator

from makespan.settings import Block, Count, option, taken_from, unlike
from makespan.training.zoo import FAMILIES

__all__ = ["Verification"]

_Family = Annotated[str, taken_from(lambda: FAMILIES)]
_Value = bool | int | float | str
_verified = partial(option, source="a choice", changes="verify")


class Verification(Block):
    """Every schedule of the library, compared with the models as they are."""

    device: Literal["auto", "cpu", "cuda"] = _verified(
        "where models run; auto uses GPUs if there is one for each process"
    )
    families: Annotated[tuple[_Family, ...], unlike("each family once")] = _verified(
        "architectures of the zoo", min_length=1
    )
    processes: Annotated[tuple[Count, ...], unlike("each number once")] = _verified(
        "processes that share a model, one launch each", min_length=1
    )
    size: str = _verified("size of the models")
    samples: Count = _verified("samples of a batch", unit="samples")
    seed: int = _verified("seed of weights, samples and gradients of outputs", ge=0)
    schedules: dict[str, dict[str, _Value]] = _verified(
        "options of `apply_schedule` by name of the schedule", min_length=1
    )
    left_out: dict[_Family, Annotated[list[str], Field(min_length=1)]] = _verified(
        "schedules that a family does not have"
    )

    @model_validator(mode="after")
    def _names_are_known(self) -> "Verification":
        for family, names in self.left_out.items():
            for name in names:
                if name not in self.schedules:
                    raise ValueError(f"left_out.{family}: {name!r}; accepted: {', '.join(self.schedules)}")
        return self

    @property
    def most_processes(self) -> int:
        """Largest number of processes at a time."""
        return max(self.processes)
