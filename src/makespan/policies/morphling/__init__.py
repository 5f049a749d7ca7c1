"""Morphling: resources and execution plans chosen together; two variants and their ablations."""

from makespan.policies.morphling._options import Freedom
from makespan.policies.morphling._rules import Morphling
from makespan.policies.morphling._tuning import RuleTuning, WorkTuning
from makespan.policies.morphling._work import MorphlingWork

__all__ = ["POLICIES", "Freedom", "Morphling", "MorphlingWork", "RuleTuning", "WorkTuning"]

_LESS = (Freedom(resources=False), Freedom(plan=False), Freedom(plan=False, resources=False))

POLICIES = (
    Morphling(),
    *(Morphling(freedom, name=f"morphling{freedom.suffix}", title=f"Morphling {freedom.suffix[1:].upper()}") for freedom in _LESS),
    MorphlingWork(),
    *(
        MorphlingWork(
            freedom, name=f"morphling-work{freedom.suffix}", title=f"Morphling (work-aware) {freedom.suffix[1:].upper()}"
        )
        for freedom in _LESS
    ),
)
