"""Scheduling policies, one file each, all behind the protocol `makespan.sim.Policy`.

A module ``_<something>.py`` defines ``POLICIES``, a tuple of policies; the registry names the module of each,
so that names can be checked, and the code of one policy told from that of others, without importing any.
"""

from makespan.policies._registry import REGISTRY, policy, policy_names

__all__ = ["REGISTRY", "policy", "policy_names"]
