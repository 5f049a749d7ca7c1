"""One package a paper: its experiments as functions from tables to tables, its figures and its claims.

A paper is a package here and one name in `PAPERS`. The face of the package shows ``SETTINGS``, its options
(`makespan.settings.PaperSettings`), ``SCHEMAS``, its tables, and ``LEDGER``, its statements with checks;
``figures.yaml`` lists its figures. One with verbs of its own shows ``COMMANDS`` too, a group of ``click`` in
its module ``_commands``. Beside the package stand ``rules/<paper>.smk``,
``workflow/scripts/<paper>_*.py``, ``config/papers/<paper>.yaml``, ``config/published/<paper>_*.csv`` and
``docs/papers/<paper>.md``.
"""

from makespan.papers.figure import (
    FigureEntry as FigureEntry,
    figures as figures,
)

PAPERS: tuple[str, ...] = ("morphling", "easyscale", "oobleck", "slapo")
"""Every paper, by the name of its package."""
