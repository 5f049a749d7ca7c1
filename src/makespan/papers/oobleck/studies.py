"""Several nodes lost at once: what is lost with them, and how long fewer nodes are left than f asks for.

Bursts come at random times; what is lost comes back after a while as new nodes. The job goes on degraded
below ``(f + 1) n0`` nodes, waits below ``n0``, and starts from a checkpoint where all copies of a layer are
gone.
"""

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from makespan.oobleck.instantiation import choose_plan, estimated_time_s
from makespan.oobleck.plan import HybridPlan, PipelineTemplate
from makespan.oobleck.profile import ModelProfile, uniform24
from makespan.oobleck.reconfiguration import InsufficientNodes, StateLost, reconfigure
from makespan.oobleck.simulator import (
    SYSTEMS,
    Costs,
    Systems,
    expected_share,
    repairs,
    simulate,
    young_daly_steps,
)
from makespan.oobleck.templates import (
    TemplateSet,
    check_guarantee,
    least_template_count,
    make_templates,
    template_sizes,
)
from makespan.oobleck.traces import generate_steady
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.papers.oobleck.planning import artifact_profiles
from makespan.papers.oobleck.reconfiguration import Bursts
from makespan.papers.oobleck.simulation import Assumptions, Intervals, Model, systems_of
from makespan.settings import Count, option, shared
from makespan.units import MS

# ------------------------------------------------------------------------------------------------
# Several nodes lost at once: what is lost with them, and how long fewer nodes are left than f asks for.
#
# Bursts come at random times; what is lost comes back after a while as new nodes. The job goes on degraded
# below ``(f + 1) n0`` nodes, waits below ``n0``, and starts from a checkpoint where all copies of a layer
# are gone.

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
        """Return the pipelines that continue, degraded if there are too few nodes."""
        pipelines = old.pipelines if old else ()
        layer_bytes = [1] * next(iter(self.templates.values())).n_layers
        return reconfigure(
            pipelines, lost, joined, self.templates, self.f, self.n0, self.n_microbatches,
            layer_bytes=layer_bytes, hosts=racks if self.is_spread else None, policy="degrade",
        ).plan  # fmt: skip


@dataclass(slots=True)
class _Run:
    """Racks of the nodes, pipelines, and counts of lost state, time below the threshold and microbatches."""

    job: _Job
    racks: dict[int, int]
    plan: HybridPlan | None
    lost_state: int = 0
    below_s: float = 0.0
    microbatches: float = 0.0
    safe_microbatches: float = 0.0

    def pass_time(self, time_s: float) -> None:
        """Train for a time [s]."""
        is_below = len(self.racks) < (self.job.f + 1) * self.job.n0
        self.below_s += time_s if is_below else 0.0
        if self.plan is None:
            return
        shares = [pipeline.n_microbatches for pipeline in self.plan.pipelines]
        templates = [pipeline.template for pipeline in self.plan.pipelines]
        iteration_s = estimated_time_s(templates, shares, "1f1b")
        done = time_s / iteration_s * self.job.n_microbatches
        self.microbatches += done
        self.safe_microbatches += 0.0 if is_below else done

    def lose(self, victims: Sequence[int]) -> None:
        """Continue without some nodes, from a checkpoint if state is lost with them."""
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
        """Add nodes, each with its rack."""
        self.racks |= racks
        if self.plan is None:
            self.start()
        else:
            self.plan = self.job.plan(self.plan, (), sorted(racks), self.racks)

    def start(self) -> None:
        """Start from a checkpoint on all nodes, if they are enough."""
        try:
            self.plan = self.job.plan(None, (), sorted(self.racks), self.racks)
        except InsufficientNodes:
            self.plan = None


def burst_study(how: Bursts) -> Iterator[dict[str, Any]]:
    """Yield the work that each f keeps through bursts of losses: anywhere, in one rack, with copies spread.

    Work is a share of what all nodes would do in that time without losses; safe is what is done on
    ``(f + 1) n0`` nodes or more. Times and victims are the same for every f.
    """
    n_nodes, n0 = how.n_nodes, how.n0
    templates = make_templates(uniform24(), range(n0, n_nodes + 1))
    for f, burst, shape in product(how.f, how.burst_nodes, _SHAPES):
        job = _Job(templates, n0, f, how.n_microbatches, shape == "rack, spread")
        run, time_s = _simulated(job, burst, shape, how)
        whole = _Run(job, _racks(how), None)
        whole.start()
        whole.pass_time(time_s)
        shares = {
            "state_lost_share": run.lost_state / how.n_bursts,
            "below_share": run.below_s / time_s,
            "work_share": run.microbatches / whole.microbatches,
            "safe_work_share": run.safe_microbatches / whole.microbatches,
        }
        case = f"f={f} nodes={burst} {shape}"
        for quantity, value in shares.items():
            yield {"study": "bursts", "case": case, "quantity": quantity, "value": value}


