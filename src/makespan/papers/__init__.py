"""Papers: their experiments, figures and statements, one package per paper.

A paper is a package here and one name in `PAPERS`. The package has ``PAPER``, a subclass of
`makespan.papers.experiment.Paper` with its options and experiments, ``tables.csv``, the columns of its
tables, ``claims.csv``, its statements, and a module ``checks`` with the functions that decide them. Beside it
stand ``config/published/<paper>_*.csv``, the values that the paper prints, and ``docs/papers/<paper>.md``.
"""

from makespan.papers.experiment import Figure as Figure, paper_named as paper_named

PAPERS: tuple[str, ...] = ("morphling", "easyscale", "oobleck", "slapo")
"""Every paper, by the name of its package."""
