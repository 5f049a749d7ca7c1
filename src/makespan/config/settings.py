"""From a validation failure to one line an option: key, what was found, what is accepted."""

import difflib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, reduce
from importlib import resources
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, create_model, field_validator, model_validator
from pydantic_core import ErrorDetails

from makespan import __version__
from makespan.errors import ConfigError, MissingDataError
from makespan.files import read_preset, read_yaml
from makespan.hardware import cluster_names
from makespan.papers import PAPERS, paper_named
from makespan.papers.experiment import Paper
from makespan.plans import Placement
from makespan.policies import policy_names
from makespan.settings import Block, Count, one_of, option, parsed_by
from makespan.sim import RecoveryKind
from makespan.workloads import small_workload_keys

# ------------------------------------------------------------------------------------------------
# From a validation failure to one line an option: key, what was found, what is accepted.

_MOST_FAILURES = 20


def explain(details: Sequence[ErrorDetails], root: type[BaseModel]) -> list[str]:
    """Turn the details of a failed validation of ``root`` into messages: one line each, of many the first."""
    places = [detail["loc"] for detail in details]
    shown = [detail for detail in details if not _follows(detail, places)]
    lines = [_line(detail, root) for detail in shown[:_MOST_FAILURES]]
    return lines + [f"and {len(shown) - len(lines):,} more"] * (len(shown) > len(lines))


