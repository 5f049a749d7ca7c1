"""What one system costs on one model: throughput by nodes, and the time of all that is not training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from makespan.errors import InputError, unknown_name
from makespan.oobleck.simulators._defects import Defect
from makespan.units import MS

__all__ = ["SYSTEMS", "Costs", "ModelCosts", "Systems"]

SYSTEMS = ("bamboo", "varuna", "oobleck")
"""In the order of the figures."""

_ENDLESS_MS = 10**12  # the released step of a job that cannot run


@dataclass(frozen=True, slots=True)
class Costs:
    """What a simulation is given, besides the trace.

    Parameters
    ----------
    samples_per_step
        Global batch.
    throughput
        Samples per second by number of nodes; empty if the model never fits. 0: not with so many nodes.
    creation_ms
        From a node's arrival to its being ready.
    global_ms, local_ms
        Rendezvous of all nodes, and the one by which Bamboo takes spare nodes in.
    checkpoint_ms, checkpoint_every
        Writing one, and after how many steps.
    charges_checkpoints
        Whether writing one takes that time; where it does not, none fails.
    restart_ms, restart_by_nodes_ms
        Varuna: restart from a checkpoint, checkpoint included, at first and after a rendezvous of so many
        nodes.
    idle_gpus
        GPUs that Varuna's plan for so many nodes leaves idle.
    falls_back
        Whether Varuna loses the steps since the last checkpoint.
    n_stages, slow_down, overload_limit, useful_share
        Stages of a pipeline; Bamboo: factor of a step while a node does the work of two, share of such nodes
        above which it plans anew, share of a step that is useful as the release has it.
    plain_throughput
        Samples per second without redundant work.
    horizon_ms
        Over how much time joined nodes must pay for a new plan (repair of D2).
    """

    samples_per_step: int
    throughput: Mapping[int, float]
    creation_ms: int
    global_ms: int
    local_ms: int = 0
    checkpoint_ms: int = 0
    checkpoint_every: int = 10
    charges_checkpoints: bool = True
    restart_ms: int = 0
    restart_by_nodes_ms: Mapping[int, int] | None = None
    idle_gpus: Mapping[int, int] | None = None
    falls_back: bool = True
    n_stages: int = 12
    slow_down: float = 1.5
    overload_limit: float = 0.05
    useful_share: float = 1.0
    plain_throughput: Mapping[int, float] | None = None
    horizon_ms: int = 3_600_000

    def known(self, n_nodes: int) -> int:
        """Return the number of nodes of the table that is nearest."""
        return min(max(n_nodes, min(self.throughput)), max(self.throughput))

    def samples_per_s(self, n_nodes: int, repaired: frozenset[Defect]) -> float:
        """Return the throughput on so many nodes; nodes beyond the table are idle, too few make 0."""
        if Defect.D10 in repaired and n_nodes < min(self.throughput):
            return 0.0
        return self.throughput[self.known(n_nodes)]

    def step_ms(self, n_nodes: int, repaired: frozenset[Defect]) -> int | None:
        """Return the time of a step; None if the job must wait for nodes."""
        rate = self.samples_per_s(n_nodes, repaired)
        if rate > 0:
            return max(int(1000 * self.samples_per_step / rate), 1)
        # As released, fewer nodes than the table has run at the rate of its first row, also where that is 0.
        waits_below = Defect.D10 in repaired and n_nodes < min(self.throughput)
        return None if Defect.D7 in repaired or waits_below else _ENDLESS_MS


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What configuration says of one model; times [s]."""

    name: str
    samples_per_step: int
    regroup_s: float
    checkpoint_s: float
    restart_s: float
    local_rebalance_s: float
    falls_back_on_spot: bool


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What configuration says of the systems; times [s]."""

    node_creation_s: float
    n_stages: int
    checkpoint_every: int
    bamboo_restart_s: float
    slow_down: float
    overload_limit: float
    useful_share: float
    horizon_s: float


class Systems:
    """Costs of every system on every model, from printed cells and configuration.

    Parameters
    ----------
    cells
        Throughput, restart times and idle GPUs by model, system and number of nodes, schema
        ``published_throughput``; a model that a system does not fit has no rows.
    models, assumptions
        As in the configuration; see `ModelCosts` and `Assumptions`.

    Raises
    ------
    InputError
        A model has no throughput under any system.
    """

    def __init__(
        self, cells: pd.DataFrame, models: Sequence[Mapping[str, Any]], assumptions: Mapping[str, Any]
    ) -> None:
        self.models = {model["name"]: ModelCosts(**model) for model in models}
        self._assumed = Assumptions(**assumptions)
        again = cells[cells.duplicated(["model", "system", "n_nodes"])]
        low = cells[~(cells["published_samples_per_s"] >= 0)]
        for what, rows in (("occurs twice; accepted: once", again), ("is below 0; accepted: 0 or more", low)):
            for model, system, n_nodes in rows[["model", "system", "n_nodes"]].to_numpy().tolist()[:1]:
                raise InputError(f"throughput of {model!r}, {system}, {n_nodes} nodes {what}")
        self._cells = dict(list(cells.groupby(["model", "system"])))
        for name in self.models:
            if not any((name, system) in self._cells for system in SYSTEMS):
                known = ", ".join(sorted({str(model) for model, _ in self._cells}))
                raise InputError(f"model {name!r} has no throughput; there is one of: {known}")

    def costs(
        self, system: str, model: str, *, falls_back: bool = True, checkpoint_every: int | None = None,
        charges_checkpoints: bool = True,
    ) -> Costs:  # fmt: skip
        """Return the costs of a system on a model; the options are Varuna's.

        Raises
        ------
        UnknownNameError
            There is no such system or model.
        """
        if system not in SYSTEMS:
            raise unknown_name("system", system, SYSTEMS)
        if model not in self.models:
            raise unknown_name("model", model, self.models)
        own, assumed = self.models[model], self._assumed
        global_s = {"bamboo": assumed.bamboo_restart_s, "oobleck": own.regroup_s}.get(system, 0.0)
        restarts = self._column(system, model, "published_restart_s")
        return Costs(
            samples_per_step=own.samples_per_step,
            throughput=self._column(system, model, "published_samples_per_s"),
            creation_ms=_ms(assumed.node_creation_s),
            global_ms=_ms(global_s),
            local_ms=_ms(own.local_rebalance_s),
            checkpoint_ms=_ms(own.checkpoint_s),
            checkpoint_every=checkpoint_every or assumed.checkpoint_every,
            charges_checkpoints=charges_checkpoints,
            restart_ms=_ms(own.restart_s),
            restart_by_nodes_ms={n: _ms(value) for n, value in restarts.items()},
            idle_gpus={
                n: int(value) for n, value in self._column(system, model, "published_idle_gpus").items()
            },
            falls_back=falls_back,
            n_stages=assumed.n_stages,
            slow_down=assumed.slow_down,
            overload_limit=assumed.overload_limit,
            useful_share=assumed.useful_share,
            plain_throughput=self._column("varuna", model, "published_samples_per_s"),
            horizon_ms=_ms(assumed.horizon_s),
        )

    def _column(self, system: str, model: str, column: str) -> dict[int, float]:
        """Return a column by number of nodes, without what is missing."""
        rows = self._cells.get((model, system))
        if rows is None:
            return {}
        pairs = zip(rows["n_nodes"].tolist(), rows[column].tolist(), strict=True)
        return {int(n): float(value) for n, value in pairs if value == value}


def _ms(time_s: float) -> int:
    return round(time_s / MS)
