"""Schemas of what is counted and measured here of schedules, and the cells printed beside it."""

from makespan.papers.slapo._tables_tuning import BATCH_COLUMN, ORACLE_COLUMN, RATIO_COLUMN
from makespan.tables import table_schema

__all__ = ["MEASURED", "MEASURED_CELLS", "TABLE4", "TUNER"]

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