def _follows(detail: ErrorDetails, places: Sequence[tuple[int | str, ...]]) -> bool:
    """Tell whether a list is too short only because one of its entries was not accepted."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(
        other[: len(place)] == place and len(other) > len(place) for other in places
    )


def _line(detail: ErrorDetails, root: type[BaseModel]) -> str:
    key = _dotted(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key, detail["loc"], root)
    if detail["type"] == "missing":
        return f"{key}: found nothing; expected a value, there is no default"
    return f"{key}: found {_shown(detail['input'])}; expected {_accepted(detail)}"


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "configuration"


def _unknown_key(key: str, location: Sequence[int | str], root: type[BaseModel]) -> str:
    accepted = _keys_at(location[:-1], root)
    close = difflib.get_close_matches(str(location[-1]), accepted, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{key}: unknown key; expected {', '.join(accepted)}.{hint}"


def _keys_at(location: Sequence[int | str], root: type[BaseModel]) -> list[str]:
    block = root
    for part in location:
        if isinstance(part, str):
            block = _block_of(block.model_fields[part].annotation)
    return [name for name, field in block.model_fields.items() if not field.exclude]


def _block_of(annotation: Any) -> type[BaseModel]:
    while not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        annotation = annotation.__args__[0]
    return annotation


def _shown(value: object) -> str:
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_PHRASES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "model_type": "a group of options",
    "model_attributes_type": "a group of options",
    "string_too_short": "a text that is not empty",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "too_short": ("min_length", "a list of at least {}"),
    "literal_error": ("expected", "{}"),
    "value_error": ("error", "{}"),
}


def _accepted(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in _LIMITS:
        name, phrase = _LIMITS[kind]
        return phrase.format(detail["ctx"][name])
    return _PHRASES.get(kind, detail["msg"])


# ------------------------------------------------------------------------------------------------
# Block ``throughput``: where iteration times come from, and what is profiled.

SourceName = Literal["emulated", "published", "measured"]
EVERYTHING = "all"
_TIMES = "measured iteration times and what uses them"
SmallWorkload = Annotated[str, one_of(small_workload_keys)]
Processes = Annotated[
    str, parsed_by(lambda text: Placement.parse(text).text, "processes on each node, for example 2 or 44")
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
        "L1",
        source="makespan validate; see docs/background/emulator.md",
        changes=EVERYTHING,
    )
    seed: int = option("seed of the measurement noise", 0, source="a choice", changes=EVERYTHING, ge=0)
    noise: float = option(
        "scale of the scatter between repeated measurements; 0 gives the exact value of the model",
        1.0,
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
        None,
        changes=EVERYTHING,
    )
    fetch: bool = option(
        "whether files are fetched from their pinned commits when no directory is given", False, changes=""
    )
    fetched_directory: str = option(
        "where fetched files are kept", "data/published", source="a choice", changes="", min_length=1
    )
    register_file: str = option(
        "register of data sets: commits, checksums, licences",
        "src/makespan/throughput/presets/datasets.csv",
        changes="",
        min_length=1,
    )
    default_cpu_threads: int = option(
        "CPU threads per GPU where a file does not say",
        12,
        unit="threads",
        source="Morphling, section 7: 96 threads and 8 GPUs per node",
        changes=EVERYTHING,
        ge=1,
    )


class Profile(Block):
    """Profile small workloads where no directory with tables is given."""

    workloads: tuple[SmallWorkload, ...] = option(
        "small workloads that are profiled",
        ("tiny-gpt", "tiny-llama"),
        source="a choice",
        changes=_TIMES,
        min_length=1,
    )
    placements: tuple[Processes, ...] = option(
        "processes on each node; without GPUs at most as many as there are cores",
        ("1", "2"),
        source="two cores",
        changes=_TIMES,
        min_length=1,
    )
    cpu_threads: int = option(
        "CPU threads per process", 1, unit="threads", source="a choice", changes=_TIMES, ge=1
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "where models train; auto: GPUs if there are any", "auto", source="a choice", changes=_TIMES
    )
    environment: str | None = option(
        "constants of the machine: name of an environment or path of a .toml file; null: they are measured",
        None,
        changes=_TIMES,
    )
    warmup_steps: int = option(
        "steps of a run that are thrown away", 1, source="a choice", changes=_TIMES, ge=0
    )
    steps: int = option("steps of a run that are timed", 3, source="a choice", changes=_TIMES, ge=1)
    repetitions: int = option(
        "runs of each point; their scatter is the repeatability", 5, source="a choice", changes=_TIMES, ge=1
    )
    points_per_job: int | None = option(
        "most points that one job measures; null: all of a placement, which saves the start of processes",
        None,
        source="a choice",
        changes="",
        ge=1,
    )
    gpu_model: str | None = option(
        "kind of GPU that jobs ask for, as many as a point has processes; null: jobs ask for CPU cores",
        None,
        source="a choice",
        changes="",
    )
    mem_mb_per_process: int = option(
        "memory that a job asks for", 2000, unit="MB", source="measured on CPU, with room", changes="", ge=1
    )
    runtime_min: int = option(
        "time that a job asks for",
        20,
        unit="min",
        source="measured on two cores, with room",
        changes="",
        ge=1,
    )


class Measured(Block):
    """Options of the measured source."""

    directory: str | None = option(
        "directory with one throughput table per workload, WORKLOAD.csv; null: small workloads are profiled "
        "here",
        None,
        changes=EVERYTHING,
    )
    profile: Profile = option("what is profiled where no directory is given", Profile())


class Throughput(Block):
    """Sources of iteration times."""

    sources: tuple[SourceName, ...] = option(
        "sources that the target all builds",
        ("emulated", "measured"),
        source="a choice",
        changes=EVERYTHING,
        min_length=1,
    )
    emulated: Emulated = option("the emulated source", Emulated())
    published: Published = option("the published source", Published())
    measured: Measured = option("the measured source", Measured())


# ------------------------------------------------------------------------------------------------
# The whole configuration: reading, merging, checking.

DEFAULT_FILES = ("config/config.yaml",)
PUBLISHED_VARIABLE = "MAKESPAN_PUBLISHED_DIR"


FormName = Literal["published", "extended"]


class PerformanceModel(Block):
    """Fit of iteration times."""

    forms: tuple[FormName, ...] = option(
        "forms that are fitted and compared",
        ("published", "extended"),
        source="docs/background/performance-model.md",
        changes="fitted models and their errors",
        min_length=1,
    )
    experiment_form: FormName = option(
        "form that the experiments use; one of forms",
        "extended",
        source="the form with the smaller error",
        changes="what Morphling plans for single jobs",
    )

    @model_validator(mode="after")
    def _experiment_form_is_fitted(self) -> "PerformanceModel":
        if self.experiment_form not in self.forms:
            raise ValueError(f"experiment_form among the fitted forms ({', '.join(self.forms)})")
        return self


def shipped_live_workloads() -> list[str]:
    """Return the names of `makespan.live.live_workloads` without importing what runs them."""
    return [name for name, entry in read_preset("makespan.live", "live").items() if "jobs" in entry]


class LiveRuns(Block):
    """Live runs of several policies, each on jobs drawn with several seeds, beside their predictions."""

    policies: tuple[Annotated[str, one_of(policy_names)], ...] = option(
        "names of the policies",
        ("morphling-lookahead", "morphling-work"),
        source="a choice",
        changes="live",
        min_length=1,
    )
    workload: Annotated[str, one_of(shipped_live_workloads)] = option(
        "name of the live workload", "live-small", source="docs/guides/schedule-live.md", changes="live"
    )
    slots: Count = option("slots that the jobs share", 2, unit="slots", source="two cores", changes="live")
    nodes: Count = option(
        "nodes over which the slots are spread evenly", 1, unit="nodes", source="a choice", changes="live"
    )
    failures_per_hour: float = option(
        "failures of nodes in the whole cluster, an hour of real time; drawn with the seed of the run",
        0.0, unit="1/h", source="a choice", changes="live", ge=0, le=3600,
    )  # fmt: skip
    recovery: RecoveryKind = option(
        "what a job does that loses a node or a process: restart from its checkpoint, or resume from memory",
        "restart", source="a choice", changes="live",
    )  # fmt: skip
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = option(
        "with which the jobs are drawn, one run each", (21, 22, 23, 24, 25),
        source="fixed before the first run", changes="live", min_length=1,
    )  # fmt: skip
    in_all: bool = option(
        "whether the target all runs them, and the ledger rests on them; each needs all cores for minutes",
        False,
        source="a choice",
        changes="live, claims",
    )

    @model_validator(mode="after")
    def _slots_are_even(self) -> "LiveRuns":
        if self.slots % self.nodes:
            raise ValueError(f"as many slots on each node, not {self.slots} on {self.nodes}")
        return self

    @model_validator(mode="after")
    def _ledger_is_without_failures(self) -> "LiveRuns":
        if self.in_all and self.failures_per_hour:
            raise ValueError("in_all without failures_per_hour: the statement is about runs without failures")
        if self.in_all and self.recovery != "restart":
            raise ValueError("in_all with recovery 'restart': the statement is about jobs that restart")
        return self

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return what `makespan.live.live_experiment` is asked for, by the name of the run."""
        shared: dict[str, Any] = {"workload": self.workload, "slots": self.slots}
        # Only what differs from runs before nodes could fail, which need not be made again.
        shared |= {"nodes": self.nodes} if self.nodes > 1 else {}
        shared |= {"failures_per_hour": self.failures_per_hour} if self.failures_per_hour else {}
        shared |= {"recovery": self.recovery} if self.recovery != "restart" else {}
        return {
            f"{policy}-{self.workload}-{seed}": {"policy": policy, "seed": seed, **shared}
            for policy in self.policies
            for seed in self.seeds
        }


