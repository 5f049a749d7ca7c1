"""Finds the policies in the modules of this package."""

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from makespan.errors import unknown_name
from makespan.sim import Policy

__all__ = ["REGISTRY", "policy", "policy_names"]

_PACKAGE = "makespan.policies"


def _found() -> Mapping[str, Policy]:
    policies: dict[str, Policy] = {}
    modules = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    for name in modules:
        if name == "_registry":
            continue
        for entry in getattr(importlib.import_module(f"{_PACKAGE}.{name}"), "POLICIES", ()):
            if entry.name in policies:
                raise ValueError(f"{name}: a policy {entry.name!r} exists already")
            policies[entry.name] = entry
    return MappingProxyType(dict(sorted(policies.items())))


REGISTRY: Mapping[str, Policy] = _found()
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
