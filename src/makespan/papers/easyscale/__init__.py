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

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.easyscale._checks import LEDGER
    from makespan.papers.easyscale._cluster import cluster_experiments
    from makespan.papers.easyscale._fig9 import fig9_experiment
    from makespan.papers.easyscale._gap import gap_experiment
    from makespan.papers.easyscale._generated import generated_jobs
    from makespan.papers.easyscale._jobs import ClusterJobs, cluster_jobs, pooled, published_jobs
    from makespan.papers.easyscale._overheads import measure_overheads
    from makespan.papers.easyscale._profile import Profile, published_profile
    from makespan.papers.easyscale._serving import serving_experiment
    from makespan.papers.easyscale._settings import EasyScale as SETTINGS
    from makespan.papers.easyscale._tables import SCHEMAS, read_published

__all__ = [
    "LEDGER",
    "SCHEMAS",
    "SETTINGS",
    "ClusterJobs",
    "Profile",
    "cluster_experiments",
    "cluster_jobs",
    "fig9_experiment",
    "gap_experiment",
    "generated_jobs",
    "measure_overheads",
    "pooled",
    "published_jobs",
    "published_profile",
    "read_published",
    "serving_experiment",
]

__getattr__ = shown_lazily(__name__, __file__)
