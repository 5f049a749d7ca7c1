"""Schema of the table of measured iterations beside predicted ones."""

from pathlib import Path

import pandas as pd

from makespan.oobleck.trainer import ITERATIONS, RECOVERIES
from makespan.tables import printed_schemas, read_printed, table_schema

# ------------------------------------------------------------------------------------------------
# Schema of the table of measured iterations beside predicted ones.

PREDICTIONS = table_schema(
    "oobleck_predictions",
    ("n_layers", "int", "1", "layers of the small model, embedding and head among them"),
    ("n_microbatches", "int", "1", "microbatches of an iteration"),
    ("n_nodes", "int", "1", "nodes, a process with one thread each"),
    ("stages", "text", "", "layers of the stages of each pipeline"),
    ("microbatches", "text", "", "microbatches of each pipeline"),
    ("n_cores", "int", "1", "CPU cores that all nodes share"),
    ("predicted_iter_time_s", "float", "s", "by planning, from the profile: a core for each node"),
    (
        "predicted_cores_iter_time_s",
        "float",
        "s",
        "the same, and not less than all passes take on these cores",
    ),
    ("iter_wall_s", "float", "s", "median of measured iterations"),
)
EXECUTED = {"predictions": PREDICTIONS}


# ------------------------------------------------------------------------------------------------
# Schemas of the experiment that kills nodes of a resilient run, and of what the run itself writes.

HYBRID = table_schema(
    "hybrid",
    ("run", "text", "", "job and system"),
    ("step", "int", "1", "iteration, from 0"),
    ("loss", "float", "1", "mean over all microbatches"),
    ("reference_loss", "float", "1", "the same of one process that adds up in the same order"),
    ("abs_difference", "float", "1", "between the two"),
    ("n_pipelines", "int", "1", "pipelines that did it"),
    ("n_processes", "int", "1", "processes that did it"),
    ("event", "text", "", "kill or join before it was committed", True),
    ("phase", "text", "", "phase in which the killed process was", True),
    ("recovery_wall_s", "float", "s", "SIGKILL to the first instruction of the repeated iteration", True),
)
HYBRID_KILLS = table_schema(
    "hybrid_kills",
    ("run", "text", "", "job and system"),
    ("kill", "int", "1", "number of the kill in its job"),
    ("phase", "text", "", "phase in which the process was when it died, as it had announced itself"),
    ("kind", "text", "", "compute, reduction, commit or recovery"),
    ("step", "int", "1", "iteration that went on"),
    ("released_wall_s", "float", "s", "SIGKILL to the last survivor that gave up its groups", True),
    ("first_wall_s", "float", "s", "SIGKILL to the first instruction of the repeated iteration"),
)
HYBRID_SUMMARY = table_schema(
    "hybrid_summary",
    ("run", "text", "", "job and system"),
    ("kills", "int", "1", "processes killed"),
    ("iterations", "int", "1", "iterations committed"),
    ("repeated", "int", "1", "iterations done again"),
    ("median_pause_wall_s", "float", "s", "SIGKILL to the first instruction of the repeated iteration"),
    ("worst_pause_wall_s", "float", "s", "the longest of these"),
    ("median_released_wall_s", "float", "s", "SIGKILL to the last survivor that gave up its groups", True),
    ("worst_released_wall_s", "float", "s", "the longest of these", True),
    (
        "goodput_samples_per_s",
        "float",
        "samples/s",
        "samples of committed iterations over the time from the first on",
    ),
    ("equal", "bool", "", "whether parameters and optimizer state have the bits of the reference"),
    ("pids_kept", "bool", "", "whether every node that was not killed kept its process"),
    ("checkpoint_reads", "int", "1", "starts from a checkpoint"),
)
LIVE_SCHEMAS = (HYBRID, HYBRID_KILLS, HYBRID_SUMMARY, ITERATIONS, RECOVERIES)


# ------------------------------------------------------------------------------------------------
# Schemas of the tables of planning, and of the cells that belong to them.

