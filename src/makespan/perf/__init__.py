"""Fitted models of iteration time: two forms, one fit, plan search and sensitivity curves.

The package fits one of the forms in `FORMS` to a few rows of a throughput table (schema
`makespan.tables.THROUGHPUT`, of any source) that `sampling_design` picks, and predicts all other plans and
placements::

    environment = load_environment("a800-64")
    result = fit_table(frame, "gpt2", "extended", environment)  # samples, fits, predicts
    result.fit.table()  # fitted parameters, standard errors, what the data determine
    result.predicted_s  # beside result.frame, the feasible rows
    Learner.from_table(frame, "extended", environment)  # a model that learns from what ran
    rank_plans(result.fit, Placement.parse("44"), cluster("a800-64"))  # fastest feasible plan first
    envelope(sensitivity_families(result.fit, cluster("a800-64"), range(1, 65)))
"""

from makespan.perf.fitting import (
    FORMS as FORMS,
    Fit as Fit,
    Learner as Learner,
    TableFit as TableFit,
    fit as fit,
    fit_shared as fit_shared,
    fit_table as fit_table,
    regret as regret,
    sampling_design as sampling_design,
)
from makespan.perf.forms import (
    Environment as Environment,
    Measured as Measured,
    Points as Points,
    environment_names as environment_names,
    environment_of as environment_of,
    load_cluster as load_cluster,
    load_environment as load_environment,
    measured_from_table as measured_from_table,
    points_from_plans as points_from_plans,
    points_from_table as points_from_table,
)
from makespan.perf.sampling import (
    intervals as intervals,
    next_runs as next_runs,
    sequential_design as sequential_design,
    warnings_of as warnings_of,
)
from makespan.perf.search import (
    best_plan as best_plan,
    envelope as envelope,
    rank_plans as rank_plans,
    sensitivity_curve as sensitivity_curve,
    sensitivity_families as sensitivity_families,
)
