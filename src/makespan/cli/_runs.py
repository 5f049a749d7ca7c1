"""One checked simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from makespan.cli._setup import Scenario
from makespan.metrics import Summary, summary, table4_row
from makespan.policies import policy
from makespan.sim import Observer, SimulationResult, Violation, simulate, validate_schedule

__all__ = ["Run", "run", "verdict_lines"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Run:
    """A simulation, what it comes to, and what the validator says of it.

    Parameters
    ----------
    policy
        Name of the policy.
    restart_delay_s, interval_s
        Restart delay and length of a round [s]; None if the policy was asked after each event.
    result
        Tables and times.
    metrics
        Its metrics.
    violations
        What is impossible in the schedule.
    """

    policy: str
    restart_delay_s: float
    interval_s: float | None
    result: SimulationResult
    metrics: Summary
    violations: tuple[Violation, ...]

    def row(self, trace: str, wall_s: float | None = None) -> Mapping[str, Any]:
        """Return the row of schema `makespan.tables.TABLE4`, ratios still missing."""
        return table4_row(
            trace,
            self.policy,
            self.metrics,
            restart_delay_s=self.restart_delay_s,
            interval_s=self.interval_s,
            wall_s=self.result.wall_s if wall_s is None else wall_s,
        )


def run(
    scenario: Scenario,
    policy_name: str,
    restart_delay_s: float,
    interval_s: float | None,
    observers: Sequence[Observer] = (),
) -> Run:
    """Simulate a scenario under a policy and check the schedule.

    Parameters
    ----------
    scenario
        Jobs, cluster and catalogue.
    policy_name
        Name of the policy.
    restart_delay_s
        Time without progress after each start and change [s].
    interval_s
        Length of a round [s]; None for the policy's own, 0 for none.
    observers
        Who watches.

    Raises
    ------
    MakespanError
        The policy is unknown, or the simulation cannot be done.
    """
    chosen = policy(policy_name)
    round_s = chosen.interval_s if interval_s is None else interval_s or None
    where, catalogue = scenario.cluster, scenario.catalogue.on(scenario.cluster)
    result = simulate(
        scenario.jobs,
        where,
        catalogue,
        chosen,
        restart_delay_s=restart_delay_s,
        interval_s=interval_s,
        observers=observers,
    )
    violations = validate_schedule(
        result.events,
        scenario.jobs,
        where,
        catalogue,
        restart_delay_s,
        interval_s=round_s,
        keeps_guarantees=chosen.honours_guarantees,
        outcomes=result.outcomes,
    )
    metrics = summary(result.events, result.outcomes, where, restart_delay_s=restart_delay_s)
    return Run(policy_name, restart_delay_s, round_s, result, metrics, tuple(violations))


def verdict_lines(done: Run) -> list[str]:
    """Return what the validator found, in words."""
    n_rows = len(done.result.events)
    if not done.violations:
        return [f"schedule of {done.policy}: possible, {n_rows} events replayed"]
    lines = [f"schedule of {done.policy}: IMPOSSIBLE, {len(done.violations)} violations in {n_rows} events"]
    lines += [
        f"  {found.rule} at {found.time_s:.1f} s, row {found.seq}, job {found.job_id or '-'}: {found.message}"
        for found in done.violations[:_SHOWN]
    ]
    return lines
