"""Contents of the report: read finished results, whatever part of them was built, as plain values."""

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from makespan.claims import join_claims
from makespan.errors import InputError
from makespan.files import read_bytes, read_json, read_text
from makespan.papers import PAPERS
from makespan.papers.experiment import SOURCES, About, Experiment, Figure, Paper
from makespan.report.charts import interactive
from makespan.tables import CLAIMS, parse_csv, read_csv
from makespan.units import format_bytes

VERDICTS = ("holds", "fails", "undecided", "not run")
"""Verdicts in the order in which the report counts them."""
_N_NAMED = 3  # missing files that a command names one by one


@dataclass(frozen=True, slots=True)
class Table:
    """A table as text: names of columns, and rows of cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class View:
    """A figure of one source: picture, caption, and the table behind it.

    ``picture`` is the path of the SVG or, where there is none, of the PNG; ``charts`` are those of
    `makespan.report.charts.interactive`, empty where the figure declares none.
    """

    source: str
    picture: Path
    caption: tuple[str, ...]
    csv: str
    n_rows: int
    file: str
    charts: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure of a paper with everything that belongs to it."""

    name: str
    title: str
    views: tuple[View, ...]
    published: tuple[tuple[str, Table], ...]
    statements: tuple["Statement", ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """A row of the ledger; ``found`` has what was reproduced and the verdict, per source that judged it."""

    paper: str
    artifact: str
    statement: str
    published: str
    tolerance: str
    verdict: str
    note: str
    found: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Missing:
    """Files of a default build that are not there, and the command that builds them."""

    source: str
    n_missing: int
    n_expected: int
    files: tuple[str, ...]
    command: str


@dataclass(frozen=True, slots=True)
class Section:
    """A paper: its description, figures, counts of verdicts, and missing files."""

    key: str
    title: str
    about: About
    figures: tuple[Shown, ...]
    counts: Mapping[str, int]
    missing: tuple[Missing, ...]

    @property
    def is_built(self) -> bool:
        """Tell whether anything of the paper is there."""
        return bool(self.figures) or bool(sum(self.counts.values()))


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a rule over its jobs: wall clock and CPU time [s], and the largest resident memory [bytes]."""

    rule: str
    sources: tuple[str, ...]
    n_jobs: int
    wall_s: float
    cpu_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Product:
    """A file of the results: size, checksum, whether it is as written, and what made it from what."""

    path: str
    source: str
    size_bytes: int
    sha256: str
    state: str
    rule: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the page shows."""

    runs: tuple[Mapping[str, Any], ...]
    sources: tuple[str, ...]
    absent: tuple[str, ...]
    sections: tuple[Section, ...]
    statements: tuple[Statement, ...]
    costs: tuple[Cost, ...]
    products: tuple[Product, ...]
    warnings: tuple[str, ...]

    @property
    def facts(self) -> list[tuple[str, list[str]]]:
        """What each run was made with: a title, and a value per source."""
        return [(title, [fact(run) or "not recorded" for run in self.runs]) for title, fact in _FACTS.items()]

    @property
    def counts(self) -> Counter[str]:
        """Count all statements by verdict."""
        return Counter(one.verdict for one in self.statements)


def collect(
    settings: Any,
    results: str | Path = "results",
    benchmarks: str | Path = "benchmarks/results",
    published: str | Path = "config/published",
) -> Report:
    """Read everything that the report shows.

    Parameters
    ----------
    settings
        Checked configuration (`makespan.config.Settings`), which says what is built by default.
    results, benchmarks, published
        Directories of results, of Snakemake's benchmark files, and of printed values; each may lack anything.

    Raises
    ------
    TraceError
        A table of the ledger or of an interactive chart is damaged.
    """
    results, benchmarks, published = Path(results), Path(benchmarks), Path(published)
    options: Mapping[str, Paper] = settings.papers()
    built = tuple(
        source
        for source in SOURCES
        if any(
            any((results / source / key).glob(pattern))
            for key in PAPERS
            for pattern in ("*.csv", "figures/*.png")
        )
    )
    statements = _statements(results, built)
    sections = []
    for key, paper in options.items():
        own = [one for one in statements if one.paper == paper.title]
        figures = tuple(
            shown
            for figure in paper.figures().values()
            if (shown := _figure(key, figure, results, published, built, own)) is not None
        )
        counts = Counter(one.verdict for one in own)
        missing = tuple(_missing(settings, key, paper, results))
        sections.append(Section(key, paper.title, paper.about(), figures, counts, missing))
    runs = tuple(_run(results, source) for source in built)
    expected = {source for paper in options.values() for source in paper.sources(settings)}
    return Report(
        runs=runs,
        sources=built,
        absent=tuple(source for source in SOURCES if source not in built and source not in expected),
        sections=tuple(sections),
        statements=tuple(statements),
        costs=tuple(_costs(benchmarks)),
        products=tuple(_products(results, options, settings)),
        warnings=tuple(_warnings(runs)),
    )


# --- The run ----------------------------------------------------------------------------------------


def _run(results: Path, source: str) -> Mapping[str, Any]:
    path = results / source / "provenance.json"
    record = read_json(path) if path.is_file() else {}
    if not isinstance(record, dict):
        raise InputError(
            f"{path}: found {type(record).__name__}; expected a record of what results were made with"
        )
    return {"source": source, "is_recorded": path.is_file(), **record}


def _times(run: Mapping[str, Any]) -> str:
    n_rows = sum((run.get("iteration_time_rows") or {}).values())
    return f"{run.get('iteration_times', '')}{f' ({n_rows} rows)' if n_rows else ''}"


def _seed(run: Mapping[str, Any]) -> str:
    if "seed" not in run:
        return ""
    return "none" if run["seed"] is None else str(run["seed"])


def _machine(run: Mapping[str, Any]) -> str:
    host = run.get("machine")
    if not host:
        return ""
    gpus = f"{len(host['gpus'])} GPUs" if host["gpus"] else "no GPU"
    return f"{host['processor']}, {host['cpus']} CPUs, {format_bytes(host['memory_bytes'])}, {gpus}"


def _system(run: Mapping[str, Any]) -> str:
    host = run.get("machine")
    return f"{host['system']}, Python {host['versions']['python']}" if host else ""


_FACTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "Iteration times": _times,
    "Recorded": lambda run: run.get("recorded_at", "").replace("T", " ").replace("+00:00", " UTC"),
    "makespan": lambda run: run.get("makespan_version", ""),
    "Seed": _seed,
    "Configuration": lambda run: run.get("config_sha256", "")[:12],
    "Package pins": lambda run: run.get("pins_sha256", "")[:12],
    "Machine": _machine,
    "System": _system,
}


