"""Train under every plan, under changing plans and with another seed: results/measured/morphling/fig9.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import (
    FIG9,
    FIG9_SUMMARY,
    OTHER_SEED,
    SWITCHING,
    fig9,
    fig9_summary,
    read_published,
)
from makespan.plans import ExecutionPlan
from makespan.runtime import local_launcher
from makespan.tables import write_result
from makespan.training import SmallModel, TrainingJob, cost_table, train_compared


def main(published: str, table: str, summary: str, experiment: Mapping[str, Any]) -> None:
    """Write the losses of all runs, and what sums them up beside the paper's curves."""
    given = dict(experiment)
    plans = {name: ExecutionPlan(**values) for name, values in given["plans"].items()}
    launcher = local_launcher(given["device"], max(plan.n_gpus for plan in plans.values()))
    first = TrainingJob(SmallModel(**given["model"]), next(iter(plans.values())), **given["options"])
    runs = train_compared(
        first, plans, given["switches"], given["other_seed"], (SWITCHING, OTHER_SEED), launcher=launcher
    )
    rows = fig9({name: [loss for part in parts for loss in part.losses] for name, parts in runs.items()})
    write_result(rows, table, FIG9)
    cells = read_published("fig9", published)
    write_result(fig9_summary(rows, cost_table(runs), cells), summary, FIG9_SUMMARY)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(snakemake.input.published, *snakemake.output, snakemake.params.experiment)
