"""Options of the simulations."""

from functools import partial
from typing import Annotated, Any

from makespan.presets import read_preset
from makespan.settings import Block, Count, option, taken_from, unlike

__all__ = ["Simulation"]

_CHANGED = "fig9"
_of_all = partial(option, source="Oobleck SOSP'23 artifact", changes=_CHANGED)
_chosen = partial(option, source="a choice", changes=_CHANGED)

FailureTrace = Annotated[str, taken_from(lambda: read_preset("makespan.papers.oobleck", "failures"))]


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


class Simulation(Block):
    """Simulations of systems that lose nodes."""

    failure_traces: Annotated[tuple[FailureTrace, ...], unlike("each trace once")] = _of_all(
        "distances between failures", min_length=1
    )
    seeds: int = _chosen("generated traces of each kind", ge=2)
    models: tuple[Model, ...] = option("models and their costs", min_length=1)
    assumptions: Assumptions = option("what systems do, and how long it takes")

    def systems(self) -> dict[str, Any]:
        """Return the options of `makespan.papers.oobleck.simulators.Systems`."""
        return {
            "models": [model.model_dump() for model in self.models],
            "assumptions": self.assumptions.model_dump(),
        }

    def batches(self) -> dict[str, int]:
        """Return the samples of a step by model."""
        return {model.name: model.samples_per_step for model in self.models}
