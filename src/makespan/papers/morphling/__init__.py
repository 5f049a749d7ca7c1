"""Experiments of the Morphling paper (MLSys 2025): from throughput tables to result tables.

One function a stage; each takes tables and plain values and returns tables, and names the files
that a run writes below ``results/<source>/morphling/``:

- `fit_workload`: ``../throughput/<workload>.csv`` to ``fits/<workload>.csv`` and the predictions of
  its rows
- `table2_rows`: all predictions and the paper's cells to ``table2_rows.csv``
- `table2`, `table2_summary`: ``table2_rows.csv`` to ``table2.csv`` and ``table2_summary.csv``
- `sensitivity`: throughput tables to ``sensitivity.csv`` and ``sensitivity_families.csv``
- `fig7`: one throughput table, the stages and the paper's cells to ``fig7.csv``
- `fig8`: throughput tables of the jobs and the paper's cells to ``fig8.csv``
- `generated_workloads`, `published_workloads`: ``workloads/<list>.csv``
- `makespan.studies.predictions`: throughput tables and job lists to ``predictions.csv``
- `getting_started`: the short job list to ``getting_started.csv``
- `compare_policies`: all job lists to ``table4.csv``, ``jct.csv``, ``allocation.csv``, ``schedule.csv``
- `perturbed_arrivals`, `STUDIES`, `scale_study`: to
  ``perturbed.csv``, ``load.csv``, ``large_models.csv``, ``rounds.csv``, ``scale.csv``, and for the studies
  over seeds ``<study>_summary.csv``
- `measured_table2`, `measured_fig7`: the same two on profiled workloads, with the repeatability
- `fig9`, `fig9_summary`: losses of real training runs to ``fig9.csv`` and ``fig9_summary.csv``
- `LEDGER`: what `makespan.claims.judge` makes ``claims.csv`` with

The cluster experiments start from a `makespan.studies.Scenario` a job list, which
`makespan.studies.read_scenarios` reads;
every schedule is validated.
`read_published` reads the paper's cells, ``config/published/morphling_<artifact>.csv``.
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.morphling._checks import LEDGER
    from makespan.papers.morphling._experiments import run_experiment
    from makespan.papers.morphling._fig7 import STRATEGIES, Stage, fig7
    from makespan.papers.morphling._fig8 import SCHEDULERS, fig8
    from makespan.papers.morphling._fig9 import (
        OTHER_SEED,
        SWITCHING,
        fig9,
        fig9_summary,
        published_loss_statistics,
    )
    from makespan.papers.morphling._measured import measured_fig7, measured_table2, table2_results
    from makespan.papers.morphling._names import MORPHLING, NAIVE, WORKLOADS
    from makespan.papers.morphling._published import read_published
    from makespan.papers.morphling._sensitivity import sensitivity
    from makespan.papers.morphling._settings import Morphling as SETTINGS
    from makespan.papers.morphling._settings_simulation import EXPERIMENT_TABLES
    from makespan.papers.morphling._studies import (
        STUDIES,
        Draw,
        perturbed_arrivals,
        scale_study,
        seeded_lists,
    )
    from makespan.papers.morphling._table2 import fit_workload, table2, table2_rows, table2_summary
    from makespan.papers.morphling._table4 import Table4, compare_policies, getting_started
    from makespan.papers.morphling._tables import (
        ALLOCATION,
        FIG7,
        FIG8,
        FIG9,
        FIG9_SUMMARY,
        JCT,
        LARGE_MODELS,
        LOAD,
        PERTURBED,
        ROUNDS,
        SCALE,
        SCHEMAS,
        STUDY,
        TABLE2,
        TABLE2_ROWS,
        TABLE2_SUMMARY,
        TABLE4,
    )
    from makespan.papers.morphling._workloads import generated_workloads, published_workloads

__all__ = [
    "SCHEMAS",
    "TABLE2",
    "TABLE2_ROWS",
    "TABLE2_SUMMARY",
    "FIG7",
    "FIG8",
    "TABLE4",
    "JCT",
    "ALLOCATION",
    "PERTURBED",
    "LOAD",
    "LARGE_MODELS",
    "ROUNDS",
    "STUDY",
    "SCALE",
    "FIG9",
    "FIG9_SUMMARY",
    "EXPERIMENT_TABLES",
    "SETTINGS",
    "LEDGER",
    "MORPHLING",
    "NAIVE",
    "SCHEDULERS",
    "STRATEGIES",
    "STUDIES",
    "WORKLOADS",
    "Draw",
    "OTHER_SEED",
    "SWITCHING",
    "Stage",
    "Table4",
    "compare_policies",
    "fig7",
    "fig8",
    "fig9",
    "fig9_summary",
    "fit_workload",
    "generated_workloads",
    "getting_started",
    "perturbed_arrivals",
    "published_workloads",
    "measured_fig7",
    "measured_table2",
    "published_loss_statistics",
    "read_published",
    "run_experiment",
    "scale_study",
    "seeded_lists",
    "sensitivity",
    "table2",
    "table2_results",
    "table2_rows",
    "table2_summary",
]

__getattr__ = shown_lazily(__name__, __file__)
