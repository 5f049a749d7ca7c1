"""Morphling: resources and execution plans chosen together, as the paper does it and as we do."""

from makespan.policies.morphling._options import Freedom
from makespan.policies.morphling._policies import MorphlingLookahead, MorphlingWork
from makespan.policies.morphling._rules import Morphling
from makespan.policies.morphling._tuning import CLAIRVOYANT, NON_CLAIRVOYANT, Tuning

__all__ = [
    "CLAIRVOYANT",
    "NON_CLAIRVOYANT",
    "Freedom",
    "Morphling",
    "MorphlingLookahead",
    "MorphlingWork",
    "Tuning",
]
