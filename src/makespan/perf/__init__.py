"""Fitted models of iteration time: two forms, one fit, plan search and sensitivity curves.

The package takes throughput tables (schema ``makespan.tables.THROUGHPUT``) of any source,
fits one of the forms in :data:`FORMS` to the few rows that :func:`sampling_design` picks,
and predicts every other plan and placement.

Typical use::

    environment = load_environment("a800-64")
    result = fit_table(frame, "gpt2", "extended", environment)   # samples, fits, predicts
    result.fit.table()                                           # schema FIT
    result.rows()                                                # schema TABLE2_ROWS
    result.errors()                                              # one row a plan family, TABLE2
    rank_plans(result.fit, Placement.parse("44"), cluster)       # fastest feasible plan first
    families = sensitivity_families(result.fit, cluster, range(1, 65))
    envelope(families)                                           # schema SENSITIVITY
"""

from makespan.perf._api_draft import (
    FORMS,
    Environment,
    Fit,
    Measured,
    Points,
    RankedPlan,
    TableFit,
    best_plan,
    envelope,
    fit,
    fit_table,
    load_environment,
    measured_from_table,
    points_from_plans,
    points_from_table,
    rank_plans,
    regret,
    sampling_design,
    sensitivity_curve,
    sensitivity_families,
)

__all__ = [
    "FORMS",
    "Environment",
    "Fit",
    "Measured",
    "Points",
    "RankedPlan",
    "TableFit",
    "best_plan",
    "envelope",
    "fit",
    "fit_table",
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
