"""Block ``throughput``: where iteration times come from, and what is profiled."""

from importlib import resources
from typing import Annotated, Literal

from pydantic import field_validator

from makespan.plans import Placement
from makespan.settings import Block, option, readable, taken_from, unlike
from makespan.workloads import small_workload_keys

__all__ = ["Emulated", "Measured", "Published", "SourceName", "Throughput"]

SourceName = Literal["emulated", "published", "measured"]
EVERYTHING = "all"
_TIMES = "measured throughput, table2, fig7"

SmallWorkload = Annotated[str, taken_from(small_workload_keys)]
Processes = Annotated[
    str, readable(lambda text: Placement.parse(text).text, "processes on each node, for example 2 or 44")
]


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
        "whether files are fetched from their pinned commits when no directory is given", changes=""
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


class Profile(Block):
    """Profile small workloads where no directory with tables is given."""

    workloads: tuple[SmallWorkload, ...] = option(
        "small workloads that are profiled", source="a choice", changes=_TIMES, min_length=1
    )
    placements: tuple[Processes, ...] = option(
        "processes on each node; without GPUs at most as many as there are cores",
        source="two cores",
        changes=_TIMES,
        min_length=1,
    )
    cpu_threads: int = option(
        "CPU threads a process", unit="threads", source="a choice", changes=_TIMES, ge=1
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "where models train; auto: GPUs if there are any", source="a choice", changes=_TIMES
    )
    environment: str | None = option(
        "constants of the machine: name of an environment or path of a .toml file; null: they are measured",
        changes=_TIMES,
    )
    warmup_steps: int = option("steps of a run that are thrown away", source="a choice", changes=_TIMES, ge=0)
    steps: int = option("steps of a run that are timed", source="a choice", changes=_TIMES, ge=1)
    repetitions: int = option(
        "runs of each point; their scatter is the repeatability", source="a choice", changes=_TIMES, ge=1
    )
    points_per_job: int | None = option(
        "most points that one job measures; null: all of a placement, which saves the start of processes",
        source="a choice",
        changes="",
        ge=1,
    )
    gpu_model: str | None = option(
        "kind of GPU that jobs ask for, as many as a point has processes; null: jobs ask for CPU cores",
        source="a choice",
        changes="",
    )
    mem_mb_per_process: int = option(
        "memory that a job asks for", unit="MB", source="measured on CPU, with room", changes="", ge=1
    )
    runtime_min: int = option(
        "time that a job asks for", unit="min", source="measured on two cores, with room", changes="", ge=1
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

    sources: Annotated[tuple[SourceName, ...], unlike("each source once")] = option(
        "sources that the target all builds", source="a choice", changes=EVERYTHING, min_length=1
    )
    emulated: Emulated = option("the emulated source")
    published: Published = option("the published source")
    measured: Measured = option("the measured source")
