"""Several nodes lost at once: what is lost with them, and how long fewer nodes are left than f asks for.

Bursts come at random times; what is lost comes back after a while as new nodes. The job goes on degraded
below ``(f + 1) n0`` nodes, waits below ``n0``, and starts from a checkpoint where all copies of a layer are
gone.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd

from makespan.oobleck.planning import (
    HybridPlan,
    PipelineTemplate,
    estimated_time_s,
    make_templates,
    uniform24,
)
from makespan.oobleck.reconfiguration import InsufficientNodes, StateLost, reconfigure

__all__ = ["burst_study", "burst_table"]

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


def burst_study(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what each f keeps over bursts of so many nodes, anywhere, in one rack, or with copies spread.

    Work is a share of what all nodes would do in that time without losses; safe is what is done on
    ``(f + 1) n0`` nodes or more. Times and victims are the same for every f.

    Parameters
    ----------
    options
        ``bursts``: ``n_nodes, rack_size, n0, f, burst_nodes, n_bursts, gap_s, repair_s, n_microbatches,
        seed``, see the configuration.
    """
    how = options["bursts"]
    n_nodes, n0 = how["n_nodes"], how["n0"]
    templates = make_templates(uniform24(), range(n0, n_nodes + 1))
    for f, burst, shape in product(how["f"], how["burst_nodes"], _SHAPES):
        job = _Job(templates, n0, f, how["n_microbatches"], shape == "rack, spread")
        run, time_s = _simulated(job, burst, shape, how)
        whole = _Run(job, _racks(how), None)
        whole.start()
        whole.pass_time(time_s)
        found = {
            "state_lost_share": run.lost_state / how["n_bursts"],
            "below_share": run.below_s / time_s,
            "work_share": run.microbatches / whole.microbatches,
            "safe_work_share": run.safe_microbatches / whole.microbatches,
        }
        case = f"f={f} nodes={burst} {shape}"
        for quantity, value in found.items():
            yield {"study": "bursts", "case": case, "quantity": quantity, "value": value}


def burst_table(studies: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a table of studies that are of bursts, one a case, with a column a quantity."""
    rows = studies[studies["study"] == "bursts"]
    parts = rows["case"].str.extract(r"f=(?P<f>\d+) nodes=(?P<nodes>\d+) (?P<shape>.*)")
    rows = rows.join(parts.astype({"f": int, "nodes": int}))
    keys = ["f", "nodes", "shape"]
    return rows.pivot_table(index=keys, columns="quantity", values="value").reset_index()


def _racks(how: Mapping[str, Any]) -> dict[int, int]:
    return {node: node // how["rack_size"] for node in range(how["n_nodes"])}


def _simulated(job: _Job, burst: int, shape: Shape, how: Mapping[str, Any]) -> tuple[_Run, float]:
    """Return a run through all bursts and the time that it took."""
    n_bursts = how["n_bursts"]
    rng = np.random.default_rng([how["seed"], burst, shape == "anywhere"])
    run = _Run(job, _racks(how), None)
    run.start()
    times_s = np.cumsum(rng.exponential(how["gap_s"], n_bursts + 1))
    # A burst brings no nodes; what is repaired brings racks.
    events: list[tuple[float, int, list[int]]] = [(t, order, []) for order, t in enumerate(times_s.tolist())]
    now_s, next_node = 0.0, how["n_nodes"]
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
            back = (time_s + how["repair_s"], n_bursts + 1 + order, [run.racks[node] for node in victims])
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
