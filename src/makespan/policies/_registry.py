"""Every policy by its name, imported when it is asked for, and policies in files of the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from makespan.errors import unknown_name

if TYPE_CHECKING:
    from makespan.sim import Policy

__all__ = ["REGISTRY", "policy", "policy_names"]

_MODULES = {
    "antman": "makespan.policies._antman",
    "easyscale-heter": "makespan.policies._easyscale",
    "easyscale-heter-growth": "makespan.policies._easyscale",
    "easyscale-homo": "makespan.policies._easyscale",
    "fifo": "makespan.policies._fifo",
    "fifo-serial": "makespan.policies._fifo",
    "gavel": "makespan.policies._gavel",
    "gavel-ftf": "makespan.policies._gavel",
    "gavel-makespan": "makespan.policies._gavel",
    "morphling": "makespan.policies.morphling._rules",
    "morphling-e": "makespan.policies.morphling._rules",
    "morphling-lookahead": "makespan.policies.morphling._policies",
    "morphling-lookahead-e": "makespan.policies.morphling._policies",
    "morphling-lookahead-n": "makespan.policies.morphling._policies",
    "morphling-lookahead-r": "makespan.policies.morphling._policies",
    "morphling-lookahead-s": "makespan.policies.morphling._policies",
    "morphling-n": "makespan.policies.morphling._rules",
    "morphling-r": "makespan.policies.morphling._rules",
    "morphling-work": "makespan.policies.morphling._policies",
    "morphling-work-e": "makespan.policies.morphling._policies",
    "morphling-work-n": "makespan.policies.morphling._policies",
    "morphling-work-r": "makespan.policies.morphling._policies",
    "morphling-work-s": "makespan.policies.morphling._policies",
    "sia": "makespan.policies._sia",
    "sjf": "makespan.policies._shortest",
    "srtf": "makespan.policies._shortest",
    "synergy": "makespan.policies._synergy",
    "tiresias": "makespan.policies._tiresias",
}


@cache
def _load(name: str) -> Policy:
    """Policy of that name in the tuple ``POLICIES`` of its module."""
    from makespan.policies._files import policy_in_module

    return policy_in_module(_MODULES[name], name)


class _Registry(Mapping[str, "Policy"]):
    """Names that are known without importing a policy: quickly, and whether it can be imported or not."""

    def __getitem__(self, name: str) -> Policy:
        return _load(name)

    def __contains__(self, name: object) -> bool:
        return name in _MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


REGISTRY: Mapping[str, Policy] = _Registry()
"""Every policy by its name, sorted."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, sorted."""
    return tuple(REGISTRY)


def policy(name: str | Path) -> Policy:
    """Return a policy by its name, or from a file: ``mine.py``, or ``mine.py:NAME`` if it has several.

    Raises
    ------
    UnknownNameError
        No policy has that name.
    PolicyError
        Its file is broken; says where and why. Other policies are not concerned.
    """
    from makespan.policies._files import is_file_name, policy_in_file
    from makespan.sim import PolicyError

    text = str(name)
    if text in REGISTRY:
        return REGISTRY[text]
    if not (isinstance(name, Path) or is_file_name(text)):
        raise unknown_name("policy", text, (*REGISTRY, "FILE.py"))
    found = policy_in_file(text)
    if found.name in REGISTRY:
        raise PolicyError(f"{text}: name {found.name!r} belongs to another policy; accepted: a new one")
    return found
