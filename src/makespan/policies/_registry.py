"""Finds the policies in the modules of this package."""

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from makespan.errors import unknown_name
from makespan.sim import Policy

__all__ = ["REGISTRY", "found_in", "policy", "policy_names"]


def found_in(package: str, directory: Path) -> Mapping[str, Policy]:
    """Return the policies in the modules of a package, by their names, sorted.

    Raises
    ------
    ValueError
        Two modules define policies of one name.
    """
    policies: dict[str, Policy] = {}
    modules = sorted(module.name for module in pkgutil.iter_modules([str(directory)]))
    for name in modules:
        if f"{package}.{name}" == __name__:
            continue
        for entry in getattr(importlib.import_module(f"{package}.{name}"), "POLICIES", ()):
            if entry.name in policies:
                raise ValueError(f"{name}: a policy {entry.name!r} exists already")
            policies[entry.name] = entry
    return MappingProxyType(dict(sorted(policies.items())))


REGISTRY: Mapping[str, Policy] = found_in("makespan.policies", Path(__file__).parent)
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
