"""Morphling: resources and execution plans chosen together; two variants and their ablations."""

from makespan.policies.morphling._blind import Morphling
from makespan.policies.morphling._options import Freedom
from makespan.policies.morphling._tuning import BLIND, WORK_AWARE, Tuning
from makespan.policies.morphling._variants import POLICIES
from makespan.policies.morphling._work import MorphlingWork

__all__ = ["BLIND", "POLICIES", "WORK_AWARE", "Freedom", "Morphling", "MorphlingWork", "Tuning"]
