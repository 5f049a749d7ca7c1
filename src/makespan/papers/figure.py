"""The figures of a paper as data: ``figures.yaml`` in its package, one entry a figure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from importlib import resources
from typing import Any

import yaml

from makespan.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FigureEntry:
    """One figure: what it shows, the tables that it reads and the function that draws it.

    Parameters
    ----------
    paper, name
        Package below `makespan.papers`; name of the files, ``results/<source>/<paper>/figures/<name>.*``.
    title, caption
        What the report calls it and says below it, which the text beside the figure says too; ``{source}``
        stands for the throughput source.
    draw
        ``module:function``. The function takes the paths of the tables by name, the source and the options;
        it returns the figure and the table behind it.
    tables
        Names of the result tables of the paper that the figure reads.
    published
        Artifacts whose printed values it reads from ``config/published/``, under ``published_<artifact>``.
    settings, values
        Options that come from the configuration, argument to dotted path; options with a fixed value.
    sources
        Throughput sources that the figure exists for; empty for all.
    """

    paper: str
    name: str
    title: str
    caption: str
    draw: str
    tables: tuple[str, ...]
    published: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def inputs(self, source: str) -> dict[str, str]:
        """Return the files that the figure reads, by the name under which the drawing function finds them."""
        results = {table: f"results/{source}/{self.paper}/{table}.csv" for table in self.tables}
        directory = f"config/published/{self.paper}"
        return results | {f"published_{name}": f"{directory}_{name}.csv" for name in self.published}

    def is_drawn(self, source: str, tables: Iterable[str]) -> bool:
        """Tell whether it is drawn for a source of which these tables are built."""
        return set(self.tables) <= set(tables) and source in (self.sources or (source,))

    def captioned(self, source: str, shown: str) -> str:
        """Return the caption; ``shown``: what iteration times are said to be, see `tables.shown_source`."""
        if shown == source:
            return self.caption.format(source=source)
        return f"{self.caption.format(source='given')} Iteration times: {shown}."

    def options(self, settings: object) -> dict[str, Any]:
        """Return the options of the drawing function, those from the configuration looked up."""
        looked_up = {option: _setting(settings, path) for option, path in self.settings.items()}
        return looked_up | dict(self.values)


def _setting(settings: object, path: str) -> object:
    def step(value: Any, key: str) -> Any:
        return value[int(key)] if key.isdigit() else getattr(value, key)

    try:
        return reduce(step, path.split("."), settings)
    except (AttributeError, IndexError, TypeError):
        raise ConfigError(f"a figure asks for the setting {path!r}, which does not exist") from None


def figures(paper: str) -> dict[str, FigureEntry]:
    """Return the figures of a paper by name, without importing its package.

    Raises
    ------
    ConfigError
        An entry has an unknown key or lacks one.
    """
    text = resources.files("makespan.papers").joinpath(paper, "figures.yaml").read_text(encoding="utf-8")
    return {name: _entry(paper, name, raw) for name, raw in yaml.safe_load(text).items()}


def _entry(paper: str, name: str, raw: dict[str, Any]) -> FigureEntry:
    known = {one.name for one in fields(FigureEntry)} - {"paper", "name"}
    needed = {"title", "caption", "draw", "tables"}
    if not needed <= set(raw) <= known:
        wrong = ", ".join(sorted(needed - set(raw) | set(raw) - known))
        raise ConfigError(
            f"papers/{paper}/figures.yaml: figure {name!r} has unknown or missing keys: {wrong}; "
            f"accepted: {', '.join(sorted(known))}"
        )
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in raw.items()}
    return FigureEntry(paper, name, **values)
