"""ReCycle (SOSP 2024) and dropped replicas beside Oobleck, Varuna and Bamboo: schedules and simulations.

**What is known of the paper.** Only its abstract (arXiv 2405.14009) was at hand: the techniques, and
throughput of up to 1.46 times that of Oobleck and 1.64 times that of Bamboo. Its models, clusters and
failures are not known here, so that a difference from these figures says nothing about its measurements.

**Question.** How fast is ReCycle under the costs that this project has for Oobleck, Varuna and Bamboo?

**Systems.** Costs of the three are those of Oobleck's artifact, with all defects of its simulators repaired.
ReCycle and dropped replicas run at Oobleck's printed throughput on all nodes; iteration times of
`makespan.oobleck.rerouting` scale it by the live workers, and never above it. Both use as few stages as hold
the model (two at least, a divisor of the nodes), which leaves the most peers. A loss costs them the running
step and Oobleck's time to regroup; taking in a node costs a regrouping; a stage without a live worker costs
Varuna's restart and the steps since the last of its checkpoints, whose writing is free. Passes are those of
`layer_times` on one A40 per node, microbatches those of the throughput from times of layers. Half of a
backward pass is taken for weights. A worker holds as many microbatches as its memory has room for. Transfers
take no time, as in the throughput from times of layers; each stage waits for the exchange of one layer.

**Losses.** Two kinds, each with ten seeds. *Fixed distances* are Oobleck's: half of 30 nodes go one by one
and never return. *Repaired* losses come at random with a mean of 6 h, 2 h or 30 min in the whole cluster, and
each node is back after an hour; 40 of them (30 after the first run, which took 22 s of CPU; its verdicts were
the same). Ratios are taken per seed, and their mean has a 95 % interval.

**Schedules.** Equal stages, 2, 5 and 10 of them on 30 nodes, with one, two, four and eight times as many
microbatches per pipeline, with all workers and without one in the middle, for each technique, with room for
the activations of 1F1B and for twice as many.

**Expected before the first run.** (Of the schedules a few had been seen while the scheduler was written.)

1. The largest lead over Oobleck is below 1.24, so that the statement of 1.46 within 15 % fails. Oobleck
   spreads a loss over all nodes, while in ReCycle the peers of one stage carry it, and these models run many
   more microbatches than stages, which leaves few bubbles to fill.
2. The largest lead over Bamboo is far above 1.64, so that this statement within 15 % fails, too. Bamboo's
   printed throughput is less than a third of Oobleck's.
3. ReCycle is ahead of dropped replicas for every model and kind of losses.
4. ReCycle is behind Oobleck by at most 10 % for models of two stages under repaired losses.
5. In schedules of equal stages, a lost worker costs nothing with all techniques and room for twice the
   activations wherever the work of its peers fits into an iteration of 1F1B.
6. With a lost worker, schedules with all techniques are shorter than those of re-routing alone, always.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from makespan.errors import InputError
from makespan.hardware import cluster
from makespan.numerics import half_widths
from makespan.oobleck.instantiation import microbatches, stage_passes_s
from makespan.oobleck.profile import layer_times, paper_model, pipeline_workload
from makespan.oobleck.rerouting import (
    ALL_TECHNIQUES,
    NO_TECHNIQUES,
    PeerRates,
    StagePasses,
    Techniques,
    lower_bound_s,
    normalized,
    plain_time_s,
    rerouted_time_s,
    shared_out,
)
from makespan.oobleck.simulator import PEER_SYSTEMS, SYSTEMS, Costs, Systems, repairs, simulate
from makespan.oobleck.templates import MemoryLimit, make_templates, smallest_node_count
from makespan.oobleck.traces import NodeTrace, generate_failures, generate_repaired
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.papers.oobleck.simulation import Assumptions, FailureTrace, Model, Seeds, systems_of
from makespan.settings import Count, option, shared
from makespan.tables import read_csv, schemas_of

ALL_SYSTEMS = (*SYSTEMS, *PEER_SYSTEMS)
"""All systems of the comparison, in the order of the figures."""
TECHNIQUES = {
    "rerouted": NO_TECHNIQUES,
    "rerouted_split": Techniques(splits_backward=True, staggers_optimizer=False),
    "rerouted_staggered": Techniques(splits_backward=False, staggers_optimizer=True),
    "every": ALL_TECHNIQUES,
}
"""Techniques by their name in the table of schedules."""
_option = partial(option, source="a choice", changes="recycle, recycle_ratios")
_of_schedules = partial(option, source="a choice", changes="recycle_schedules")
_FORWARD_S, _BACKWARD_S = 1.0, 2.0  # passes of a stage of the schedules; only their ratio matters
Traces = Mapping[tuple[str, str], Mapping[int, NodeTrace]]
"""Traces by kind of losses and name, then by seed."""


class ReCycle(Experiment):
    """Compare ReCycle and dropped replicas with Oobleck, Varuna and Bamboo."""

    name = "recycle"
    sources = ("emulated",)
    cells = ("throughput",)
    unjudged = frozenset({"recycle"})
    tables = {
        "recycle": "average throughput of ReCycle, dropped replicas, Oobleck, Varuna and Bamboo",
        "recycle_ratios": "throughput of ReCycle over that of the other systems",
        "recycle_schedules": "iterations of schedules with a lost worker, by technique",
    }
    figures = (
        Figure(
            "recycle",
            "ReCycle",
            "Above: average throughput of ReCycle over that of the other systems, "
            "mean of {traces: config oobleck.recycle.seeds} per kind of losses with "
            "the 95 % interval, on printed throughput and with all defects of the "
            "simulators repaired. Left of the line nodes never return, right of it "
            "each is back after a while. Bamboo has no marks for models that do not "
            "fit, Varuna none where it makes no progress. Below: iterations with one "
            "lost worker in the middle stage over those of 1F1B without losses, for "
            "equal stages, against microbatches over stages of a pipeline; the bound "
            "holds for any schedule with all techniques.",
            tables=("recycle_ratios", "recycle_schedules"),
        ),
    )

    distances: tuple[FailureTrace, ...] = _option(
        "distances between failures of nodes that never return",
        ("6h", "3h", "1h", "30m", "10m"),
        min_length=1,
    )
    mtbf_s: dict[str, Annotated[float, Field(gt=0)]] = _option(
        "mean times between losses that are repaired, by name",
        {"6h": 21_600.0, "2h": 7_200.0, "30m": 1_800.0},
        unit="s",
        min_length=1,
    )
    repair_s: float = _option("time until a lost node is back", 3600.0, unit="s", gt=0)
    n_losses: Count = _option("repaired losses of a trace", 30)
    seeds: Seeds = _option("traces of each kind", 10)
    least_stages: Count = _option("stages of a pipeline, at least", 2)
    weight_share: float = _option("share of the gradients of weights in a backward pass", 0.5, gt=0, lt=1)
    scheduled_passes: Count = _option(
        "microbatches times stages of a pipeline up to which they are scheduled one by one", 60, ge=20
    )
    schedule_nodes: Count = _of_schedules("nodes of the schedules of equal stages", 30)
    schedule_stages: tuple[Count, ...] = _of_schedules("their stages, divisors of the nodes", (2, 5, 10))
    schedule_multiples: tuple[Count, ...] = _of_schedules(
        "microbatches of a pipeline over its stages", (1, 2, 4, 8), min_length=1
    )
    models: tuple[Model, ...] = shared("oobleck.simulation.models")
    assumptions: Assumptions = shared("oobleck.simulation.assumptions")
    cluster: str = shared("oobleck.planning.layer_throughput.cluster")
    state_factor: float = shared("oobleck.planning.layer_throughput.state_factor")
    micro_batch_sizes: dict[str, Count] = shared("oobleck.planning.layer_throughput.micro_batch_sizes")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per run, per ratio, and per schedule."""
        systems = Systems(given.cells["throughput"], **systems_of(self.models, self.assumptions))
        found = pd.DataFrame(throughput_rows(systems, self))
        return {
            "recycle": found,
            "recycle_ratios": ratio_table(found),
            "recycle_schedules": pd.DataFrame(schedule_rows(self)),
        }


