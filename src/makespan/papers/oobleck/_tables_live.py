"""Schemas of what a resilient run writes, and of the experiment that kills its nodes."""

from makespan.tables import table_schema

__all__ = ["HYBRID", "HYBRID_KILLS", "HYBRID_SUMMARY", "ITERATIONS", "LIVE_SCHEMAS", "RECOVERIES"]

_TIMES = (
    ("frozen_wall_s", "float", "s", "until the last of those who go on had given up its groups"),
    ("decided_wall_s", "float", "s", "until there was a plan"),
    ("built_wall_s", "float", "s", "until the last had its groups"),
    ("copied_wall_s", "float", "s", "until the last had its layers"),
    ("first_wall_s", "float", "s", "until the first instruction of the next iteration"),
)

_CALL = ("call", "int", "1", "call of the run that did it, from 1; each appends its rows")

ITERATIONS = table_schema(
    "iterations",
    _CALL,
    ("iteration", "int", "1", "iteration, from 0"),
    ("loss", "float", "1", "mean over all microbatches"),
    ("generation", "int", "1", "generation in which it was committed"),
    ("attempts", "int", "1", "times it was begun"),
    ("n_pipelines", "int", "1", "pipelines of the plan"),
    ("n_nodes", "int", "1", "nodes of the plan"),
    ("end_wall_s", "float", "s", "commit, from the start of the call"),
)
RECOVERIES = table_schema(
    "recoveries",
    _CALL,
    ("generation", "int", "1", "generation that went on"),
    ("iteration", "int", "1", "iteration with which it did"),
    ("cause", "text", "", "start, loss, join, drain or failure; what came first"),
    ("lost", "text", "", "nodes that were lost, with the phase in which each was"),
    ("joined", "text", "", "nodes that came in"),
    ("action", "text", "", "what became of the pipelines"),
    ("n_microbatches", "text", "", "microbatches of the pipelines"),
    ("layers", "text", "", "layers of the stages of the pipelines"),
    ("nodes", "text", "", "nodes of the pipelines"),
    ("copies_bytes", "float", "B", "state that was copied"),
    (
        "begin_wall_s",
        "float",
        "s",
        "when it was noticed, from the start of the call; the times below from then",
    ),
    *_TIMES,
)
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
