"""Train under every plan, under changing plans and with another seed: results/measured/morphling/fig9.csv."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import OTHER_SEED, SWITCHING, fig9, fig9_summary, read_published
from makespan.plans import ExecutionPlan
from makespan.tables import FIG9, FIG9_SUMMARY, write_csv
from makespan.training import (
    SmallModel,
    TrainingJob,
    cost_table,
    local_launcher,
    those_that_fit,
    train_grouped,
    train_switching,
)  # fmt: skip


def main(
    published: str, table: str, summary: str, model: Mapping[str, Any], plans: Mapping[str, Any],
    switches: Sequence[tuple[int, str]], options: Mapping[str, Any], other_seed: int, device: str,
) -> None:  # fmt: skip
    """Write the losses of all runs, and what sums them up beside the paper's curves."""
    named = {name: ExecutionPlan(**values) for name, values in plans.items()}
    launcher = local_launcher(device, max(plan.n_gpus for plan in named.values()))
    named = those_that_fit(named, launcher)
    first = TrainingJob(SmallModel(**model), next(iter(named.values())), **options)
    jobs = {name: replace(first, plan=plan) for name, plan in named.items()}
    results = train_grouped(jobs | {OTHER_SEED: replace(first, seed=other_seed)}, launcher=launcher)
    changes = [(step, named[name]) for step, name in switches if name in named]
    runs = {name: (result,) for name, result in results.items()}
    runs[SWITCHING] = train_switching(first, changes, launcher=launcher)
    rows = fig9({name: [loss for part in parts for loss in part.losses] for name, parts in runs.items()})
    write_csv(rows, table, FIG9)
    cells = read_published("fig9", published)
    write_csv(fig9_summary(rows, cost_table(runs), cells), summary, FIG9_SUMMARY)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(snakemake.input.published, *snakemake.output, **snakemake.params.experiment)
