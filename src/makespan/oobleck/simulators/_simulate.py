"""Run one system on one trace."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from makespan.errors import unknown_name
from makespan.oobleck.simulators._bamboo import BambooMachine
from makespan.oobleck.simulators._costs import Costs
from makespan.oobleck.simulators._defects import Defect
from makespan.oobleck.simulators._machine import Machine
from makespan.oobleck.simulators._oobleck import OobleckMachine
from makespan.oobleck.simulators._records import Run
from makespan.oobleck.simulators._traces import NodeTrace
from makespan.oobleck.simulators._varuna import VarunaMachine
from makespan.units import MS

__all__ = ["Outcome", "simulate", "unused_nodes"]

Floats = npt.NDArray[np.float64]
_MACHINES: dict[str, type[Machine]] = {
    "bamboo": BambooMachine,
    "varuna": VarunaMachine,
    "oobleck": OobleckMachine,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation found.

    Parameters
    ----------
    is_feasible
        Whether the model fits; if not, nothing was simulated.
    throughput_samples_per_s
        Average over the run, 0 if no step ended.
    n_steps, n_failures
        Steps that the system counts, and nodes removed.
    times_s
        Time by category.
    runs
        Steps, see `steps`; consecutive equal ones together.
    """

    is_feasible: bool
    throughput_samples_per_s: float = 0.0
    n_steps: int = 0
    n_failures: int = 0
    times_s: dict[str, float] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()

    def steps(self) -> Floats:
        """Return start and end [s] and samples that count, one row a step, (n_steps, 3)."""
        parts = [
            np.column_stack([edges[:-1], edges[1:], np.full(n_steps, samples)])
            for start_ms, end_ms, n_steps, samples in self.runs
            for edges in (np.linspace(start_ms, end_ms, n_steps + 1) * MS,)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, 3))


def simulate(system: str, trace: NodeTrace, costs: Costs, repaired: Collection[Defect] = ()) -> Outcome:
    """Simulate a system from the first event of a trace to the time of the last.

    Parameters
    ----------
    system
        ``bamboo``, ``varuna`` or ``oobleck``.
    repaired
        Defects of the released simulators that are repaired, see `repairs`.

    Returns
    -------
    Outcome
        Of a model without throughput at once, with ``is_feasible`` false.

    Raises
    ------
    UnknownNameError
        There is no such system.
    """
    if system not in _MACHINES:
        raise unknown_name("system", system, _MACHINES)
    if not costs.throughput:
        return Outcome(is_feasible=False)
    machine = _MACHINES[system](trace, costs, frozenset(repaired))
    machine.run()
    runs = machine.steps.runs()
    return Outcome(
        is_feasible=True,
        throughput_samples_per_s=_average(machine, sum(n_steps * samples for *_, n_steps, samples in runs)),
        n_steps=machine.n_steps,
        n_failures=machine.n_failures,
        times_s=machine.account.times_s(is_conservative=Defect.D5 in machine.repaired),
        runs=tuple(runs),
    )


def unused_nodes(trace: NodeTrace, costs: Costs) -> int:
    """Return how many nodes of a trace stay idle because throughput is known for fewer only.

    Parameters
    ----------
    trace, costs
        What is simulated.

    Returns
    -------
    int
        The most nodes that are there at once less the most of the table; 0 where there are no more.
    """
    return max(0, max(trace.counts()) - max(costs.throughput, default=0)) if costs.throughput else 0


def _average(machine: Machine, n_samples: float) -> float:
    """Return samples over time: to the last step as released, or to the end of the trace."""
    if machine.is_repaired(Defect.D4):
        start_ms, end_ms = machine.first_ready_ms, machine.trace.end_ms
    else:
        start_ms, end_ms = machine.start_ms, machine.last_step_ms
    if start_ms is None or end_ms <= start_ms:
        return 0.0
    return n_samples / ((end_ms - start_ms) * MS)
