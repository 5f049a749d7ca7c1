"""What becomes of every plan of a few nodes after every loss: the test of reconfiguration of the artifact."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, count, islice
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from makespan.oobleck.instantiation import distribute, enumerate_plans, event_time_s
from makespan.oobleck.plan import Pipeline, PipelineTemplate
from makespan.oobleck.profile import ModelProfile, uniform24
from makespan.oobleck.reconfiguration import Copy, InsufficientNodes, StateLost, reconfigure
from makespan.oobleck.templates import make_templates
from makespan.papers.oobleck.tables import RECONFIGURATION

Groups = list[tuple[int, ...]]
ENDS = ("state-lost", "insufficient-nodes")
"""Actions that end training."""


def reconfiguration_experiment(
    cells: Mapping[str, pd.DataFrame], options: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """Lose nodes of every plan: all sets of up to ``f``, and some larger ones.

    Parameters
    ----------
    cells
        ``reconfiguration``: the cases that the artifact works out.
    options
        ``most_nodes, most_n0, most_f, larger_losses, n_microbatches, state_factor, seed``, see the
        configuration.

    Returns
    -------
    dict
        ``reconfiguration``.
    """
    profile = uniform24()
    templates = make_templates(profile, range(1, options["most_nodes"] + 1))
    how = {name: options[name] for name in ("n_microbatches", "state_factor")}
    rng = np.random.default_rng(options["seed"])
    rows = list(_worked(cells["reconfiguration"], **how))
    for n0 in range(1, options["most_n0"] + 1):
        for f in range(options["most_f"] + 1):
            for n_nodes in range((f + 1) * n0, options["most_nodes"] + 1):
                sizes = range(n0, n_nodes - f * n0 + 1)
                job: dict[str, Any] = {
                    "templates": {size: templates[size] for size in sizes},
                    "n0": n0,
                    "f": f,
                }
                plans = [_grouped(counts, n0) for counts in enumerate_plans(sizes, n_nodes, f)]
                case = f"n0={n0} f={f} N={n_nodes}"
                losses = [lost for k in range(1, f + 1) for lost in combinations(range(n_nodes), k)]
                every = [(groups, lost) for groups in plans for lost in losses]
                rows += _lost(case, every, profile, **job, **how)
                larger = _larger(plans, n_nodes, f, options["larger_losses"], rng)
                rows += _lost(f"{case} beyond", larger, profile, **job, **how)
    table = pd.DataFrame(rows, columns=RECONFIGURATION.names)
    return {"reconfiguration": RECONFIGURATION.validate(table, where="reconfiguration_experiment")}


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
    """Yield a row for each plan and loss."""
    layer_bytes = [round(layer.parameter_bytes * state_factor) for layer in profile.layers]
    for step, (groups, lost) in enumerate(losses):
        pipelines = started(templates, groups, n_microbatches)
        copies_bytes = iter_time_s = most_sent_bytes = copied_layers = float("nan")
        after = ""
        start = perf_counter()
        try:
            found = reconfigure(
                pipelines, lost, (), templates, f, n0, n_microbatches, layer_bytes=layer_bytes
            )
            action = found.action
        except StateLost:
            action = "state-lost"
        except InsufficientNodes:
            action = "insufficient-nodes"
        wall_s = perf_counter() - start
        if action not in ENDS:
            plan = found.plan.pipelines
            after, copies_bytes = counts_of(len(one.nodes) for one in plan), float(found.copies_bytes)
            most_sent_bytes = float(max(_sent(found.copies).values(), default=0))
            copied_layers = float(len({copy.layer for copy in found.copies}))
            iter_time_s = event_time_s(
                [one.template for one in plan], [one.n_microbatches for one in plan], profile
            )
        before = counts_of(map(len, groups))
        named = " ".join(map(str, lost))
        sizes = (most_sent_bytes, copied_layers)
        yield case, step, named, action, before, after, copies_bytes, iter_time_s, wall_s, *sizes


def _sent(copies: Iterable[Copy]) -> Counter[int]:
    """Return what each node sends."""
    sent: Counter[int] = Counter()
    for one in copies:
        sent[one.src.node] += one.n_bytes
    return sent


def _grouped(counts: Sequence[int], first_size: int) -> Groups:
    """Give the pipelines of a plan nodes from 0 on, the smallest first."""
    nodes = count()
    return [tuple(islice(nodes, size)) for size, times in enumerate(counts, first_size) for _ in range(times)]


def _larger(
    plans: Sequence[Groups], n_nodes: int, f: int, number: int, rng: np.random.Generator
) -> Iterator[tuple[Groups, tuple[int, ...]]]:
    """Draw plans and losses of more than f nodes, at most all."""
    for _ in range(number if f < n_nodes else 0):
        n_lost = int(rng.integers(f + 1, n_nodes + 1))
        lost = sorted(int(node) for node in rng.choice(n_nodes, n_lost, replace=False))
        yield plans[int(rng.integers(len(plans)))], tuple(lost)


def _worked(cells: pd.DataFrame, n_microbatches: int, state_factor: float) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each worked case; with five equal layers every layer is left in all of them."""
    profile = ModelProfile("five", uniform24().layers[:5])
    for cell in cells.itertuples():
        groups = [tuple(map(int, nodes.split())) for nodes in str(cell.pipelines).split("|")]
        lost = tuple(map(int, str(cell.lost_nodes).split()))
        n0 = int(str(cell.n0))
        templates = make_templates(profile, range(n0, 6))
        yield from _lost(
            f"worked {cell.case}", [(groups, lost)], profile, templates, n0, 1, n_microbatches, state_factor
        )
