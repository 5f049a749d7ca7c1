"""Schemas of searches, and the printed grid that they are replayed on."""

from makespan.tables import table_schema

__all__ = ["BATCH_COLUMN", "ORACLE_COLUMN", "RATIO_COLUMN", "TUNED", "TUNING_CELLS"]

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
