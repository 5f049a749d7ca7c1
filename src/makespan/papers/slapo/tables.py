"""Schemas of what is counted and measured here of schedules, and the cells printed beside it."""

from pathlib import Path

import pandas as pd

from makespan.tables import printed_schemas, read_printed, table_schema

# ------------------------------------------------------------------------------------------------
# Schemas of searches, and the printed grid that they are replayed on.

ORACLE_COLUMN = (
    "oracle",
    "text",
    "",
    "what says how fast a point is: published, model, emulator or measured",
)
BATCH_COLUMN = ("global_batch_size", "int", "samples", "samples an optimiser step over all GPUs")
RATIO_COLUMN = ("ckpt_ratio", "float", "1", "share of the layers whose activations are recomputed")
_SEARCH = (
    ORACLE_COLUMN,
    ("strategy", "text", "", "how points are chosen"),
    ("seed", "int", "1", "seed of what it draws"),
)
FIG10 = table_schema(
    "slapo_fig10",
    *_SEARCH,
    ("explored_order", "int", "1", "number of the evaluation within its search, from 1"),
    *(BATCH_COLUMN, RATIO_COLUMN),
    ("status", "text", "", "ok, or oom where it needs more memory than there is"),
    ("throughput_samples_per_s", "float", "samples/s", "throughput; none out of memory", True),
)
FIG10_SEARCHES = table_schema(
    "slapo_fig10_searches",
    *_SEARCH,
    ("explored", "int", "1", "points that are evaluated"),
    ("explored_oom", "int", "1", "those of them that run out of memory"),
    ("space", "int", "1", "points of the space"),
    ("explored_ratio", "float", "1", "evaluated points over all"),
    ("stopped", "text", "", "finished, or what ended the search: patience or budget"),
    ("best_global_batch_size", "int", "samples", "batch size of the best point"),
    ("best_ckpt_ratio", "float", "1", "share of recomputed layers of the best point"),
    ("best_samples_per_s", "float", "samples/s", "its throughput"),
    ("optimum_ratio", "float", "1", "that over the best of the whole space"),
)
TUNED = {"fig10": FIG10, "fig10_searches": FIG10_SEARCHES}
TUNING_CELLS = {
    "fig10": (
        *(BATCH_COLUMN, RATIO_COLUMN),
        ("published_samples_per_s", "float", "samples/s", "throughput; none out of memory", True),
    ),
}


# ------------------------------------------------------------------------------------------------
# Schemas of what is counted and measured here of schedules, and the cells printed beside it.

_FAMILY = ("family", "text", "", "model family")
TABLE4 = table_schema(
    "slapo_table4",
    *(ORACLE_COLUMN, _FAMILY),
    ("published_lines", "float", "lines", "lines of the schedule that the authors print", True),
    ("helpers", "int", "lines", "statements of our schedule; a helper of several families is one"),
    ("expanded", "int", "1", "places that apply a primitive, those in helpers included"),
    ("listing", "int", "lines", "lines of text of our schedule that do not contain the word for"),
    ("model_lines", "int", "lines", "lines of code of the model, which the schedule leaves as it is"),
)
TUNER = table_schema(
    "slapo_tuner",
    ORACLE_COLUMN,
    ("strategy", "text", "", "how points are chosen"),
    ("explored_order", "int", "1", "number of the evaluation within its search, from 1"),
    BATCH_COLUMN,
    RATIO_COLUMN,
    ("status", "text", "", "ok, or oom where the forward pass keeps more than the budget"),
    ("throughput_samples_per_s", "float", "samples/s", "median over timed steps; none out of memory", True),
    (
        "saved_bytes",
        "float",
        "B",
        "kept by the forward pass for the backward one; none beyond the budget",
        True,
    ),
    ("budget_bytes", "float", "B", "most that it may keep, which stands for the memory of a device"),
)
MEASURED = {"table4": TABLE4, "tuner": TUNER}
MEASURED_CELLS = {
    "table4": (
        _FAMILY,
        ("published_lines", "int", "lines", "lines of the schedule without those that contain for"),
    ),
}


