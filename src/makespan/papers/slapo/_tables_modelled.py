"""Schemas of what the hardware model and the emulator say of Figs 7 to 10, and of the printed settings."""

from makespan.papers.slapo._tables_tuning import BATCH_COLUMN, ORACLE_COLUMN, RATIO_COLUMN
from makespan.tables import table_schema

__all__ = ["FIG7", "FIG8", "FIG9", "FIG10_FIT", "FIG10_GRIDS", "INEQUALITIES", "MODELLED", "MODELLED_CELLS"]

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
