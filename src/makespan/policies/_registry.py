"""Every policy by its name, imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from makespan.errors import unknown_name

if TYPE_CHECKING:
    from makespan.sim import Policy

__all__ = ["REGISTRY", "policy", "policy_names"]

_MODULES = {
    "antman": "makespan.policies._antman",
    "fifo": "makespan.policies._fifo",
    "gavel": "makespan.policies._gavel",
    "morphling": "makespan.policies.morphling._policies",
    "morphling-e": "makespan.policies.morphling._policies",
    "morphling-n": "makespan.policies.morphling._policies",
    "morphling-r": "makespan.policies.morphling._policies",
    "morphling-work": "makespan.policies.morphling._policies",
    "morphling-work-e": "makespan.policies.morphling._policies",
    "morphling-work-n": "makespan.policies.morphling._policies",
    "morphling-work-r": "makespan.policies.morphling._policies",
    "sia": "makespan.policies._sia",
    "sjf": "makespan.policies._shortest",
    "srtf": "makespan.policies._shortest",
    "synergy": "makespan.policies._synergy",
    "tiresias": "makespan.policies._tiresias",
}


@cache
def _load(name: str) -> Policy:
    """Policy of that name in the tuple ``POLICIES`` of its module."""
    policies: dict[str, Policy] = {
        entry.name: entry for entry in importlib.import_module(_MODULES[name]).POLICIES
    }
    return policies[name]


class _Registry(Mapping[str, "Policy"]):
    """Names that are known without importing a policy, so that a configuration is checked quickly."""

    def __getitem__(self, name: str) -> Policy:
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


REGISTRY: Mapping[str, Policy] = _Registry()
"""Every policy by its name, sorted."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, sorted."""
    return tuple(REGISTRY)


def policy(name: str) -> Policy:
    """Return a policy.

    Raises
    ------
    UnknownNameError
        No policy has that name.
    """
    try:
        return REGISTRY[name]
    except KeyError:
        raise unknown_name("policy", name, REGISTRY) from None