def losses(options: ReCycle, n_nodes: int) -> Traces:
    """Return the traces of losses, seeds from 1."""
    seeds = range(1, options.seeds + 1)
    fixed = {
        ("fixed", name): {seed: generate_failures(name, seed) for seed in seeds} for name in options.distances
    }
    repaired = {
        ("repaired", name): {
            seed: generate_repaired(n_nodes, mtbf_s, options.repair_s, options.n_losses, seed)
            for seed in seeds
        }
        for name, mtbf_s in options.mtbf_s.items()
    }
    return fixed | repaired


def peer_rates(
    model: str, batch: int, n_nodes: int, full_samples_per_s: float, options: ReCycle
) -> PeerRates:
    """Return the throughput of equal pipelines of a model by live workers, from emulated times of its layers.

    Pipelines have the fewest stages that hold the model with the activations of 1F1B, a divisor of the nodes.

    Raises
    ------
    InputError
        No divisor of the number of nodes holds the model twice, so that no worker has a peer.
    """
    hardware = cluster(options.cluster)
    node = replace(hardware.node, n_gpus=1)
    size = options.micro_batch_sizes[model]
    profile = layer_times(pipeline_workload(paper_model(model), batch), node, hardware.network, size)
    memory = MemoryLimit(node.gpu.usable_bytes, options.state_factor)
    least = max(options.least_stages, smallest_node_count(profile, memory, n_nodes))
    n_stages = next((p for p in range(least, n_nodes // 2 + 1) if n_nodes % p == 0), None)
    if n_stages is None:
        raise InputError(
            f"{model}: no pipelines of {least} stages or more on {n_nodes} nodes; expected two or more"
        )
    stages = make_templates(profile, [n_stages], memory=memory)[n_stages].stages
    forward_s, backward_s = zip(*(stage_passes_s(stage, profile) for stage in stages), strict=True)
    # Only the exchange of the first layer of a stage is waited for, as in `ModelProfile.sync_time_s`.
    n_pipelines = n_nodes // n_stages
    exchange_s = [profile.layers[stage.first_layer].allreduce_across_nodes_s[n_pipelines] for stage in stages]
    room = []
    for stage in stages:
        layers = [profile.layers[index] for index in stage.layers]
        left = memory.device_bytes - memory.state_factor * sum(layer.parameter_bytes for layer in layers)
        room.append(int(left // sum(layer.activation_bytes for layer in layers)))
    return PeerRates(
        StagePasses.split(forward_s, backward_s, options.weight_share, exchange_s),
        microbatches(batch, size),
        n_pipelines,
        full_samples_per_s,
        in_flight=tuple(room),
        most_scheduled=max(2, options.scheduled_passes // n_stages),
    )


def throughput_rows(systems: Systems, options: ReCycle) -> Iterator[dict[str, Any]]:
    """Yield the average throughput of every system, model, kind of losses and seed, all defects repaired."""
    for model, configured in systems.models.items():
        if model not in options.micro_batch_sizes:
            raise InputError(f"recycle: {model} has no entry in planning.layer_throughput.micro_batch_sizes")
        oobleck = systems.costs("oobleck", model)
        n_nodes = max(oobleck.throughput)
        peers = peer_rates(model, configured.samples_per_step, n_nodes, oobleck.throughput[n_nodes], options)
        costs: dict[str, Costs] = {name: systems.costs(name, model) for name in SYSTEMS}
        costs |= dict.fromkeys(PEER_SYSTEMS, replace(oobleck, n_stages=peers.n_stages, peers=peers))
        for (kind, name), traces in losses(options, n_nodes).items():
            for system in ALL_SYSTEMS:
                outcome = None
                for seed, trace in traces.items():
                    # At fixed distances, only these systems can tell the seeds apart, which say who is lost.
                    if outcome is None or kind == "repaired" or system in ("bamboo", *PEER_SYSTEMS):
                        outcome = simulate(system, trace, costs[system], repairs("fixed"))
                    yield {
                        "losses": kind,
                        "trace": name,
                        "seed": seed,
                        "model": model,
                        "system": system,
                        "n_stages": peers.n_stages,
                        "throughput_samples_per_s": outcome.throughput_samples_per_s,
                        "feasible": outcome.is_feasible,
                    }


def ratio_table(found: pd.DataFrame) -> pd.DataFrame:
    """Return ReCycle's throughput over that of each other system: means over seeds, with 95 % intervals.

    Where the other system does not fit or makes no progress under some seed, there is no ratio.
    """
    keys = ["losses", "trace", "model", "n_stages"]
    rows = []
    for key, runs in found.groupby(keys, sort=False):
        wide = runs.pivot(index="seed", columns="system", values="throughput_samples_per_s")
        for other in (name for name in ALL_SYSTEMS if name != "recycle"):
            ratios = wide["recycle"] / wide[other].where(wide[other] > 0)
            row: dict[str, Any] = dict(zip(keys, key, strict=True)) | {"other": other}
            row["ratio"] = row["half_width"] = math.nan
            if ratios.notna().all():
                row["ratio"] = float(ratios.mean())
                row["half_width"] = float(half_widths(ratios.groupby(np.zeros(len(ratios))))[0])
            rows.append(row)
    order = ["losses", "trace", "model", "n_stages", "ratio", "half_width", "other"]
    return pd.DataFrame(rows)[order]


def schedule_rows(options: ReCycle) -> Iterator[dict[str, Any]]:
    """Yield the iterations of equal stages with all workers and without one, by technique, over 1F1B."""
    for n_stages in options.schedule_stages:
        n_pipelines, rest = divmod(options.schedule_nodes, n_stages)
        if rest or n_pipelines < 2:
            raise InputError(
                f"recycle.schedule_stages has {n_stages}; expected divisors of {options.schedule_nodes} that "
                "leave two pipelines or more"
            )
        passes = StagePasses.split((_FORWARD_S,) * n_stages, (_BACKWARD_S,) * n_stages)
        for multiple in options.schedule_multiples:
            total = n_pipelines * multiple * n_stages
            counts = shared_out(total, n_pipelines)
            plain_s = plain_time_s(passes, counts)
            for n_lost in (0, 1):
                live = [n_pipelines - (n_lost if stage == n_stages // 2 else 0) for stage in range(n_stages)]
                gone = normalized(live, n_pipelines)
                for technique, techniques in TECHNIQUES.items():
                    bound_s = lower_bound_s(passes, counts, gone, techniques)
                    for room, in_flight in (("once", n_stages), ("twice", 2 * n_stages)):
                        time_s = rerouted_time_s(passes, total, n_pipelines, live, techniques, in_flight)
                        yield {
                            "n_stages": n_stages,
                            "n_pipelines": n_pipelines,
                            "n_microbatches": multiple * n_stages,
                            "n_lost": n_lost,
                            "technique": technique,
                            "room": room,
                            "time_ratio": time_s / plain_s,
                            "bound_ratio": bound_s / plain_s,
                        }


# --- The page of the paper ----------------------------------------------------------------------------


_ON_PAGE = {"oobleck": "Oobleck", "replica-drop": "dropped replicas", "varuna": "Varuna", "bamboo": "Bamboo"}


def page(results: str | Path) -> dict[str, str]:
    """Return the table of ratios of the paper's page, by its mark; nothing where it is not built.

    Parameters
    ----------
    results
        The directory ``results/``.

    Raises
    ------
    TraceError
        The table lacks a column or has a cell that its schema does not accept.
    """
    path = Path(results) / "emulated/oobleck/recycle_ratios.csv"
    if not path.is_file():
        return {}
    table = read_csv(path, schemas_of("makespan.papers.oobleck")["recycle_ratios"])
    lines = [("model", "losses", *_ON_PAGE.values()), ("---",) * (2 + len(_ON_PAGE)), *_page_rows(table)]
    return {"table: recycle": "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"}


def _page_rows(table: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """Yield models and the most frequent losses of each kind, with ratios and their intervals as text."""
    last = table.groupby(["model", "losses"], sort=False)["trace"].transform("last")
    for case, group in table[table["trace"] == last].groupby(["model", "losses", "trace"], sort=False):
        model, kind, trace = map(str, case)
        found = group.set_index("other").astype({"ratio": float, "half_width": float})
        ratios, halves = found["ratio"].to_dict(), found["half_width"].to_dict()
        cells = [
            "–" if math.isnan(ratios[other]) else f"{ratios[other]:.2f} ± {halves[other]:.2f}"
            for other in _ON_PAGE
        ]
        yield model, f"{trace}, {'repaired' if kind == 'repaired' else 'for good'}", *cells
