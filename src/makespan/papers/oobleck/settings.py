"""Options of training: what is timed beside its prediction."""

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from makespan.files import read_preset
from makespan.settings import Block, Count, PaperSettings, option, taken_from, unlike

# ------------------------------------------------------------------------------------------------
# Options of training: what is timed beside its prediction.

_predicted = partial(option, source="a choice", changes="predictions")


class Predictions(Block):
    """Small models that are profiled, planned and trained, each under every plan."""

    n_layers: tuple[Count, ...] = _predicted("layers between embedding and head", min_length=1)
    n_microbatches: tuple[Count, ...] = _predicted("microbatches of an iteration", min_length=1)
    microbatch_size: Count = _predicted("samples of a microbatch", unit="samples")
    most_nodes: Count = _predicted("plans on one node and more, up to these")
    profile_repeats: Annotated[int, Field(ge=5)] = _predicted("timed passes of a layer")
    warm_ups: Count = _predicted("iterations that are not timed")
    iterations: Count = _predicted("iterations that are timed")


class Execution(Block):
    """Training of small models."""

    predictions: Predictions = option("measured iterations beside predicted ones")

    def options_of(self, table: str) -> dict[str, Any]:
        """Return the options of the experiment that makes a table."""
        own: dict[str, Any] = getattr(self, table).model_dump()
        return own


# ------------------------------------------------------------------------------------------------
# Block ``oobleck.hybrid``: training whose nodes are killed again and again.

_hybrid_option = partial(option, source="a choice", changes="hybrid, hybrid_kills, hybrid_summary")
_Number = Annotated[int, Field(ge=0)]


class Kills(Block):
    """Kills of each kind, over all jobs."""

    compute: Count = _hybrid_option("in a forward or backward pass")
    reduction: _Number = _hybrid_option("while gradients are added up")
    commit: _Number = _hybrid_option("between prepared and committed")
    recovery: _Number = _hybrid_option("during regroup, group build and copy after another kill")

    @model_validator(mode="after")
    def _recoveries_have_a_cause(self) -> "Kills":
        if self.recovery > self.compute:
            raise ValueError(f"at most as many kills in recoveries as in passes, {self.compute}")
        return self


class Hybrid(Block):
    """Pipelines of different shapes that lose nodes."""

    jobs: Count = _hybrid_option("jobs, each with a seed and a share of the kills")
    nodes: Count = _hybrid_option("processes of a job; a new one joins for each that is killed")
    f: _Number = _hybrid_option("losses at once that must be survived")
    kills: Kills = _hybrid_option("how many processes are killed, and when")
    most_delay_s: float = _hybrid_option(
        "longest time from the beginning of a phase to the kill", unit="s", gt=0
    )
    most_pipelines: Count = _hybrid_option(
        "pipelines above which an exchange of gradients is taken to be slow"
    )
    layers: Count = _hybrid_option("blocks of the model, besides embedding and head")
    hidden: Count = _hybrid_option("its width; 4 heads")
    sequence: Count = _hybrid_option("tokens of a sample")
    microbatches: Count = _hybrid_option("microbatches of an iteration")
    microbatch_size: Count = _hybrid_option("samples of each", unit="samples")
    checkpoint_every: Count = _hybrid_option(
        "iterations between checkpoints of the baseline, which relaunches"
    )
    baseline_jobs: _Number = _hybrid_option("jobs that the baseline repeats under the same kills")

    @model_validator(mode="after")
    def _nodes_suffice(self) -> "Hybrid":
        if self.nodes < self.f + 3:
            raise ValueError(f"nodes that are at least f + 3, {self.f + 3}, as two can be lost at once")
        return self


# ------------------------------------------------------------------------------------------------
# Options of planning: which profiles, nodes and batches are tried.

_templates = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="templates")
_instantiation = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="instantiation")
_studies = partial(option, source="a choice", changes="studies")
_throughput = partial(option, source="a choice", changes="layer_throughput")
Threshold = Annotated[int, Field(ge=0)]


class Templates(Block):
    """Templates of made-up layers."""

    random_seeds: Count = _templates("profiles of random layers, seeds from 0")
    n_nodes: Count = _templates("nodes of the job")
    f: tuple[Threshold, ...] = _templates("nodes that may be lost at once", min_length=1)
    n0: tuple[Count, ...] = _templates("least nodes that hold the model", min_length=1)
    scaled_layers: tuple[Count, ...] = option(
        "further models, of equal and of skewed layers, for the time of the search",
        source="a choice", changes="templates",
    )  # fmt: skip


