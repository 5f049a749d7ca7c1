"""Options of what is measured of schedules."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from makespan.settings import Block, Count, PaperSettings, option, taken_from, unlike
from makespan.training.zoo import FAMILIES, family_sizes

# ------------------------------------------------------------------------------------------------
# Options of what is measured of schedules.

_of_steps = partial(option, source="a choice", changes="fig9")
_of_search = partial(option, source="a choice", changes="tuner")
_Ratio = Annotated[float, Field(ge=0, le=1)]
_Counts = Annotated[tuple[Count, ...], unlike("each number once")]


class Fig9Steps(Block):
    """Steps of the schedule of a small BERT, measured on CPU cores."""

    size: Annotated[str, taken_from(lambda: family_sizes("bert"))] = _of_steps("size of the model")
    batch: Count = _of_steps("samples a step", unit="samples")
    processes: _Counts = _of_steps("numbers of processes that share the model", min_length=1)
    compiler: Literal["inductor", "dynamo"] = _of_steps(
        "what compiles fused operations; dynamo captures them only"
    )
    warmup_passes: Count = _of_steps("forward and backward passes that are not timed")
    passes: Count = _of_steps("forward and backward passes that are timed")
    seed: int = _of_steps("seed of weights and samples", ge=0)


class Tuner(Block):
    """Search for the fastest schedule of a small OPT, whose objective is a run."""

    size: Annotated[str, taken_from(lambda: family_sizes("opt"))] = _of_search("size of the model")
    batches: _Counts = _of_search("batch sizes", unit="samples", min_length=2)
    ratios: Annotated[tuple[_Ratio, ...], unlike("each share once")] = _of_search(
        "shares of the layers that are recomputed", min_length=2
    )
    budget_bytes: Count = _of_search(
        "most that the forward pass may keep, which stands for the memory of a device", unit="B"
    )
    warmup_passes: Count = _of_search("forward and backward passes that are not timed")
    passes: Count = _of_search("forward and backward passes that are timed")
    seed: int = _of_search("seed of weights, samples and strategies", ge=0)


# ------------------------------------------------------------------------------------------------
# Options of searches.

_searched = partial(option, source="a choice", changes="fig10, fig10_searches")


class Fig10(Block):
    """Searches of the printed grid of batch sizes and shares of recomputed layers."""

    budget: Count = option(
        "evaluations of random search", source="Slapo, Fig. 10: 17 of 91", changes="fig10, fig10_searches"
    )
    starts: Count = _searched("coordinate descents, each from a random point, and random searches")


_drawn = partial(option, source="a choice", changes="fig10_grids")


class SyntheticGrids(Block):
    """Grids with random constants, of which no search has seen any."""

    grids: Count = _drawn("grids in which a point fits")
    noise: Annotated[float, Field(ge=0, le=0.1)] = _drawn(
        "standard deviation of measured throughput, relative"
    )
    spread: Annotated[float, Field(ge=1)] = _drawn("largest factor between a fitted and a drawn constant")
    seed: Annotated[int, Field(ge=0)] = _drawn("seed of everything that is drawn")


# ------------------------------------------------------------------------------------------------
# Options of the verification of all schedules.

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


# ------------------------------------------------------------------------------------------------
# Block ``slapo``: options of the paper, checked when a configuration is read.

_TUNED = ("fig10", "fig10_searches", "fig10_fit")
_MODELLED = ("fig7", "fig8", "fig9")
_MEASURED = ("verify", "table4", "fig9", "tuner")
_BUILT = {
    "emulated": (*_MODELLED, *_TUNED),
    "published": (*_MODELLED, *_TUNED, "fig10_grids", "inequalities"),
    "measured": _MEASURED,
}


class Slapo(PaperSettings):
    """Experiments of the Slapo paper."""

    untimed = frozenset(table for tables in _BUILT.values() for table in tables)
    judged_on_profile = frozenset(_MEASURED)
    self_contained = frozenset({"published"})
    judged_cells = ("limits",)
    contents = {
        "fig7": "throughput inside one node by model, GPUs and implementation, by model and emulator",
        "fig8": "throughput on two to eight nodes, by model and emulator, with an earlier figure's values",
        "fig9": "throughput and largest batch as BERT is optimised step by step",
        "fig10": "points of the tuning grid in the order in which each search tries them",
        "fig10_searches": "what each search finds of that grid, with how many evaluations",
        "fig10_fit": "predictions of that grid, fitted, with a batch size left out, and untuned",
        "fig10_grids": "searches of grids with random constants and noise",
        "inequalities": "conclusions of Figs 7 to 9 with every constant of the model halved and doubled",
        "verify": "every schedule of the library beside its model as it is, outputs and gradients",
        "table4": "lines of the schedules, counted in their source, beside the paper's",
        "tuner": "points in the order in which searches try them whose objective is a run",
        "claims": "the statements of the paper, judged by this source alone",
    }

    fig10: Fig10 = option("searches of the tuning grid")
    fig9_steps: Fig9Steps = option("steps of a schedule of a small BERT")
    fig10_grids: SyntheticGrids = option("searches of synthetic grids")
    tuner: Tuner = option("search whose objective is a run of a small OPT")
    verify: Verification = option("verification of all schedules")

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built; none rests on iteration times of a source."""
        return list(_BUILT.get(source, ()))

    def options_of(self, experiment: str, source: str) -> dict[str, Any]:
        """Return the options of an experiment, by the name of its function without ``_experiment``."""
        if source == "measured":
            block = getattr(self, experiment, None)
            return {} if block is None else block.model_dump(mode="json")
        if experiment == "inequalities":
            return {}
        if experiment == "tuning":
            own = {"searches": self.fig10.model_dump(), "grids": self.fig10_grids.model_dump()}
            return {"source": source, **own}
        return {"source": source}
