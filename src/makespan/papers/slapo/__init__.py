"""Experiments of Slapo (ASPLOS 2024): a schedule language for the training of large models, and its tuner.

Below ``results/<source>/slapo/`` a run writes

- of `tuning_experiment`: ``fig10.csv``, ``fig10_searches.csv``, ``fig10_fit.csv`` and ``fig10_grids.csv``,
  the tuner on the paper's own grid and on others, and predictions of that grid
- of `modelled_experiment`: ``fig7.csv``, ``fig8.csv`` and ``fig9.csv``, by a small model of the paper's
  machine and by the emulator
- of `inequalities_experiment`: ``inequalities.csv``, what the conclusions of these figures depend on
- of `verify_experiment`: ``verify.csv``, every schedule of the library beside its model as it is
- of `table4_experiment`: ``table4.csv``, lines of the schedules, beside the paper's
- of `fig9_steps_experiment`: ``fig9.csv``, steps of a schedule measured on CPU cores
- of `tuner_experiment`: ``tuner.csv``, a search whose objective is a run
- of `LEDGER`, by `makespan.claims.judge`: ``claims.csv``

`read_published` reads the paper's cells, ``config/published/slapo_<artifact>.csv``. The schedule language and
the tuner are `makespan.slapo`.
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.slapo._checks import LEDGER
    from makespan.papers.slapo._fig10_fit import tuning_experiment
    from makespan.papers.slapo._inequalities import inequalities_experiment
    from makespan.papers.slapo._measured import fig9_steps_experiment, tuner_experiment
    from makespan.papers.slapo._modelled import modelled_experiment
    from makespan.papers.slapo._settings import Slapo as SETTINGS
    from makespan.papers.slapo._table4 import table4_experiment
    from makespan.papers.slapo._tables import SCHEMAS, read_published
    from makespan.papers.slapo._verification import verify_experiment, verify_schedules

__all__ = [
    "LEDGER",
    "SCHEMAS",
    "SETTINGS",
    "fig9_steps_experiment",
    "inequalities_experiment",
    "modelled_experiment",
    "read_published",
    "table4_experiment",
    "tuner_experiment",
    "tuning_experiment",
    "verify_experiment",
    "verify_schedules",
]

__getattr__ = shown_lazily(__name__, __file__)
