"""Block ``throughput.measured.profile``: what is profiled on the hardware at hand, and how."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from makespan.config._fields import Block, option
from makespan.config._morphling import Fig7Stage
from makespan.errors import MakespanError
from makespan.plans import Placement
from makespan.workloads import small_workload_keys

__all__ = ["Profile"]

_TIMES = "measured throughput, table2, fig7"


def _known_workload(key: str) -> str:
    if key not in small_workload_keys():
        raise ValueError(f"one of {', '.join(small_workload_keys())}")
    return key


def _placement(text: str) -> str:
    try:
        return Placement.parse(text).text
    except MakespanError as error:
        raise ValueError(f"processes on each node, for example 2 or 44 ({error})") from None


class Profile(Block):
    """Profile small workloads where no directory with tables is given."""

    workloads: tuple[Annotated[str, AfterValidator(_known_workload)], ...] = option(
        "small workloads that are profiled", source="a choice", changes=_TIMES, min_length=1
    )
    placements: tuple[Annotated[str, AfterValidator(_placement)], ...] = option(
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
    stages: tuple[Fig7Stage, ...] = option(
        "resource limits of the adaptation experiment in order",
        source="after Morphling, Fig. 7",
        changes="fig7",
        min_length=1,
    )
