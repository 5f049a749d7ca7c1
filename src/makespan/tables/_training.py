"""Schemas of the tables that real training runs write."""

from makespan.tables._schema import Column, TableSchema

__all__ = ["FIG9", "FIG9_SUMMARY"]

FIG9 = TableSchema(
    "fig9",
    (
        Column("run", "text", "", "name of the plan, or of the run that switches or has another seed"),
        Column("step", "int", "1", "optimiser steps done before"),
        Column("loss", "float", "1", "mean loss of the global batch"),
        Column("abs_difference", "float", "1", "distance to the loss of the first run at that step"),
    ),
)

FIG9_SUMMARY = TableSchema(
    "fig9_summary",
    (
        Column("run", "text", "", "name of the run; the paper's runs have its name in front"),
        Column("kind", "text", "", "reference, plan, switching, other seed, or published of each"),
        Column("mean_abs_difference", "float", "1", "mean distance to the reference"),
        Column("max_abs_difference", "float", "1", "largest distance to the reference"),
        Column("restarts", "int", "1", "checkpoints from which the run continued"),
        Column("restart_s", "float", "s", "mean cost of a restart, from saving to the loaded model", True),
        Column("step_s", "float", "s", "median time of an optimiser step", True),
    ),
)
