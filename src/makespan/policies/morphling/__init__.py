"""Morphling: resources and execution plans chosen together; two variants and their ablations."""

from makespan.policies.morphling._options import Freedom
from makespan.policies.morphling._policies import Morphling, MorphlingWork
from makespan.policies.morphling._tuning import CLAIRVOYANT, NON_CLAIRVOYANT, Tuning

__all__ = ["NON_CLAIRVOYANT", "CLAIRVOYANT", "Freedom", "Morphling", "MorphlingWork", "Tuning"]
