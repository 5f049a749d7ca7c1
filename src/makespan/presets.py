"""Presets: data files inside the package, one table an entry, each with its source."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from makespan.errors import unknown_name

__all__ = ["preset_entry", "read_preset"]


@cache
def read_preset(package: str, name: str) -> dict[str, Any]:
    """Return the content of ``presets/<name>.toml`` of a package; shared, so nobody may change it."""
    path = resources.files(package).joinpath(f"presets/{name}.toml")
    return tomllib.loads(path.read_text("utf-8"))


def preset_entry(package: str, name: str, kind: str, key: str) -> dict[str, Any]:
    """Return a copy of one entry of a preset, which a message calls ``kind``; raises `UnknownNameError`."""
    entries = read_preset(package, name)
    if key not in entries:
        raise unknown_name(kind, key, entries)
    return dict(entries[key])
