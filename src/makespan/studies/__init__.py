"""Studies: assembly of scenarios, many validated simulations in a pool, and comparisons.

`scenario` assembles a `makespan.sim.Scenario` from names and files. `run` simulates one under one policy;
`run_all` runs a list of `SimulationSpec` in processes, and `attempt_all` continues if one fails. Every
schedule is validated. `comparison` returns a table of the runs, with ratios to a baseline, and `demand`
computes the load that the jobs put on the cluster. `TableCatalogue` holds the configurations of jobs, from
throughput tables.
"""

from makespan.sim import Scenario as Scenario
from makespan.studies.catalogue import (
    PREDICTION_MODES as PREDICTION_MODES,
    PredictionMode as PredictionMode,
    TableCatalogue as TableCatalogue,
    predicted_catalogue as predicted_catalogue,
    predictions as predictions,
)
from makespan.studies.clusters import (
    read_cluster as read_cluster,
    resized as resized,
    site as site,
    with_models as with_models,
)
from makespan.studies.runs import (
    Attempt as Attempt,
    Demand as Demand,
    ImpossibleScheduleError as ImpossibleScheduleError,
    Run as Run,
    RunError as RunError,
    SimulationSpec as SimulationSpec,
    attempt_all as attempt_all,
    comparison as comparison,
    demand as demand,
    load_policy as load_policy,
    measures as measures,
    nobody_waited as nobody_waited,
    run as run,
    run_all as run_all,
    violation_lines as violation_lines,
)
from makespan.studies.scenarios import (
    generated_jobs as generated_jobs,
    limited_statistics as limited_statistics,
    read_trace as read_trace,
    scenario as scenario,
    table_scenarios as table_scenarios,
    with_predictions as with_predictions,
)
