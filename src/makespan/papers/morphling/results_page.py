"""The tables of the paper's page, made from result tables, so that its numbers are those of a run."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.papers.experiment import paper_named
from makespan.tables import JOINED_CLAIMS, LIVE, read_csv

_SOURCES = ("emulated", "published", "measured")
_SIMULATED = ("emulated", "published")
_GPUS = 64  # of the paper's testbed
_NONE = "–"
Rows = Iterable[Sequence[str]]


class _NotBuilt(Exception):
    """A result table is not built, so a block keeps its text."""


def page(results: str | Path) -> dict[str, str]:
    """Return the text of every block of the page whose result tables are built, by its mark.

    Parameters
    ----------
    results
        The directory ``results/``; what a table there says is taken as it is.

    Raises
    ------
    TraceError
        A result table lacks a column or has a cell that its schema does not accept.
    """
    found = {}
    for mark, block in BLOCKS.items():
        try:
            found[mark] = block(_Results(Path(results)))
        except _NotBuilt:
            continue
    return found


class _Results:
    """Result tables by source and name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claims(self) -> pd.DataFrame:
        return read_csv(self._found("claims"), JOINED_CLAIMS)

    def live(self) -> pd.DataFrame:
        return read_csv(self._found("measured/live/live"), LIVE)

    def read(self, table: str, source: str) -> pd.DataFrame:
        path = self._found(f"{source}/morphling/{table}")
        return read_csv(path, paper_named("morphling").schema_of(table))

    def each(self, table: str, sources: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
        """Return the table of every source that has it; at least one must."""
        there = [one for one in sources if (self._folder / one / "morphling" / f"{table}.csv").is_file()]
        if not there:
            raise _NotBuilt
        return ((source, self.read(table, source)) for source in there)

    def _found(self, name: str) -> Path:
        path = self._folder / f"{name}.csv"
        if not path.is_file():
            raise _NotBuilt
        return path


def _markdown(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


def _statements(artifact: str) -> Callable[[_Results], str]:
    def block(results: _Results) -> str:
        claims = results.claims()
        own = claims[(claims["paper"] == "Morphling") & (claims["artifact"] == artifact)]
        judged = [
            source
            for source in _SOURCES
            if f"verdict_{source}" in own and (own[f"verdict_{source}"] != "not run").any()
        ]
        columns = [own["statement"], own["published"].replace("", _NONE)]
        for source in judged:
            verdicts, found = own[f"verdict_{source}"], own[f"reproduced_{source}"].fillna("").astype(str)
            pairs = zip(verdicts, found, strict=True)
            columns.append(
                pd.Series([f"{verdict}: {value}" if value else verdict for verdict, value in pairs])
            )
        notes = own["note"].where(own["verdict"] != "holds", "").replace("", _NONE)
        rows = [[str(cell) for cell in row] for row in zip(*columns, notes, strict=True)]
        return _markdown(["statement", "paper", *judged, "note, unless it holds"], rows)

    return block


_ERRORS = {
    "avg_error_pct": "average",
    "p95_error_pct": "95th percentile",
    "max_error_pct": "largest",
    "avg_error_shipped_pct": "average, as shipped",
    "max_error_shipped_pct": "largest, as shipped",
    "avg_error_all_rows_pct": "average with flagged rows",
    "regret_mean_pct": "throughput lost",
    "regret_max_pct": "at worst",
}


def _errors(results: _Results) -> str:
    rows = []
    for source, table in results.each("table2_summary", _SOURCES):
        for row in table[table["scope"].str.startswith("all")].to_dict("records"):
            values = [
                _NONE if math.isnan(row[name]) else f"{row[name]:.{1 if 'error' in name else 2}f} %"
                for name in _ERRORS
            ]
            rows.append([source, str(row["form"]), str(row["scope"]), str(row["n_validate"]), *values])
    return _markdown(["source", "form", "models", "rows", *_ERRORS.values()], rows)


def _one_list(results: _Results) -> str:
    table = results.read("table4", "published")
    settings = [
        (trace, delay_s) for trace in ("base", "mt") for delay_s in dict.fromkeys(table["restart_delay_s"])
    ]
    records = table.to_dict("records")
    cells = {(row["policy"], row["trace"], row["restart_delay_s"]): row for row in records}
    rows = []
    for policy in dict.fromkeys(table["policy"]):
        own = [cells.get((policy, *setting)) for setting in settings]
        times = [f"{row['avg_jct_s']:.0f} / {row['makespan_s'] / 1000:.1f}" if row else _NONE for row in own]
        kept = [row["sla_attainment"] for row in own if row and row["trace"] == "mt"]
        rows.append([f"`{policy}`", *times, _kept(min(kept)) if kept else _NONE])
    names = [f"{trace.upper() if trace == 'mt' else 'Base'}, {delay_s:g} s" for trace, delay_s in settings]
    return _markdown(["policy", *names, "guarantees kept"], rows)


def _kept(share: float) -> str:
    return _NONE if math.isnan(share) else f"{100 * share:.0f} %"


def _many_lists(source: str) -> Callable[[_Results], str]:
    def block(results: _Results) -> str:
        table = results.read("lists_summary", source)
        parts = []
        for (gpus, delay_s), rows in table.groupby(["gpus", "restart_delay_s"], sort=False):
            counts = sorted(set(rows["lists"]))
            spread = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            parts.append(f"\n{gpus} GPUs, restart delay {delay_s:g} s, {spread} lists of each trace:\n")
            parts.append(_markdown(_LISTS_HEAD, _list_rows(rows)))
        return "".join(parts)

    return block


def _readings(source: str) -> Callable[[_Results], str]:
    def block(results: _Results) -> str:
        table = results.read("readings", source).fillna({"reading": "", "value": ""})
        settings = list(dict.fromkeys(zip(table["trace"], table["restart_delay_s"], strict=True)))
        head = ["reading", *(f"{_TRACES[trace]}, {delay_s:g} s" for trace, delay_s in settings)]
        cells = {
            (row["reading"], row["value"], row["trace"], row["restart_delay_s"]): row
            for row in table.to_dict("records")
        }
        lines = []
        for reading, value in dict.fromkeys(zip(table["reading"], table["value"], strict=True)):
            name = f"`{reading}`: {value}" if reading else "as shipped, in s and ks"
            lines.append([name, *(_reading_cell(cells[reading, value, *where]) for where in settings)])
        n_lists = table["lists"].min()
        counts = f"\n{n_lists} list{'s' if n_lists > 1 else ''} of each trace, {source} iteration times:\n"
        return counts + _markdown(head, lines)

    return block


def _reading_cell(row: Mapping[Hashable, Any]) -> str:
    """Return the means with the shipped readings, or ratios to them with their intervals."""
    if not row["reading"]:
        return f"{row['jct_mean_s']:.0f} / {row['makespan_mean_s'] / 1000:.1f}"
    ratios = []
    for what in ("jct", "makespan"):
        low, high = (row[f"{what}_ratio_{end}"] for end in ("low", "high"))
        interval = "" if math.isnan(low) else f" ({low:.2f} to {high:.2f})"  # a single list has none
        ratios.append(f"{row[f'{what}_ratio_mean']:.2f}{interval}")
    return " / ".join(ratios)


_TRACES = {"base": "Base", "bp": "BP", "mt": "MT"}
_LISTS_HEAD = (
    *("policy", "Base: average JCT [s]", "Base: makespan [ks]"),
    *("MT: average JCT [s]", "MT: makespan [ks]", "guarantees kept, least"),
)


def _list_rows(rows: pd.DataFrame) -> Rows:
    cells = {(row["policy"], row["trace"]): row for row in rows.to_dict("records")}
    for policy in dict.fromkeys(rows["policy"]):
        line = [f"`{policy}`"]
        for trace in ("base", "mt"):
            row = cells.get((policy, trace))
            if row is None:
                line += [_NONE, _NONE]
                continue
            line += _mean_cells(row)
        guaranteed = cells.get((policy, "mt"))
        yield [*line, _NONE if guaranteed is None else _kept(guaranteed["sla_attainment"])]


def _mean_cells(row: Mapping[Hashable, Any]) -> list[str]:
    """Return average JCT [s] and makespan [ks] with their intervals."""
    low, high = (f"{row[f'makespan_{end}_s'] / 1000:.1f}" for end in ("low", "high"))
    return [
        f"{row['jct_mean_s']:.0f} ({row['jct_low_s']:.0f} to {row['jct_high_s']:.0f})",
        f"{row['makespan_mean_s'] / 1000:.1f} ({low} to {high})",
    ]


def _today(results: _Results) -> str:
    own, testbed = results.read("today_summary", "emulated"), results.read("lists_summary", "emulated")
    first = testbed[["gpus", "restart_delay_s"]].iloc[0]
    beside = testbed[
        (testbed[["gpus", "restart_delay_s"]] == first).all(axis=1) & (testbed["trace"] == "base")
    ]
    head, cells = ["policy"], list[dict[str, list[str]]]()
    for where, table in (("models of today", own), ("testbed", beside)):
        head += [f"{where}, {table['lists'].min()} lists: average JCT [s]", "makespan [ks]"]
        rows = table.to_dict("records")
        cells.append({str(row["policy"]): _mean_cells(row) for row in rows})
    lines = [
        [f"`{policy}`", *(text for part in cells for text in part.get(policy, [_NONE, _NONE]))]
        for policy in own["policy"]
    ]
    return _markdown(head, lines)


def _carried(results: _Results) -> str:
    """Say which leads on the testbed, on emulated times, are leads with models of today, too."""
    claims = results.claims()
    own = claims[claims["paper"] == "Morphling"]
    verdicts: dict[str, dict[str, str]] = {}
    for artifact, place in (("Table 4", " on Base lists is"), ("Models of today", " with models")):
        of_artifact = own[own["artifact"] == artifact]
        for statement, verdict in zip(of_artifact["statement"], of_artifact["verdict_emulated"], strict=True):
            what, found, rest = str(statement).partition(place)
            if found and rest.endswith("under every policy of others that knows no more"):
                verdicts.setdefault(what, {})[artifact] = str(verdict)
    pairs = {what: found for what, found in verdicts.items() if len(found) == 2}
    led = [what for what, found in pairs.items() if found["Table 4"] == "holds"]
    kept = [what for what in led if pairs[what]["Models of today"] == "holds"]
    lost = [f"{what}: {pairs[what]['Models of today']}" for what in led if what not in kept]
    counts = [
        f"{word}: {len(of)}" + (f" ({', '.join(of)})" if of else "")
        for word, of in (("carried over", kept), ("not", lost))
    ]
    text = "; ".join(counts).replace(": average JCT", " in average JCT").replace(": makespan", " in makespan")
    return f"Of {len(led)} leads over every policy of others on the emulated testbed, {text}.\n"


def _losses(results: _Results) -> str:
    table = results.read("fig9_summary", "measured")
    kinds = {"plan": "the plans", "switching": "the run that switches", "other seed": "other seed"}
    rows = []
    for kind, name in kinds.items():
        own = table[table["kind"] == kind]
        means, most = own["mean_abs_difference"].max(), own["max_abs_difference"].max()
        label = f"{len(own)} of {name}" if len(own) > 1 else name
        rows.append([label, f"{means:.2g}", f"{most:.2g}"])
    for row in table[table["kind"].str.startswith("published")].to_dict("records"):
        name = str(row["run"]).replace("Morphling ", "paper, ")
        rows.append([name, f"{row['mean_abs_difference']:g}", f"{row['max_abs_difference']:g}"])
    return _markdown(["run", "mean difference, largest of them", "largest difference"], rows)


def _live_runs(results: _Results) -> str:
    table = results.live()
    errors = list(_LIVE_ERRORS)
    sizes = table[errors].abs()
    rows = []
    for row in table.to_dict("records"):
        low_s, high_s = (row[f"predicted_{end}_avg_jct_s"] for end in ("low", "high"))
        rows.append(
            [
                f"`{row['policy']}`, seed {row['seed']}",
                *(f"{row[name]:.1f}" for name in ("live_avg_jct_s", "predicted_avg_jct_s")),
                _NONE if math.isnan(low_s) else f"{low_s:.1f} to {high_s:.1f}",
                *(f"{row[name]:+.1f} %" for name in errors),
                f"{row['n_restarts']} ({row['predicted_n_restarts']})",
            ]
        )
    for name, size in (
        ("mean size", sizes.mean()),
        ("median size", sizes.median()),
        ("largest", sizes.max()),
    ):
        rows.append([name, _NONE, _NONE, _NONE, *(f"{size[error]:.1f} %" for error in errors), _NONE])
    head = ["run", "average JCT [s]", "as predicted [s]", "nine of ten [s]", *_LIVE_ERRORS.values()]
    head.append("restarts (as predicted)")
    return _markdown(head, rows)


_LIVE_ERRORS = {
    "jct_difference_pct": "error of the prediction",
    "undisturbed_jct_difference_pct": "of the one as profiled",
    "makespan_difference_pct": "of its makespan",
    "retrodiction_jct_difference_pct": "of the retrodiction",
    "profile_drift_pct": "drift of the profile",
}
STATEMENTS = {
    "statements of Table 2": "Table 2",
    "statements of the sensitivity curves": "Sensitivity curves",
    "statements of Fig. 7": "Fig. 7",
    "statements of Fig. 8": "Fig. 8",
    "statements of Table 4": "Table 4",
    "statements of the load studies": "Load study",
    "statements of models of today": "Models of today",
    "statements of failures": "Failures",
    "statements of Fig. 9": "Fig. 9",
    "statements of live runs": "Live run",
}
"""Artifact in the ledger, by the mark of the block that shows its statements."""
BLOCKS: Mapping[str, Callable[[_Results], str]] = {
    **{mark: _statements(artifact) for mark, artifact in STATEMENTS.items()},
    "errors over all models": _errors,
    "the lists of the authors": _one_list,
    "many lists, published": _many_lists("published"),
    "many lists, emulated": _many_lists("emulated"),
    "readings, published": _readings("published"),
    "readings, emulated": _readings("emulated"),
    "what carries over": _carried,
    "models of today": _today,
    "losses": _losses,
    "live runs": _live_runs,
}
"""What fills the page between the comments ``<mark>`` and ``end of <mark>``."""
