"""Schemas of the tables that a resilient run writes."""

from makespan.tables import table_schema

__all__ = ["ITERATIONS", "RECOVERIES"]

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
