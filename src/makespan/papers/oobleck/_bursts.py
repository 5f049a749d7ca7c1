"""Several nodes lost at once: what is lost with them, and how long fewer nodes are left than f asks for.

Bursts come at random times; what is lost comes back after a while as new nodes. The job goes on degraded
below ``(f + 1) n0`` nodes, waits below ``n0``, and starts from a checkpoint where all copies of a layer are
gone.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import pandas as pd

from makespan.papers.oobleck.planning import (
    HybridPlan,
    PipelineTemplate,
    estimated_time_s,
    make_templates,
    uniform24,
)
from makespan.papers.oobleck.reconfiguration import InsufficientNodes, StateLost, reconfigure

__all__ = ["burst_study"]

Shape = Literal["anywhere", "rack", "rack, spread"]
_SHAPES: tuple[Shape, ...] = ("anywhere", "rack", "rack, spread")


@dataclass(frozen=True, slots=True)
class _Job:
    """A model on nodes in racks; whether the racks are known when nodes are placed."""

    templates: Mapping[int, PipelineTemplate]
    n0: int
    f: int
    n_microbatches: int
    is_spread: bool

    def plan(
        self, old: HybridPlan | None, lost: Sequence[int], joined: Sequence[int], racks: Mapping[int, int]
    ) -> HybridPlan:
        """Return the pipelines that go on, degraded if need be."""
        pipelines = old.pipelines if old else ()
        layer_bytes = [1] * next(iter(self.templates.values())).n_layers
        found = reconfigure(
            pipelines, lost, joined, self.templates, self.f, self.n0, self.n_microbatches,
            layer_bytes=layer_bytes, hosts=racks if self.is_spread else None, policy="degrade",
        )  # fmt: skip
        return found.plan


@dataclass(slots=True)
class _Run:
    """Nodes and pipelines over time, and what was counted."""

    job: _Job
    racks: dict[int, int]
    plan: HybridPlan | None
    lost_state: int = 0
    below_s: float = 0.0
    microbatches: float = 0.0
    safe_microbatches: float = 0.0

    def pass_time(self, time_s: float) -> None:
        """Train for a while."""
        is_below = len(self.racks) < (self.job.f + 1) * self.job.n0
        self.below_s += time_s if is_below else 0.0
        if self.plan is None:
            return
        shares = [one.n_microbatches for one in self.plan.pipelines]
        iteration_s = estimated_time_s([one.template for one in self.plan.pipelines], shares, "1f1b")
        done = time_s / iteration_s * self.job.n_microbatches
        self.microbatches += done
        self.safe_microbatches += 0.0 if is_below else done

    def lose(self, victims: Sequence[int]) -> None:
        """Go on without some nodes, from a checkpoint where state is lost with them."""
        for node in victims:
            del self.racks[node]
        try:
            used = set(self.plan.nodes) if self.plan else set[int]()
            self.plan = self.job.plan(self.plan, [node for node in victims if node in used], (), self.racks)
        except StateLost:
            self.lost_state += 1
            self.start()
        except InsufficientNodes:
            self.plan = None

    def gain(self, racks: Mapping[int, int]) -> None:
        """Take nodes in."""
        self.racks |= racks
        if self.plan is None:
            self.start()
        else:
            self.plan = self.job.plan(self.plan, (), sorted(racks), self.racks)

    def start(self) -> None:
        """Start from a checkpoint on the nodes that there are, if they are enough."""
        try:
            self.plan = self.job.plan(None, (), sorted(self.racks), self.racks)
        except InsufficientNodes:
            self.plan = None


def burst_study(
    *,
    n_nodes: int,
    rack_size: int,
    n0: int,
    f: Sequence[int],
    burst_nodes: Sequence[int],
    n_bursts: int,
    gap_s: float,
    repair_s: float,
    n_microbatches: int,
    seed: int,
) -> pd.DataFrame:
    """Count over bursts of so many nodes what each f keeps.

    Parameters
    ----------
    n_nodes, rack_size
        Nodes of the cluster, and of each rack.
    n0, n_microbatches
        Of the job.
    f, burst_nodes
        All combinations of these are simulated: losses asked to be survived, and nodes lost at once,
        anywhere, in one rack, and in one rack where copies are spread over racks.
    n_bursts, gap_s, repair_s
        Number of bursts, mean time between them, and time until what is lost is back.
    seed
        Of times and victims, which are the same for every f.

    Returns
    -------
    pandas.DataFrame
        One row a combination: ``f, nodes, shape, bursts, state_lost_share, below_share, work_share,
        safe_work_share``; work is a share of what all nodes would do in the time without losses, and safe is
        what is done on ``(f + 1) n0`` nodes or more.
    """
    templates = make_templates(uniform24(), range(n0, n_nodes + 1))
    rows = []
    for losses, nodes, shape in product(f, burst_nodes, _SHAPES):
        job = _Job(templates, n0, losses, n_microbatches, shape == "rack, spread")
        run, time_s = _simulated(job, n_nodes, rack_size, nodes, shape, n_bursts, gap_s, repair_s, seed)
        whole = _Run(job, {node: node // rack_size for node in range(n_nodes)}, None)
        whole.start()
        whole.pass_time(time_s)
        rows.append(
            {
                "f": losses,
                "nodes": nodes,
                "shape": shape,
                "bursts": n_bursts,
                "state_lost_share": run.lost_state / n_bursts,
                "below_share": run.below_s / time_s,
                "work_share": run.microbatches / whole.microbatches,
                "safe_work_share": run.safe_microbatches / whole.microbatches,
            }
        )
    return pd.DataFrame(rows)


def _simulated(
    job: _Job,
    n_nodes: int,
    rack_size: int,
    burst: int,
    shape: Shape,
    n_bursts: int,
    gap_s: float,
    repair_s: float,
    seed: int,
) -> tuple[_Run, float]:
    """Return a run through all bursts and the time that it took."""
    rng = np.random.default_rng([seed, burst, shape == "anywhere"])
    run = _Run(job, {node: node // rack_size for node in range(n_nodes)}, None)
    run.start()
    times_s = np.cumsum(rng.exponential(gap_s, n_bursts + 1))
    # A burst brings no nodes; what is repaired brings racks.
    events: list[tuple[float, int, list[int]]] = [(t, order, []) for order, t in enumerate(times_s.tolist())]
    now_s, next_node = 0.0, n_nodes
    while events[0][1] != n_bursts:
        time_s, order, racks = heapq.heappop(events)
        run.pass_time(time_s - now_s)
        now_s = time_s
        if racks:
            run.gain(dict(enumerate(racks, next_node)))
            next_node += len(racks)
            continue
        victims = _victims(run.racks, burst, shape, rng)
        if victims:
            back = (time_s + repair_s, n_bursts + 1 + order, [run.racks[node] for node in victims])
            heapq.heappush(events, back)
            run.lose(victims)
    run.pass_time(events[0][0] - now_s)
    return run, events[0][0]


def _victims(racks: Mapping[int, int], burst: int, shape: Shape, rng: np.random.Generator) -> list[int]:
    """Draw the nodes of a burst, at most all there are."""
    nodes = sorted(racks)
    if shape != "anywhere" and nodes:
        rack = racks[nodes[int(rng.integers(len(nodes)))]]
        nodes = [node for node in nodes if racks[node] == rack]
    return sorted(int(node) for node in rng.choice(nodes, min(burst, len(nodes)), replace=False))
