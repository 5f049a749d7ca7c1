"""Plans of templates: the published choice and ours, both priced by the simulated schedule."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from makespan.oobleck.planning import (
    BatchMode,
    Estimator,
    Instantiation,
    ModelProfile,
    PipelineTemplate,
    PlanChoice,
    Stage,
    choose_plan,
    distribute,
    enumerate_plans,
    event_time_s,
    least_time_by_program,
    make_templates,
    schedule_times_s,
)
from makespan.papers.oobleck._tables_planning import INSTANTIATION
from makespan.papers.oobleck._templates import artifact_profiles, joined

__all__ = ["instantiation_experiment"]

_WAYS: tuple[tuple[BatchMode, Estimator], ...] = (
    ("per_pipeline", "1f1b"),
    ("per_template", "compat"),
    ("per_template", "1f1b"),
    ("per_pipeline", "compat"),
)
"""Ours, which the others are compared with, the published one, and the two between them."""


def instantiation_experiment(
    cells: Mapping[str, pd.DataFrame], options: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """Choose plans in each way for made-up layers, and from printed times.

    Parameters
    ----------
    cells
        ``instantiation``: the plan that the artifact prints.
    options
        ``random_seeds, n_nodes, global_microbatches, f, n0, n_templates``, see the configuration.

    Returns
    -------
    dict
        ``instantiation``, one row a choice.
    """
    sizes = range(options["n0"], options["n0"] + options["n_templates"])
    rows: list[dict[str, Any]] = []
    for profile in artifact_profiles(options["random_seeds"]):
        templates = make_templates(profile, sizes)
        for n_nodes in options["n_nodes"]:
            for count in options["global_microbatches"]:
                rows += _choices(profile, templates, n_nodes, options, count)
    rows += _printed(cells["instantiation"], options["f"])
    return {"instantiation": INSTANTIATION.validate(pd.DataFrame(rows), where="instantiation")}


def _choices(
    profile: ModelProfile,
    templates: Mapping[int, PipelineTemplate],
    n_nodes: int,
    options: Mapping[str, Any],
    count: int,
) -> Iterator[dict[str, Any]]:
    ours_s = 0.0
    for mode, estimator in _WAYS:
        started = time.perf_counter()
        choice = choose_plan(templates, n_nodes, options["f"], count, mode, estimator, profile)
        wall_s = time.perf_counter() - started
        best = choice.best
        each_s = schedule_times_s(best.templates, best.n_microbatches, profile)
        iter_time_s = event_time_s(best.templates, best.n_microbatches, profile)
        ours_s = ours_s or iter_time_s
        yield {
            "profile": profile.name,
            "n_nodes": n_nodes,
            "f": options["f"],
            "n0": options["n0"],
            "n_templates": len(templates),
            **_row(choice, mode, estimator, each_s),
            "iter_time_s": iter_time_s,
            "optimal_iter_time_s": ours_s,
            "gap_pct": 100.0 * (iter_time_s / ours_s - 1.0),
            "wall_s": wall_s,
            "program_time_s": _by_program(best, profile) if (mode, estimator) == _WAYS[0] else math.nan,
        }


def _by_program(plan: Instantiation, profile: ModelProfile) -> float:
    """Return the time of a plan with the batches of an integer program [s]."""
    least_s = least_time_by_program(plan.templates, sum(plan.n_microbatches))
    return least_s + profile.sync_time_s(len(plan.templates))


def _row(
    choice: PlanChoice, mode: BatchMode, estimator: Estimator, each_s: Sequence[float]
) -> dict[str, Any]:
    best = choice.best
    return {
        "global_microbatches": sum(best.n_microbatches),
        "batch_mode": mode,
        "estimator": estimator,
        "counts": joined(f"{count}x{size}" for size, count in best.counts.items()),
        "microbatches": joined(best.n_microbatches),
        "pipeline_time_s": joined(each_s),
        "spread": 1.0 - min(each_s) / max(each_s),
        "estimated_time_s": best.iter_time_s,
        "n_plans": choice.n_plans,
        "n_infeasible": choice.n_infeasible,
    }


# --- printed times ----------------------------------------------------------------------------------


def _shown_s(templates: Sequence[PipelineTemplate], counts: Sequence[int]) -> list[float]:
    """Return times of pipelines as the artifact shows them [s]."""
    return [one.time_s / one.n_stages * count for one, count in zip(templates, counts, strict=True)]


def _printed(cells: pd.DataFrame, f: int) -> Iterator[dict[str, Any]]:
    """Yield the plan that is chosen from the printed times, and the best with a batch for each pipeline."""
    templates = {
        row["n_nodes"]: _template(row["n_nodes"], row["published_time_s"] / row["microbatches"])
        for row in cells.to_dict("records")
    }
    n_nodes = int((cells["n_nodes"] * cells["n_pipelines"]).sum())
    count = int((cells["n_pipelines"] * cells["microbatches"]).sum())
    started = time.perf_counter()
    choice = choose_plan(templates, n_nodes, f, count, "per_template", "compat")
    chosen_s = time.perf_counter() - started
    ours = _own_batches(templates, n_nodes, f, count)
    both: tuple[tuple[BatchMode, PlanChoice], ...]
    both = (("per_pipeline", PlanChoice(ours, (), choice.n_plans, 0)), ("per_template", choice))
    for mode, found in both:
        each_s = _shown_s(found.best.templates, found.best.n_microbatches)
        optimal_s = max(_shown_s(ours.templates, ours.n_microbatches))
        yield {
            "profile": "printed",
            "n_nodes": n_nodes,
            "f": f,
            "n0": min(templates),
            "n_templates": len(templates),
            **_row(found, mode, "compat", each_s),
            "iter_time_s": max(each_s),
            "optimal_iter_time_s": optimal_s,
            "gap_pct": 100.0 * (max(each_s) / optimal_s - 1.0),
            "wall_s": chosen_s,
            "program_time_s": math.nan,
        }


def _template(n_nodes: int, each_s: float) -> PipelineTemplate:
    """Return a template of which only the shown time of a microbatch is known."""
    stages = tuple(Stage(index, index + 1, 1, each_s) for index in range(n_nodes))
    return PipelineTemplate(n_nodes, 1, stages, each_s * n_nodes)


def _own_batches(
    templates: Mapping[int, PipelineTemplate], n_nodes: int, f: int, count: int
) -> Instantiation:
    """Return the plan with the least shown time where each pipeline has its own batch."""
    sizes = sorted(templates)
    found = []
    for counts in enumerate_plans(sizes, n_nodes, f):
        each = tuple(templates[size] for size, n in zip(sizes, counts, strict=True) for _ in range(n))
        batches = distribute(each, count, "per_pipeline", "compat")
        if batches is not None:
            found.append(Instantiation(each, batches, max(_shown_s(each, batches))))
    return min(found, key=lambda one: one.iter_time_s)
