"""Scheduling policies, one file each, all behind the protocol `makespan.sim.Policy`.

A module ``_<something>.py`` of this package that defines ``POLICIES``, a tuple of policies, is found by
itself: adding a policy is adding one file.
"""

from makespan.policies._registry import REGISTRY, policy, policy_names

__all__ = ["REGISTRY", "policy", "policy_names"]
