"""Digests of the preset files behind an emulated trace."""

import hashlib
import tomllib
from functools import cache
from importlib import resources

__all__ = ["preset_digests", "preset_sources"]

_PACKAGES = ("makespan.hardware", "makespan.workloads", "makespan.emulator")
_DIGEST_BYTES = 16


@cache
def preset_digests() -> dict[str, str]:
    """Return the BLAKE2b digest of every preset file, keyed ``package/file``."""
    digests = {}
    for package in _PACKAGES:
        folder = resources.files(package).joinpath("presets")
        for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if item.name.endswith(".toml"):
                content = item.read_bytes()
                key = f"{package.rpartition('.')[2]}/{item.name}"
                digests[key] = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
    return digests


@cache
def preset_sources() -> dict[str, str]:
    """Return the source of every preset of this layer; empty text where it is missing."""
    sources = {}
    folder = resources.files("makespan.emulator").joinpath("presets")
    for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not item.name.endswith(".toml"):
            continue
        content = tomllib.loads(item.read_text("utf-8"))
        if "constants" in content:
            sources[item.name] = str(content.get("source", ""))
        elif "target" in content:
            entries = enumerate(content["target"])
            sources |= {f"{item.name}/{index}": str(entry.get("source", "")) for index, entry in entries}
        else:
            sources |= {
                f"{item.name}/{name}": str(entry.get("source", "")) for name, entry in content.items()
            }
    return sources
