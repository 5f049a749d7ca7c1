"""What is to be expected where losses are rare, without a simulation."""

import math

from makespan.errors import InputError, unknown_name
from makespan.oobleck.simulators._costs import SYSTEMS, Costs
from makespan.units import MS

__all__ = ["expected_share", "young_daly_steps"]


def expected_share(system: str, costs: Costs, n_nodes: int, mtbf_s: float) -> float:
    """Return the share of full throughput that is left when a node is lost now and then.

    Holds where losses are much rarer than what each of them costs; the time between losses and the place of
    a loss in a step, or between two checkpoints, are taken for evenly distributed.

    Parameters
    ----------
    system, costs
        ``bamboo``, ``varuna`` or ``oobleck``, and its costs; the throughput on ``n_nodes`` is the full one.
    mtbf_s
        Mean time between losses of the whole job [s].

    Returns
    -------
    float
        Between 0 and 1.

    Raises
    ------
    UnknownNameError
        There is no such system.
    """
    step_s = _step_s(costs, n_nodes)
    if system == "oobleck":
        return max(0.0, mtbf_s - costs.global_ms * MS - step_s / 2.0) / mtbf_s
    if system == "bamboo":
        return max(0.0, mtbf_s - costs.local_ms * MS) / mtbf_s
    if system != "varuna":
        raise unknown_name("system", system, SYSTEMS)
    checkpoint_s, work_s = costs.checkpoint_ms * MS, costs.checkpoint_every * step_s
    cycle_s = work_s + checkpoint_s
    restart_s = (costs.restart_ms - costs.checkpoint_ms) * MS
    return work_s / cycle_s * max(0.0, mtbf_s - restart_s - cycle_s / 2.0) / mtbf_s


def young_daly_steps(costs: Costs, n_nodes: int, mtbf_s: float) -> int:
    """Return the steps between checkpoints that lose least by the estimate of Young and Daly, 1 or more.

    Parameters
    ----------
    costs, n_nodes, mtbf_s
        As for `expected_share`.

    Returns
    -------
    int
        The square root of twice the cost of a checkpoint times the time between losses, in steps.
    """
    interval_s = math.sqrt(2.0 * costs.checkpoint_ms * MS * mtbf_s)
    return max(1, round(interval_s / _step_s(costs, n_nodes)))


def _step_s(costs: Costs, n_nodes: int) -> float:
    rate = costs.throughput.get(n_nodes, 0.0)
    if rate <= 0:
        raise InputError(f"no throughput on {n_nodes} nodes; accepted: a number of nodes that can run")
    return costs.samples_per_step / rate
