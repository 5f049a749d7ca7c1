"""Experiments as objects: options, tables, figures and computation of each in one place.

A paper is a package with a `Paper`, whose fields are the options of its experiments, and with ``EXPERIMENTS``
in it, the classes that compute its tables. Everything else that must know an experiment follows from these:
configuration, rules, reference pages, lists of results, and what the ledger may read.
"""

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module, resources
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pandas as pd
from pydantic import TypeAdapter, ValidationInfo, model_validator

from makespan.claims import Ledger
from makespan.errors import ConfigError, unknown_name
from makespan.files import read_preset
from makespan.settings import Block
from makespan.tables import LIVE, THROUGHPUT, TableSchema, read_csv, schemas_of

SOURCES = ("emulated", "published", "measured")
FIGURE_FORMS = ("pdf", "png", "svg", "csv", "txt")
"""Endings of the files of a figure: the picture, the table behind it, and its caption."""
_OFFLINE = ("emulated", "published")
_NUMBER = re.compile(
    r"\{(?P<noun>[^:{}]+): (?P<way>config|rows|values|largest) (?P<table>\w+)\.?(?P<column>[\w.]*)"
    r"(?: by (?P<by>\w+))?\}"
)
"""Number in a caption, with the plural of its noun, see `Figure`."""


@dataclass(frozen=True, slots=True)
class Explore:
    """Interactive chart of a figure in the report, drawn from the table behind the figure.

    Parameters
    ----------
    kind
        ``lines``, ``steps`` (constant until the next row), ``areas`` (steps, stacked), ``shares`` (share of
        rows up to a value of ``x``), or ``spans`` (bars from one column of ``x`` to the next).
    x
        Column of the horizontal axis; of spans start and end, and between them when progress begins.
    y
        Columns of the vertical axis, one series each (empty: all other columns); of spans those that name a
        row of the chart.
    by, panels
        Columns whose values make a series each, and those whose values make a chart each.
    unit_x, unit_y
        Titles of the axes.
    """

    kind: Literal["lines", "steps", "areas", "shares", "spans"]
    x: tuple[str, ...]
    y: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()
    unit_x: str = ""
    unit_y: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a paper: the tables that it shows, and the function that draws it.

    Parameters
    ----------
    name
        Name of the files, ``results/<source>/<paper>/figures/<name>.*``.
    title, caption
        Title in the report, and the text below the figure. ``{source}`` stands for the throughput source, and
        ``{NOUN: WAY}`` for a number with its noun, a plural: ``{seeds: values fig9.seed}`` counts the values
        of a column (add ``by COLUMN`` for the fewest and the most per value of another column),
        ``{kills: rows hybrid_kills}`` the rows of a table; ``{steps: largest fig12.samples}`` is the largest
        value of a column, ``{passes: config slapo.fig9.passes}`` an option.
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
    explore
        Interactive chart in the report, for figures that reward a closer look.
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
    explore: Explore | None = None

    def function(self, paper: str) -> str:
        """Return the drawing function as ``module:function``."""
        draw = self.draw or self.name
        return draw if ":" in draw else f"makespan.papers.{paper}.figures:{draw}"

    def is_drawn(self, source: str, tables: Iterable[str]) -> bool:
        """Tell whether the figure is drawn for a source for which ``tables`` are built."""
        return set(self.tables) <= set(tables) and source in (self.sources or (source,))

    def captioned(self, source: str, shown: str, settings: object) -> str:
        """Return the caption for a source, with numbers of the configuration.

        ``shown`` is the label of the iteration times, see `tables.shown_source`. `with_counts` fills in the
        numbers of tables.
        """
        is_as_named = shown == source
        text = self.caption.replace("{source}", source if is_as_named else "given")

        def option(number: re.Match[str]) -> str:
            if number["way"] != "config":
                return number[0]
            return _counted(number["noun"], [option_at(settings, f"{number['table']}.{number['column']}")])

        text = _NUMBER.sub(option, text)
        return text if is_as_named else f"{text} Iteration times: {shown}."

    def arguments(self, settings: object) -> dict[str, Any]:
        """Return the further arguments of the drawing function."""
        return {name: option_at(settings, path) for name, path in self.options.items()} | dict(self.values)


