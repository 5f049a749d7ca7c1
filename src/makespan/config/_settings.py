"""The whole configuration: reading, merging, checking."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ValidationError, create_model, model_validator

from makespan import __version__
from makespan.config._messages import explain
from makespan.config._throughput import Throughput
from makespan.errors import ConfigError, MissingDataError
from makespan.files import read_yaml
from makespan.hardware import cluster_names
from makespan.papers import PAPERS
from makespan.policies import policy_names
from makespan.presets import read_preset
from makespan.settings import Block, Count, PaperSettings, option, taken_from, unlike

__all__ = [
    "DEFAULT_FILES",
    "PUBLISHED_VARIABLE",
    "PerformanceModel",
    "Settings",
    "check_settings",
    "load_settings",
    "merge",
    "provenance",
    "published_directory",
    "settings_hash",
    "settings_model",
]

DEFAULT_FILES = ("config/config.yaml", *(f"config/papers/{name}.yaml" for name in PAPERS))
PUBLISHED_VARIABLE = "MAKESPAN_PUBLISHED_DIR"


FormName = Literal["published", "extended"]


class PerformanceModel(Block):
    """How iteration times are fitted."""

    forms: Annotated[tuple[FormName, ...], unlike("each form once")] = option(
        "forms that are fitted and compared",
        source="docs/background/performance-model.md",
        changes="table2, fits",
        min_length=1,
    )
    experiment_form: FormName = option(
        "form that the experiments use; one of forms",
        source="the form with the smaller error",
        changes="sensitivity, fig7, fig8",
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

    policies: Annotated[tuple[Annotated[str, taken_from(policy_names)], ...], unlike("each policy once")] = (
        option("names of the policies", source="a choice", changes="live", min_length=1)
    )
    workload: Annotated[str, taken_from(shipped_live_workloads)] = option(
        "name of the live workload", source="docs/guides/schedule-live.md", changes="live"
    )
    slots: Count = option("slots that the jobs share", unit="slots", source="two cores", changes="live")
    seeds: Annotated[tuple[int, ...], unlike("each seed once")] = option(
        "with which the jobs are drawn, one run each", source="fixed before the first run", changes="live",
        min_length=1,
    )  # fmt: skip
    in_all: bool = option(
        "whether the target all runs them, and the ledger rests on them; each needs all cores for minutes",
        source="a choice",
        changes="live, claims",
    )

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return what `makespan.live.live_experiment` is asked for, by the name of the run."""
        shared = {"workload": self.workload, "slots": self.slots}
        return {
            f"{policy}-{self.workload}-{seed}": {"policy": policy, "seed": seed, **shared}
            for policy in self.policies
            for seed in self.seeds
        }


class Settings(Block):
    """Everything that can be configured, but for the options of papers; `settings_model` adds those."""

    cluster: Annotated[str, taken_from(cluster_names)] = option(
        "name of the cluster preset on which the experiments run",
        source="Morphling, section 7: 8 nodes with 8 A800-80GB each",
        changes="all",
    )
    throughput: Throughput = option("where iteration times come from")
    performance_model: PerformanceModel = option("how iteration times are fitted")
    live: LiveRuns = option("live runs")

    def papers(self) -> dict[str, PaperSettings]:
        """Return the options of each paper by its name."""
        return {name: getattr(self, name) for name in PAPERS}

    def throughput_workloads(self) -> list[str]:
        """Return the workloads whose iteration times some paper needs."""
        needed = [paper.throughput_workloads() for paper in self.papers().values()]
        return list(dict.fromkeys(key for keys in needed for key in keys))


@cache
def settings_model() -> type[Settings]:
    """Return the model of the whole configuration: the general options and those of every paper."""
    blocks: dict[str, Any] = {}
    for name in PAPERS:
        block = import_module(f"makespan.papers.{name}").SETTINGS
        blocks[name] = (block, option(block.__doc__.splitlines()[0].rstrip(".")))
    return create_model("Settings", __base__=Settings, __doc__="Everything that can be configured.", **blocks)


def check_settings(values: Mapping[str, Any]) -> Settings:
    """Turn merged values, as read from YAML, into settings; raises `ConfigError`, one line a bad key."""
    try:
        text = json.dumps(values, default=str)
    except (ValueError, RecursionError):
        raise ConfigError("the configuration contains itself; accepted: values that end somewhere") from None
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
        raise ConfigError(f"{path}: found {type(values).__name__}; accepted: a mapping of options")
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
    version, seed, configuration and its hash, and the hash of ``pins``, the exact versions.
    """
    from makespan.tables import shown_source  # a workflow that only plans need not import tables

    rows = Counter(provenances)
    record = {
        "source": source,
        "iteration_times": shown_source(source, rows),
        "iteration_time_rows": dict(rows),
        "makespan_version": __version__,
        "seed": settings.throughput.emulated.seed if source == "emulated" else None,
        "pins_sha256": hashlib.sha256(Path(pins).read_bytes()).hexdigest(),
        "config_sha256": settings_hash(settings),
        "config": settings.model_dump(mode="json"),
    }
    return json.dumps(record, indent=2, sort_keys=True) + "\n"
