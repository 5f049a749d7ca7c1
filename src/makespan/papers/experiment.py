"""Experiments as objects: options, tables, figures and computation of each in one place.

A paper is a package with a `Paper`, whose fields are the options of its experiments, and with ``EXPERIMENTS``
in it, the classes that compute its tables. Everything else that must know an experiment follows from these:
configuration, rules, reference pages, lists of results, and what the ledger may read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd
from pydantic import ValidationInfo, model_validator

from makespan.errors import ConfigError
from makespan.settings import Block, Shared
from makespan.tables import TableSchema, read_csv, schemas_of

SOURCES = ("emulated", "published", "measured")
_OFFLINE = ("emulated", "published")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a paper: the tables that it shows, and the function that draws it.

    Parameters
    ----------
    name
        Name of the files, ``results/<source>/<paper>/figures/<name>.*``.
    title, caption
        Title in the report, and the text below the figure; ``{source}`` stands for the throughput source.
    tables
        Result tables of the paper that the figure reads.
    cells
        Artifacts whose printed cells it reads, ``config/published/<paper>_<artifact>.csv``.
    draw
        Function of the module ``figures`` of the paper, or ``module:function``; the name of the figure unless
        given. It takes the tables by name, printed cells as ``published_<artifact>``, and the source; it
        returns the figure and the table behind it.
    options, values
        Further arguments of the function: paths of options in the configuration, and fixed values.
    sources
        Throughput sources for which the figure is drawn; empty for all.
    """

    name: str
    title: str
    caption: str
    tables: tuple[str, ...]
    cells: tuple[str, ...] = ()
    draw: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def function(self, paper: str) -> str:
        """Return the drawing function as ``module:function``."""
        draw = self.draw or self.name
        return draw if ":" in draw else f"makespan.papers.{paper}.figures:{draw}"

    def is_drawn(self, source: str, tables: Iterable[str]) -> bool:
        """Tell whether the figure is drawn for a source for which ``tables`` are built."""
        return set(self.tables) <= set(tables) and source in (self.sources or (source,))

    def captioned(self, source: str, shown: str) -> str:
        """Return the caption; ``shown`` is the label of the iteration times, see `tables.shown_source`."""
        if shown == source:
            return self.caption.format(source=source)
        return f"{self.caption.format(source='given')} Iteration times: {shown}."

    def arguments(self, settings: object) -> dict[str, Any]:
        """Return the further arguments of the drawing function."""
        return {name: option_at(settings, path) for name, path in self.options.items()} | dict(self.values)


@dataclass(frozen=True, slots=True)
class Given:
    """What an experiment is given when it runs.

    Parameters
    ----------
    source
        Source of the iteration times.
    times
        Throughput tables by workload.
    cells, tables
        Printed cells by artifact, and tables of the same paper by name, those that the experiment reads.
    paths
        Paths of everything that it reads; files of the authors stand under ``files``.
    n_threads
        Cores that it may use.
    published
        Directory with the authors' files, and the register of data sets that says which files they are.
    """

    source: str
    times: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    cells: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    paths: Mapping[str, Any] = field(default_factory=dict)
    n_threads: int = 1
    published: tuple[Path, Path] | None = None