class Instantiations(Block):
    """Plans of templates of made-up layers."""

    n_nodes: tuple[Count, ...] = _instantiation("nodes to use", min_length=1)
    global_microbatches: tuple[Count, ...] = _instantiation("microbatches of an iteration", min_length=1)
    f: Threshold = _instantiation("nodes that may be lost at once")
    n0: Count = _instantiation("nodes of the smallest template")
    n_templates: Count = _instantiation("templates, each with a node more")


class PlanningStudies(Block):
    """Which templates are needed, and what fewer cost."""

    most_n0: Count = _studies("least nodes that hold the model, up to these")
    most_f: Threshold = _studies("nodes that may be lost at once, up to these")
    most_nodes: Count = _studies("nodes of a job, up to these")
    compared_nodes: Count = _studies("nodes at the start where all and few templates are compared")
    compared_microbatches: Count = _studies("microbatches of an iteration there")
    random_seeds: Count = _studies("profiles of random layers there, seeds from 0")


class LayerThroughput(Block):
    """Throughput from emulated times of layers."""

    cluster: str = _throughput("cluster of the catalogue whose node, with one GPU, and network are taken")
    f: Threshold = _throughput("nodes that may be lost at once")
    least_nodes: Count = _throughput("nodes, from")
    most_nodes: Count = _throughput("nodes, up to")
    state_factor: float = _throughput("bytes held for each byte of a 16-bit weight", gt=0)
    micro_batch_sizes: dict[str, Count] = _throughput(
        "samples of a microbatch, by model: divisors of the batch that leave room for activations"
    )


class Planning(Block):
    """Planning of pipelines."""

    templates: Templates = option("templates of made-up layers")
    instantiation: Instantiations = option("plans of templates of made-up layers")
    studies: PlanningStudies = option("which templates are needed, and what fewer cost")
    layer_throughput: LayerThroughput = option("throughput from emulated times of layers")

    def options_of(self, table: str, samples_per_step: dict[str, int]) -> dict[str, Any]:
        """Return the options of the experiment that makes a table."""
        own: dict[str, Any] = getattr(self, table).model_dump()
        if table == "instantiation":
            own |= {"random_seeds": self.templates.random_seeds}
        elif table == "studies":
            own |= {"f": self.templates.f, "n0": self.templates.n0}
        elif table == "layer_throughput":
            own |= {"samples_per_step": samples_per_step}
        return own


# ------------------------------------------------------------------------------------------------
# Options of reconfiguration: which losses are tried.

_artifact = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="reconfiguration")
_loss_option = partial(option, source="a choice", changes="reconfiguration")


class Bursts(Block):
    """Several nodes lost at once, again and again."""

    n_nodes: Count = _studies("nodes of the cluster")
    rack_size: Count = _studies("nodes of a rack")
    n0: Count = _studies("least nodes of a pipeline")
    f: tuple[Threshold, ...] = _studies("nodes that may be lost at once", min_length=1)
    burst_nodes: tuple[Count, ...] = _studies("nodes that are lost at once", min_length=1)
    n_bursts: Count = _studies("bursts of each kind")
    gap_s: float = _studies("mean time between bursts", unit="s", gt=0)
    repair_s: float = _studies("time until what was lost is back", unit="s", gt=0)
    n_microbatches: Count = _studies("microbatches of an iteration")
    seed: int = _studies("seed of times and victims", ge=0)


class Losses(Block):
    """Losses of nodes of all plans of a few, and bursts of them."""

    most_nodes: Count = _loss_option("nodes of a plan, up to these", le=16)
    most_n0: Count = _artifact("least nodes of a pipeline, up to these")
    most_f: Threshold = _loss_option("nodes lost at once, up to these")
    larger_losses: int = _loss_option("random losses of more nodes, for each number of nodes, n0 and f", ge=0)
    n_microbatches: Count = _loss_option("microbatches of an iteration")
    state_factor: float = _loss_option(
        "bytes sent for each byte of parameters: weights and two moments", gt=0
    )
    seed: int = _loss_option("seed of the larger losses", ge=0)
    bursts: Bursts = option("several nodes lost at once, again and again")


# ------------------------------------------------------------------------------------------------
# Options of the simulations.

