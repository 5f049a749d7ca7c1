"""The ledger of the paper: how each statement is checked against result tables."""

from makespan.claims import Check, Ledger
from makespan.papers.oobleck._checks_execution import EXECUTION_CHECKS
from makespan.papers.oobleck._checks_intervals import INTERVAL_CHECKS
from makespan.papers.oobleck._checks_live import LIVE_CHECKS
from makespan.papers.oobleck._checks_planning import PLANNING_CHECKS
from makespan.papers.oobleck._checks_reconfiguration import RECONFIGURATION_CHECKS
from makespan.papers.oobleck._checks_simulation import SIMULATION_CHECKS
from makespan.papers.oobleck._checks_spot import SPOT_CHECKS
from makespan.papers.oobleck._tables import PUBLISHED
from makespan.papers.oobleck._tables_execution import EXECUTED
from makespan.papers.oobleck._tables_live import HYBRID, HYBRID_KILLS, HYBRID_SUMMARY
from makespan.papers.oobleck._tables_planning import PLANNED
from makespan.papers.oobleck._tables_reconfiguration import RECONFIGURATION
from makespan.papers.oobleck._tables_simulation import SIMULATED

__all__ = ["LEDGER"]

_CHECKS: tuple[Check, ...] = (
    *PLANNING_CHECKS,
    *RECONFIGURATION_CHECKS,
    *EXECUTION_CHECKS,
    *LIVE_CHECKS,
    *SIMULATION_CHECKS,
    *SPOT_CHECKS,
    *INTERVAL_CHECKS,
)
_PRINTED = {f"{name}_published": PUBLISHED[name] for name in ("instantiation", "fig12")}

LEDGER = Ledger(
    paper="Oobleck",
    package="makespan.papers.oobleck",
    checks={check.__name__.removeprefix("_"): check for check in _CHECKS},
    tables={
        **PLANNED,
        **EXECUTED,
        **SIMULATED,
        **{schema.name: schema for schema in (HYBRID, HYBRID_KILLS, HYBRID_SUMMARY)},
        "reconfiguration": RECONFIGURATION,
        **_PRINTED,
    },
)
"""What the paper states of systems that lose nodes."""
