"""The ledger of the paper: how each statement is checked against result tables."""

from makespan.claims import Check, Ledger
from makespan.papers.slapo._checks_measured import MEASURED_CHECKS
from makespan.papers.slapo._checks_modelled import MODELLED_CHECKS
from makespan.papers.slapo._checks_tuning import TUNING_CHECKS
from makespan.papers.slapo._checks_verification import VERIFICATION_CHECKS
from makespan.papers.slapo._tables import PUBLISHED
from makespan.papers.slapo._tables_measured import MEASURED
from makespan.papers.slapo._tables_modelled import MODELLED
from makespan.papers.slapo._tables_tuning import TUNED
from makespan.papers.slapo._tables_verification import VERIFIED

__all__ = ["LEDGER"]

_CHECKS: tuple[Check, ...] = (*TUNING_CHECKS, *MODELLED_CHECKS, *VERIFICATION_CHECKS, *MEASURED_CHECKS)

LEDGER = Ledger(
    paper="Slapo",
    package="makespan.papers.slapo",
    checks={check.__name__.removeprefix("_"): check for check in _CHECKS},
    tables={**TUNED, **MODELLED, **VERIFIED, **MEASURED, "limits_published": PUBLISHED["limits"]},
)
"""What the paper states of schedules and of their tuner."""
