"""Scheduling policies, one file each, all behind the protocol `makespan.sim.Policy`.

A module ``_<something>.py`` defines ``POLICIES``, a tuple of policies; the registry names the module of each,
so that names can be checked, and the code of one policy told from that of others, without importing any.
A file of the user's defines the same, and `policy` takes its path for a name. `Room` and `serve` are what
many policies share.
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily
from makespan.policies._registry import REGISTRY, policy, policy_names

if TYPE_CHECKING:
    from makespan.policies._placing import Room
    from makespan.policies._queue import serve

__all__ = ["REGISTRY", "Room", "policy", "policy_names", "serve"]

__getattr__ = shown_lazily(__name__, __file__)
