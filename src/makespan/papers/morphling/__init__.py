"""Experiments of the Morphling paper (MLSys 2025): functions from tables and plain values to result tables.

Below ``results/<source>/morphling/`` a run writes

- of `fit_workloads`: ``fits/<workload>.csv`` and the predictions of its rows
- of `table2_rows`, `table2`, `table2_summary`: tables of these names, of predictions and the paper's cells
- of `sensitivity`: ``sensitivity.csv`` and ``sensitivity_families.csv``
- of `fig7`, `fig8`: one throughput table, or those of the jobs, with the paper's cells
- of `table2_results`, `measured_fig7`: the same on profiled workloads, with the repeatability
- of `generated_workloads`, `published_workloads`: ``workloads/<list>.csv``
- of `makespan.studies.predictions`: ``predictions.csv``
- of `run_experiment`: the tables of `EXPERIMENT_TABLES`, from a `makespan.studies.Scenario` a job list
- of `threads_study`: ``threads.csv``, emulated only
- of `fig9`, `fig9_summary`: losses of real training runs
- of `LEDGER`, by `makespan.claims.judge`: ``claims.csv``

`page` makes the tables of the paper's page from these.
`read_published` reads the paper's cells, ``config/published/morphling_<artifact>.csv``. Every schedule is
validated.
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.morphling._checks import LEDGER
    from makespan.papers.morphling._experiments import run_experiment
    from makespan.papers.morphling._fig7 import Stage, fig7, measured_fig7
    from makespan.papers.morphling._fig8 import fig8
    from makespan.papers.morphling._fig9 import OTHER_SEED, SWITCHING, fig9, fig9_summary
    from makespan.papers.morphling._page import page
    from makespan.papers.morphling._performance import (
        fit_workloads,
        sensitivity,
        table2,
        table2_results,
        table2_rows,
        table2_summary,
    )
    from makespan.papers.morphling._settings import Morphling as SETTINGS
    from makespan.papers.morphling._settings_simulation import EXPERIMENT_TABLES
    from makespan.papers.morphling._tables import (
        FIG7,
        FIG8,
        FIG9,
        FIG9_SUMMARY,
        SCHEMAS,
        TABLE2,
        TABLE2_ROWS,
        TABLE2_SUMMARY,
        read_published,
    )
    from makespan.papers.morphling._threads import threads_study
    from makespan.papers.morphling._workloads import generated_workloads, published_workloads

__all__ = [
    "EXPERIMENT_TABLES",
    "FIG7",
    "FIG8",
    "FIG9",
    "FIG9_SUMMARY",
    "LEDGER",
    "OTHER_SEED",
    "SCHEMAS",
    "SETTINGS",
    "SWITCHING",
    "TABLE2",
    "TABLE2_ROWS",
    "TABLE2_SUMMARY",
    "Stage",
    "fig7",
    "fig8",
    "fig9",
    "fig9_summary",
    "fit_workloads",
    "generated_workloads",
    "measured_fig7",
    "page",
    "published_workloads",
    "read_published",
    "run_experiment",
    "sensitivity",
    "table2",
    "table2_results",
    "table2_rows",
    "table2_summary",
    "threads_study",
]

__getattr__ = shown_lazily(__name__, __file__)