class Settings(Block):
    """Everything that can be configured, but for the options of papers; `settings_model` adds those."""

    cluster: Annotated[str, one_of(cluster_names)] = option(
        "name of the cluster preset on which the experiments run",
        "a800-64",
        source="Morphling, section 7: 8 nodes with 8 A800-80GB each",
        changes="all",
    )
    throughput: Throughput = option("where iteration times come from", Throughput())
    performance_model: PerformanceModel = option("how iteration times are fitted", PerformanceModel())
    live: LiveRuns = option("live runs", LiveRuns())

    def papers(self) -> dict[str, Paper]:
        """Return the options of each paper by its name."""
        return {name: getattr(self, name) for name in PAPERS}

    def throughput_workloads(self) -> list[str]:
        """Return the workloads whose iteration times some paper needs."""
        experiments = [one for paper in self.papers().values() for one in paper.experiments(self).values()]
        return list(dict.fromkeys(key for one in experiments for key in one.timed_workloads("emulated", ())))


@cache
def settings_model() -> type[Settings]:
    """Return the model of the whole configuration: the general options and those of every paper."""
    blocks: dict[str, Any] = {}
    for name in PAPERS:
        block = paper_named(name)
        blocks[name] = (block, option((block.__doc__ or "").splitlines()[0].rstrip("."), block()))
    return create_model("Settings", __base__=Settings, __doc__="Everything that can be configured.", **blocks)


