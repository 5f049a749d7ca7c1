"""Presets: data files inside the package, one table an entry, each with its source."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from makespan.errors import unknown_name

__all__ = ["preset_entry", "read_preset", "sources_of"]


@cache
def read_preset(package: str, name: str) -> dict[str, Any]:
    """Return the content of ``presets/<name>.toml`` of a package.

    The result is shared: callers must not change it.

    Parameters
    ----------
    package
        Import name of the package that owns the file, for example ``"makespan.hardware"``.
    name
        Name of the file without its suffix.
    """
    path = resources.files(package).joinpath(f"presets/{name}.toml")
    return tomllib.loads(path.read_text("utf-8"))


def preset_entry(package: str, name: str, kind: str, key: str) -> dict[str, Any]:
    """Return a copy of one entry of a preset.

    Parameters
    ----------
    package, name
        As for `read_preset`.
    kind
        What an entry is called in the message, for example ``"device"``.
    key
        Name of the entry.

    Raises
    ------
    UnknownNameError
        There is no such entry; the message lists the accepted names.
    """
    entries = read_preset(package, name)
    if key not in entries:
        raise unknown_name(kind, key, entries)
    return dict(entries[key])


def sources_of(package: str, *names: str) -> dict[str, str]:
    """Return the source of every entry, keyed ``name/key``; empty text where it is missing."""
    return {
        f"{name}/{key}": str(entry.get("source", ""))
        for name in names
        for key, entry in read_preset(package, name).items()
    }
