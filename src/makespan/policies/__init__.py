"""Scheduling policies, all behind the protocol `makespan.sim.Policy`.

A module defines ``POLICIES``, a tuple of policies; the registry names the module of each, so that names can
be checked, and the code of one policy told from that of others, without importing any. A user file defines
the same, and `policy` accepts its path as a name. Many policies share `FreeResources` and `serve`.
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
