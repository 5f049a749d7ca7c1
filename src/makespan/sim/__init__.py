"""The event-driven simulator of a cluster.

`simulate` runs a trace under a policy and leaves two tables behind, `EVENTS` and `OUTCOMES`;
`validate_schedule` replays the first of them with code of its own and reports what could not have
happened. A policy sees a `ClusterView` and returns a `Decision`; the protocol is `Policy`.
"""

from makespan.sim._books import Violation
from makespan.sim._catalogue import Catalogue
from makespan.sim._configuration import Allocation, Configuration
from makespan.sim._events import Event, EventKind, NodeEvent, NodeEventKind, Observer
from makespan.sim._policy import Decision, InfeasibleDecision, Policy, StalledError
from makespan.sim._recorder import Recorder
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
    "read_failures",
    "simulate",
    "validate_schedule",
]