class Experiment(Block):
    """One experiment: its fields are its options, and its class attributes say what it reads and writes.

    An option that stands elsewhere in the configuration is a field of `makespan.settings.shared`.

    Attributes
    ----------
    name
        Name of its rule, after that of the paper.
    tables
        Tables that it writes, each with a line about its content.
    figures
        Figures that show these tables.
    cells, reads
        Artifacts whose printed cells it reads, and tables of the paper that it reads.
    sources
        Sources for which its tables are built by default.
    on_request
        Sources for which its tables can be built, but are not by default.
    on_profile
        Whether its tables are also built where iteration times are a profile of small workloads.
    is_timed
        Whether iteration times of the source enter its tables.
    unjudged
        Tables of it that no statement is about.
    reads_files
        Whether it reads files of the authors on the published source.
    trains
        Whether it runs models, and so needs the environment with torch.
    n_gpus
        GPUs that its processes may use at a time.
    group
        Group of jobs that a cluster runs as one, or nothing.
    is_local
        Whether it is so short that it runs where Snakemake runs.
    minutes, mem_mb
        Resources that its job asks for.
    """

    name: ClassVar[str] = ""
    tables: ClassVar[Mapping[str, str]] = {}
    figures: ClassVar[tuple[Figure, ...]] = ()
    cells: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    sources: ClassVar[tuple[str, ...]] = _OFFLINE
    on_request: ClassVar[tuple[str, ...]] = ()
    on_profile: ClassVar[bool] = False
    is_timed: ClassVar[bool] = False
    unjudged: ClassVar[frozenset[str]] = frozenset()
    reads_files: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    n_gpus: ClassVar[int] = 0
    group: ClassVar[str] = ""
    is_local: ClassVar[bool] = False
    minutes: ClassVar[int] = 10
    mem_mb: ClassVar[int] = 1000

    @model_validator(mode="before")
    @classmethod
    def _shared_options_stand_elsewhere(cls, values: Any, info: ValidationInfo) -> Any:
        # A user sets a shared option where it stands, so that it has one value; only a resolved experiment has it.
        is_resolved = bool(info.context and info.context.get("resolved"))
        if isinstance(values, Mapping) and not is_resolved:
            for key in cls.shared_options():
                if key in values:
                    raise ValueError(f"no option {key}, which is {cls.shared_options()[key]}")
        return values

    @classmethod
    def shared_options(cls) -> dict[str, str]:
        """Return the fields that stand elsewhere, each with its path in the configuration."""
        return {
            name: mark.path
            for name, one in cls.model_fields.items()
            for mark in one.metadata
            if isinstance(mark, Shared)
        }

    def resolved(self, settings: object) -> Self:
        """Return the experiment with its shared options, as a checked configuration has them."""
        return self.model_copy(
            update={name: option_at(settings, path) for name, path in self.shared_options().items()}
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a resolved experiment from its options as JSON."""
        return cls.model_validate_json(text, context={"resolved": True})

    def workloads(self, source: str) -> Sequence[str]:
        """Return the workloads whose throughput tables it reads."""
        return ()

    def tables_of(self, source: str, profiled: Sequence[str] = ()) -> dict[str, str]:
        """Return the tables that it writes for a source, each with its content.

        ``profiled`` are the workloads of a profile, where iteration times are one.
        """
        if source not in (*self.sources, *self.on_request) or (profiled and not self.on_profile):
            return {}
        return dict(self.tables)

    def n_threads(self, all_cores: int) -> int:
        """Return the cores that it takes; ``all_cores`` where nothing may run beside it."""
        return 1

    def policies(self) -> Sequence[str] | None:
        """Return the names of the policies whose code it runs; None: any."""
        return None

    def run(self, given: Given) -> Mapping[str, pd.DataFrame]:
        """Compute the tables, by name."""
        raise NotImplementedError


class Paper(Block):
    """Options of a paper, with the experiments that they belong to.

    Attributes
    ----------
    title
        Name of the paper, for people.
    EXPERIMENTS
        Its experiments, in the order in which documents list their tables.
    judged_cells
        Artifacts whose printed cells its checks read.
    judges_live
        Whether its checks read the live runs, if those are part of what is built by default.
    self_contained
        Sources for which its tables need no file of the authors, so that they are built by default.
    """

    title: ClassVar[str] = ""
    EXPERIMENTS: ClassVar[tuple[type[Experiment], ...]] = ()
    judged_cells: ClassVar[tuple[str, ...]] = ()
    judges_live: ClassVar[bool] = False
    self_contained: ClassVar[frozenset[str]] = frozenset()

    def throughput_workloads(self) -> tuple[str, ...]:
        """Return the workloads whose iteration times the paper needs."""
        return ()

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names in the register of the files that the paper reads besides iteration times."""
        return ()

    def experiments(self, settings: object) -> dict[str, Experiment]:
        """Return the experiments by name, with all their options."""
        found = dict(_blocks(self))
        own = {cls: found.get(cls) or cls.model_construct() for cls in self.EXPERIMENTS}
        return {cls.name: experiment.resolved(settings) for cls, experiment in own.items()}


def _blocks(block: Block) -> Iterable[tuple[type[Experiment], Experiment]]:
    for name in type(block).model_fields:
        value = getattr(block, name)
        if isinstance(value, Experiment):
            yield type(value), value
        if isinstance(value, Block):
            yield from _blocks(value)


def option_at(settings: object, path: str) -> Any:
    """Return the option at a dotted path of a checked configuration; a number takes an entry of a list."""

    def step(value: Any, key: str) -> Any:
        return value[int(key)] if key.isdigit() else getattr(value, key)

    try:
        return reduce(step, path.split("."), settings)
    except (AttributeError, IndexError, TypeError):
        raise ConfigError(f"no option {path!r} in the configuration") from None
