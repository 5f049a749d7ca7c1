"""Measured iterations of small models beside what planning says of them."""

from collections.abc import Mapping
from statistics import median
from typing import Any

import pandas as pd

from makespan.leftovers import temporary_directory
from makespan.oobleck.planning import (
    HybridPlan,
    ModelProfile,
    Pipeline,
    distribute,
    enumerate_plans,
    event_time_s,
    make_templates,
)
from makespan.oobleck.runtime import ChainJob, FixedRun, profile_chain, run_fixed
from makespan.papers.oobleck._tables_execution import PREDICTIONS
from makespan.runtime import usable_cpus

__all__ = ["predictions_experiment"]

Options = Mapping[str, Any]


def predictions_experiment(cells: Mapping[str, pd.DataFrame], options: Options) -> dict[str, pd.DataFrame]:
    """Profile small models, plan them, train under the plans, and set both times side by side.

    Nothing else should run meanwhile.

    Parameters
    ----------
    cells
        Printed cells; none are read.
    options
        ``n_layers`` and ``n_microbatches``, both lists: layers between embedding and head, microbatches of an
        iteration; ``microbatch_size``; ``most_nodes``, all plans on up to so many; ``profile_repeats``, timed
        passes of a layer; ``iterations`` and ``warm_ups``, timed and not.

    Returns
    -------
    dict
        ``predictions``, a row a model, number of microbatches and plan.

    Raises
    ------
    makespan.errors.WorkerError
        A process failed.
    """
    rows = [row for n_layers in options["n_layers"] for row in _of_model(n_layers, options)]
    return {"predictions": PREDICTIONS.validate(pd.DataFrame(rows), "predictions")}


def _of_model(n_layers: int, options: Options) -> list[dict[str, Any]]:
    """Profile a model, and train it at once, while the machine is as it was."""
    jobs = [_job(n_layers, count, options) for count in options["n_microbatches"]]
    repeats, most_nodes = options["profile_repeats"], options["most_nodes"]
    profile = profile_chain(jobs[0], n_replicas=most_nodes, repeats=repeats)
    cases = [(job, plan) for job in jobs for plan in _plans(profile, job.n_microbatches, most_nodes)]
    rows = [_predicted(job, profile, plan) for job, plan in cases]
    runs = [FixedRun(job, plan, options["warm_ups"] + options["iterations"]) for job, plan in cases]
    with temporary_directory("predictions") as path:
        for row, seen in zip(rows, run_fixed(runs, path), strict=True):
            # The exchange of the loss ends an iteration everywhere at once.
            row["iter_wall_s"] = median(seen[0].iter_times_s[options["warm_ups"] :])
    return rows


def _job(n_layers: int, n_microbatches: int, options: Options) -> ChainJob:
    size = options["microbatch_size"]
    return ChainJob(model_options={"n_layers": n_layers}, n_microbatches=n_microbatches, microbatch_size=size)


def _plans(profile: ModelProfile, n_microbatches: int, most_nodes: int) -> list[HybridPlan]:
    """Return every plan on one node, two, and so on: its microbatches are those that planning chooses."""
    templates = make_templates(profile, range(1, most_nodes + 1))
    found = []
    for n_nodes in range(1, most_nodes + 1):
        for counts in enumerate_plans(sorted(templates), n_nodes, 0):
            used = [templates[size] for size, count in zip(sorted(templates), counts, strict=True)
                    for _ in range(count)]  # fmt: skip
            if (shares := distribute(used, n_microbatches)) is None:
                continue  # fewer microbatches than pipelines
            starts = [sum(one.n_nodes for one in used[:index]) for index in range(len(used))]
            found.append(HybridPlan(tuple(
                Pipeline(tuple(range(start, start + one.n_nodes)), one, share)
                for start, one, share in zip(starts, used, shares, strict=True)
            )))  # fmt: skip
    return found


def _predicted(job: ChainJob, profile: ModelProfile, plan: HybridPlan) -> dict[str, Any]:
    templates = [one.template for one in plan.pipelines]
    counts = [one.n_microbatches for one in plan.pipelines]
    n_cores = usable_cpus()
    work_s = job.n_microbatches * sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    predicted_s = event_time_s(templates, counts, profile)
    return {
        "n_layers": profile.n_layers, "n_microbatches": job.n_microbatches, "n_nodes": len(plan.nodes),
        "stages": "+".join("/".join(str(len(stage.layers)) for stage in one.stages) for one in templates),
        "microbatches": " ".join(map(str, counts)), "n_cores": n_cores,
        "predicted_iter_time_s": predicted_s,
        "predicted_cores_iter_time_s": max(predicted_s, work_s / n_cores),
    }  # fmt: skip
