"""Reconfiguration of every plan of a few nodes after every loss, the test of the artifact."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, count, islice, product
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from makespan.oobleck.instantiation import distribute, enumerate_plans, event_time_s
from makespan.oobleck.plan import Pipeline, PipelineTemplate
from makespan.oobleck.profile import ModelProfile, uniform24
from makespan.oobleck.reconfiguration import InsufficientNodes, StateLost, reconfigure
from makespan.oobleck.templates import make_templates
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.settings import Block, Count, option
from makespan.tables import schemas_of

Groups = list[tuple[int, ...]]
ENDS = ("state-lost", "insufficient-nodes")
"""Actions that end training."""


_artifact = partial(option, source="Oobleck SOSP'23 artifact, tests", changes="reconfiguration")
_loss_option = partial(option, source="a choice", changes="reconfiguration")
_studies = partial(option, source="a choice", changes="studies")
Threshold = Annotated[int, Field(ge=0)]


class Bursts(Block):
    """Several nodes lost at once, again and again."""

    n_nodes: Count = _studies("nodes of the cluster", 16)
    rack_size: Count = _studies("nodes of a rack", 4)
    n0: Count = _studies("least nodes of a pipeline", 4)
    f: tuple[Threshold, ...] = _studies("nodes that may be lost at once", (0, 1, 2, 3), min_length=1)
    burst_nodes: tuple[Count, ...] = _studies("nodes that are lost at once", (1, 2, 4), min_length=1)
    n_bursts: Count = _studies("bursts of each kind", 100)
    gap_s: float = _studies("mean time between bursts", 3600.0, unit="s", gt=0)
    repair_s: float = _studies("time until what was lost is back", 1800.0, unit="s", gt=0)
    n_microbatches: Count = _studies("microbatches of an iteration", 64)
    seed: int = _studies("seed of times and victims", 1, ge=0)


class Losses(Experiment):
    """Lose nodes of every plan of a few nodes: all sets of up to ``f``, and some larger ones."""

    name = "reconfiguration"
    sources = ("emulated",)
    cells = ("reconfiguration",)
    unused = frozenset({"bursts"})
    tables = {
        "reconfiguration": "what becomes of every plan of a few nodes after every loss",
    }
    figures = (
        Figure(
            "reconfiguration",
            "Reconfiguration",
            "Outcome of losing nodes at once, as a share of losses, for plans of "
            "a few nodes; {losses: rows reconfiguration} in all. Left: all losses "
            "of up to f nodes of all plans; right: random larger losses. Below: "
            "the mean of the bytes sent where training continues, and, as a black "
            "dot, of those of the node that sends most; each of the 24 layers has "
            "1 kB of parameters. "
            "No source of iteration times plays a part.",
            tables=("reconfiguration",),
        ),
    )

    most_nodes: Count = _loss_option("nodes of a plan, up to these", 12, le=16)
    most_n0: Count = _artifact("least nodes of a pipeline, up to these", 3)
    most_f: Threshold = _loss_option("nodes lost at once, up to these", 2)
    larger_losses: int = _loss_option(
        "random losses of more nodes, for each number of nodes, n0 and f", 50, ge=0
    )
    n_microbatches: Count = _loss_option("microbatches of an iteration", 48)
    state_factor: float = _loss_option(
        "bytes sent for each byte of parameters: weights and two moments", 3.0, gt=0
    )
    seed: int = _loss_option("seed of the larger losses", 1, ge=0)
    bursts: Bursts = option("several nodes lost at once, again and again", Bursts())

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per plan and loss, and per worked case of the artifact."""
        profile = uniform24()
        templates = make_templates(profile, range(1, self.most_nodes + 1))
        how: dict[str, Any] = {"n_microbatches": self.n_microbatches, "state_factor": self.state_factor}
        rng = np.random.default_rng(self.seed)
        rows = list(_worked(given.cells["reconfiguration"], **how))
        for n0, f in product(range(1, self.most_n0 + 1), range(self.most_f + 1)):
            for n_nodes in range((f + 1) * n0, self.most_nodes + 1):
                sizes = range(n0, n_nodes - f * n0 + 1)
                job: dict[str, Any] = {
                    "templates": {size: templates[size] for size in sizes}, "n0": n0, "f": f,
                }  # fmt: skip
                # Pipelines of a plan have nodes from 0 on, the smallest first.
                plans: list[Groups] = []
                for counts in enumerate_plans(sizes, n_nodes, f):
                    nodes = count()
                    plans.append([
                        tuple(islice(nodes, size))
                        for size, times in enumerate(counts, n0) for _ in range(times)
                    ])  # fmt: skip
                case = f"n0={n0} f={f} N={n_nodes}"
                losses = [lost for k in range(1, f + 1) for lost in combinations(range(n_nodes), k)]
                every = [(groups, lost) for groups in plans for lost in losses]
                rows += _lost(case, every, profile, **job, **how)
                larger = _larger(plans, n_nodes, f, self.larger_losses, rng)
                rows += _lost(f"{case} beyond", larger, profile, **job, **how)
        names = schemas_of("makespan.papers.oobleck")["reconfiguration"].names
        return {"reconfiguration": pd.DataFrame(rows, columns=names)}


