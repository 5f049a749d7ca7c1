"""Throughput from emulated times of layers, beside what the artifact has for its nodes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from makespan.hardware import cluster
from makespan.oobleck.planning import (
    MemoryLimit,
    TemplateSet,
    choose_plan,
    covering_templates,
    layer_times,
    microbatches,
    paper_model,
    pipeline_workload,
    smallest_node_count,
)
from makespan.papers.oobleck._tables_planning import LAYER_THROUGHPUT
from makespan.papers.oobleck._templates import joined

__all__ = ["layer_throughput_experiment"]

_SETS: tuple[TemplateSet, ...] = ("full", "minimal")


def layer_throughput_experiment(
    cells: Mapping[str, pd.DataFrame], options: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """Plan every model on every number of nodes from emulated times of its layers.

    Parameters
    ----------
    cells
        ``throughput``: the printed throughput.
    options
        ``cluster, f, least_nodes, most_nodes, state_factor, micro_batch_sizes``, see the configuration, and
        ``samples_per_step`` by model.

    Returns
    -------
    dict
        ``layer_throughput``, of the numbers of nodes that can hold the model f + 1 times.
    """
    printed = cells["throughput"]
    own = printed[printed["system"] == "oobleck"].set_index(["model", "n_nodes"])["published_samples_per_s"]
    rows = [row for model in options["micro_batch_sizes"] for row in _rows(model, options)]
    table = pd.DataFrame(rows)
    keys = zip(table["model"], table["n_nodes"], strict=True)
    found = pd.Series([own.get(key, float("nan")) for key in keys], dtype=float)
    table["published_samples_per_s"] = found.where(found > 0)
    table["ratio"] = table["throughput_samples_per_s"] / table["published_samples_per_s"]
    return {"layer_throughput": LAYER_THROUGHPUT.validate(table, where="layer_throughput")}


def _rows(model: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = cluster(options["cluster"])
    node = replace(place.node, n_gpus=1)
    batch, size = options["samples_per_step"][model], options["micro_batch_sizes"][model]
    count = microbatches(batch, size)
    profile = layer_times(pipeline_workload(paper_model(model), batch), node, place.network, size)
    memory = MemoryLimit(node.gpu.usable_bytes, options["state_factor"])
    n0 = smallest_node_count(profile, memory, options["most_nodes"])
    full, few = (
        covering_templates(profile, options["most_nodes"], options["f"], n0, 1, template_set, memory=memory)
        for template_set in _SETS
    )
    for n_nodes in range(options["most_nodes"], options["least_nodes"] - 1, -1):
        if n_nodes < (options["f"] + 1) * n0:
            return
        best, least = (
            choose_plan(templates, n_nodes, options["f"], count, profile=profile).best
            for templates in (full, few)
        )
        yield {
            "model": model,
            "n_nodes": n_nodes,
            "f": options["f"],
            "n0": n0,
            "counts": joined(f"{n}x{nodes}" for nodes, n in best.counts.items()),
            "iter_time_s": best.iter_time_s,
            "throughput_samples_per_s": batch / best.iter_time_s,
            "n_templates": len(full),
            "least_templates": len(few),
            "lost_pct": 100.0 * (1.0 - best.iter_time_s / least.iter_time_s),
        }