# ------------------------------------------------------------------------------------------------
# Schemas of what the hardware model and the emulator say of Figs 7 to 10, and of the printed settings.

_MODEL = ("model", "text", "", "model, as figures call it")
_IMPLEMENTATION = ("implementation", "text", "", "megatron, deepspeed, or a schedule of Slapo")
_GPUS = ("n_gpus", "int", "1", "GPUs")
_RATE = ("throughput_samples_per_s", "float", "samples/s", "throughput, whether or not memory is enough")
_RUN = (
    ORACLE_COLUMN,
    *(_MODEL, _IMPLEMENTATION, _GPUS),
    BATCH_COLUMN,
    ("ckpt_ratio", "float", "1", "share of the layers that are recomputed; none for a printed bar", True),
    ("is_feasible", "bool", "", "whether it fits into memory"),
    ("gpu_memory_ratio", "float", "1", "memory that it needs over what there is", True),
    (
        "largest_global_batch_size",
        "float",
        "samples",
        "largest batch that fits with as many recomputed layers; model only",
        True,
    ),
    _RATE,
)
FIG7 = table_schema(
    "slapo_fig7",
    *_RUN,
    ("kind", "text", "", "published, the printed setting; tuned, the best that the tuner finds; plain, full"),
    ("parameters_per_gpu", "float", "1", "parameters whose states a GPU holds"),
    ("flop_per_s", "float", "FLOP/s", "model FLOP of a GPU a second, recomputation not counted"),
)
FIG8 = table_schema(
    "slapo_fig8",
    *_RUN,
    ("tp", "int", "1", "tensor-parallel degree; 0 for a printed bar"),
    ("pp", "int", "1", "pipeline-parallel degree; 0 for a printed bar"),
)
# One schema for what is modelled, emulated and measured; each leaves out what it does not know.
FIG9 = table_schema(
    "slapo_fig9",
    ORACLE_COLUMN,
    ("step", "text", "", "what the schedule has come to"),
    ("n_gpus", "int", "1", "devices; processes where it is measured on CPU cores"),
    BATCH_COLUMN,
    ("throughput_samples_per_s", "float", "samples/s", "throughput, median over timed steps where measured"),
    ("speedup", "float", "1", "throughput over that of the first step", True),
    ("gpu_memory_ratio", "float", "1", "memory that it needs over what there is; not measured", True),
    ("largest_global_batch_size", "float", "samples", "largest batch that fits; model only", True),
    ("throughput_iqr_samples_per_s", "float", "samples/s", "inter-quartile range; measured only", True),
    ("compiler", "text", "", "what compiles fused operations; empty where nothing is fused"),
    ("saved_bytes", "float", "B", "most that a process keeps for the backward pass; measured only", True),
    ("parameter_bytes", "float", "B", "parameters of a process; measured only", True),
    ("output_error", "float", "1", "largest relative difference of outputs; measured only", True),
    ("gradient_error", "float", "1", "the same of gradients", True),
)
FIG10_FIT = table_schema(
    "slapo_fig10_fit",
    ORACLE_COLUMN,
    ("protocol", "text", "", "in sample, one batch size left out, or untuned"),
    BATCH_COLUMN,
    RATIO_COLUMN,
    ("published_samples_per_s", "float", "samples/s", "printed throughput; none out of memory", True),
    ("published_is_feasible", "bool", "", "whether the printed point fits into memory"),
    (
        "predicted_samples_per_s",
        "float",
        "samples/s",
        "predicted throughput, whether or not memory is enough",
    ),
    ("is_feasible", "bool", "", "whether it is predicted to fit"),
    ("relative_error", "float", "1", "of predicted throughput against printed", True),
)
FIG10_GRIDS = table_schema(
    "slapo_fig10_grids",
    ("grid", "int", "1", "number of the synthetic grid, from 0"),
    ("fixed_s", "float", "s", "time of a step at least"),
    ("sample_s", "float", "s", "time of a sample without recomputation"),
    ("recomputed_s", "float", "s", "time of recomputing all layers of a sample"),
    ("usable_ratio", "float", "1", "usable memory over that of the fit"),
    ("feasible", "int", "1", "points that fit"),
    ("explored", "int", "1", "points that the frontier evaluates"),
    ("optimum_ratio", "float", "1", "true throughput of what the frontier finds over the best of the grid"),
    ("measured_optimum_ratio", "float", "1", "the same of throughput as it is measured, with noise"),
    ("descent_optimum_ratio", "float", "1", "true, of coordinate descent from one random point"),
)
INEQUALITIES = table_schema(
    "slapo_inequalities",
    ("inequality", "text", "", "name of a conclusion of Figs 7 to 9"),
    ("constant", "text", "", "constant that is changed; empty for the model as it is"),
    ("factor", "float", "1", "what it is multiplied by"),
    ("holds", "bool", "", "whether the conclusion still holds"),
    ("found", "text", "", "the numbers that decide it"),
)
MODELLED = {
    "fig7": FIG7,
    "fig8": FIG8,
    "fig9": FIG9,
    "fig10_fit": FIG10_FIT,
    "fig10_grids": FIG10_GRIDS,
    "inequalities": INEQUALITIES,
}
_PRINTED_RATE = ("published_samples_per_s", "float", "samples/s", "throughput")
MODELLED_CELLS = {
    "fig7": (
        _MODEL,
        ("family", "text", "", "family of the zoo"),
        ("size", "text", "", "size in it"),
        *(_GPUS, _IMPLEMENTATION, BATCH_COLUMN, RATIO_COLUMN),
    ),
    "fig8": (_MODEL, _GPUS, _IMPLEMENTATION, _PRINTED_RATE),
    "fig9": (("step", "text", "", "step of the ablation"), _GPUS, BATCH_COLUMN),
    "limits": (_MODEL, _PRINTED_RATE),
}


