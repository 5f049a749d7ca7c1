"""Scenarios: what is simulated, running it under a policy, and checking the schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from makespan.errors import InputError, MakespanError
from makespan.hardware import ClusterSpec
from makespan.metrics import Summary, summary
from makespan.policies import policy as policy_named
from makespan.sim import (
    DECISION_LIMIT_S,
    Catalogue,
    NodeEvent,
    Observer,
    Policy,
    RestartCost,
    SimulationResult,
    Violation,
    restart_cost,
    round_length,
    simulate,
    validate_schedule,
)
from makespan.workloads import JobSpec

__all__ = [
    "Case",
    "ImpossibleScheduleError",
    "Run",
    "Scenario",
    "repeated",
    "resolved",
    "run",
    "violation_lines",
]

_SHOWN = 5


class ImpossibleScheduleError(MakespanError):
    """The validator found that a schedule could not have happened."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a simulation needs, except the policy.

    Parameters
    ----------
    name, report
        For tables and messages; what readers or the generator say of the jobs.
    jobs, cluster
        The trace and the nodes.
    catalogue
        What jobs may run as, how fast in truth, and how fast as policies believe.
    restart_delay_s
        Time without progress after each start and change [s], or a function of job, old and new allocation.
    interval_s
        Length of a round [s]; None for the policy's own, 0 to ask after each event.
    failures, checkpoint_interval_s
        Nodes that fail and join, and running time between checkpoints [s], as for `makespan.sim.simulate`.
    source, predictions
        Where iteration times come from, and what policies know of them, one of `PREDICTION_MODES`.
    decision_limit_s
        Wall time after which one call of a policy is interrupted [s], None or 0 for no limit; no result
        depends on it.
    kept
        What stays as in the job list whatever the cluster, for the title: durations or steps.
    made_for
        Cluster for whose nodes and network the times of the catalogue hold, however many nodes; None if
        nobody says.

    Raises
    ------
    InputError
        The cluster has other nodes or another network than ``made_for``, or predictions that are called exact
        are not.
    """

    name: str
    jobs: tuple[JobSpec, ...]
    cluster: ClusterSpec
    catalogue: Catalogue
    restart_delay_s: float | RestartCost = 0.0
    interval_s: float | None = None
    failures: tuple[NodeEvent, ...] = ()
    checkpoint_interval_s: float | None = None
    source: str = ""
    predictions: str = "exact"
    report: str = ""
    decision_limit_s: float | None = DECISION_LIMIT_S
    kept: str = ""
    made_for: ClusterSpec | None = None

    def __post_init__(self) -> None:
        """Check that times and knowledge are those of the cluster and of the label beside them."""
        there = self.made_for
        if there is not None and not (
            set(self.cluster.nodes) <= set(there.nodes) and self.cluster.network == there.network
        ):
            raise InputError(
                f"scenario {self.name!r}: its iteration times hold for nodes and network of cluster "
                f"{there.name!r}, got cluster {self.cluster.name!r}; assemble it anew by scenario(..., "
                f"cluster_name=...), or replace catalogue and made_for too"
            )
        if self.predictions == "exact" and there is not None and not _is_exact(self.catalogue):
            raise InputError(
                f"scenario {self.name!r}: predictions are 'exact', but its catalogue predicts other times "
                "than jobs take; change what policies know by makespan.studies.knowing"
            )

    @property
    def title(self) -> str:
        """Name, source, size, and what stays as in the job list, in a few words."""
        source = f" ({self.source})" if self.source else ""
        nodes = self.cluster.nodes
        if len({(node.n_gpus, node.gpu_type) for node in nodes}) == 1:
            size = f"{len(nodes)} x {nodes[0].n_gpus} GPUs"
        else:
            counts = dict.fromkeys(self.cluster.gpu_types, 0)
            for node in nodes:
                counts[node.gpu_type] += node.n_gpus
            size = f"{len(nodes)} nodes with {', '.join(f'{n} {kind}' for kind, n in counts.items())}"
        kept = f", {self.kept}" if self.kept else ""
        return f"{self.name}{source}, {len(self.jobs)} jobs on {size}{kept}"


def _is_exact(catalogue: Catalogue) -> bool:
    return all(
        item.predicted_iter_time_s == item.iter_time_s
        for key in catalogue.workloads
        for item in catalogue.all(key)
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation of several.

    Parameters
    ----------
    scenario, policy
        What is simulated, and who decides: a policy, or the name or the file of one.
    keeps_tables, repeats
        Whether its tables are handed back, and how often it is run again to compare schedules.
    repeat_within_s
        No further repeat once the simulations of the case took so long together [s, wall clock].
    """

    scenario: Scenario
    policy: str | Path | Policy
    keeps_tables: bool = False
    repeats: int = 0
    repeat_within_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Run:
    """A simulation that is over, what it comes to, and what the validator says of it.

    Parameters
    ----------
    scenario, policy
        Names.
    restart_delay_s, interval_s
        Restart delay that policies reckon with, and length of a round [s]; None if asked after each event.
    given_interval_s
        Length of a round that the scenario gives [s]; None where it leaves that to the policy.
    metrics, result
        Its metrics; tables, empty if the case does not keep them, and wall clock times.
    violations, n_events
        What is impossible in the schedule; rows of the events table.
    n_repeats, n_identical, repeat_walls_s
        How often it was run again, how many of these gave the same events, and wall clock times [s] of each:
        of the whole simulation, and of the policy.
    """

    scenario: str
    policy: str
    restart_delay_s: float
    interval_s: float | None
    given_interval_s: float | None
    metrics: Summary
    result: SimulationResult
    violations: tuple[Violation, ...]
    n_events: int
    n_repeats: int = 0
    n_identical: int = 0
    repeat_walls_s: tuple[tuple[float, float], ...] = ()

    @property
    def decision_wall_s(self) -> float:
        """Wall clock time of the policy a decision [s]."""
        return self.result.policy_wall_s / max(self.result.n_decisions, 1)

    def check(self) -> None:
        """Raise `ImpossibleScheduleError` with the setting and the first violations, if there are any."""
        if self.violations:
            raise ImpossibleScheduleError(
                f"policy {self.policy!r} on {self.scenario!r} with delay {self.restart_delay_s} s and rounds "
                f"of {self.interval_s or 0} s: {len(self.violations)} violation(s): "
                f"{'; '.join(violation_lines(self))}"
            )


