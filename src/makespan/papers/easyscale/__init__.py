"""Experiments of EasyScale (SC 2023): elastic training with the same bits on any GPUs, and its scheduler.

Below ``results/<source>/easyscale/`` a run writes

- of `generated_jobs` or `published_jobs`: ``jobs.csv``
- of `cluster_experiments`: ``fig14.csv``, ``fig14_jobs.csv``, ``fig15.csv`` and ``sensitivity.csv``
- of `serving_experiment`: ``serving.csv`` and ``serving_rounds.csv``
- of `fig9_experiment` and `gap_experiment`, which train: ``fig9.csv``, ``fig9_summary.csv``, ``gap.csv``,
  ``gap_spread.csv`` and ``gap_curves.csv``
- of `measure_overheads`: ``fig10.csv`` to ``fig13.csv``, of real training
- of `LEDGER`, by `makespan.claims.judge`: ``claims.csv``

`cluster_jobs` prepares a job list for the simulator, with times of `published_profile` on the cluster of
`pooled`. `read_published` reads the paper's cells, ``config/published/easyscale_<artifact>.csv``. The system
itself, trainer and planner, is `makespan.easyscale`.
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.papers.easyscale.accuracy import (
        fig9_experiment as fig9_experiment,
        gap_experiment as gap_experiment,
    )
    from makespan.papers.easyscale.checks import LEDGER as LEDGER
    from makespan.papers.easyscale.cluster import (
        ClusterJobs as ClusterJobs,
        Profile as Profile,
        cluster_experiments as cluster_experiments,
        cluster_jobs as cluster_jobs,
        generated_jobs as generated_jobs,
        pooled as pooled,
        published_jobs as published_jobs,
        published_profile as published_profile,
        serving_experiment as serving_experiment,
    )
    from makespan.papers.easyscale.overheads import measure_overheads as measure_overheads
    from makespan.papers.easyscale.settings import EasyScale as SETTINGS
    from makespan.papers.easyscale.tables import (
        SCHEMAS as SCHEMAS,
        read_published as read_published,
    )


__getattr__ = lazy_exports(__name__, __file__)
