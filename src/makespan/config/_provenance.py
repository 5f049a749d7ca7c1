"""What a set of results was made with."""

import hashlib
import json
from pathlib import Path

from makespan import __version__
from makespan.config._settings import Settings

__all__ = ["provenance", "settings_hash"]


def settings_hash(settings: Settings) -> str:
    """Return the sha256 of the merged configuration, independent of the order of keys."""
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def provenance(settings: Settings, source: str, pins: str | Path) -> str:
    """Collect what the results of a source were made with.

    Parameters
    ----------
    settings
        The merged configuration.
    source
        Throughput source, first part of the result paths.
    pins
        File with the exact versions of the run set.

    Returns
    -------
    str
        JSON: source, package version, seed, configuration and its hash, hash of the pins.
    """
    record = {
        "source": source,
        "makespan_version": __version__,
        "seed": settings.throughput.emulated.seed if source == "emulated" else None,
        "pins_sha256": hashlib.sha256(Path(pins).read_bytes()).hexdigest(),
        "config_sha256": settings_hash(settings),
        "config": settings.model_dump(mode="json"),
    }
    return json.dumps(record, indent=2, sort_keys=True) + "\n"
