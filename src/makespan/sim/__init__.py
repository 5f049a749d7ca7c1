"""The event-driven simulator of a cluster.

`simulate` runs the jobs of a `Scenario` under a policy. Its result, a `Schedule`, has two tables, of the
schemas `makespan.tables.EVENTS` and `makespan.tables.OUTCOMES`; `validate_schedule` replays the first of them
with code of its own and reports what could not have happened. A policy sees a `ClusterView` and returns a
`Decision`; the configurations of jobs come from a `Catalogue`. `Policy` and `Catalogue` are protocols: this
package has no implementation.
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
    Decision as Decision,
    Engine as Engine,
    InfeasibleDecision as InfeasibleDecision,
    Policy as Policy,
    PolicyError as PolicyError,
    Schedule as Schedule,
    StalledError as StalledError,
    check_policy as check_policy,
    events_table as events_table,
    losses_table as losses_table,
    outcomes_table as outcomes_table,
    round_length as round_length,
    simulate as simulate,
)
from makespan.sim.failures import (
    FAILURE_DAYS as FAILURE_DAYS,
    FAILURE_WEIGHTS as FAILURE_WEIGHTS,
    REPAIR_S as REPAIR_S,
    REPAIR_TIMES as REPAIR_TIMES,
    FailureModel as FailureModel,
    Failures as Failures,
    FailureWeight as FailureWeight,
    RepairTimes as RepairTimes,
    node_events as node_events,
)
from makespan.sim.interruptions import (
    Loss as Loss,
    LossOutcome as LossOutcome,
)
from makespan.sim.recovery import (
    CHECKPOINT_INTERVAL_S as CHECKPOINT_INTERVAL_S,
    CHECKPOINT_S as CHECKPOINT_S,
    PAUSES_S as PAUSES_S,
    RECOVERY_KINDS as RECOVERY_KINDS,
    Recovery as Recovery,
    RecoveryKind as RecoveryKind,
    expected_goodput as expected_goodput,
)
from makespan.sim.scenario import (
    DECISION_LIMIT_S as DECISION_LIMIT_S,
    PLACEMENT_RULES as PLACEMENT_RULES,
    PlacementRule as PlacementRule,
    Scenario as Scenario,
    check_jobs as check_jobs,
)
from makespan.sim.sharing import (
    IDLE_SHARE as IDLE_SHARE,
    MIN_SPEED as MIN_SPEED,
    Colocation as Colocation,
    Sharing as Sharing,
    colocated_speed as colocated_speed,
    colocated_speeds as colocated_speeds,
    oversubscribed_bytes as oversubscribed_bytes,
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
    absent_nodes as absent_nodes,
    ordered_node_events as ordered_node_events,
    read_failures as read_failures,
)
from makespan.sim.validator import (
    Violation as Violation,
    validate_schedule as validate_schedule,
)
