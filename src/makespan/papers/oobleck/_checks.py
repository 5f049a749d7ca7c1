"""The ledger of the paper: how each statement is checked against result tables."""

from makespan.claims import Check, Ledger
from makespan.papers.oobleck._checks_simulation import SIMULATION_CHECKS
from makespan.papers.oobleck._checks_spot import SPOT_CHECKS
from makespan.papers.oobleck._tables import PUBLISHED
from makespan.papers.oobleck._tables_simulation import SIMULATED

__all__ = ["LEDGER"]

_CHECKS: tuple[Check, ...] = (*SIMULATION_CHECKS, *SPOT_CHECKS)

LEDGER = Ledger(
    paper="Oobleck",
    package="makespan.papers.oobleck",
    checks={check.__name__.removeprefix("_"): check for check in _CHECKS},
    tables={**SIMULATED, **{f"{name}_published": PUBLISHED[name] for name in ("fig12",)}},
)
"""What the paper states of systems that lose nodes."""
