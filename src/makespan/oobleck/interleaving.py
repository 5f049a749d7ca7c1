"""Interleaved stages: every node of a pipeline runs several short stages, so that it fills and drains sooner.

Stage k of a pipeline on p nodes runs on node k mod p, as the model chunks of Narayanan et al. (SC 2021). The
planner chooses sizes of pipelines as without interleaving; here the layers of a pipeline are cut for its
nodes, and all its passes get one order.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from makespan.errors import InputError
from makespan.oobleck.peers import template_passes
from makespan.oobleck.plan import PipelineTemplate, Stage
from makespan.oobleck.profile import PICOSECONDS, ModelProfile
from makespan.oobleck.rerouting import Kind, ScheduledPass
from makespan.oobleck.templates import Ints, StageTimes
from makespan.plans import interleaved_order

# --- Cutting the layers -----------------------------------------------------------------------------

_Judge = Callable[[Ints], list[tuple[float, ...]]]
"""Function of the times of the stages of several cuts, (n_cuts, stages per node, n_nodes); less is better."""


def interleaved_templates(
    templates: Mapping[int, PipelineTemplate], profile: ModelProfile, interleave: int
) -> dict[int, PipelineTemplate]:
    """Return templates for the same numbers of nodes whose nodes run several stages each.

    A pipeline of one node keeps its one stage, and one with fewer than ``interleave`` layers per node gets as
    many stages per node as there are layers for.

    Parameters
    ----------
    templates
        Templates with one GPU per node, by number of nodes.
    profile
        Times of the layers.
    interleave
        Stages of each node; with 1 the templates stay as they are.

    Raises
    ------
    InputError
        No template has so many stages per node.
    """
    if interleave == 1:
        return dict(templates)
    cut = {size: _interleaved(template, profile, interleave) for size, template in templates.items()}
    if not any(template.interleave == interleave for template in cut.values()):
        sizes = f"{profile.n_layers} layers on pipelines of {min(cut)} to {max(cut)} nodes"
        raise InputError(
            f"interleave is {interleave} with {sizes}; expected a size of 2 nodes or more with as many "
            "layers for each node, or 1"
        )
    return cut


def _interleaved(template: PipelineTemplate, profile: ModelProfile, interleave: int) -> PipelineTemplate:
    n_nodes, n_layers = template.n_nodes, profile.n_layers
    each = min(interleave, n_layers // n_nodes)
    if n_nodes == 1 or each == 1:
        return template
    ends = StageTimes(profile, 1).latency[1][0]
    even = _even(ends, n_nodes * each)
    tried = []
    for judge in (_by_rounds, _by_loads):
        bounds = _improved(ends, even, n_nodes, judge).tolist()
        stages = tuple(
            Stage(low, high, 1, int(ends[high] - ends[low]) / PICOSECONDS) for low, high in pairwise(bounds)
        )
        tried.append(PipelineTemplate(n_nodes, 1, stages, 0.0, each))
    costs_s = [_simulated_s(one, 3 * n_nodes + 1) for one in tried]
    return replace(tried[costs_s.index(min(costs_s))], time_s=min(costs_s))


def _even(ends: Ints, n_stages: int) -> Ints:
    """Return the bounds of stages that are about equal, (n_stages + 1,), from the times of layers before."""
    n_layers, bounds = len(ends) - 1, [0]
    for number in range(1, n_stages):
        first, end = bounds[-1] + 1, n_layers - n_stages + number + 1
        distance = np.abs(ends[first:end] * n_stages - ends[-1] * number)
        bounds.append(first + int(distance.argmin()))
    return np.array([*bounds, n_layers], dtype=np.int64)


def _improved(ends: Ints, bounds: Ints, n_nodes: int, judge: _Judge) -> Ints:
    """Move layers from long stages, and from those of the busiest node, to others while that helps.

    One layer moves at a time, by shifting all bounds between, and always the one that helps most.
    """
    n_stages = len(bounds) - 1
    target, bound = np.arange(n_stages)[:, None], np.arange(n_stages + 1)[None, :]
    times = np.diff(ends[bounds]).reshape(1, -1, n_nodes)
    best = judge(times)[0]
    while True:
        longest = times[0].argmax(axis=1) + np.arange(0, n_stages, n_nodes)
        busiest = np.arange(times[0].sum(axis=0).argmax(), n_stages, n_nodes)
        found = best, bounds
        for source in np.union1d(longest, busiest):
            if bounds[source + 1] - bounds[source] == 1:
                continue
            up, down = (target < bound) & (bound <= source), (source < bound) & (bound <= target)
            moved = bounds + up - down  # by target
            judged = judge(np.diff(ends[moved]).reshape(n_stages, -1, n_nodes))
            least = min(range(n_stages), key=judged.__getitem__)
            if judged[least] < found[0]:
                found = judged[least], moved[least]
        if found[0] >= best:
            return bounds
        best, bounds = found
        times = np.diff(ends[bounds]).reshape(1, -1, n_nodes)


def _by_rounds(times: Ints) -> list[tuple[float, ...]]:
    """Judge by the longest stage of each round of stages, which all nodes run at about the same time."""
    longest = times.max(axis=2).sum(axis=1) + times.sum(axis=1).max(axis=1)
    return list(zip(longest.tolist(), _squares(times), strict=True))


def _by_loads(times: Ints) -> list[tuple[float, ...]]:
    """Judge by the busiest node."""
    loads = times.sum(axis=1)
    return list(zip(loads.max(axis=1).tolist(), _squares(loads), _squares(times), strict=True))


def _squares(times: Ints) -> list[float]:
    """Return the sum of squares of each cut, as floating-point numbers, because they are large."""
    return [float(each) for each in (times.reshape(len(times), -1).astype(float) ** 2).sum(axis=1)]


# --- Estimates --------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def linear_interleaved(template: PipelineTemplate) -> tuple[int, int]:
    """Return the times of the first and of each further microbatch of a pipeline [ps].

    The line goes through the simulated times of two and of three microbatches per node.
    """
    n_nodes = template.n_nodes
    less, more = (round(_simulated_s(template, count * n_nodes) * PICOSECONDS) for count in (2, 3))
    further = (more - less) // n_nodes
    return more - (3 * n_nodes - 1) * further, further


def _simulated_s(template: PipelineTemplate, n_microbatches: int) -> float:
    """Return the time of an iteration whose backward passes take twice as long as forward ones [s]."""
    forward_s = tuple(stage.latency_s / 3 for stage in template.stages)
    backward_s = tuple(2 * time_s for time_s in forward_s)
    return interleaved_time_s(forward_s, backward_s, template.n_nodes, n_microbatches)


# --- One order of all passes ------------------------------------------------------------------------


@lru_cache(maxsize=8)
def interleaved_passes(
    template: PipelineTemplate, n_microbatches: int, splits_backward: bool
) -> tuple[ScheduledPass, ...]:
    """Return all passes of an iteration of a pipeline; all its nodes find the same.

    Backward passes are taken to be twice as long as forward ones. Times are shares of the longest stage, and
    ``runs_on`` is the place of a node in the pipeline.
    """
    passes = template_passes(template)
    backward = (passes.input_s, passes.weight_s) if splits_backward else (passes.backward_s,)
    timed = _timed(template.n_nodes, n_microbatches, passes.forward_s, *backward)
    steps = [
        ScheduledPass(kind, 0, number, stage, stage % template.n_nodes, start_s, end_s)
        for kind, number, stage, start_s, end_s in timed
    ]
    return tuple(sorted(steps, key=lambda step: (step.start_s, step.stage)))


@lru_cache(maxsize=4096)
def interleaved_time_s(
    forward_s: tuple[float, ...], backward_s: tuple[float, ...], n_nodes: int, n_microbatches: int
) -> float:
    """Return the time of an iteration of a pipeline with interleaved stages, without transfers [s].

    Parameters
    ----------
    forward_s, backward_s
        Passes of a microbatch in each stage [s], (n_stages,).
    n_nodes, n_microbatches
        Nodes, of which each runs ``n_stages / n_nodes`` stages; microbatches.
    """
    return max(end_s for *_, end_s in _timed(n_nodes, n_microbatches, forward_s, backward_s))


def _timed(
    n_nodes: int,
    n_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] | None = None,
) -> list[tuple[Kind, int, int, float, float]]:
    """Run the orders of all nodes, each pass as soon as node and tensor are there.

    With ``weight_s``, backward passes are in two parts. Returns kind, microbatch, stage, start and end [s] of
    each pass.
    """
    lengths: dict[Kind, Sequence[float]] = {"F": forward_s, "B": backward_s, "W": weight_s or ()}
    last, n_chunks = len(forward_s) - 1, len(forward_s) // n_nodes
    left = [
        deque(interleaved_order(place, n_nodes, n_chunks, n_microbatches, weight_s is not None))
        for place in range(n_nodes)
    ]
    free_s, ends_s = [0.0] * n_nodes, dict[tuple[str, int, int], float]()
    timed = list[tuple[Kind, int, int, float, float]]()
    # At least one node advances in every sweep, because the orders have no cyclic waits.
    while any(left):
        for place, order in enumerate(left):
            while order:
                word, chunk, number = order[0]
                stage = chunk * n_nodes + place
                kind: Kind = "F" if word == "F" else "B" if word == "B" else "W"
                if kind == "F":
                    ready_s = ends_s.get(("F", stage - 1, number)) if stage else 0.0
                elif kind == "B" and stage < last:
                    ready_s = ends_s.get(("B", stage + 1, number))
                else:
                    ready_s = ends_s.get(("F" if kind == "B" else "B", stage, number))
                if ready_s is None:
                    break
                order.popleft()
                start_s = max(free_s[place], ready_s)
                free_s[place] = ends_s[kind, stage, number] = start_s + lengths[kind][stage]
                timed.append((kind, number, stage, start_s, free_s[place]))
    return timed
