"""What pipelines really take under one forward, one backward: the schedule, event by event."""

from collections.abc import Sequence
from functools import lru_cache

from makespan.emulator import pipeline_time_s
from makespan.oobleck.planning._profile import ModelProfile
from makespan.oobleck.planning._template import PipelineTemplate, Stage

__all__ = ["event_time_s", "schedule_times_s", "stage_passes_s"]


def stage_passes_s(stage: Stage, profile: ModelProfile) -> tuple[float, float]:
    """Return forward and backward pass of one microbatch through a stage [s]."""
    layers = profile.layers[stage.first_layer : stage.end_layer]
    exchange = sum(one.allreduce_in_node_s[stage.n_gpus] for one in layers) if stage.n_gpus > 1 else 0.0
    forward = sum(layer.forward_s for layer in layers) / stage.n_gpus + exchange
    return forward, sum(layer.backward_s for layer in layers) / stage.n_gpus + exchange


def event_time_s(
    templates: Sequence[PipelineTemplate], n_microbatches: Sequence[int], profile: ModelProfile
) -> float:
    """Return the iteration time of pipelines by a simulation of their schedules [s].

    The longest pipeline, without transfers between stages, and then the wait for gradients of layer 0.

    Parameters
    ----------
    templates, n_microbatches
        Of each pipeline, (n_pipelines,).
    profile
        Times of the layers, of which the templates were made.
    """
    longest = max(schedule_times_s(templates, n_microbatches, profile))
    return longest + profile.sync_time_s(len(templates))


def schedule_times_s(
    templates: Sequence[PipelineTemplate], n_microbatches: Sequence[int], profile: ModelProfile
) -> tuple[float, ...]:
    """Return the time of each pipeline by a simulation of its schedule, without the wait for gradients [s].

    Parameters
    ----------
    templates, n_microbatches, profile
        See `event_time_s`.

    Returns
    -------
    tuple of float
        Of each pipeline, (n_pipelines,).
    """
    passes = {one: tuple(stage_passes_s(stage, profile) for stage in one.stages) for one in set(templates)}
    pairs = zip(templates, n_microbatches, strict=True)
    return tuple(_schedule_s(passes[template], count) for template, count in pairs)


@lru_cache(maxsize=4096)
def _schedule_s(passes: tuple[tuple[float, float], ...], n_microbatches: int) -> float:
    forward, backward = zip(*passes, strict=True)
    return pipeline_time_s(forward, backward, n_microbatches)
