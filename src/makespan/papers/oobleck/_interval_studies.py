"""Studies of steady losses: intervals between checkpoints, and the analytic model beside the simulation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from makespan.oobleck.simulators import (
    SYSTEMS,
    Costs,
    Systems,
    expected_share,
    generate_steady,
    repairs,
    simulate,
    young_daly_steps,
)
from makespan.units import MS

__all__ = ["INTERVALS", "analytic_study", "interval_study"]

Cells = Mapping[str, pd.DataFrame]

INTERVALS = "checkpoint intervals"
_ANALYTIC = "analytic model"
_RARE = 20.0  # losses are so many times rarer than what each costs


def _flat(costs: Costs, n_nodes: int) -> Costs:
    """Let throughput not depend on the number of nodes, so that only the cost of losses counts."""
    rates = dict.fromkeys(costs.throughput, costs.throughput[n_nodes])
    plain = dict.fromkeys(rates, (costs.plain_throughput or rates)[n_nodes])
    return replace(costs, throughput=rates, plain_throughput=plain, restart_by_nodes_ms=None)


def _share(
    system: str, costs: Costs, n_nodes: int, mtbf_s: float, n_losses: int, seeds: Sequence[int]
) -> float:
    """Return the simulated share of full throughput, mean over seeds, all defects repaired."""
    full = costs.throughput[n_nodes]
    found = [
        simulate(system, generate_steady(n_nodes, mtbf_s, n_losses, seed), costs, repairs("fixed"))
        for seed in seeds
    ]
    return float(np.mean([one.throughput_samples_per_s for one in found])) / full


def interval_study(cells: Cells, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Vary the steps between Varuna's checkpoints, and find the best beside Young and Daly's and Oobleck.

    ``options``: ``systems``, ``models``, ``n_nodes``, ``mtbf_s``, ``n_losses``, ``seeds`` and ``every``.
    """
    systems, seeds = Systems(cells["throughput"], **options["systems"]), range(1, options["seeds"] + 1)
    n_nodes, n_losses, mtbf_s = options["n_nodes"], options["n_losses"], options["mtbf_s"]
    for model in options["models"]:
        base = _flat(systems.costs("varuna", model), n_nodes)
        estimate = young_daly_steps(base, n_nodes, mtbf_s)
        shares = {}
        for every in sorted({*options["every"], estimate}):
            costs = replace(base, checkpoint_every=every)
            shares[every] = _share("varuna", costs, n_nodes, mtbf_s, n_losses, seeds)
            case = f"{model}, every {every} steps"
            yield _row(INTERVALS, case, "simulated_share", shares[every])
            yield _row(INTERVALS, case, "expected_share", expected_share("varuna", costs, n_nodes, mtbf_s))
        oobleck = _flat(systems.costs("oobleck", model), n_nodes)
        own = _share("oobleck", oobleck, n_nodes, mtbf_s, n_losses, seeds)
        yield _row(INTERVALS, model, "best_steps", max(shares, key=lambda every: shares[every]))
        yield _row(INTERVALS, model, "best_share", max(shares.values()))
        yield _row(INTERVALS, model, "young_daly_steps", estimate)
        yield _row(INTERVALS, model, "young_daly_share", shares[estimate])
        yield _row(INTERVALS, model, "oobleck_share", own)


def analytic_study(cells: Cells, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Compare the analytic model with the simulation where losses are rare; options as there."""
    systems, seeds = Systems(cells["throughput"], **options["systems"]), range(1, options["seeds"] + 1)
    n_nodes = options["n_nodes"]
    for system in SYSTEMS:
        for model in systems.models:
            costs = systems.costs(system, model)
            if not costs.throughput:
                continue
            costs = _flat(costs, n_nodes)
            mtbf_s = _RARE * _cost_s(system, costs, n_nodes)
            found = _share(system, costs, n_nodes, mtbf_s, options["n_losses"], seeds)
            expected = expected_share(system, costs, n_nodes, mtbf_s)
            case = f"{system}, {model}, a loss every {mtbf_s:.0f} s"
            yield _row(_ANALYTIC, case, "simulated_share", found)
            yield _row(_ANALYTIC, case, "expected_share", expected)
            yield _row(_ANALYTIC, case, "difference_pct", 100.0 * (found / expected - 1.0))


def _cost_s(system: str, costs: Costs, n_nodes: int) -> float:
    """Return what a loss costs at the most: recovering, and the work since the last safe state [s]."""
    step_s = costs.samples_per_step / costs.throughput[n_nodes]
    if system == "varuna":
        return (costs.restart_ms - costs.checkpoint_ms) * MS + costs.checkpoint_every * step_s
    return (costs.global_ms if system == "oobleck" else costs.local_ms) * MS + step_s


def _row(study: str, case: str, quantity: str, value: float) -> dict[str, Any]:
    return {"study": study, "case": case, "quantity": quantity, "value": float(value)}
