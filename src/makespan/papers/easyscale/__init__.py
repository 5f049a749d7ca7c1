"""Experiments of EasyScale (SC 2023): elastic training with the same bits on any GPUs, and its scheduler.

`PAPER` has the options and the experiments: the scheduler on a job list, alone and beside serving
(`cluster`), bits and accuracy of real training (`accuracy`), and memory and time of logical workers, measured
on this machine (`overheads`). The system itself, trainer and planner, is `makespan.easyscale`.
"""

from makespan.papers.easyscale.accuracy import Fig9, Gap
from makespan.papers.easyscale.cluster import JobList, Serving, Simulation
from makespan.papers.easyscale.overheads import Copying, Levels, Overheads, Sharing, Switching
from makespan.papers.experiment import Paper
from makespan.settings import option
from makespan.traces import EASYSCALE_JOBS


class EasyScale(Paper):
    """Experiments of the EasyScale paper."""

    title = "EasyScale"
    EXPERIMENTS = (Fig9, Gap, Sharing, Switching, Levels, Copying, JobList, Simulation, Serving)
    judged_cells = ("fig10", "fig11", "fig12", "fig13")
    shared_schemas = {"jobs": EASYSCALE_JOBS}

    simulation: Simulation = option("cluster experiments", Simulation())
    serving: Serving = option("training beside online serving", Serving())
    fig9: Fig9 = option("bits of elastic training and of stock training", Fig9())
    gap: Gap = option("accuracy of elastic schemes by the number of devices", Gap())
    overheads: Overheads = option("memory and time of logical workers, measured here", Overheads())

    def published_datasets(self) -> tuple[str, ...]:
        """Return the name of the authors' job list."""
        return ("easyscale-workload",)


PAPER = EasyScale
