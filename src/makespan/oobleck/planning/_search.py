"""Templates of a model for numbers of nodes."""

from collections.abc import Iterable
from typing import Literal, get_args

from makespan.errors import InfeasiblePlanError, InputError, unknown_name
from makespan.oobleck.planning._cost import REFERENCE, CostRule, MemoryLimit, StageTimes, pipeline_cost
from makespan.oobleck.planning._coverage import (
    GuaranteeUnsatisfiable,
    TemplateSet,
    check_guarantee,
    template_sizes,
)
from makespan.oobleck.planning._divide import DivideAndConquer
from makespan.oobleck.planning._exact import Cut, exact_cuts
from makespan.oobleck.planning._profile import PICOSECONDS, ModelProfile
from makespan.oobleck.planning._template import PipelineTemplate, Stage
from makespan.units import format_bytes

__all__ = ["SearchMode", "TemplateSearch", "covering_templates", "make_templates", "smallest_node_count"]

SearchMode = Literal["exact", "dc"]


class TemplateSearch:
    """Finds the templates of a model one by one, as in Oobleck, section 4.1.

    Parameters
    ----------
    profile
        Times of the layers.
    gpus_per_node
        GPUs of each node, all of which are used; a stage has 1, 2, 4 ... of one node.
    mode
        ``exact``: the least cost; ``dc``: the published divide and conquer, at most as good, for which what
        was found for one number of nodes serves the others.
    memory
        What a GPU holds, None for no limit.
    rule
        How pipelines are priced.

    Raises
    ------
    InputError
        The number of GPUs is less than 1, or the profile lacks an exchange time.
    """

    def __init__(
        self,
        profile: ModelProfile,
        gpus_per_node: int = 1,
        mode: SearchMode = "exact",
        memory: MemoryLimit | None = None,
        rule: CostRule = REFERENCE,
    ) -> None:
        if mode not in get_args(SearchMode):
            raise unknown_name("search", mode, get_args(SearchMode))
        self._times, self._rule = StageTimes(profile, gpus_per_node, memory), rule
        self._published = DivideAndConquer(self._times, rule) if mode == "dc" else None

    def template(self, n_nodes: int) -> PipelineTemplate | None:
        """Return the template for so many nodes, None if none fits; `InputError` for less than 1."""
        if n_nodes < 1:
            raise InputError(f"a template for {n_nodes} nodes; accepted: 1 or more")
        if self._published is None:
            cuts = exact_cuts(self._times, n_nodes, self._rule)
        else:
            cuts = self._published.cuts(n_nodes)
        return None if cuts is None else self._template(n_nodes, cuts)

    def _template(self, n_nodes: int, cuts: tuple[Cut, ...]) -> PipelineTemplate:
        latencies = [int(self._times.latency[width][first, end]) for first, end, width in cuts]
        stages = (
            Stage(first, end, width, latency / PICOSECONDS)
            for (first, end, width), latency in zip(cuts, latencies, strict=True)
        )
        cost_s = pipeline_cost(latencies, self._rule) / PICOSECONDS
        return PipelineTemplate(n_nodes, self._times.gpus_per_node, tuple(stages), cost_s)


def make_templates(
    profile: ModelProfile,
    sizes: Iterable[int],
    gpus_per_node: int = 1,
    mode: SearchMode = "exact",
    memory: MemoryLimit | None = None,
    rule: CostRule = REFERENCE,
) -> dict[int, PipelineTemplate]:
    """Find a pipeline for each number of nodes.

    Parameters
    ----------
    profile, gpus_per_node, mode, memory, rule
        See `TemplateSearch`.
    sizes
        Numbers of nodes; those for which nothing fits are left out of the result.

    Returns
    -------
    dict
        Templates by number of nodes, ascending.

    Raises
    ------
    InputError
        A size or the number of GPUs is less than 1, or the profile lacks an exchange time.
    """
    search = TemplateSearch(profile, gpus_per_node, mode, memory, rule)
    found = {size: search.template(size) for size in sorted(set(sizes))}
    return {size: template for size, template in found.items() if template is not None}


def smallest_node_count(
    profile: ModelProfile, memory: MemoryLimit | None, n_nodes: int, gpus_per_node: int = 1
) -> int:
    """Return n0, the least number of nodes on which a pipeline of the model fits into memory.

    Raises
    ------
    InfeasiblePlanError
        It does not fit on ``n_nodes``; the message has the bytes needed and the largest layer.
    """
    held = [0.0] * profile.n_layers
    first = 1
    if memory is not None:
        held = [memory.state_factor * one.parameter_bytes + one.activation_bytes for one in profile.layers]
        first = max(1, int(-(-sum(held) // (gpus_per_node * memory.device_bytes))))
    for count in range(first, n_nodes + 1):
        if make_templates(profile, [count], gpus_per_node, memory=memory):
            return count
    largest = max(range(profile.n_layers), key=lambda index: held[index])
    limit = "" if memory is None else f" of {format_bytes(memory.device_bytes)}"
    raise InfeasiblePlanError(
        f"profile {profile.name!r}: no pipeline on up to {n_nodes} nodes with {gpus_per_node} GPUs{limit}; "
        f"its {profile.n_layers} layers hold {format_bytes(sum(held))} or more, the largest, layer "
        f"{largest}, {format_bytes(held[largest])}"
    )


def covering_templates(
    profile: ModelProfile,
    n_nodes: int,
    f: int,
    n0: int | None = None,
    gpus_per_node: int = 1,
    template_set: TemplateSet = "full",
    mode: SearchMode = "exact",
    memory: MemoryLimit | None = None,
) -> dict[int, PipelineTemplate]:
    """Find the templates with which a job on so many nodes survives the loss of f at once.

    Parameters
    ----------
    profile, gpus_per_node, mode, memory
        See `make_templates`.
    n_nodes, f
        Nodes at the start, and nodes that may be lost at once.
    n0
        Least number of nodes of a pipeline; None for what memory asks for.
    template_set
        See `template_sizes`.

    Raises
    ------
    InfeasiblePlanError
        The model does not fit.
    GuaranteeUnsatisfiable
        The templates that exist cannot use every number of nodes from (f + 1) n0 on.
    """
    least = smallest_node_count(profile, memory, n_nodes, gpus_per_node) if n0 is None else n0
    most = profile.n_layers // gpus_per_node.bit_count()
    sizes = template_sizes(least, f, n_nodes, template_set, most_possible=most)
    found = make_templates(profile, sizes, gpus_per_node, mode, memory)
    hole = check_guarantee(found, least, f, n_nodes)
    if hole is not None:
        made = ", ".join(map(str, found)) or "none"
        raise GuaranteeUnsatisfiable(
            f"templates exist for {made} nodes, which cannot use {hole} nodes with {f + 1} pipelines"
        )
    return found
