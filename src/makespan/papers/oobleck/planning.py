"""Templates of made-up layers: what both searches find, and how long they take."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from makespan.hardware import cluster
from makespan.oobleck.instantiation import (
    BatchMode,
    Estimator,
    Instantiation,
    PlanChoice,
    choose_plan,
    distribute,
    enumerate_plans,
    event_time_s,
    least_time_by_program,
    microbatches,
    schedule_times_s,
)
from makespan.oobleck.plan import PipelineTemplate, Stage
from makespan.oobleck.profile import (
    LayerProfile,
    ModelProfile,
    layer_times,
    paper_model,
    pipeline_workload,
    random32,
    uniform24,
)
from makespan.oobleck.templates import (
    MemoryLimit,
    TemplateSearch,
    TemplateSet,
    covering_templates,
    make_templates,
    smallest_node_count,
    template_sizes,
)
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.papers.oobleck.simulation import Model
from makespan.settings import Count, option, shared
from makespan.units import MS

# ------------------------------------------------------------------------------------------------
# Templates of made-up layers: what both searches find, and how long they take.

_templates = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="templates")
_instantiation = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="instantiation")
_throughput = partial(option, source="a choice", changes="layer_throughput")
Threshold = Annotated[int, Field(ge=0)]

_FORWARD_MS, _BACKWARD_MS = 0.05, 0.10  # of each layer of the artifact's uniform profile
_STEEPEST = 4.0  # the last of skewed layers over the first
_Found = tuple[PipelineTemplate, float]


def artifact_profiles(n_seeds: int) -> list[ModelProfile]:
    """Return the profiles of the artifact's tests: equal layers, and random ones of so many seeds."""
    return [uniform24(), *(random32(seed) for seed in range(n_seeds))]


def joined(values: Any) -> str:
    """Return values as text, separated by spaces."""
    return " ".join(f"{value:.9g}" if isinstance(value, float) else str(value) for value in values)


