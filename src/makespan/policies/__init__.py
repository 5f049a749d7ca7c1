"""Scheduling policies, all behind the protocol `makespan.sim.Policy`.

Each module defines ``POLICIES``, a tuple of policies. The registry maps every policy name to its module, so
names can be checked, and the code of each policy hashed, without importing it. A policy file of the user
defines the same tuple, and `policy` accepts its path in place of a name. Many policies share `FreeResources`
and `serve`.
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports
from makespan.policies.base import (
    REGISTRY as REGISTRY,
    policy as policy,
    policy_names as policy_names,
)

if TYPE_CHECKING:
    from makespan.policies.base import serve as serve
    from makespan.policies.placing import FreeResources as FreeResources


__getattr__ = lazy_exports(__name__, __file__, renamed={"Room": "FreeResources"})
