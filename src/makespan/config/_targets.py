"""What can be asked of the workflow, and what is said of a target that nothing makes."""

import difflib
from collections.abc import Iterable
from pathlib import PurePath

from makespan.errors import ConfigError

__all__ = ["unknown_target"]

_N_SHOWN = 3


def unknown_target(target: str, known: Iterable[str]) -> ConfigError:
    """Build the error for a target that nothing makes, with those that it may have been meant for.

    Files of the same name, in another folder or of another source, come before those with a similar name.

    Parameters
    ----------
    target, known
        What was asked for; names of rules and files that can be.
    """
    names = list(known)
    same = [name for name in names if PurePath(name).name == PurePath(target).name]
    close = difflib.get_close_matches(target, names, n=_N_SHOWN)
    by_path = difflib.get_close_matches(target, same, n=_N_SHOWN, cutoff=0.0)
    near = list(dict.fromkeys([*by_path, *close]))[:_N_SHOWN]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    accepted = "a rule without wildcards or a file that a rule makes, as results/README.md lists them"
    return ConfigError(f"unknown target {target}; accepted: {accepted}.{hint}")