class Templates(Experiment):
    """Search templates of made-up layers in both ways, one GPU per node.

    Sizes go up to ``n_nodes - f``, as in the artifact, which is more than a job needs; further models are
    searched in the exact way alone.
    """

    name = "templates"
    sources = ("emulated",)
    tables = {
        "templates": "pipeline templates of made-up layers, by the exact and the published search",
    }
    figures = (
        Figure(
            "templates",
            "Templates",
            "Templates of layers that are random ({profiles: config "
            "oobleck.planning.templates.random_seeds}, mean and range) and equal: "
            "time of the slowest stage over the mean of all stages. Right: time "
            "of one search for a template per point, for layers that grow from "
            "first to last, and of the published search on random layers, which "
            "reuses results for fewer nodes. The layers are generated, so no "
            "source of iteration times plays a part.",
            tables=("templates",),
        ),
    )

    random_seeds: Count = _templates("profiles of random layers, seeds from 0", 10)
    n_nodes: Count = _templates("nodes of the job", 13)
    f: tuple[Threshold, ...] = _templates("nodes that may be lost at once", (1, 3), min_length=1)
    n0: tuple[Count, ...] = _templates("least nodes that hold the model", (2, 3), min_length=1)
    scaled_layers: tuple[Count, ...] = option(
        "further models, of equal and of skewed layers, for the time of the search", (24, 32, 64, 96),
        source="a choice", changes="templates",
    )  # fmt: skip

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per profile, threshold and size."""
        sizes = range(min(self.n0), self.n_nodes - min(self.f) + 1)
        rows: list[dict[str, Any]] = []
        for profile in artifact_profiles(self.random_seeds):
            for mode in ("exact", "dc"):
                searched = _timed(profile, sizes, mode)
                for f, n0 in product(self.f, self.n0):
                    rows += _template_rows(profile.name, f, n0, mode, searched, self.n_nodes)
        known = {str(row["profile"]) for row in rows}
        for n_layers in self.scaled_layers:
            # Equal layers, and layers that grow evenly, with a head at the end as long as four of the last.
            growth = [1.0 + (_STEEPEST - 1.0) * index / max(n_layers - 1, 1) for index in range(n_layers)]
            growth[-1] *= _STEEPEST
            for name, weights in (("uniform", [1.0] * n_layers), ("skewed", growth)):
                layers = (LayerProfile(size * _FORWARD_MS * MS, size * _BACKWARD_MS * MS) for size in weights)
                profile = ModelProfile(f"{name}{n_layers}", tuple(layers))
                if profile.name not in known:
                    searched = _timed(profile, sizes, "exact")
                    rows += _template_rows(
                        profile.name, self.f[0], self.n0[0], "exact", searched, self.n_nodes
                    )
        return {"templates": pd.DataFrame(rows)}


def _timed(profile: ModelProfile, sizes: range, mode: Any) -> dict[int, _Found]:
    """Search a template of each size that there is, with the time that the search took [s]."""
    search = TemplateSearch(profile, mode=mode)
    found = {}
    for n_nodes in sizes:
        started = time.perf_counter()
        template = search.template(n_nodes)
        if template is not None:
            found[n_nodes] = template, time.perf_counter() - started
    return found


def _template_rows(
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


# ------------------------------------------------------------------------------------------------
# Plans of templates: the published choice and ours, both priced by the simulated schedule.

_WAYS: tuple[tuple[BatchMode, Estimator], ...] = (
    ("per_pipeline", "1f1b"),
    ("per_template", "compat"),
    ("per_template", "1f1b"),
    ("per_pipeline", "compat"),
)
"""Ours, which the others are compared with, the published one, and the two between them."""


class Instantiations(Experiment):
    """Choose plans in each way for made-up layers, and from printed times."""

    name = "instantiation"
    sources = ("emulated",)
    cells = ("instantiation",)
    tables = {
        "instantiation": "plans of templates, chosen as published and by us, by the simulated schedule",
    }
    figures = (
        Figure(
            "instantiation",
            "Plans",
            "Time of every pipeline under the published choice and under ours: of "
            "the templates that the artifact prints, in its own measure, and of "
            "random layers on {nodes: largest instantiation.n_nodes} with "
            "{microbatches: largest instantiation.global_microbatches} by the simulated "
            "schedule, one plan each. A line over the dots of its pipelines is an "
            "iteration, with its time. The vertical axes do not start at 0. "
            "No source of iteration times plays a part.",
            tables=("instantiation",),
        ),
    )

    n_nodes: tuple[Count, ...] = _instantiation("nodes to use", (13, 16, 21), min_length=1)
    global_microbatches: tuple[Count, ...] = _instantiation(
        "microbatches of an iteration", (512, 4096), min_length=1
    )
    f: Threshold = _instantiation("nodes that may be lost at once", 3)
    n0: Count = _instantiation("nodes of the smallest template", 3)
    n_templates: Count = _instantiation("templates, each with a node more", 7)
    random_seeds: int = shared("oobleck.planning.templates.random_seeds")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per choice."""
        sizes = range(self.n0, self.n0 + self.n_templates)
        rows: list[dict[str, Any]] = []
        for profile in artifact_profiles(self.random_seeds):
            templates = make_templates(profile, sizes)
            for n_nodes in self.n_nodes:
                for n_microbatches in self.global_microbatches:
                    rows += _choices(profile, templates, n_nodes, self.f, self.n0, n_microbatches)
        rows += _printed(given.cells["instantiation"], self.f)
        return {"instantiation": pd.DataFrame(rows)}


