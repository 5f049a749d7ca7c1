"""The event-driven simulator of a cluster.

`simulate` runs a trace under a policy and leaves two tables behind, `EVENTS` and `OUTCOMES`;
`validate_schedule` replays the first of them with code of its own and reports what could not have
happened. A policy sees a `ClusterView` and returns a `Decision`; the protocol is `Policy`.
"""

from makespan.sim._books import Violation
from makespan.sim._catalogue import Allocation, Catalogue, Configuration
from makespan.sim._engine import Engine
from makespan.sim._events import Event, EventKind, NodeEvent, NodeEventKind, Observer
from makespan.sim._inputs import check_jobs, round_length
from makespan.sim._policy import Decision, InfeasibleDecision, Policy, StalledError
from makespan.sim._recorder import Recorder, events_table, outcomes_table
from makespan.sim._simulate import SimulationResult, simulate
from makespan.sim._tables import EVENTS, FAILURES, OUTCOMES, read_failures
from makespan.sim._validator import validate_schedule
from makespan.sim._view import ClusterView, JobView

__all__ = [
    "EVENTS",
    "FAILURES",
    "OUTCOMES",
    "Allocation",
    "Catalogue",
    "ClusterView",
    "Configuration",
    "Decision",
    "Engine",
    "Event",
    "EventKind",
    "InfeasibleDecision",
    "JobView",
    "NodeEvent",
    "NodeEventKind",
    "Observer",
    "Policy",
    "Recorder",
    "SimulationResult",
    "StalledError",
    "Violation",
    "check_jobs",
    "events_table",
    "outcomes_table",
    "read_failures",
    "round_length",
    "simulate",
    "validate_schedule",
]
