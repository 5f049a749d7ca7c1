"""Fitted models of iteration time: two forms, one fit, plan search and sensitivity curves.

The package takes throughput tables (schema `makespan.tables.THROUGHPUT`) of any source, fits one of
the forms in `FORMS` to the few rows that `sampling_design` picks, and predicts every other
plan and placement::

    environment = load_environment("a800-64")
    result = fit_table(frame, "gpt2", "extended", environment)  # samples, fits, predicts
    result.fit.table()  # fitted parameters, standard errors, what the data determine
    result.predicted_s  # beside result.frame, the feasible rows
    Learner.from_table(frame, "extended", environment)  # a model that learns from what ran
    rank_plans(result.fit, Placement.parse("44"), cluster("a800-64"))  # fastest feasible plan first
    envelope(sensitivity_families(result.fit, cluster("a800-64"), range(1, 65)))
"""

from makespan.perf._environment import Environment, environment_names, load_cluster, load_environment
from makespan.perf._fit import FORMS, Fit, fit
from makespan.perf._learning import Learner, TableFit, fit_table, regret, sampling_design
from makespan.perf._points import Measured, Points, measured_from_table, points_from_plans, points_from_table
from makespan.perf._search import best_plan, envelope, rank_plans, sensitivity_curve, sensitivity_families
from makespan.perf._shared import fit_shared

__all__ = [
    "Environment",
    "FORMS",
    "Fit",
    "Learner",
    "Measured",
    "Points",
    "TableFit",
    "best_plan",
    "envelope",
    "environment_names",
    "fit",
    "fit_shared",
    "fit_table",
    "load_cluster",
    "load_environment",
    "measured_from_table",
    "points_from_plans",
    "points_from_table",
    "rank_plans",
    "regret",
    "sampling_design",
    "sensitivity_curve",
    "sensitivity_families",
]