_PROFILE = ("profile", "text", "", "layers: uniform, random (with its seed) or skewed, and how many")
_MODE = ("mode", "text", "", "exact, or dc, the published divide and conquer")
_ESTIMATOR = ("estimator", "text", "", "1f1b, of the schedule, or compat, as the artifact compares plans")
_F = ("f", "int", "1", "nodes that may be lost at once")
_N0 = ("n0", "int", "1", "least nodes that hold the model")
TEMPLATES = table_schema(
    "oobleck_templates",
    *(_PROFILE, _F, _N0),
    ("n_nodes", "int", "1", "nodes of the template"),
    ("gpus_per_node", "int", "1", "GPUs of each node"),
    _MODE,
    ("n_stages", "int", "1", "stages"),
    ("layers_per_stage", "text", "", "layers of each stage"),
    ("stage_latency_s", "text", "s", "forward and backward pass of a microbatch through each stage"),
    ("iter_time_s", "float", "s", "cost of the template"),
    ("imbalance", "float", "1", "slowest stage over the mean"),
    ("wall_s", "float", "s", "time of the search, with what smaller templates left of theirs"),
    ("is_needed", "bool", "", "whether a job of 13 nodes may use it, with f pipelines of n0 nodes beside it"),
)
INSTANTIATION = table_schema(
    "oobleck_instantiation",
    _PROFILE,
    ("n_nodes", "int", "1", "nodes to use"),
    *(_F, _N0),
    ("n_templates", "int", "1", "templates, of n0 nodes and more"),
    ("global_microbatches", "int", "1", "microbatches of an iteration"),
    ("batch_mode", "text", "", "per_template, equal for pipelines of one template, or per_pipeline"),
    _ESTIMATOR,
    ("counts", "text", "", "pipelines of each number of nodes"),
    ("microbatches", "text", "", "microbatches of each pipeline"),
    ("iter_time_s", "float", "s", "iteration by the simulated schedule; shown times of printed templates"),
    ("optimal_iter_time_s", "float", "s", "the same of per_pipeline"),
    ("gap_pct", "float", "%", "by how much the first is longer"),
    ("wall_s", "float", "s", "time of the choice"),
    ("pipeline_time_s", "text", "s", "time of each pipeline"),
    ("spread", "float", "1", "longest minus shortest pipeline, over the longest"),
    ("estimated_time_s", "float", "s", "what the choice takes the iteration for"),
    ("n_plans", "int", "1", "plans that use all nodes"),
    ("n_infeasible", "int", "1", "those in which the microbatches cannot be distributed"),
    (
        "program_time_s",
        "float",
        "s",
        "what an integer program finds for the plan, of per_pipeline by 1f1b",
        True,
    ),
)
LAYER_THROUGHPUT = table_schema(
    "oobleck_layer_throughput",
    ("model", "text", "", "model that is trained"),
    ("n_nodes", "int", "1", "nodes with a GPU each"),
    *(_F, _N0),
    ("counts", "text", "", "pipelines of each number of nodes"),
    ("iter_time_s", "float", "s", "iteration, from emulated times of layers"),
    ("throughput_samples_per_s", "float", "samples/s", "global batch over that"),
    (
        "published_samples_per_s",
        "float",
        "samples/s",
        "throughput that the artifact has for so many nodes",
        True,
    ),
    ("ratio", "float", "1", "emulated over published", True),
    ("n_templates", "int", "1", "templates of all sizes that a pipeline may have"),
    ("least_templates", "int", "1", "as few templates as use every number of nodes"),
    ("lost_pct", "float", "%", "throughput lost with these few"),
)
STUDIES = table_schema(
    "oobleck_studies",
    ("study", "text", "", "what is studied"),
    ("case", "text", "", "what is varied, with its value"),
    ("quantity", "text", "", "what is found"),
    ("value", "float", "1", "its value, in the unit that the quantity ends in"),
)
PLANNED = {
    "templates": TEMPLATES,
    "instantiation": INSTANTIATION,
    "layer_throughput": LAYER_THROUGHPUT,
    "studies": STUDIES,
}
PLANNING_CELLS = {
    "instantiation": (
        ("n_nodes", "int", "1", "nodes of the template"),
        ("n_pipelines", "int", "1", "pipelines made from it"),
        ("microbatches", "int", "1", "microbatches of each"),
        ("published_time_s", "float", "s", "their time"),
    ),
}


# ------------------------------------------------------------------------------------------------
# Schema of what becomes of plans after losses, and of the cases that the artifact works out.

RECONFIGURATION = table_schema(
    "oobleck_reconfiguration",
    ("case", "text", "", "a worked case, or n0, f and the nodes; beyond where more than f are lost at once"),
    ("step", "int", "1", "number of the plan and of the loss in that case"),
    ("lost_nodes", "text", "", "nodes lost at once; a plan has nodes from 0, the smallest pipeline first"),
    (
        "action",
        "text",
        "",
        "drop, re-instantiate, borrow, merge, split, re-plan, or why training ends: state-lost, "
        "insufficient-nodes",
    ),
    ("counts_before", "text", "", "pipelines of each number of nodes before"),
    ("counts_after", "text", "", "the same afterwards; empty where training ends"),
    ("copies_bytes", "float", "B", "state that is sent", True),
    ("iter_time_s", "float", "s", "iteration afterwards, by a simulated schedule", True),
    ("wall_s", "float", "s", "time in which the answer was found"),
    ("most_sent_bytes", "float", "B", "of that, what the node that sends most sends", True),
    ("copied_layers", "float", "1", "layers of which copies are sent", True),
)
RECONFIGURATION_CELLS = {
    "reconfiguration": (
        ("case", "int", "1", "number of the case"),
        ("n0", "int", "1", "least nodes of a pipeline"),
        ("pipelines", "text", "", "nodes of each pipeline at the start"),
        ("lost_nodes", "text", "", "nodes lost at once"),
        ("published_action", "text", "", "what is done"),
        ("published_pipelines", "text", "", "nodes of each pipeline afterwards"),
    )
}


