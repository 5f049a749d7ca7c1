"""Experiments of Slapo (ASPLOS 2024): a schedule language for the training of large models, and its tuner.

`PAPER` holds the options and the experiments: searches of the printed grid and of synthetic ones (`tuning`),
Figs 7 to 9 from a hardware model and from the emulator (`throughput`, `performance`), and measurements of
schedules on this machine (`measured`, `table4`). The schedule language and the tuner are `makespan.slapo`.
"""

from makespan.papers.experiment import Paper
from makespan.papers.slapo.measured import Fig9Steps, TunerRun, Verification
from makespan.papers.slapo.table4 import Table4
from makespan.papers.slapo.throughput import Inequalities, Modelled
from makespan.papers.slapo.tuning import Fig10, SyntheticGrids, Tuning
from makespan.settings import option


class Slapo(Paper):
    """Experiments of the Slapo paper."""

    title = "Slapo"
    EXPERIMENTS = (Modelled, Tuning, Inequalities, Verification, Table4, Fig9Steps, TunerRun)
    self_contained = frozenset({"published"})
    judged_cells = ("limits",)

    fig10: Fig10 = option("searches of the tuning grid", Fig10())
    fig9_steps: Fig9Steps = option("steps of a schedule of a small BERT", Fig9Steps())
    fig10_grids: SyntheticGrids = option("searches of synthetic grids", SyntheticGrids())
    tuner: TunerRun = option("search whose objective is a run of a small OPT", TunerRun())
    verify: Verification = option("verification of all schedules", Verification())


PAPER = Slapo
