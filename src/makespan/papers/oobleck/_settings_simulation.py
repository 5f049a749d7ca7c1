"""Options of the simulations."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from makespan.presets import read_preset
from makespan.settings import Block, Count, option, taken_from, unlike

__all__ = ["Simulation", "trace_dataset"]

_CHANGED = "fig1, fig9, fig10, fig12, fig13, fig14, fig15, ablation"
_of_all = partial(option, source="Oobleck SOSP'23 artifact", changes=_CHANGED)
_of_spot = partial(option, source="Oobleck SOSP'23 artifact", changes="fig10, fig14, fig15")
_of_studies = partial(option, source="a choice", changes="studies")
_chosen = partial(option, source="a choice", changes=_CHANGED)

_SYSTEM = "makespan.oobleck"
FailureTrace = Annotated[str, taken_from(lambda: read_preset(_SYSTEM, "failures"))]
SpotTrace = Annotated[str, taken_from(lambda: read_preset(_SYSTEM, "spot"))]
Seeds = Annotated[int, Field(ge=2)]


class Model(Block):
    """What a model costs beside its throughput, which is printed."""

    name: str = _of_all("name of the model in the printed cells", min_length=1)
    samples_per_step: Count = _of_all("global batch", unit="samples")
    regroup_s: float = _of_all("Oobleck: regrouping, copying state and building groups", unit="s", ge=0)
    checkpoint_s: float = _of_all("Varuna: writing a checkpoint", unit="s", ge=0)
    restart_s: float = _of_all(
        "Varuna: restart with its checkpoint, until a printed time by nodes takes its place", unit="s", ge=0
    )
    local_rebalance_s: float = _of_all("Bamboo: taking spare nodes in", unit="s", ge=0)
    falls_back_on_spot: bool = _of_all(
        "Varuna on spot traces: whether a restart loses the steps since the last checkpoint"
    )


class Assumptions(Block):
    """What systems do, and how long it takes."""

    node_creation_s: float = _of_all("from a node's arrival to its being ready", unit="s", ge=0)
    n_stages: Count = _of_all("stages of a pipeline")
    checkpoint_every: Count = _of_all("Varuna: steps between checkpoints", unit="steps")
    bamboo_restart_s: float = _of_all("Bamboo: restart", unit="s", ge=0)
    slow_down: float = _of_all("Bamboo: factor of a step while a node does the work of two", ge=1)
    overload_limit: float = _of_all("Bamboo: share of such nodes above which it plans anew", ge=0, le=1)
    useful_share: float = _of_all("Bamboo: share of a step that counts as useful in compat", ge=0, le=1)
    horizon_s: float = _chosen(
        "over how much time joined nodes must pay for a new plan where defect D2 is repaired", unit="s", gt=0
    )


class Intervals(Block):
    """Steady losses, each with a new node, at a throughput that does not depend on nodes."""

    models: tuple[str, ...] = _of_studies("models whose checkpoints are varied", min_length=1)
    every: tuple[Count, ...] = _of_studies(
        "steps between checkpoints, besides those of Young and Daly", unit="steps", min_length=1
    )
    n_nodes: Count = _of_studies("nodes, a number with printed throughput")
    mtbf_s: float = _of_studies("mean time between losses where checkpoints are varied", unit="s", gt=0)
    n_losses: Count = _of_studies("losses of a trace")
    seeds: Count = _of_studies("traces of each kind")


class Simulation(Block):
    """Simulations of systems that lose nodes."""

    failure_traces: dict[FailureTrace, Seeds] = _of_all(
        "distances between failures, and how many traces are generated of each", min_length=1
    )
    spot_traces: dict[SpotTrace, Seeds] = _of_spot(
        "spot traces, those of EC2 P3 and GCP as scaled to 30 nodes among them, and how many are generated"
    )
    breakdown_models: tuple[str, ...] = option(
        "models whose time is broken down",
        source="Oobleck, Figs 1 and 12",
        changes="fig1, fig12",
        min_length=1,
    )
    checkpoint_model: str = option(
        "model that Varuna also trains without the cost of checkpoints",
        source="Oobleck, Fig. 13",
        changes="fig13",
    )
    ablation_traces: Annotated[tuple[SpotTrace, ...], unlike("each trace once")] = option(
        "spot traces on which defects are repaired one by one", source="a choice", changes="ablation"
    )
    ablation_seeds: Count = option("generated ones of each of them", source="a choice", changes="ablation")
    ablation_judged_seeds: Count = option(
        "generated ones where a statement is about the repair", source="a choice", changes="ablation"
    )
    models: tuple[Model, ...] = option("models and their costs", min_length=1)
    assumptions: Assumptions = option("what systems do, and how long it takes")
    intervals: Intervals = option("steady losses")

    @model_validator(mode="after")
    def _names_are_known(self) -> "Simulation":
        names = [model.name for model in self.models]
        unknown = sorted({*self.breakdown_models, self.checkpoint_model, *self.intervals.models} - set(names))
        if unknown or len(set(names)) < len(names):
            raise ValueError(f"each of models once, and none other ({', '.join(unknown or names)})")
        if missing := {"p3_scaled", "gcp_scaled"} - set(self.spot_traces):
            raise ValueError(
                f"spot_traces with those of Figs 14 and 15 (not there: {', '.join(sorted(missing))})"
            )
        return self

    def experiments(self, kind: Literal["failure", "spot"]) -> dict[str, Any]:
        """Return the options of `failure_experiments` or of `spot_experiments`."""
        own: dict[str, Any]
        if kind == "failure":
            own = {"breakdown_models": list(self.breakdown_models), "checkpoint_model": self.checkpoint_model}
        else:
            own = self.model_dump(include={"ablation_seeds", "ablation_judged_seeds"})
            own["ablation_traces"] = list(self.ablation_traces)
        return {"systems": self.systems(), **own}

    def steady(self) -> dict[str, Any]:
        """Return the options of the studies of steady losses."""
        return {"systems": self.systems(), **self.intervals.model_dump()}

    def systems(self) -> dict[str, Any]:
        """Return the options of `makespan.oobleck.simulators.Systems`."""
        return {
            "models": [model.model_dump() for model in self.models],
            "assumptions": self.assumptions.model_dump(),
        }

    def batches(self) -> dict[str, int]:
        """Return the samples of a step by model."""
        return {model.name: model.samples_per_step for model in self.models}


def trace_dataset(name: str) -> str:
    """Return the name of a trace in the register."""
    scaled = {"p3_scaled": "scale-p3", "gcp_scaled": "scale-gcp"}
    return f"oobleck-trace-{scaled.get(name, name)}"