def burst_table(studies: pd.DataFrame) -> pd.DataFrame:
    """Return the bursts of a table of studies: one row per case, one column per quantity."""
    rows = studies[studies["study"] == "bursts"]
    parts = rows["case"].str.extract(r"f=(?P<f>\d+) nodes=(?P<nodes>\d+) (?P<shape>.*)")
    rows = rows.join(parts.astype({"f": int, "nodes": int}))
    keys = ["f", "nodes", "shape"]
    return rows.pivot_table(index=keys, columns="quantity", values="value").reset_index()


def _racks(how: Bursts) -> dict[int, int]:
    return {node: node // how.rack_size for node in range(how.n_nodes)}


def _simulated(job: _Job, burst: int, shape: Shape, how: Bursts) -> tuple[_Run, float]:
    """Return a run through all bursts and the time that it took."""
    n_bursts = how.n_bursts
    rng = np.random.default_rng([how.seed, burst, shape == "anywhere"])
    run = _Run(job, _racks(how), None)
    run.start()
    times_s = np.cumsum(rng.exponential(how.gap_s, n_bursts + 1))
    # A burst brings no nodes; what is repaired brings racks.
    events: list[tuple[float, int, list[int]]] = [(t, order, []) for order, t in enumerate(times_s.tolist())]
    now_s, next_node = 0.0, how.n_nodes
    while events[0][1] != n_bursts:
        time_s, order, racks = heapq.heappop(events)
        run.pass_time(time_s - now_s)
        now_s = time_s
        if racks:
            run.gain(dict(enumerate(racks, next_node)))
            next_node += len(racks)
            continue
        # A burst strikes nodes anywhere or of one rack, at most all that there are.
        nodes = sorted(run.racks)
        if shape != "anywhere" and nodes:
            rack = run.racks[nodes[int(rng.integers(len(nodes)))]]
            nodes = [node for node in nodes if run.racks[node] == rack]
        drawn = rng.choice(nodes, min(burst, len(nodes)), replace=False)
        victims = sorted(int(node) for node in drawn)
        if victims:
            back = (time_s + how.repair_s, n_bursts + 1 + order, [run.racks[node] for node in victims])
            heapq.heappush(events, back)
            run.lose(victims)
    run.pass_time(events[0][0] - now_s)
    return run, events[0][0]


# ------------------------------------------------------------------------------------------------
# Which templates are needed at least, and what it costs to have only these.

_Row = dict[str, Any]


def guarantee_map(most_n0: int, most_f: int, most_nodes: int) -> Iterator[_Row]:
    """Yield the least number of template sizes for every n0 and f, counted and by the formula."""
    for n0 in range(1, most_n0 + 1):
        for f in range(most_f + 1):
            # The least number of consecutive sizes that leaves no hole up to the most nodes, by trial.
            n_sizes = 1
            while check_guarantee(range(n0, n0 + n_sizes), n0, f, most_nodes) is not None:
                n_sizes += 1
            counts = {
                "least_templates": n_sizes,
                "formula_templates": least_template_count(n0, f),
                "full_templates": most_nodes - (f + 1) * n0 + 1,
            }
            for quantity, value in counts.items():
                yield {"study": "guarantee", "case": f"n0={n0} f={f}", "quantity": quantity, "value": value}


def template_sets(options: "Studies") -> Iterator[_Row]:
    """Yield the throughput that is lost with as few templates as are needed, while nodes are lost."""
    for f in options.f:
        for n0 in options.n0:
            found: dict[str, list[float]] = {}
            for profile in artifact_profiles(options.random_seeds):
                for quantity, values in _compared(profile, f, n0, options).items():
                    found.setdefault(quantity, []).extend(values)
            case = f"n0={n0} f={f}"
            lost = found["lost_pct"]
            summary = {
                "mean_lost_pct": sum(lost) / len(lost),
                "most_lost_pct": max(lost),
                "full_templates": max(found["full_templates"]),
                "minimal_templates": max(found["minimal_templates"]),
                "full_wall_s": sum(found["full_wall_s"]) / len(found["full_wall_s"]),
                "minimal_wall_s": sum(found["minimal_wall_s"]) / len(found["minimal_wall_s"]),
            }
            for quantity, value in summary.items():
                yield {"study": "template sets", "case": case, "quantity": quantity, "value": value}


def _compared(profile: ModelProfile, f: int, n0: int, options: "Studies") -> dict[str, list[float]]:
    """Compare all templates with the fewest that are needed, on every number of nodes."""
    full, full_s = _timed(profile, f, n0, options.compared_nodes, "full")
    minimal, minimal_s = _timed(profile, f, n0, options.compared_nodes, "minimal")
    lost, n_microbatches = [], options.compared_microbatches
    for n_nodes in range((f + 1) * n0, options.compared_nodes + 1):
        best, least = (
            choose_plan(templates, n_nodes, f, n_microbatches, profile=profile).best.iter_time_s
            for templates in (full, minimal)
        )
        lost.append(100.0 * (1.0 - best / least))
    return {
        "lost_pct": lost,
        "full_templates": [float(len(full))],
        "minimal_templates": [float(len(minimal))],
        "full_wall_s": [full_s],
        "minimal_wall_s": [minimal_s],
    }


def _timed(
    profile: ModelProfile, f: int, n0: int, n_nodes: int, template_set: TemplateSet
) -> tuple[dict[int, PipelineTemplate], float]:
    started = time.perf_counter()
    sizes = template_sizes(n0, f, n_nodes, template_set, most_possible=profile.n_layers)
    return make_templates(profile, sizes), time.perf_counter() - started


# ------------------------------------------------------------------------------------------------
# Studies of steady losses: intervals between checkpoints, and the analytic model beside the simulation.

INTERVALS = "checkpoint intervals"
_ANALYTIC = "analytic model"
_RARE = 20.0  # losses are so many times rarer than what each costs


def _flat(costs: Costs, n_nodes: int) -> Costs:
    """Make throughput independent of the number of nodes, so that only the cost of losses counts."""
    rates = dict.fromkeys(costs.throughput, costs.throughput[n_nodes])
    plain = dict.fromkeys(rates, (costs.plain_throughput or rates)[n_nodes])
    return replace(costs, throughput=rates, plain_throughput=plain, restart_by_nodes_ms=None)


def _share(
    system: str, costs: Costs, n_nodes: int, mtbf_s: float, n_losses: int, seeds: Sequence[int]
) -> float:
    """Return the simulated share of full throughput, mean over seeds, all defects repaired."""
    full = costs.throughput[n_nodes]
    outcomes = [
        simulate(system, generate_steady(n_nodes, mtbf_s, n_losses, seed), costs, repairs("fixed"))
        for seed in seeds
    ]
    return float(np.mean([outcome.throughput_samples_per_s for outcome in outcomes])) / full


def interval_study(systems: Systems, how: Intervals) -> Iterator[dict[str, Any]]:
    """Vary the steps between Varuna's checkpoints, and find the best beside Young and Daly's and Oobleck."""
    seeds = range(1, how.seeds + 1)
    n_nodes, n_losses, mtbf_s = how.n_nodes, how.n_losses, how.mtbf_s
    for model in how.models:
        base = _flat(systems.costs("varuna", model), n_nodes)
        estimate = young_daly_steps(base, n_nodes, mtbf_s)
        shares = {}
        for every in sorted({*how.every, estimate}):
            costs = replace(base, checkpoint_every=every)
            shares[every] = _share("varuna", costs, n_nodes, mtbf_s, n_losses, seeds)
            case = f"{model}, every {every} steps"
            yield _row(INTERVALS, case, "simulated_share", shares[every])
            yield _row(INTERVALS, case, "expected_share", expected_share("varuna", costs, n_nodes, mtbf_s))
        oobleck = _flat(systems.costs("oobleck", model), n_nodes)
        oobleck_share = _share("oobleck", oobleck, n_nodes, mtbf_s, n_losses, seeds)
        yield _row(INTERVALS, model, "best_steps", max(shares, key=lambda every: shares[every]))
        yield _row(INTERVALS, model, "best_share", max(shares.values()))
        yield _row(INTERVALS, model, "young_daly_steps", estimate)
        yield _row(INTERVALS, model, "young_daly_share", shares[estimate])
        yield _row(INTERVALS, model, "oobleck_share", oobleck_share)


def analytic_study(systems: Systems, how: Intervals) -> Iterator[dict[str, Any]]:
    """Compare the analytic model with the simulation where losses are rare."""
    seeds = range(1, how.seeds + 1)
    n_nodes = how.n_nodes
    for system in SYSTEMS:
        for model in systems.models:
            costs = systems.costs(system, model)
            if not costs.throughput:
                continue
            costs = _flat(costs, n_nodes)
            # A loss costs at most its recovery and the work since the last safe state.
            step_s = costs.samples_per_step / costs.throughput[n_nodes]
            if system == "varuna":
                cost_s = (costs.restart_ms - costs.checkpoint_ms) * MS + costs.checkpoint_every * step_s
            else:
                cost_s = (costs.global_ms if system == "oobleck" else costs.local_ms) * MS + step_s
            mtbf_s = _RARE * cost_s
            simulated = _share(system, costs, n_nodes, mtbf_s, how.n_losses, seeds)
            expected = expected_share(system, costs, n_nodes, mtbf_s)
            case = f"{system}, {model}, a loss every {mtbf_s:.0f} s"
            yield _row(_ANALYTIC, case, "simulated_share", simulated)
            yield _row(_ANALYTIC, case, "expected_share", expected)
            yield _row(_ANALYTIC, case, "difference_pct", 100.0 * (simulated / expected - 1.0))


def _row(study: str, case: str, quantity: str, value: float) -> dict[str, Any]:
    return {"study": study, "case": case, "quantity": quantity, "value": float(value)}


# --- The experiment ---------------------------------------------------------------------------------

_studies = partial(option, source="a choice", changes="studies")
Threshold = Annotated[int, Field(ge=0)]


class Studies(Experiment):
    """Study which templates are needed and what fewer cost, bursts of losses, and checkpoint intervals."""

    name = "studies"
    sources = ("emulated",)
    cells = ("throughput",)
    tables = {
        "studies": "which templates are needed at least; nodes lost at once; intervals between checkpoints",
    }
    figures = (
        Figure(
            "guarantee",
            "Coverage",
            "Fewest consecutive template sizes with which f + 1 pipelines can use "
            "every number of nodes from (f + 1) n0 to {nodes: config "
            "oobleck.planning.studies.most_nodes}, counted by trying all. "
            "No source of iteration times and no randomness play a part.",
            tables=("studies",),
        ),
        Figure(
            "intervals",
            "Checkpoint intervals",
            "Share of its full throughput that Varuna keeps with a loss every "
            "hour on average and a new node for each, against the steps between "
            "its checkpoints: simulated with all defects repaired, mean of "
            "{generated traces: config oobleck.simulation.intervals.seeds}, and "
            "by the analytic model. The dotted line is the interval of Young and "
            "Daly; for comparison, the share that Oobleck keeps. Throughput is "
            "printed and does not depend on the number of nodes here.",
            tables=("studies",),
        ),
        Figure(
            "bursts",
            "Several nodes at once",
            "Job that must survive f losses, while bursts of nodes are lost at "
            "random times, anywhere or in one rack, and come back later. Left to "
            "right: share of bursts that take all copies of a layer; share of "
            "time below (f + 1) n0 nodes, where the job continues degraded; work "
            "done on as many nodes or more, as a share of the work of all nodes "
            "in that time. Each mark is one simulation of {bursts: config "
            "oobleck.losses.bursts.n_bursts} on {nodes: config "
            "oobleck.losses.bursts.n_nodes} in racks of {nodes: config "
            "oobleck.losses.bursts.rack_size}, with pipelines of {nodes: config "
            "oobleck.losses.bursts.n0} or more. No source of iteration times plays a part.",
            tables=("studies",),
        ),
    )

    most_n0: Count = _studies("least nodes that hold the model, up to these", 8)
    most_f: Threshold = _studies("nodes that may be lost at once, up to these", 4)
    most_nodes: Count = _studies("nodes of a job, up to these", 64)
    compared_nodes: Count = _studies("nodes at the start where all and few templates are compared", 21)
    compared_microbatches: Count = _studies("microbatches of an iteration there", 512)
    random_seeds: Count = _studies("profiles of random layers there, seeds from 0", 3)
    f: tuple[int, ...] = shared("oobleck.planning.templates.f")
    n0: tuple[int, ...] = shared("oobleck.planning.templates.n0")
    bursts: Bursts = shared("oobleck.losses.bursts")
    models: tuple[Model, ...] = shared("oobleck.simulation.models")
    assumptions: Assumptions = shared("oobleck.simulation.assumptions")
    intervals: Intervals = shared("oobleck.simulation.intervals")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per quantity."""
        systems = Systems(given.cells["throughput"], **systems_of(self.models, self.assumptions))
        rows = [
            *guarantee_map(self.most_n0, self.most_f, self.most_nodes),
            *template_sets(self),
            *burst_study(self.bursts),
            *interval_study(systems, self.intervals),
            *analytic_study(systems, self.intervals),
        ]
        return {"studies": pd.DataFrame(rows)}
