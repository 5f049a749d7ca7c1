"""Schemas of what is counted and measured here of schedules, and the cells printed beside it."""

from makespan.tables import table_schema

__all__ = ["FIG9", "MEASURED", "MEASURED_CELLS", "TABLE4", "TUNER"]

_ORACLE = ("oracle", "text", "", "what the row rests on: published, model, emulator or measured")
_FAMILY = ("family", "text", "", "model family")

TABLE4 = table_schema(
    "slapo_table4",
    *(_ORACLE, _FAMILY),
    ("published_lines", "float", "lines", "lines of the schedule that the authors print", True),
    ("helpers", "int", "lines", "statements of our schedule; a helper of several families is one"),
    ("expanded", "int", "1", "places that apply a primitive, those in helpers included"),
    ("listing", "int", "lines", "lines of text of our schedule that do not contain the word for"),
    ("model_lines", "int", "lines", "lines of code of the model, which the schedule leaves as it is"),
)
_BATCH = ("global_batch_size", "int", "samples", "samples a step")
FIG9 = table_schema(
    "slapo_fig9",
    _ORACLE,
    ("step", "text", "", "what the schedule has come to"),
    ("n_gpus", "int", "1", "devices; processes where it is measured on CPU cores"),
    _BATCH,
    ("throughput_samples_per_s", "float", "samples/s", "throughput, median over timed steps where measured"),
    ("throughput_iqr_samples_per_s", "float", "samples/s", "inter-quartile range of the same", True),
    ("compiler", "text", "", "what compiles fused operations; empty where nothing is fused"),
    ("saved_bytes", "float", "B", "most that a process keeps of a forward pass for the backward one", True),
    ("parameter_bytes", "float", "B", "parameters of a process", True),
    (
        "output_error",
        "float",
        "1",
        "largest difference of outputs, over the largest value of its tensor",
        True,
    ),
    ("gradient_error", "float", "1", "the same of gradients", True),
)
TUNER = table_schema(
    "slapo_tuner",
    _ORACLE,
    ("strategy", "text", "", "how points are chosen"),
    ("explored_order", "int", "1", "number of the evaluation within its search, from 1"),
    _BATCH,
    ("ckpt_ratio", "float", "1", "share of the layers whose activations are recomputed"),
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
MEASURED = {"table4": TABLE4, "fig9": FIG9, "tuner": TUNER}

MEASURED_CELLS = {
    "table4": (
        _FAMILY,
        ("published_lines", "int", "lines", "lines of the schedule without those that contain for"),
    ),
}