def with_counts(caption: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Fill numbers of runs into a caption, from the tables that its figure reads."""

    def count(number: re.Match[str]) -> str:
        table = tables[number["table"]]
        if number["way"] == "rows":
            counts = [len(table)]
        elif number["way"] == "largest":
            counts = [int(table[number["column"]].max())]
        elif number["by"] is None:
            counts = [table[number["column"]].nunique()]
        else:
            counts = table.groupby(number["by"], dropna=False)[number["column"]].nunique().tolist()
        return _counted(number["noun"], counts)

    return _NUMBER.sub(count, caption)


def _counted(noun: str, counts: Sequence[int]) -> str:
    fewest, most = min(counts), max(counts)
    if fewest < most:
        return f"{fewest} to {most} {noun}"
    return f"1 {re.sub('(?<=ch|sh)es$|s$', '', noun)}" if most == 1 else f"{most} {noun}"


@dataclass(frozen=True, slots=True)
class About:
    """Description of a paper for readers of its results, from ``presets/about.toml`` of its package.

    Parameters
    ----------
    citation, idea, setting
        Title with venue; what the paper proposes; what its experiments run on, here and there.
    deviations
        Where this project departs from the paper, one sentence or two each.
    """

    citation: str
    idea: str
    setting: str
    deviations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """Input of an experiment when it runs.

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
        Sources for which its tables are built.
    on_profile
        Whether its tables are also built where iteration times are a profile of small workloads.
    is_timed
        Whether iteration times of the source enter its tables.
    unjudged, on_the_way
        Tables that no statement is about, and tables, or folders of them, that are only made for other
        experiments.
    reads_files
        Whether it reads files of the authors on the published source.
    trains
        Whether it runs models, and so needs the environment with torch.
    group
        Group of jobs that a cluster runs as one, or nothing.
    is_local
        Whether it is so short that it runs where Snakemake runs.
    minutes, mem_mb
        Resources that its job asks for.
    unused
        Options that `compute` does not read, but figures, other experiments or the choice of resources.
    """

    name: ClassVar[str] = ""
    tables: ClassVar[Mapping[str, str]] = {}
    figures: ClassVar[tuple[Figure, ...]] = ()
    cells: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    sources: ClassVar[tuple[str, ...]] = _OFFLINE
    on_profile: ClassVar[bool] = False
    is_timed: ClassVar[bool] = False
    unjudged: ClassVar[frozenset[str]] = frozenset()
    on_the_way: ClassVar[frozenset[str]] = frozenset()
    reads_files: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    group: ClassVar[str] = ""
    is_local: ClassVar[bool] = False
    unused: ClassVar[frozenset[str]] = frozenset()
    minutes: ClassVar[int] = 10
    mem_mb: ClassVar[int] = 1000

    @model_validator(mode="after")
    def _shared_options_are_set_elsewhere(self, info: ValidationInfo) -> Self:
        # A user sets a shared option where it stands, so that it has one value everywhere.
        if not (info.context and info.context.get("resolved")):
            for name, path in self.shared_options().items():
                if name in self.model_fields_set:
                    raise ValueError(f"no option {name}, which is set as {path}")
        return self

    @classmethod
    def shared_options(cls) -> dict[str, str]:
        """Return the fields that stand elsewhere, each with its path in the configuration."""
        paths = {
            name: extra.get("shared")
            for name, one in cls.model_fields.items()
            if isinstance(extra := one.json_schema_extra, dict)
        }
        return {name: str(path) for name, path in paths.items() if path}

    def resolved(self, settings: object) -> Self:
        """Return the experiment with its shared options, as a checked configuration has them."""
        return self.model_copy(
            update={name: option_at(settings, path) for name, path in self.shared_options().items()}
        )

    def to_json(self) -> str:
        """Return the options as JSON, those that the experiment reads; `from_json` reads them back."""
        own = self.model_dump(mode="json", exclude=set(self.unused))
        kinds: dict[str, Any] = {
            name: type(self).model_fields[name].annotation
            for name in self.shared_options()
            if name not in self.unused
        }
        shared = {
            name: TypeAdapter(kind).dump_python(getattr(self, name), mode="json")
            for name, kind in kinds.items()
        }
        return json.dumps(own | shared)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a resolved experiment from its options as JSON."""
        return cls.model_validate_json(text, context={"resolved": True})

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads whose throughput tables it reads; ``profiled`` are those of a profile."""
        return ()

    def tables_of(self, source: str, profiled: Sequence[str]) -> Mapping[str, str]:
        """Return the tables that it writes for a source, each with its content.

        ``profiled`` are the workloads of the profile that is the source; empty for any other source.
        """
        is_built = source in self.sources and (self.on_profile or not profiled)
        return self.tables if is_built else {}

    def n_threads(self, all_cores: int) -> int:
        """Return the cores that it takes; ``all_cores`` are those of the machine, at least one."""
        return 1

    def n_gpus(self) -> int:
        """Return the GPUs that its processes can use at a time."""
        return 0

    def policies_run(self) -> Sequence[str] | None:
        """Return the names of the policies whose code it runs; None: of any."""
        return None

    def compute(self, given: Given) -> Mapping[str, pd.DataFrame]:
        """Compute the tables, by name; every experiment says how."""
        raise NotImplementedError

    def run(self, given: Given) -> dict[str, pd.DataFrame]:
        """Compute the tables and check them against their schemas.

        Raises
        ------
        ConfigError
            Shared options have no value yet; `resolved` takes them from a configuration.
        TraceError
            A table is not what its schema says.
        """
        missing = self.shared_options().keys() - self.unused - self.model_fields_set
        if missing:
            options = ", ".join(sorted(missing))
            raise ConfigError(
                f"{type(self).__name__} has no value of the shared option(s) {options}; "
                "take it from Paper.experiments(settings), or call resolved(settings)"
            )
        paper = paper_named(type(self).__module__.split(".")[2])
        return {
            name: paper.schema_of(name).validate(table, where=name)
            for name, table in self.compute(given).items()
        }


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
    shared_schemas
        Schemas of tables that ``tables.csv`` of the paper lacks, by table or by its folder.
    judges_live
        Whether its checks read the live runs, if those are part of what is built by default.
    self_contained
        Sources for which its tables need no file of the authors, so that they are built by default.
    """

    title: ClassVar[str] = ""
    EXPERIMENTS: ClassVar[tuple[type[Experiment], ...]] = ()
    judged_cells: ClassVar[tuple[str, ...]] = ()
    shared_schemas: ClassVar[Mapping[str, TableSchema]] = {}
    judges_live: ClassVar[bool] = False
    self_contained: ClassVar[frozenset[str]] = frozenset()

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names in the register of the files that the paper reads besides iteration times."""
        return ()

    @classmethod
    def key(cls) -> str:
        """Return the name of the package, which is that of the folder of results."""
        return cls.__module__.split(".")[2]

    @classmethod
    def about(cls) -> About:
        """Return the description of the paper."""
        return TypeAdapter(About).validate_python(read_preset(f"makespan.papers.{cls.key()}", "about"))

    @classmethod
    def schema_of(cls, table: str) -> TableSchema:
        """Return the schema of a result table, or of printed cells, ``published_<artifact>``.

        Raises
        ------
        UnknownNameError
            The paper has no such table.
        """
        known = schemas_of(f"makespan.papers.{cls.key()}") | dict(cls.shared_schemas)
        for name in (table, table.partition("/")[0]):
            if name in known:
                return known[name]
        raise unknown_name(f"table of {cls.title}", table, known)

    @classmethod
    def read_published(cls, artifact: str, path: str | Path) -> pd.DataFrame:
        """Read the cells that the paper prints of an artifact, each with its source; errors as `read_csv`."""
        return read_csv(path, cls.schema_of(f"published_{artifact}"))

    @classmethod
    def figures(cls) -> dict[str, Figure]:
        """Return the figures of all experiments by name."""
        return {figure.name: figure for one in cls.EXPERIMENTS for figure in one.figures}

    @classmethod
    def unjudged(cls) -> frozenset[str]:
        """Return the tables that no statement is about."""
        return frozenset(table for one in cls.EXPERIMENTS for table in one.unjudged)

    @classmethod
    def timed_tables(cls) -> frozenset[str]:
        """Return the tables that depend on the iteration times of the source."""
        return frozenset(table for one in cls.EXPERIMENTS if one.is_timed for table in one.tables)

    @classmethod
    def checks_code(cls) -> str:
        """Return what decides its statements: its module ``checks``, or ``module:PAPER`` without one."""
        package = f"makespan.papers.{cls.key()}"
        has_module = resources.files(package).joinpath("checks.py").is_file()
        return f"{package}.checks" if has_module else f"{package}:PAPER"

    @classmethod
    def ledger(cls) -> Ledger:
        """Return the statements of the paper with the functions that decide them, see `checks_code`."""
        package = f"makespan.papers.{cls.key()}"
        found = vars(import_module(cls.checks_code().partition(":")[0])).items()
        schemas = {**schemas_of(package), **cls.shared_schemas, "live": LIVE}
        cells = {f"{name}_published": schemas[f"published_{name}"] for name in cls.judged_cells}
        return Ledger(
            paper=cls.title,
            package=package,
            checks={
                name.removeprefix("_"): one
                for name, one in found
                if inspect.isfunction(one) and [*inspect.signature(one).parameters] == ["tables", "claim"]
            },
            tables=schemas | cells,
        )

    def experiments(self, settings: object) -> dict[str, Experiment]:
        """Return the experiments by name, with all their options from a checked configuration."""
        blocks = dict(_blocks(self))
        own = {cls: blocks.get(cls) or cls.model_construct() for cls in self.EXPERIMENTS}
        return {cls.name: experiment.resolved(settings) for cls, experiment in own.items()}

    def sources(self, settings: object) -> list[str]:
        """Return the sources of the default build: those configured, and those that need no file."""
        configured = option_at(settings, "throughput.sources")
        return list(dict.fromkeys([*configured, *sorted(self.self_contained)]))

    def tables_of(self, settings: object, source: str) -> list[str]:
        """Return the names of the tables that are built by default for a source."""
        profiled = profiled_workloads(settings, source)
        return [
            table
            for experiment in self.experiments(settings).values()
            for table in experiment.tables_of(source, profiled)
            if table.partition("/")[0] not in experiment.on_the_way
        ]

    def judged_tables(self, settings: object, source: str) -> list[str]:
        """Return the names of the tables that decide statements for a source.

        Iteration times of a profile are those of small workloads, which the paper is not about.
        """
        left_out = self.unjudged()
        if profiled_workloads(settings, source):
            left_out |= self.timed_tables()
        return [table for table in self.tables_of(settings, source) if table not in left_out]

    def files_of(self, settings: object, source: str) -> list[str]:
        """Return what is built by default for a source, as paths below its folder of results."""
        tables = self.tables_of(settings, source)
        drawn = [name for name, figure in self.figures().items() if figure.is_drawn(source, tables)]
        pictures = [f"figures/{name}.{form}" for name in drawn for form in FIGURE_FORMS]
        return [*(f"{name}.csv" for name in tables), *pictures, "claims.csv"]


def one_per(place: str, names: Iterable[str], tables: Mapping[str, str]) -> dict[str, str]:
    """Return tables with one per name where a path has ``place``, for example ``<workload>``."""
    return {
        table.replace(place, name): what
        for table, what in tables.items()
        for name in (names if place in table else ("",))
    }


def paper_named(name: str) -> type[Paper]:
    """Return the class with the options and experiments of a paper, by the name of its package."""
    paper: type[Paper] = import_module(f"makespan.papers.{name}").PAPER
    return paper


def _blocks(block: Block) -> Iterable[tuple[type[Experiment], Experiment]]:
    for name in type(block).model_fields:
        value = getattr(block, name)
        if isinstance(value, Experiment):
            yield type(value), value
        if isinstance(value, Block):
            yield from _blocks(value)


def profiled_workloads(settings: object, source: str) -> tuple[str, ...]:
    """Return the workloads of the profile that fills a source; none where its times come from elsewhere."""
    measured = option_at(settings, "throughput.measured")
    return tuple(measured.profile.workloads) if source == "measured" and measured.directory is None else ()


def option_at(settings: object, path: str) -> Any:
    """Return the option at a dotted path of a checked configuration; a number takes an entry of a list."""

    def step(value: Any, key: str) -> Any:
        return value[int(key)] if key.isdigit() else getattr(value, key)

    try:
        return reduce(step, path.split("."), settings)
    except (AttributeError, IndexError, TypeError):
        raise ConfigError(f"no option {path!r} in the configuration") from None


def read_inputs(
    paper: type[Paper],
    experiment: Experiment,
    source: str,
    paths: Mapping[str, Any],
    workloads: Sequence[str],
    **further: Any,
) -> Given:
    """Read what an experiment is given: throughput tables, printed cells and tables of the paper.

    Parameters
    ----------
    paths
        ``times``: throughput tables in the order of ``workloads``; printed cells as ``published_<artifact>``,
        and tables by name.
    further
        Further fields of `Given`.
    """
    return Given(
        source,
        {key: read_csv(path, THROUGHPUT) for key, path in zip(workloads, paths["times"], strict=True)},
        {name: paper.read_published(name, paths[f"published_{name}"]) for name in experiment.cells},
        {name: read_csv(paths[name], paper.schema_of(name)) for name in experiment.reads},
        paths,
        **further,
    )
