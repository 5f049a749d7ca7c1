"""Block ``throughput``: where iteration times come from."""

from importlib import resources
from typing import Literal

from pydantic import field_validator

from makespan.config._fields import Block, option
from makespan.config._profile import Profile

__all__ = ["Emulated", "Measured", "Published", "SourceName", "Throughput"]

SourceName = Literal["emulated", "published", "measured"]
EVERYTHING = "all"


def shipped_calibrations() -> list[str]:
    """Return the names of `makespan.emulator.calibration_names` without importing the emulator.

    Every start of the workflow checks its configuration, and the emulator takes a while to import.
    """
    presets = resources.files("makespan").joinpath("emulator", "presets")
    return sorted(
        {"L0", *(item.name.removesuffix(".toml") for item in presets.iterdir() if item.name[0] == "L")}
    )


class Emulated(Block):
    """Options of the emulated source."""

    calibration: str = option(
        "name of a shipped set of efficiency constants, or the path of a .toml file with one",
        source="makespan validate; see docs/background/emulator.md",
        changes=EVERYTHING,
    )
    seed: int = option("seed of the measurement noise", source="a choice", changes=EVERYTHING, ge=0)
    noise: float = option(
        "scale of the scatter between repeated measurements; 0 gives the exact value of the model",
        source="1: spread of equivalent rows in the published traces",
        changes=EVERYTHING,
        ge=0,
    )

    @field_validator("calibration")
    @classmethod
    def _known_calibration(cls, name: str) -> str:
        if not name.endswith(".toml") and name not in shipped_calibrations():
            raise ValueError(f"one of {', '.join(shipped_calibrations())}, or a path ending in .toml")
        return name


class Published(Block):
    """Options of the published source."""

    directory: str | None = option(
        "directory with the published files, or a clone of the authors' repository; null: the environment "
        "variable MAKESPAN_PUBLISHED_DIR",
        changes=EVERYTHING,
    )
    fetch: bool = option(
        "whether files are fetched from their pinned commits when no directory is given",
        changes="",
    )
    fetched_directory: str = option(
        "where fetched files are kept", source="a choice", changes="", min_length=1
    )
    register_file: str = option(
        "register of data sets: commits, checksums, licences", changes="", min_length=1
    )
    default_cpu_threads: int = option(
        "CPU threads a GPU where a file does not say",
        unit="threads",
        source="Morphling, section 7: 96 threads and 8 GPUs a node",
        changes=EVERYTHING,
        ge=1,
    )


class Measured(Block):
    """Options of the measured source."""

    directory: str | None = option(
        "directory with one table a workload, WORKLOAD.csv, in the schema of throughput tables; null: small "
        "workloads are profiled here",
        changes=EVERYTHING,
    )
    profile: Profile = option("what is profiled where no directory is given")


class Throughput(Block):
    """Where iteration times come from."""

    sources: tuple[SourceName, ...] = option(
        "sources that the target all builds", source="a choice", changes=EVERYTHING, min_length=1
    )
    emulated: Emulated = option("the emulated source")
    published: Published = option("the published source")
    measured: Measured = option("the measured source")

    @field_validator("sources")
    @classmethod
    def _no_repeats(cls, names: tuple[SourceName, ...]) -> tuple[SourceName, ...]:
        if len(set(names)) != len(names):
            raise ValueError("each source once")
        return names
