"""Schemas of the tables of simulations, and of the cells that belong to them."""

from makespan.tables import table_schema

__all__ = ["ABLATION", "BREAKDOWN", "FIG9", "FIG10", "FIG13", "SERIES", "SIMULATED", "SIMULATED_CELLS"]

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