# ------------------------------------------------------------------------------------------------
# Schema of what is verified.

VERIFY = table_schema(
    "slapo_verify",
    ("oracle", "text", "", "measured: the models ran"),
    ("n_processes", "int", "1", "processes that share the model"),
    ("family", "text", "", "architecture of the zoo"),
    ("schedule", "text", "", "name of the schedule"),
    ("options", "text", "", "options of `apply_schedule`"),
    ("steps", "int", "1", "primitives that were applied"),
    ("outputs", "int", "1", "output tensors that were compared"),
    ("gradients", "int", "1", "parameters whose gradients were compared"),
    ("not_compared", "int", "1", "parameters without a counterpart"),
    ("output_error", "float", "1", "largest error of an output, over the largest value of its tensor"),
    ("input_gradient_error", "float", "1", "the same of gradients of inputs"),
    ("gradient_error", "float", "1", "the same of gradients of parameters"),
    ("is_equal", "bool", "", "whether all agree within the tolerances of the type"),
    ("fault", "text", "", "what differs and where; empty where nothing does"),
)
VERIFIED = {"verify": VERIFY}


# ------------------------------------------------------------------------------------------------
# Schemas of the tables that only this paper has, and of its printed cells.

SCHEMAS = (*TUNED.values(), *MODELLED.values(), *VERIFIED.values(), *MEASURED.values())
PUBLISHED = printed_schemas({**TUNING_CELLS, **MODELLED_CELLS, **MEASURED_CELLS})


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the paper's cells of an artifact, one of `PUBLISHED`, each with its source.

    Raises
    ------
    UnknownNameError, MissingDataError, TraceError
        No such artifact, no such file, or a column or cell without an accepted value.
    """
    return read_printed(artifact, path, PUBLISHED)
