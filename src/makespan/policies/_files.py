"""Policies from modules and from files of the user, and what is wrong where there are none."""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from makespan.errors import failed_at, short_path
from makespan.sim import Policy, PolicyError, check_policy

__all__ = ["is_file_name", "policy_in_file", "policy_in_module"]

_FILE = re.compile(r"(?P<path>.*\.py)(?::(?P<name>[^/:]+))?", re.DOTALL)


def is_file_name(text: str) -> bool:
    """Whether a text stands for a file, maybe with the name of one of its policies behind a colon."""
    return "/" in text or _FILE.fullmatch(text) is not None


def policy_in_module(module: str, name: str) -> Policy:
    """Return a policy from the tuple ``POLICIES`` of a module, imported by its dotted name."""
    with _explained(module):
        spec = importlib.util.find_spec(module)
    file = (spec and spec.origin) or module
    with _explained(file):
        found = importlib.import_module(module)
    return _chosen(found, file, name)


def policy_in_file(text: str) -> Policy:
    """Return the policy of a file, ``FILE.py``, or one of several, ``FILE.py:NAME``."""
    match = _FILE.fullmatch(text)
    if match is None:
        raise PolicyError(f"{text}: accepted: a policy file with the ending .py")
    path = Path(match["path"])
    if not path.is_file():
        problem = "is no regular file" if path.exists() else "no such file"
        raise PolicyError(f"{path}: {problem}; accepted: a policy file with the ending .py")
    stat = path.stat()
    file = str(path.resolve())
    return _chosen(_loaded(file, stat.st_mtime_ns, stat.st_size), file, match["name"])


@cache
def _loaded(file: str, mtime_ns: int, size: int) -> ModuleType:
    """Run a file as a module; again when it has changed, and without leaving compiled code beside it."""
    name = f"{Path(file).stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    module = ModuleType(name)
    module.__file__ = file
    with _explained(file):
        code = compile(Path(file).read_bytes(), file, "exec")
        sys.modules[name] = module  # dataclasses and messages look for it there
        exec(code, module.__dict__)
    return module


@contextmanager
def _explained(file: str) -> Iterator[None]:
    """Say in which file and line an import failed, and why."""
    try:
        yield
    except (Exception, SystemExit) as error:
        line, problem = failed_at(error.__traceback__, file), str(error)
        if isinstance(error, SyntaxError):
            line, problem = (error.lineno if error.filename == file else line), error.msg
        where = short_path(file) + (f", line {line}" if line else "")
        raise PolicyError(f"{where}: {type(error).__name__}: {problem}") from error


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
