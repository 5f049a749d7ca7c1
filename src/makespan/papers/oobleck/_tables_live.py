"""Schemas of the experiment that kills nodes of a resilient run, and of what the run itself writes."""

from makespan.oobleck._tables import ITERATIONS, RECOVERIES
from makespan.tables import table_schema

__all__ = ["HYBRID", "HYBRID_KILLS", "HYBRID_SUMMARY", "LIVE_SCHEMAS"]

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
