"""Both variants of Morphling, and what each loses with less to choose."""

from makespan.policies.morphling._blind import Morphling
from makespan.policies.morphling._options import Freedom
from makespan.policies.morphling._work import MorphlingWork

__all__ = ["POLICIES"]

_LESS = {
    "-e": (Freedom(resources=False), "plan only"),
    "-r": (Freedom(plan=False), "resources only"),
    "-n": (Freedom(plan=False, resources=False), "neither"),
}

POLICIES = (
    Morphling(),
    MorphlingWork(),
    *(
        Morphling(freedom, name=f"morphling{suffix}", title=f"Morphling ({title})")
        for suffix, (freedom, title) in _LESS.items()
    ),
    *(
        MorphlingWork(freedom, name=f"morphling-work{suffix}", title=f"Morphling (work-aware, {title})")
        for suffix, (freedom, title) in _LESS.items()
    ),
)
"""Both variants, each also with less to choose."""
