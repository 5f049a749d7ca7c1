"""The event-driven simulator of a cluster.

`simulate` runs a trace under a policy and leaves two tables behind, of the schemas
`makespan.tables.EVENTS` and `makespan.tables.OUTCOMES`;
`validate_schedule` replays the first of them with code of its own and reports what could not have
happened. A policy sees a `ClusterView` and returns a `Decision`; what may run comes from a
`Catalogue`. Both `Policy` and `Catalogue` are protocols: this package knows no implementation.
"""

from makespan.sim._catalogue import (
    Allocation,
    Catalogue,
    Configuration,
    Devices,
)
from makespan.sim._costs import RestartCost, RestartDelays, restart_cost
from makespan.sim._engine import Engine
from makespan.sim._events import (
    Event,
    EventKind,
    EventQueue,
    NodeEvent,
    NodeEventKind,
    Observer,
    read_failures,
)
from makespan.sim._node_accounts import Violation
from makespan.sim._policy import (
    Decision,
    InfeasibleDecision,
    Policy,
    PolicyError,
    StalledError,
    check_policy,
)
from makespan.sim._sharing import (
    IDLE_SHARE,
    LEAST_PACE,
    Company,
    Sharing,
    crowded_guest,
    pace_beside,
    paces_on,
)
from makespan.sim._simulate import (
    SimulationResult,
    check_jobs,
    events_table,
    outcomes_table,
    round_length,
    simulate,
)
from makespan.sim._validator import validate_schedule
from makespan.sim._view import ClusterView, JobView
from makespan.sim._watch import DECISION_LIMIT_S

__all__ = [
    "DECISION_LIMIT_S",
    "IDLE_SHARE",
    "LEAST_PACE",
    "Allocation",
    "Catalogue",
    "ClusterView",
    "Company",
    "Configuration",
    "Decision",
    "Devices",
    "Engine",
    "Event",
    "EventKind",
    "EventQueue",
    "InfeasibleDecision",
    "JobView",
    "NodeEvent",
    "NodeEventKind",
    "Observer",
    "Policy",
    "PolicyError",
    "RestartCost",
    "RestartDelays",
    "Sharing",
    "SimulationResult",
    "StalledError",
    "Violation",
    "check_jobs",
    "check_policy",
    "crowded_guest",
    "events_table",
    "outcomes_table",
    "pace_beside",
    "paces_on",
    "read_failures",
    "restart_cost",
    "round_length",
    "simulate",
    "validate_schedule",
]
