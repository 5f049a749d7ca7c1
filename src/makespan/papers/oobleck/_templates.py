"""Templates of made-up layers: what both searches find, and how long they take."""

import time
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pandas as pd

from makespan.oobleck.planning import (
    LayerProfile,
    ModelProfile,
    PipelineTemplate,
    TemplateSearch,
    random32,
    template_sizes,
    uniform24,
)
from makespan.papers.oobleck._tables_planning import TEMPLATES
from makespan.units import MS

__all__ = ["artifact_profiles", "joined", "template_experiment"]

_FORWARD_MS, _BACKWARD_MS = 0.05, 0.10  # of each layer of the artifact's uniform profile
_STEEPEST = 4.0  # the last of skewed layers over the first

_Found = tuple[PipelineTemplate, float]


def artifact_profiles(n_seeds: int) -> list[ModelProfile]:
    """Return the profiles of the artifact's tests: equal layers, and random ones of so many seeds."""
    return [uniform24(), *(random32(seed) for seed in range(n_seeds))]


def _scaled_profiles(n_layers: int) -> tuple[ModelProfile, ModelProfile]:
    """Return equal layers, and layers that grow evenly with a head as long as four of them behind."""
    growth = [1.0 + (_STEEPEST - 1.0) * index / max(n_layers - 1, 1) for index in range(n_layers)]
    growth[-1] *= _STEEPEST
    weights = {"uniform": [1.0] * n_layers, "skewed": growth}
    equal, skewed = (
        ModelProfile(
            f"{name}{n_layers}",
            tuple(LayerProfile(one * _FORWARD_MS * MS, one * _BACKWARD_MS * MS) for one in values),
        )
        for name, values in weights.items()
    )
    return equal, skewed


def joined(values: Any) -> str:
    """Return a list as text."""
    return " ".join(f"{value:.9g}" if isinstance(value, float) else str(value) for value in values)


def template_experiment(
    cells: Mapping[str, pd.DataFrame], options: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """Search templates by both ways, one GPU a node.

    Parameters
    ----------
    cells
        Printed cells, none of which is read.
    options
        ``random_seeds, n_nodes, f, n0, scaled_layers``, see the configuration.

    Returns
    -------
    dict
        ``templates``. Sizes go up to ``n_nodes - f``, as in the artifact, which is more than a job needs;
        further models are searched by the exact way alone.
    """
    thresholds, least = list(options["f"]), list(options["n0"])
    sizes = range(min(least), options["n_nodes"] - min(thresholds) + 1)
    rows: list[dict[str, Any]] = []
    for profile in artifact_profiles(options["random_seeds"]):
        for mode in ("exact", "dc"):
            found = _timed(profile, sizes, mode)
            for f, n0 in product(thresholds, least):
                rows += _rows(profile.name, f, n0, mode, found, options["n_nodes"])
    known = {str(row["profile"]) for row in rows}
    for n_layers in options["scaled_layers"]:
        for profile in _scaled_profiles(n_layers):
            if profile.name not in known:
                found = _timed(profile, sizes, "exact")
                rows += _rows(profile.name, thresholds[0], least[0], "exact", found, options["n_nodes"])
    return {"templates": TEMPLATES.validate(pd.DataFrame(rows), where="templates")}


def _timed(profile: ModelProfile, sizes: range, mode: Any) -> dict[int, _Found]:
    search = TemplateSearch(profile, mode=mode)
    found = {}
    for n_nodes in sizes:
        started = time.perf_counter()
        template = search.template(n_nodes)
        if template is not None:
            found[n_nodes] = template, time.perf_counter() - started
    return found


def _rows(
    name: str, f: int, n0: int, mode: str, found: Mapping[int, _Found], n_nodes: int
) -> Iterator[dict[str, Any]]:
    needed = template_sizes(n0, f, n_nodes)
    for size in template_sizes(n0, f, n_nodes, largest=n_nodes - f):
        if size not in found:
            continue
        template, wall_s = found[size]
        latencies = [stage.latency_s for stage in template.stages]
        yield {
            "profile": name,
            "f": f,
            "n0": n0,
            "n_nodes": size,
            "gpus_per_node": template.gpus_per_node,
            "mode": mode,
            "n_stages": template.n_stages,
            "layers_per_stage": joined(len(stage.layers) for stage in template.stages),
            "stage_latency_s": joined(latencies),
            "iter_time_s": template.time_s,
            "imbalance": template.imbalance,
            "wall_s": wall_s,
            "is_needed": size in needed,
        }