def _warnings(runs: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for name, what in (
        ("config_sha256", "configurations"),
        ("makespan_version", "versions of makespan"),
        ("pins_sha256", "versions of packages"),
    ):
        found = {run["source"]: run[name] for run in runs if name in run}
        if len(set(found.values())) > 1:
            yield f"The sources {' and '.join(found)} were built with different {what}."
    for run in runs:
        if not run["is_recorded"]:
            yield (
                f"Nothing records what the results of source {run['source']} were made with; "
                f"build results/{run['source']}/provenance.json for that."
            )


# --- Statements -------------------------------------------------------------------------------------


def _statements(results: Path, sources: Sequence[str]) -> list[Statement]:
    ledgers = {
        source: [
            read_csv(path, CLAIMS)
            for key in PAPERS
            if (path := results / source / key / "claims.csv").is_file()
        ]
        for source in sources
    }
    ledgers = {source: found for source, found in ledgers.items() if found}
    if not ledgers:
        return []
    rows = join_claims(ledgers).fillna("").to_dict("records")
    return [_statement({str(name): str(cell) for name, cell in row.items()}, list(ledgers)) for row in rows]


def _statement(row: Mapping[str, str], sources: Sequence[str]) -> Statement:
    found = {
        source: (row[f"reproduced_{source}"], row[f"verdict_{source}"])
        for source in sources
        if row[f"verdict_{source}"] != "not run"
    }
    return Statement(
        row["paper"],
        row["artifact"],
        row["statement"],
        row["published"],
        row["tolerance"],
        row["verdict"],
        row["note"],
        found,
    )


# --- Figures ----------------------------------------------------------------------------------------


def _figure(
    key: str,
    figure: Figure,
    results: Path,
    published: Path,
    sources: Sequence[str],
    statements: Sequence[Statement],
) -> Shown | None:
    views = tuple(view for source in sources if (view := _view(results, source, key, figure)) is not None)
    if not views:
        return None
    # Printed values have the name of the figure or of a table in it.
    artifacts = dict.fromkeys((*figure.cells, figure.name, *figure.tables))
    cells = tuple(
        (path.name, _table(path)) for one in artifacts if (path := published / f"{key}_{one}.csv").is_file()
    )
    own = tuple(one for one in statements if one.artifact in (figure.title, figure.title.partition(",")[0]))
    return Shown(figure.name, figure.title, views, cells, own)


def _view(results: Path, source: str, key: str, figure: Figure) -> View | None:
    stem = results / source / key / "figures" / figure.name
    pictures = [path for kind in ("svg", "png") if (path := stem.with_suffix(f".{kind}")).is_file()]
    if not pictures:
        return None
    caption, table = stem.with_suffix(".txt"), stem.with_suffix(".csv")
    # The first paragraph is the title, and lines are wrapped.
    text = read_text(caption, "a caption", InputError).split("\n\n")[1:] if caption.is_file() else []
    content = read_bytes(table, "the table of a figure", InputError) if table.is_file() else b""
    charts: list[dict[str, Any]] = []
    if figure.explore is not None and content:
        charts = interactive(
            figure.explore, parse_csv(content, str(table), "the table of a figure"), str(table)
        )
    return View(
        source=source,
        picture=pictures[0],
        caption=tuple(" ".join(paragraph.split()) for paragraph in text),
        csv=content.decode("utf-8"),
        n_rows=max(content.count(b"\n") - 1, 0),
        file=f"{source}-{key}-{figure.name}.csv",
        charts=tuple(charts),
    )


def _table(path: Path) -> Table:
    text = read_text(path, "printed values", InputError)
    columns, *rows = csv.reader(io.StringIO(text))
    return Table(tuple(columns), tuple(map(tuple, rows)))


# --- What is missing --------------------------------------------------------------------------------


def _missing(settings: Any, key: str, paper: Paper, results: Path) -> Iterable[Missing]:
    for source in paper.sources(settings):
        names = paper.files_of(settings, source)
        expected = [name for name in names if not name.startswith("figures/") or name.endswith(".png")]
        files = tuple(
            f"results/{source}/{key}/{name}"
            for name in expected
            if not (results / source / key / name).is_file()
        )
        if not files:
            continue
        if len(files) <= _N_NAMED:
            target = " ".join(files)
        else:
            target = key if len(files) < len(expected) or source in settings.throughput.sources else source
        yield Missing(source, len(files), len(expected), files, f"snakemake --cores all {target}")


# --- Cost -------------------------------------------------------------------------------------------

_FAMILIES = ("draw_figure", "profile_points")  # rules with a folder of files, one per job


def _costs(benchmarks: Path) -> Iterable[Cost]:
    jobs: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
    for path in sorted(benchmarks.rglob("*.tsv")):
        source, *folders = path.relative_to(benchmarks).parent.parts or ("",)
        rule = next((name for name in _FAMILIES if name in folders), path.stem)
        rows = csv.DictReader(io.StringIO(read_text(path, "a benchmark file", InputError)), delimiter="\t")
        jobs.setdefault(rule, []).extend((source, row) for row in rows)
    costs = [
        Cost(
            rule=rule,
            sources=tuple(sorted({source for source, _ in rows})),
            n_jobs=len(rows),
            wall_s=sum(_number(row, "s") for _, row in rows),
            cpu_s=sum(_number(row, "cpu_time") for _, row in rows),
            memory_bytes=max(_number(row, "max_rss") for _, row in rows) * 2**20,
        )
        for rule, rows in jobs.items()
        if rows
    ]
    return sorted(costs, key=lambda one: (-one.wall_s, one.rule))


def _number(row: Mapping[str, str], name: str) -> float:
    """Return a cell of a benchmark file; jobs too short to be sampled have none, which counts as 0."""
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        return 0.0


# --- Files ------------------------------------------------------------------------------------------


def _products(results: Path, papers: Mapping[str, Paper], settings: Any) -> Iterable[Product]:
    made = {key: _makers(key, paper.experiments(settings).values()) for key, paper in papers.items()}
    for path in sorted(results.rglob("*")):
        name = path.relative_to(results)
        if not path.is_file() or path.name.startswith(".") or name.parts[0] not in (*SOURCES, "claims.csv"):
            continue
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        source = name.parts[0] if name.parts[0] in SOURCES else ""
        rule, inputs = _maker(name, made, papers)
        yield Product(name.as_posix(), source, len(content), sha256, _state(path, sha256), rule, inputs)


def _state(path: Path, sha256: str) -> str:
    seal = path.with_name(f".{path.name}.sum")
    if not seal.is_file():
        return ""
    try:
        return "as written" if json.loads(seal.read_text("utf-8"))["sha256"] == sha256 else "changed"
    except (KeyError, TypeError, ValueError):
        return "changed"


def _makers(key: str, experiments: Iterable[Experiment]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return rule and inputs by table; tables of a family are known by their folder."""
    made = {}
    for one in experiments:
        inputs = (
            *(("iteration times",) if one.is_timed else ()),
            *(f"{name}.csv" for name in one.reads),
            *(f"printed {name}" for name in one.cells),
        )
        for table in one.tables:
            made[table.partition("/")[0]] = (f"{key}_{one.name}", inputs)
    return made


def _maker(
    name: Path, made: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]], papers: Mapping[str, Paper]
) -> tuple[str, tuple[str, ...]]:
    parts = name.parts
    if parts[0] == "claims.csv":
        return "join_claims", ("claims.csv of every paper and source",)
    if parts[-1] == "provenance.json":
        return "write_provenance", ("configuration", "requirements.txt")
    if parts[1] in papers:
        if parts[2] == "claims.csv":
            return "evaluate_claims", ("result tables", "statements of the paper")
        if parts[2] == "figures":
            figure = papers[parts[1]].figures().get(name.stem)
            return "draw_figure", tuple(f"{table}.csv" for table in figure.tables) if figure else ()
        return made[parts[1]].get(Path(parts[2]).stem, ("", ()))
    return {
        "throughput": f"throughput of {parts[0]}",
        "profile": "profile of this machine",
        "live": "run_live",
    }.get(parts[1], ""), ()