# ------------------------------------------------------------------------------------------------
# Schemas of the tables of simulations, and of the cells that belong to them.

_MODEL = ("model", "text", "", "model that is trained")
_SYSTEM = ("system", "text", "", "bamboo, varuna or oobleck; varuna-no-checkpoint in Fig. 13")
_TRACE = ("trace", "text", "", "distance of failures, or spot trace")
_HOW = (
    ("mode", "text", "", "compat, as released, or fixed, with all defects repaired"),
    ("defects", "text", "", "defects that are switched against the mode"),
)
_SEED = ("seed", "int", "1", "seed of a generated trace; 0 for the authors' file")
_AVERAGES = (
    _TRACE,
    _SEED,
    _MODEL,
    _SYSTEM,
    *_HOW,
    ("throughput_samples_per_s", "float", "samples/s", "average over the run; 0 if no step ended"),
    ("published_samples_per_s", "float", "samples/s", "the same on the authors' trace", True),
    ("n_steps", "int", "1", "steps that the system counts"),
    ("n_failures", "int", "1", "nodes removed"),
    ("feasible", "bool", "", "whether the model fits"),
)
FIG9 = table_schema("oobleck_fig9", *_AVERAGES)
FIG10 = table_schema("oobleck_fig10", *_AVERAGES)
FIG13 = table_schema("oobleck_fig13", *_AVERAGES)
ABLATION = table_schema("oobleck_ablation", *_AVERAGES)
BREAKDOWN = {
    name: table_schema(
        f"oobleck_{name}",
        *(_TRACE, _MODEL, _SYSTEM, _HOW[0]),
        ("category", "text", "", "what time is spent on"),
        ("time_s", "float", "s", "time of the category, mean over seeds"),
        ("share", "float", "1", "the same over the sum of all but idle"),
    )
    for name in ("fig1", "fig12")
}
SERIES = {
    name: table_schema(
        f"oobleck_{name}",
        *(_MODEL, _SYSTEM, _HOW[0]),
        ("time_s", "float", "s", "start of an interval"),
        ("n_nodes", "float", "1", "mean number of nodes in it"),
        ("throughput_samples_per_s", "float", "samples/s", "samples that count, over its length"),
    )
    for name in ("fig14", "fig15")
}
SIMULATED = {
    **BREAKDOWN,
    "fig9": FIG9,
    "fig10": FIG10,
    "fig13": FIG13,
    **SERIES,
    "ablation": ABLATION,
}
_PRINTED_AVERAGE = (
    *(_TRACE, _MODEL, _SYSTEM),
    ("published_samples_per_s", "float", "samples/s", "average over the run; none out of memory", True),
)
SIMULATED_CELLS = {
    "throughput": (
        *(_MODEL, _SYSTEM),
        ("n_nodes", "int", "1", "nodes"),
        ("published_samples_per_s", "float", "samples/s", "throughput; 0 where it cannot run"),
        ("published_restart_s", "float", "s", "restart after a rendezvous of so many nodes", True),
        ("published_idle_gpus", "float", "1", "GPUs that the plan leaves idle", True),
    ),
    "fig9": _PRINTED_AVERAGE,
    "fig10": _PRINTED_AVERAGE,
    "fig13": _PRINTED_AVERAGE,
    "fig12": (
        *(_TRACE, _MODEL, _SYSTEM),
        ("category", "text", "", "what time is spent on"),
        ("published_time_s", "float", "s", "time of the category; categories overlap"),
    ),
}


# ------------------------------------------------------------------------------------------------
# Schemas of the tables that only this paper has, and of its printed cells.

SCHEMAS = (*PLANNED.values(), RECONFIGURATION, *EXECUTED.values(), *SIMULATED.values(), *LIVE_SCHEMAS)
PUBLISHED = printed_schemas({**PLANNING_CELLS, **RECONFIGURATION_CELLS, **SIMULATED_CELLS})


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the paper's cells of an artifact, one of `PUBLISHED`, each with its source.

    Raises
    ------
    UnknownNameError, MissingDataError, TraceError
        No such artifact, no such file, or a column or cell without an accepted value.
    """
    return read_printed(artifact, path, PUBLISHED)
