"""Which templates are needed at least, and what it costs to have only these."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from makespan.oobleck.planning import (
    ModelProfile,
    PipelineTemplate,
    TemplateSet,
    check_guarantee,
    choose_plan,
    least_template_count,
    make_templates,
    template_sizes,
)
from makespan.papers.oobleck._templates import artifact_profiles

__all__ = ["guarantee_map", "template_sets"]

_Row = dict[str, Any]


def guarantee_map(options: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield the least number of template sizes for every n0 and f, counted and by the formula.

    Parameters
    ----------
    options
        ``most_n0, most_f, most_nodes``, see the configuration.
    """
    for n0 in range(1, options["most_n0"] + 1):
        for f in range(options["most_f"] + 1):
            found = {
                "least_templates": _least(n0, f, options["most_nodes"]),
                "formula_templates": least_template_count(n0, f),
                "full_templates": options["most_nodes"] - (f + 1) * n0 + 1,
            }
            for quantity, value in found.items():
                yield {"study": "guarantee", "case": f"n0={n0} f={f}", "quantity": quantity, "value": value}


def _least(n0: int, f: int, n_nodes: int) -> int:
    """Return the least number of consecutive sizes that leaves no hole up to so many nodes, by trial."""
    count = 1
    while check_guarantee(range(n0, n0 + count), n0, f, n_nodes) is not None:
        count += 1
    return count


def template_sets(options: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield how much throughput is lost with as few templates as are needed, while nodes are lost one by one.

    Parameters
    ----------
    options
        ``compared_nodes, compared_microbatches, random_seeds, f, n0``, see the configuration.
    """
    for f in options["f"]:
        for n0 in options["n0"]:
            found: dict[str, list[float]] = {}
            for profile in artifact_profiles(options["random_seeds"]):
                for quantity, values in _compared(profile, f, n0, options).items():
                    found.setdefault(quantity, []).extend(values)
            case = f"n0={n0} f={f}"
            lost = found["lost_pct"]
            summary = {
                "mean_lost_pct": sum(lost) / len(lost),
                "most_lost_pct": max(lost),
                "full_templates": max(found["full_templates"]),
                "minimal_templates": max(found["minimal_templates"]),
                "full_wall_s": sum(found["full_wall_s"]) / len(found["full_wall_s"]),
                "minimal_wall_s": sum(found["minimal_wall_s"]) / len(found["minimal_wall_s"]),
            }
            for quantity, value in summary.items():
                yield {"study": "template sets", "case": case, "quantity": quantity, "value": value}


def _compared(profile: ModelProfile, f: int, n0: int, options: Mapping[str, Any]) -> dict[str, list[float]]:
    full, full_s = _timed(profile, f, n0, options["compared_nodes"], "full")
    minimal, minimal_s = _timed(profile, f, n0, options["compared_nodes"], "minimal")
    lost = []
    for n_nodes in range((f + 1) * n0, options["compared_nodes"] + 1):
        best, least = (
            choose_plan(one, n_nodes, f, options["compared_microbatches"], profile=profile).best.iter_time_s
            for one in (full, minimal)
        )
        lost.append(100.0 * (1.0 - best / least))
    return {
        "lost_pct": lost,
        "full_templates": [float(len(full))],
        "minimal_templates": [float(len(minimal))],
        "full_wall_s": [full_s],
        "minimal_wall_s": [minimal_s],
    }


def _timed(
    profile: ModelProfile, f: int, n0: int, n_nodes: int, template_set: TemplateSet
) -> tuple[dict[int, PipelineTemplate], float]:
    started = time.perf_counter()
    sizes = template_sizes(n0, f, n_nodes, template_set, most_possible=profile.n_layers)
    return make_templates(profile, sizes), time.perf_counter() - started