def counts_of(sizes: Iterable[int]) -> str:
    """Return how many pipelines have how many nodes, for example ``2x3 1x4``."""
    return " ".join(f"{times}x{size}" for size, times in sorted(Counter(sizes).items()))


def started(
    templates: Mapping[int, PipelineTemplate], groups: Sequence[Sequence[int]], n_microbatches: int
) -> list[Pipeline]:
    """Return pipelines on these nodes, each with its microbatches."""
    chosen = [templates[len(nodes)] for nodes in groups]
    shares = distribute(chosen, n_microbatches) or ()
    return list(map(Pipeline, map(tuple, groups), chosen, shares))


def _lost(
    case: str,
    losses: Iterable[tuple[Groups, Collection[int]]],
    profile: ModelProfile,
    templates: Mapping[int, PipelineTemplate],
    n0: int,
    f: int,
    n_microbatches: int,
    state_factor: float,
) -> Iterator[tuple[Any, ...]]:
    """Yield a row per plan and loss."""
    layer_bytes = [round(layer.parameter_bytes * state_factor) for layer in profile.layers]
    for step, (groups, lost) in enumerate(losses):
        pipelines = started(templates, groups, n_microbatches)
        copies_bytes = iter_time_s = most_sent_bytes = copied_layers = float("nan")
        after = ""
        start = perf_counter()
        try:
            result = reconfigure(
                pipelines, lost, (), templates, f, n0, n_microbatches, layer_bytes=layer_bytes
            )
            action = result.action
        except StateLost:
            action = "state-lost"
        except InsufficientNodes:
            action = "insufficient-nodes"
        wall_s = perf_counter() - start
        if action not in ENDS:
            left = result.plan.pipelines
            after = counts_of(len(pipeline.nodes) for pipeline in left)
            copies_bytes = float(result.copies_bytes)
            sent_bytes: Counter[int] = Counter()  # by node
            for copy in result.copies:
                sent_bytes[copy.src.node] += copy.n_bytes
            most_sent_bytes = float(max(sent_bytes.values(), default=0))
            copied_layers = float(len({copy.layer for copy in result.copies}))
            shares = [pipeline.n_microbatches for pipeline in left]
            iter_time_s = event_time_s([pipeline.template for pipeline in left], shares, profile)
        before = counts_of(map(len, groups))
        lost_nodes = " ".join(map(str, lost))
        sizes = (most_sent_bytes, copied_layers)
        yield case, step, lost_nodes, action, before, after, copies_bytes, iter_time_s, wall_s, *sizes


def _larger(
    plans: Sequence[Groups], n_nodes: int, f: int, number: int, rng: np.random.Generator
) -> Iterator[tuple[Groups, tuple[int, ...]]]:
    """Draw plans and losses of more than f nodes, at most all."""
    for _ in range(number if f < n_nodes else 0):
        n_lost = int(rng.integers(f + 1, n_nodes + 1))
        lost = sorted(int(node) for node in rng.choice(n_nodes, n_lost, replace=False))
        yield plans[int(rng.integers(len(plans)))], tuple(lost)


def _worked(cells: pd.DataFrame, n_microbatches: int, state_factor: float) -> Iterator[tuple[Any, ...]]:
    """Yield a row per worked case of the artifact; five equal layers, all of which survive in every case."""
    profile = ModelProfile("five", uniform24().layers[:5])
    for cell in cells.itertuples():
        groups = [tuple(map(int, nodes.split())) for nodes in str(cell.pipelines).split("|")]
        lost = tuple(map(int, str(cell.lost_nodes).split()))
        n0 = int(str(cell.n0))
        templates = make_templates(profile, range(n0, 6))
        yield from _lost(
            f"worked {cell.case}", [(groups, lost)], profile, templates, n0, 1, n_microbatches, state_factor
        )