_CHANGED = "fig1, fig9, fig10, fig12, fig13, fig14, fig15, ablation"
_of_all = partial(option, source="Oobleck SOSP'23 artifact", changes=_CHANGED)
_of_spot = partial(option, source="Oobleck SOSP'23 artifact", changes="fig10, fig14, fig15")
_of_studies = partial(option, source="a choice", changes="studies")
_simulation_option = partial(option, source="a choice", changes=_CHANGED)
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
    horizon_s: float = _simulation_option(
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
        """Return the options of `makespan.oobleck.simulator.Systems`."""
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


# ------------------------------------------------------------------------------------------------
# Block ``oobleck``: options of the paper, checked when a configuration is read.

_SIMULATED = ("fig1", "fig9", "fig10", "fig12", "fig13", "fig14", "fig15", "ablation")
_PLANNED = ("templates", "instantiation", "reconfiguration", "layer_throughput", "studies")
_EXECUTED = ("predictions",)
_LIVE = ("hybrid", "hybrid_kills", "hybrid_summary")


class Oobleck(PaperSettings):
    """Experiments of the Oobleck paper."""

    judged_on_profile = frozenset({*_EXECUTED, *_LIVE})
    untimed = frozenset({*_SIMULATED, *_PLANNED, *_EXECUTED, *_LIVE})
    unjudged = frozenset({"layer_throughput", "fig1", "fig14", "fig15"})
    judged_cells = ("instantiation", "fig12")
    contents = {
        "templates": "pipeline templates of made-up layers, by the exact and the published search",
        "instantiation": "plans of templates, chosen as published and by us, by the simulated schedule",
        "reconfiguration": "what becomes of every plan of a few nodes after every loss",
        "layer_throughput": "throughput from emulated times of layers beside the artifact's",
        "studies": "which templates are needed at least; nodes lost at once; intervals between checkpoints",
        "predictions": "measured iterations of small models beside the times that planning predicts",
        "hybrid": "losses of training through kills beside one process that repeats it",
        "hybrid_kills": "each kill, the phase it struck, and how long training paused",
        "hybrid_summary": "pauses, repeated iterations and goodput, beside checkpoint and relaunch",
        "fig1": "where time goes with a failure every ten minutes",
        "fig9": "average throughput against the frequency of failures, with the paper's values",
        "fig10": "average throughput on spot traces, with the paper's values",
        "fig12": "where time goes at every frequency of failures",
        "fig13": "average throughput of a large model, with and without the cost of checkpoints",
        "fig14": "throughput and nodes over time on spot instances of EC2",
        "fig15": "throughput and nodes over time on spot instances of GCP",
        "ablation": "average throughput as released, with one defect repaired at a time",
        "claims": "the statements of the paper, judged by this source alone",
    }

    planning: Planning = option("templates of pipelines and plans of them")
    losses: Losses = option("losses of nodes")
    execution: Execution = option("training of small models")
    simulation: Simulation = option("simulations of systems that lose nodes")
    hybrid: Hybrid = option("training whose nodes are killed again and again")

    @model_validator(mode="after")
    def _models_are_known(self) -> Self:
        unknown = set(self.planning.layer_throughput.micro_batch_sizes) - set(self.simulation.batches())
        if unknown:
            raise ValueError(
                f"planning.layer_throughput.micro_batch_sizes has {', '.join(sorted(unknown))}; accepted: "
                f"models of simulation.models, {', '.join(self.simulation.batches())}"
            )
        return self

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built: simulations rest on printed throughput, plans on no source."""
        built = {
            "emulated": [*_PLANNED, *_SIMULATED], "published": list(_SIMULATED),
            "measured": [*_EXECUTED, *_LIVE],
        }  # fmt: skip
        return built.get(source, [])

    def options_of(self, table: str) -> dict[str, Any]:
        """Return the options of the experiment that makes a table without a trace."""
        if table == "reconfiguration":
            return self.losses.model_dump(exclude={"bursts"})
        if table in _EXECUTED:
            return self.execution.options_of(table)
        own = self.planning.options_of(table, self.simulation.batches())
        if table == "studies":
            own |= {"bursts": self.losses.bursts.model_dump(), "intervals": self.simulation.steady()}
        return own

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names of the authors' traces."""
        return tuple(map(trace_dataset, (*self.simulation.failure_traces, *self.simulation.spot_traces)))
