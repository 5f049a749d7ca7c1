"""Policies from modules and from files of the user, and what is wrong where there are none."""

import re
from functools import cache
from types import ModuleType

from makespan.errors import short_path
from makespan.sim import Policy, PolicyError, check_policy
from makespan.user_code import load_file, load_module, user_file

__all__ = ["is_file_name", "policy_in_file", "policy_in_module"]

_FILE = re.compile(r"(?P<path>.*\.py)(?::(?P<name>[^/:]+))?", re.DOTALL)


def is_file_name(text: str) -> bool:
    """Whether a text stands for a file, maybe with the name of one of its policies behind a colon."""
    return "/" in text or _FILE.fullmatch(text) is not None


def policy_in_module(module: str, name: str) -> Policy:
    """Return a policy from the tuple ``POLICIES`` of a module, imported by its dotted name."""
    found, file = load_module(module, PolicyError)
    return _chosen(found, file, name)


def policy_in_file(text: str) -> Policy:
    """Return the policy of a file, ``FILE.py``, or one of several, ``FILE.py:NAME``."""
    match = _FILE.fullmatch(text)
    if match is None:
        raise PolicyError(f"{text}: accepted: a policy file with the ending .py")
    path = user_file(match["path"], "a policy file", PolicyError)
    stat = path.stat()
    file = str(path.resolve())
    return _chosen(_loaded(file, stat.st_mtime_ns, stat.st_size), file, match["name"])


@cache
def _loaded(file: str, mtime_ns: int, size: int) -> ModuleType:
    """Run a file as a module; again when it has changed, and without leaving compiled code beside it."""
    return load_file(file, PolicyError)


def _chosen(module: ModuleType, file: str, name: str | None) -> Policy:
    where, listed = short_path(file), getattr(module, "POLICIES", None)
    if not isinstance(listed, tuple) or not listed:
        found = "no POLICIES" if listed is None else f"POLICIES is {type(listed).__name__} {listed!r:.80}"
        raise PolicyError(f"{where}: {found}; accepted: a tuple of policies, POLICIES = (MyPolicy(),)")
    by_name = {getattr(entry, "name", None): entry for entry in listed}
    if name is None and len(listed) > 1:
        accepted = " or ".join(f"{where}:{key}" for key in by_name)
        raise PolicyError(f"{where}: has {len(listed)} policies; accepted: {accepted}")
    if name is not None and name not in by_name:
        accepted = ", ".join(map(str, by_name))
        raise PolicyError(f"{where}: no policy in POLICIES has the name {name!r}; found: {accepted}")
    entry: Policy = listed[0] if name is None else by_name[name]
    check_policy(entry)
    return entry
