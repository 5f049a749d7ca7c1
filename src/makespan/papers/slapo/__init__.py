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

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.papers.slapo.checks import LEDGER as LEDGER
    from makespan.papers.slapo.measured import (
        fig9_steps_experiment as fig9_steps_experiment,
        tuner_experiment as tuner_experiment,
        verify_experiment as verify_experiment,
        verify_schedules as verify_schedules,
    )
    from makespan.papers.slapo.settings import Slapo as SETTINGS
    from makespan.papers.slapo.table4 import table4_experiment as table4_experiment
    from makespan.papers.slapo.tables import (
        SCHEMAS as SCHEMAS,
        read_published as read_published,
    )
    from makespan.papers.slapo.throughput import (
        inequalities_experiment as inequalities_experiment,
        modelled_experiment as modelled_experiment,
    )
    from makespan.papers.slapo.tuning import tuning_experiment as tuning_experiment


__getattr__ = lazy_exports(__name__, __file__)