def run(scenario: Scenario, policy: str | Path | Policy, observers: Sequence[Observer] = ()) -> Run:
    """Simulate a scenario under a policy, given itself, by name or by file, and validate the schedule.

    Observers are told of every event.

    Raises
    ------
    MakespanError
        The policy is unknown, or the simulation cannot be done.
    """
    chosen = resolved(policy)
    result = _simulated(scenario, chosen, observers)
    length_s = round_length(chosen, scenario.interval_s)
    violations = validate_schedule(
        result.events,
        scenario.jobs,
        scenario.cluster,
        scenario.catalogue,
        scenario.restart_delay_s,
        interval_s=length_s,
        checkpoint_interval_s=scenario.checkpoint_interval_s,
        keeps_guarantees=chosen.honours_guarantees,
        outcomes=result.outcomes,
    )
    delay_s = restart_cost(scenario.restart_delay_s).expected_s
    metrics = summary(result.events, result.outcomes, scenario.cluster, restart_delay_s=delay_s)
    settings = scenario.name, chosen.name, delay_s, length_s, scenario.interval_s
    return Run(*settings, metrics, result, tuple(violations), len(result.events))


def resolved(policy: str | Path | Policy) -> Policy:
    """Return a policy that may be given by name or file."""
    return policy_named(policy) if isinstance(policy, str | Path) else policy


def repeated(case: Case, first: Run) -> Run:
    """Run a case again as often as it asks for, and say in its first run what came of that."""
    same, walls_s = 0, list[tuple[float, float]]()
    while len(walls_s) < case.repeats and _total_s(first, walls_s) < case.repeat_within_s:
        again = _simulated(case.scenario, resolved(case.policy))
        same += again.events.equals(first.result.events)
        walls_s.append((again.wall_s, again.policy_wall_s))
    return replace(first, n_repeats=len(walls_s), n_identical=same, repeat_walls_s=tuple(walls_s))


def _total_s(first: Run, walls_s: Sequence[tuple[float, float]]) -> float:
    return first.result.wall_s + sum(wall_s for wall_s, _ in walls_s)


def _simulated(scenario: Scenario, policy: Policy, observers: Sequence[Observer] = ()) -> SimulationResult:
    return simulate(
        scenario.jobs,
        scenario.cluster,
        scenario.catalogue,
        policy,
        restart_delay_s=scenario.restart_delay_s,
        interval_s=scenario.interval_s,
        failures=scenario.failures,
        checkpoint_interval_s=scenario.checkpoint_interval_s,
        observers=observers,
        decision_limit_s=scenario.decision_limit_s,
        reveals_requests=scenario.predictions == "requests",
    )


def violation_lines(done: Run) -> list[str]:
    """Return the first violations of a run in words, one a line."""
    return [
        f"{found.rule} at {found.time_s:.1f} s, row {found.seq}, job {found.job_id or '-'}: {found.message}"
        for found in done.violations[:_SHOWN]
    ]
