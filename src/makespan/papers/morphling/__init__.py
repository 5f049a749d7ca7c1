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

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.papers.morphling.checks import LEDGER as LEDGER
    from makespan.papers.morphling.cluster import (
        generated_workloads as generated_workloads,
        published_workloads as published_workloads,
        run_experiment as run_experiment,
        threads_study as threads_study,
    )
    from makespan.papers.morphling.performance import (
        OTHER_SEED as OTHER_SEED,
        SWITCHING as SWITCHING,
        Stage as Stage,
        fig7 as fig7,
        fig8 as fig8,
        fig9 as fig9,
        fig9_summary as fig9_summary,
        fit_workloads as fit_workloads,
        measured_fig7 as measured_fig7,
        sensitivity as sensitivity,
        table2 as table2,
        table2_results as table2_results,
        table2_rows as table2_rows,
        table2_summary as table2_summary,
    )
    from makespan.papers.morphling.results_page import page as page
    from makespan.papers.morphling.settings import (
        EXPERIMENT_TABLES as EXPERIMENT_TABLES,
        Morphling as SETTINGS,
    )
    from makespan.papers.morphling.tables import (
        FIG7 as FIG7,
        FIG8 as FIG8,
        FIG9 as FIG9,
        FIG9_SUMMARY as FIG9_SUMMARY,
        SCHEMAS as SCHEMAS,
        TABLE2 as TABLE2,
        TABLE2_ROWS as TABLE2_ROWS,
        TABLE2_SUMMARY as TABLE2_SUMMARY,
        read_published as read_published,
    )


__getattr__ = lazy_exports(__name__, __file__)
