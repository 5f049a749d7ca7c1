"""The event-driven simulator of a cluster.

`simulate` runs a trace under a policy and returns two tables, of the schemas `makespan.tables.EVENTS` and
`makespan.tables.OUTCOMES`; `validate_schedule` replays the first of them with code of its own and reports
what could not have happened. A policy sees a `ClusterView` and returns a `Decision`; the configurations of
jobs come from a `Catalogue`. `Policy` and `Catalogue` are protocols: this package has no implementation.
"""

from makespan.sim.catalogue import (
    Allocation as Allocation,
    Catalogue as Catalogue,
    Configuration as Configuration,
    Devices as Devices,
    RestartCost as RestartCost,
    RestartDelays as RestartDelays,
    restart_cost as restart_cost,
)
from makespan.sim.engine import (
    DECISION_LIMIT_S as DECISION_LIMIT_S,
    Decision as Decision,
    Engine as Engine,
    InfeasibleDecision as InfeasibleDecision,
    Policy as Policy,
    PolicyError as PolicyError,
    SimulationResult as SimulationResult,
    StalledError as StalledError,
    check_jobs as check_jobs,
    check_policy as check_policy,
    events_table as events_table,
    outcomes_table as outcomes_table,
    round_length as round_length,
    simulate as simulate,
)
from makespan.sim.sharing import (
    IDLE_SHARE as IDLE_SHARE,
    LEAST_PACE as LEAST_PACE,
    Company as Company,
    Sharing as Sharing,
    crowded_guest as crowded_guest,
    pace_beside as pace_beside,
    paces_on as paces_on,
)
from makespan.sim.state import (
    ClusterView as ClusterView,
    Event as Event,
    EventKind as EventKind,
    EventQueue as EventQueue,
    JobView as JobView,
    NodeEvent as NodeEvent,
    NodeEventKind as NodeEventKind,
    Observer as Observer,
    read_failures as read_failures,
)
from makespan.sim.validator import (
    Violation as Violation,
    validate_schedule as validate_schedule,
)