def _choices(
    profile: ModelProfile,
    templates: Mapping[int, PipelineTemplate],
    n_nodes: int,
    f: int,
    n0: int,
    n_microbatches: int,
) -> Iterator[dict[str, Any]]:
    """Yield the plan of each way to choose one, priced by the simulated schedule and beside ours."""
    ours_s = 0.0
    for mode, estimator in _WAYS:
        started = time.perf_counter()
        choice = choose_plan(templates, n_nodes, f, n_microbatches, mode, estimator, profile)
        wall_s = time.perf_counter() - started
        best = choice.best
        each_s = schedule_times_s(best.templates, best.n_microbatches, profile)
        iter_time_s = event_time_s(best.templates, best.n_microbatches, profile)
        ours_s = ours_s or iter_time_s
        program_s = math.nan
        if (mode, estimator) == _WAYS[0]:
            # Time of the same plan with the batches of an integer program.
            least_s = least_time_by_program(best.templates, sum(best.n_microbatches))
            program_s = least_s + profile.sync_time_s(len(best.templates))
        yield {
            "profile": profile.name,
            "n_nodes": n_nodes,
            "f": f,
            "n0": n0,
            "n_templates": len(templates),
            **_row(choice, mode, estimator, each_s),
            "iter_time_s": iter_time_s,
            "optimal_iter_time_s": ours_s,
            "gap_pct": 100.0 * (iter_time_s / ours_s - 1.0),
            "wall_s": wall_s,
            "program_time_s": program_s,
        }


def _row(
    choice: PlanChoice, mode: BatchMode, estimator: Estimator, each_s: Sequence[float]
) -> dict[str, Any]:
    """Return the columns of a chosen plan, with the time of each of its pipelines [s]."""
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
    return [
        template.time_s / template.n_stages * count for template, count in zip(templates, counts, strict=True)
    ]


def _printed(cells: pd.DataFrame, f: int) -> Iterator[dict[str, Any]]:
    """Yield the plan that is chosen from the printed times, and the best with a batch for each pipeline."""
    templates = {}
    for row in cells.to_dict("records"):
        # Only the shown time of a microbatch is known of a template.
        size, each_s = row["n_nodes"], row["published_time_s"] / row["microbatches"]
        stages = tuple(Stage(index, index + 1, 1, each_s) for index in range(size))
        templates[size] = PipelineTemplate(size, 1, stages, each_s * size)
    n_nodes = int((cells["n_nodes"] * cells["n_pipelines"]).sum())
    n_microbatches = int((cells["n_pipelines"] * cells["microbatches"]).sum())
    started = time.perf_counter()
    published = choose_plan(templates, n_nodes, f, n_microbatches, "per_template", "compat")
    wall_s = time.perf_counter() - started
    # The least shown time where each pipeline has its own batch.
    sizes, plans = sorted(templates), []
    for counts in enumerate_plans(sizes, n_nodes, f):
        pipelines = tuple(templates[size] for size, n in zip(sizes, counts, strict=True) for _ in range(n))
        batches = distribute(pipelines, n_microbatches, "per_pipeline", "compat")
        if batches is not None:
            plans.append(Instantiation(pipelines, batches, max(_shown_s(pipelines, batches))))
    ours = min(plans, key=lambda plan: plan.iter_time_s)
    both: tuple[tuple[BatchMode, PlanChoice], ...]
    both = (("per_pipeline", PlanChoice(ours, (), published.n_plans, 0)), ("per_template", published))
    for mode, choice in both:
        each_s = _shown_s(choice.best.templates, choice.best.n_microbatches)
        optimal_s = max(_shown_s(ours.templates, ours.n_microbatches))
        yield {
            "profile": "printed",
            "n_nodes": n_nodes,
            "f": f,
            "n0": min(templates),
            "n_templates": len(templates),
            **_row(choice, mode, "compat", each_s),
            "iter_time_s": max(each_s),
            "optimal_iter_time_s": optimal_s,
            "gap_pct": 100.0 * (max(each_s) / optimal_s - 1.0),
            "wall_s": wall_s,
            "program_time_s": math.nan,
        }


# ------------------------------------------------------------------------------------------------
# Throughput from emulated times of layers, beside what the artifact has for its nodes.

_SETS: tuple[TemplateSet, ...] = ("full", "minimal")