def check_settings(values: Mapping[str, Any]) -> Settings:
    """Turn merged values, as read from YAML, into settings; raises `ConfigError`, one line a bad key."""
    try:
        text = json.dumps(values, default=str)
    except (ValueError, RecursionError):
        raise ConfigError("the configuration contains itself; expected values without cycles") from None
    try:
        return settings_model().model_validate_json(text)
    except ValidationError as error:
        lines = explain(error.errors(), settings_model())
    raise ConfigError("the configuration is not accepted:\n" + "\n".join(f"  {line}" for line in lines))


def load_settings(overrides: Sequence[str | Path] = (), root: str | Path = ".") -> Settings:
    """Read the default files of a checkout (``root``), then the overrides in order, and check the result."""
    files = [Path(root) / name for name in DEFAULT_FILES] + [Path(name) for name in overrides]
    return check_settings(reduce(merge, map(_read, files), {}))


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` laid over it; groups are merged, lists are replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge(old, value)
        result[key] = value
    return result


def _read(path: Path) -> Mapping[str, Any]:
    values = read_yaml(path, "a configuration", ConfigError)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: found {type(values).__name__}; expected a mapping of options")
    return values


def published_directory(settings: Settings, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory with the published files, or the one that receives fetched files.

    The option ``throughput.published.directory`` comes first, the variable ``MAKESPAN_PUBLISHED_DIR`` second,
    and with ``throughput.published.fetch`` the directory of fetched files third. Raises `MissingDataError` if
    none is given, or the one given is no directory.
    """
    published = settings.throughput.published
    named = published.directory or environment.get(PUBLISHED_VARIABLE)
    if named:
        if not Path(named).is_dir():
            raise MissingDataError(
                f"{named}: no such directory; throughput.published.directory or {PUBLISHED_VARIABLE} must "
                "name a directory with the published files or a clone of the authors' repository"
            )
        return Path(named)
    if published.fetch:
        return Path(published.fetched_directory)
    raise MissingDataError(
        "the source published needs the authors' files: set throughput.published.directory or the "
        f"environment variable {PUBLISHED_VARIABLE} to a directory that has them, or set "
        "throughput.published.fetch to true to fetch them from their pinned commits"
    )


def settings_hash(settings: Settings) -> str:
    """Return the sha256 of the merged configuration, independent of the order of keys."""
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def provenance(settings: Settings, source: str, pins: str | Path, provenances: Iterable[str] = ()) -> str:
    """Return as JSON what the results of a source were made with.

    Source, and what it is by the ``provenance`` of its throughput tables' rows, with their numbers; package
    version, seed, configuration and its hash, the hash of ``pins``, the exact versions; machine and time.
    """
    # A workflow that only plans need not import these.
    from makespan.runtime import describe_machine
    from makespan.tables import shown_source

    rows = Counter(provenances)
    machine = describe_machine()
    record = {
        "source": source,
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            name: machine[name]
            for name in ("processor", "cpus", "memory_bytes", "system", "gpus", "versions")
        },
        "iteration_times": shown_source(source, rows),
        "iteration_time_rows": dict(rows),
        "makespan_version": __version__,
        "seed": settings.throughput.emulated.seed if source == "emulated" else None,
        "pins_sha256": hashlib.sha256(Path(pins).read_bytes()).hexdigest(),
        "config_sha256": settings_hash(settings),
        "config": settings.model_dump(mode="json"),
    }
    return json.dumps(record, indent=2, sort_keys=True) + "\n"


# ------------------------------------------------------------------------------------------------
# What can be asked of the workflow, and what is said of a target that nothing makes.

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
    accepted = "a rule without wildcards or a file that a rule makes, as docs/papers/index.md lists them"
    return ConfigError(f"unknown target {target}; expected {accepted}.{hint}")