class LayerThroughput(Experiment):
    """Plan every model on every number of nodes from emulated layer times, next to the artifact's throughput.

    Rows stop at the numbers of nodes that cannot hold the model f + 1 times.
    """

    name = "layer_throughput"
    sources = ("emulated",)
    cells = ("throughput",)
    unjudged = frozenset({"layer_throughput"})
    tables = {
        "layer_throughput": "throughput from emulated times of layers beside the artifact's",
    }
    figures = (
        Figure(
            "layer_throughput",
            "Throughput from times of layers",
            "Throughput of the best plan from emulated times of layers on nodes "
            "of one A40, without transfers between stages; computed once, without "
            "randomness. Hollow diamonds are the constants of the artifact; the "
            "simulations here use these, and not the emulated times.",
            tables=("layer_throughput",),
        ),
    )

    cluster: str = _throughput(
        "cluster of the catalogue whose node, with one GPU, and network are taken", "a40-32"
    )
    f: Threshold = _throughput("nodes that may be lost at once", 1)
    least_nodes: Count = _throughput("nodes, from", 15)
    most_nodes: Count = _throughput("nodes, up to", 30)
    state_factor: float = _throughput("bytes held for each byte of a 16-bit weight", 8.0, gt=0)
    micro_batch_sizes: dict[str, Count] = _throughput(
        "samples of a microbatch, by model: divisors of the batch that leave room for activations",
        {"BERT-Large": 32, "GPT-2": 8, "GPT-3 Medium": 3, "GPT-3 2.7B": 1, "GPT-3 6.7B": 1},
    )
    models: tuple[Model, ...] = shared("oobleck.simulation.models")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per model and number of nodes."""
        cells = given.cells["throughput"]
        of_oobleck = cells[cells["system"] == "oobleck"].set_index(["model", "n_nodes"])
        known = of_oobleck["published_samples_per_s"]
        batches = {model.name: model.samples_per_step for model in self.models}
        rows = [
            row for model in self.micro_batch_sizes for row in _throughput_rows(model, batches[model], self)
        ]
        table = pd.DataFrame(rows)
        keys = zip(table["model"], table["n_nodes"], strict=True)
        printed = pd.Series([known.get(key, float("nan")) for key in keys], dtype=float)
        table["published_samples_per_s"] = printed.where(printed > 0)
        table["ratio"] = table["throughput_samples_per_s"] / table["published_samples_per_s"]
        return {"layer_throughput": table}


def _throughput_rows(model: str, batch: int, options: LayerThroughput) -> Iterator[dict[str, Any]]:
    """Yield the best plan of a model on every number of nodes, from all templates and from the fewest."""
    hardware = cluster(options.cluster)
    node = replace(hardware.node, n_gpus=1)
    size = options.micro_batch_sizes[model]
    count = microbatches(batch, size)
    profile = layer_times(pipeline_workload(paper_model(model), batch), node, hardware.network, size)
    memory = MemoryLimit(node.gpu.usable_bytes, options.state_factor)
    n0 = smallest_node_count(profile, memory, options.most_nodes)
    full, few = (
        covering_templates(profile, options.most_nodes, options.f, n0, 1, template_set, memory=memory)
        for template_set in _SETS
    )
    for n_nodes in range(options.most_nodes, options.least_nodes - 1, -1):
        if n_nodes < (options.f + 1) * n0:
            return
        best, least = (
            choose_plan(templates, n_nodes, options.f, count, profile=profile).best
            for templates in (full, few)
        )
        yield {
            "model": model,
            "n_nodes": n_nodes,
            "f": options.f,
            "n0": n0,
            "counts": joined(f"{n}x{nodes}" for nodes, n in best.counts.items()),
            "iter_time_s": best.iter_time_s,
            "throughput_samples_per_s": batch / best.iter_time_s,
            "n_templates": len(full),
            "least_templates": len(few),
            "lost_pct": 100.0 * (1.0 - best.iter_time_s / least.iter_time_s),
        }
