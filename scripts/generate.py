"""Write the files that are made from the code: reference pages, and lists of what there is.

A test compares them with what is committed; run this after an option, a table, a figure or a layer changed.
With a directory of results it fills the tables of the papers' pages instead, as far as they are built.
"""

import argparse
import ast
import contextlib
import csv
import io
import json
import math
import re
import runpy
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Hashable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure

from makespan.cli import cli_page
from makespan.config import configuration_page, load_settings
from makespan.easyscale.recovery_cost import judged_costs, measured_constants, predict_recovery
from makespan.files import write_text
from makespan.numerics import half_widths
from makespan.papers import PAPERS, paper_named
from makespan.papers.morphling.results_page import STATEMENTS
from makespan.planning import (
    Architecture,
    Attention,
    FeedForward,
    Layers,
    Pricer,
    Training,
    judged_table,
    model_types,
    parse_layout,
    plan,
    read_machines,
    read_model,
    recorded_errors,
    scaling,
    software,
)
from makespan.tables import JOINED_CLAIMS, read_csv, schemas_of, tables_page
from makespan.units import GIB

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = load_settings(root=ROOT)
SOURCES = ("emulated", "published", "measured")
VERDICTS = ("holds", "fails", "undecided", "not run")
API_HEAD = """# API

The layers of the package, lowest first; a layer imports only from those before it. What a package shows here
may be relied on; names with an underscore may not.
"""
PRIMITIVES_HEAD = """# Primitives

The steps of the schedule language, methods of every node of a `Schedule` such as
`create_schedule(model)["blocks.0"].checkpoint()`. A step that fails leaves the model as it was, and one
that is done stands in the journal.
You can [write one](../guides/write-a-primitive.md).
"""


def generated_files() -> dict[str, str]:
    """Return path below the root and text of every generated file."""
    schemas = {
        name: [
            one
            for key, one in schemas_of(f"makespan.papers.{name}").items()
            if not key.startswith("published_")
        ]
        for name in PAPERS
    }
    return {
        "CONTRIBUTING.md": _filled("CONTRIBUTING.md", "layers", _layer_list()),
        "docs/papers/index.md": _filled("docs/papers/index.md", "results", _result_list()),
        "docs/papers/history-morphling.md": _filled(
            "docs/papers/history-morphling.md", "sets of live runs", _live_sets()
        ),
        **{
            f"docs/papers/{name}.md": _filled(f"docs/papers/{name}.md", "deviations", _deviation_list(name))
            for name in PAPERS
        },
        "docs/background/planning.md": _filled(
            "docs/background/planning.md", "judged", judged_table(recorded_errors())
        ),
        **_scaling(),
        "docs/background/elastic-training.md": _recoveries(),
        "docs/guides/plan-a-run.md": _filled(
            "docs/guides/plan-a-run.md", "model types", _listed(model_types())
        ),
        "docs/guides/schedule-any-transformer.md": _filled(
            "docs/guides/schedule-any-transformer.md", "models", _scheduled_models()
        ),
        "examples/README.md": _filled("examples/README.md", "examples", _example_list()),
        "examples/one_gpu/README.md": _filled("examples/one_gpu/README.md", "steps", _steps_on_one_gpu()),
        "docs/reference/errors.md": _filled("docs/reference/errors.md", "classes", _error_list()),
        "docs/reference/api.md": "\n".join([API_HEAD, *map(_api_entry, _modules())]),
        "docs/reference/cli.md": cli_page(),
        "docs/reference/configuration.md": configuration_page(SETTINGS),
        "docs/reference/primitives.md": _primitives_page(),
        "docs/tutorial/notebook.md": _notebook_page(),
        "docs/reference/tables.md": tables_page(schemas),
    }


def _notebook_page() -> str:
    """Return the tutorial notebook as a page, with the tables and charts that its cells show."""
    notebook = json.loads((ROOT / "docs/tutorial/notebook.ipynb").read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                lines = "".join(output["data"]["text/html"]).splitlines()
                shown = " ".join(line.strip() for line in lines)  # an empty line would end the HTML
                html = f'<div style="overflow-x: auto">{shown}</div>'
                parts.append(f"<!-- output -->\n{html}\n<!-- end of output -->")
    return "\n\n".join(parts) + "\n"


def filled_pages(results: Path) -> dict[str, str]:
    """Return path and text of README and the papers' pages, filled from a directory of results."""
    pages: dict[str, str] = {}
    for package in PAPERS:
        make = getattr(import_module(f"makespan.papers.{package}"), "page", None)
        texts = (make(results) if make else {}) | _blocks_of(package, results)
        names = [f"docs/papers/{name}.md" for name in (package, f"{package}-tables", f"history-{package}")]
        names = [name for name in names if (ROOT / name).is_file()]
        for mark, text in texts.items():
            name = next(
                (one for one in names if f"<!-- {mark} -->" in (ROOT / one).read_text("utf-8")), names[0]
            )
            pages[name] = _filled(name, mark, text, pages.get(name))
    verdicts = _verdict_counts(results)
    return pages | ({"README.md": _filled("README.md", "verdicts", verdicts)} if verdicts else {})


def _filled(name: str, mark: str, text: str, given: str | None = None) -> str:
    """Return a file, or its given text, with another text between comments ``mark`` and ``end of mark``."""
    between = re.compile(
        rf"(?<=<!-- {re.escape(mark)} -->\n).*?(?=<!-- end of {re.escape(mark)} -->)", re.DOTALL
    )
    whole = (ROOT / name).read_text("utf-8") if given is None else given
    filled, n_places = between.subn(lambda _: text, whole)
    if n_places != 1:
        raise ValueError(f"{name}: found {n_places} places for {mark}; expected one")
    return filled


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table with empty lines around it."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    """Return names as code in a paragraph with empty lines around it."""
    return (
        "\n" + textwrap.fill(", ".join(f"`{name}`" for name in names), 140, break_on_hyphens=False) + "\n\n"
    )


def _cited() -> list[tuple[str, str, str | None]]:
    """Return name and venue of the papers in CITATION.cff, and their packages, None where there is none."""
    found = []
    for reference in yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["references"]:
        title, _, _ = reference["title"].partition(":")
        (venue,) = re.findall(r"\(([A-Z]\w+) '?\d+\)", reference["collection-title"])
        known_as = f"{title} {reference.get('notes', '')}".lower()
        package = next((name for name in PAPERS if name in known_as), None)
        if package is not None and package != title.lower():
            title = f"{package.capitalize()}, also called {title}"
        found.append((title, f"{venue} {reference['year']}", package))
    return found


def _scheduled_models() -> str:
    """Return the table of the models that were scheduled by their structure."""
    with (ROOT / "docs/guides/transformers.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return _table(tuple(head), [tuple(map(_cell, row)) for row in rows])


def _result_list() -> str:
    """Return the tables that are built of every paper with the figures that show them, and the live runs."""
    rows, missing = [], []
    for title, venue, package in _cited():
        if package is None:
            missing.append((f"{title} ({venue})", "not built yet", "", ""))
            continue
        rows.append((f"{title} ({venue})", f"[numbers and deviations]({package}.md)", "", ""))
        for name, content in _contents(package).items():
            sources = [source for source in SOURCES if name in _tables(package, source)] or SOURCES
            only = "" if set(sources) == set(SOURCES) else f"; {' and '.join(sources)} only"
            shown = [f"`{one.name}`" for one in paper_named(package).figures().values() if name in one.tables]
            rows.append(("", content + only, f"`{package}/{name}.csv`", ", ".join(shown)))
    for name, what in _live_files():
        rows.append(("live runs", what, f"`live/{name}.csv`", ""))
    return _table(("paper", "what", "table below `results/<source>/`", "figures"), [*rows, *missing])


def _example_list() -> str:
    """Return what the examples predict beside what was published, smallest cluster first."""
    rows = []
    for path in (ROOT / "examples").glob("*.py"):
        with contextlib.redirect_stdout(io.StringIO()):
            names = runpy.run_path(str(path))
        one, published = names["predicted"], names["PUBLISHED"]
        rate, n_gpus = one.tokens_per_s_per_gpu, names["cluster"].n_gpus
        low, high = (rate * one.step_s / step_s for step_s in (one.high_s, one.low_s))
        memory = f"{one.total_memory_bytes / GIB:.0f} GiB{'' if one.is_feasible else ', too much'}"
        about, _, _ = (names["__doc__"] or "").partition("\n")
        cells = (f"{about} [`{path.name}`]({path.name})", f"`{one.layout.text}`", memory)
        ours = (f"{rate:,.0f} ({low:,.0f} to {high:,.0f})", f"{published:,}", f"{rate / published - 1:+.0%}")
        rows.append((n_gpus, (*cells, *ours)))
    head = ("run", "layout", "memory", "predicted", "published", "error")
    return _table(head, [row for _, row in sorted(rows)])


def _steps_on_one_gpu() -> str:
    """Return how steps on one GPU were predicted before any was measured, and with their model left out."""
    folder = ROOT / "examples/one_gpu"
    table = pd.read_csv(folder / "predicted.csv")
    measured = pd.read_csv(folder / "measured.csv")
    table["step_s"], table["ran_gib"] = measured["iteration_time_s"], measured["peak_mem_gib"]
    left_out = pd.read_csv(folder / "left_out.csv").set_index(table.index[table["step_s"].notna()])
    table = table.join(left_out[["predicted_s", "low_s", "high_s"]].add_suffix("_later"))
    table["before_gib"] = table["memory_bytes"] / GIB
    for at, row in table.iterrows():
        model = read_model(folder / "models" / f"{row['model']}.json")
        training = Training(model, row["seq"], row["batch"])
        one = Pricer(training, read_machines("1xh100-80"), software("transformers")).price(
            parse_layout(row["layout"], 1)
        )
        table.loc[at, "needs_gib"] = one.total_memory_bytes / GIB
        table.loc[at, "counted_gib"] = (one.total_memory_bytes - one.memory_bytes["reserve"]) / GIB
        table.loc[at, "flop"] = row["batch"] * model.flop_per_sample(row["seq"])

    rows = []
    for row in table.to_dict("records"):
        stated = (f"{row['model']}, {row['batch']} x {row['seq']}", f"`{row['layout']}`")
        times: tuple[str, ...] = ("out of memory", "", "")
        if (step_s := row["step_s"]) > 0:
            both = (row["predicted_s"], row["predicted_s_later"])
            times = (f"{1e3 * step_s:.0f}", *(f"{1e3 * one:.0f} ({one / step_s - 1:+.0%})" for one in both))
        memory = f"{row['ran_gib']:.1f}" if step_s > 0 else "more than 80"
        rows.append((*stated, *times, memory, f"{row['counted_gib' if step_s > 0 else 'needs_gib']:.1f}"))
    head = (
        "model, samples x tokens", "layout", "step (ms)", "predicted before", "model left out",
        "memory (GiB)", "counted",
    )  # fmt: skip
    parts = (_errors_of_steps(table), _errors_of_memory(table), _table(head, rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _errors_of_steps(table: pd.DataFrame) -> str:
    """Return the mean errors of the steps that ran, beside those of one utilisation for all models."""
    ran = table[table["step_s"] > 0]
    rates = np.log(ran["flop"] / ran["step_s"])
    others = [rates[ran["model"] != model].mean() for model in ran["model"]]
    kinds = {
        "before any was measured": (ran["predicted_s"], ran["low_s"], ran["high_s"]),
        "model left out": (ran["predicted_s_later"], ran["low_s_later"], ran["high_s_later"]),
        "one utilisation, that of the other models": (ran["flop"] / np.exp(others), None, None),
    }
    rows = []
    for name, (predicted_s, low_s, high_s) in kinds.items():
        ratios = predicted_s / ran["step_s"]
        inside = "" if low_s is None else f"{ran['step_s'].between(low_s, high_s).sum()} of {len(ran)}"
        bias = math.exp(np.log(ratios).mean())
        rows.append((name, f"{(ratios - 1).abs().mean():.1%}", f"{bias:.2f}", inside))
    return _table(("steps", "mean error", "predicted over measured", "inside the interval of 90 %"), rows)


def _errors_of_memory(table: pd.DataFrame) -> str:
    """Return the mean errors of memory, and how often a run was rightly and wrongly found impossible."""
    ran = table["step_s"] > 0
    rows = []
    for name, count, total in (
        ("before, as stack `ddp`", "before_gib", "before_gib"),
        ("as stack `transformers`", "counted_gib", "needs_gib"),
    ):
        error = (table[count] / table["ran_gib"] - 1).abs().mean()
        found = [f"{(table.loc[rows_of, total] > 80).sum()} of {rows_of.sum()}" for rows_of in (~ran, ran)]
        rows.append((name, f"{error:.1%}", *found))
    head = ("memory", "mean error", "found impossible of those that ran out", "and of those that ran")
    return _table(head, rows)


# --- Scaling -----------------------------------------------------------------------------------------

COUNTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH, SEQ = 2048, 8192
GPU_HOUR_USD = 2.0
TRILLION = Architecture(
    "a trillion parameters",
    "gpt",
    25600,
    (Layers(128, Attention(160, 160, 160, 160), FeedForward(102400, False)),),
    51200,
    is_tied=True,
)
# Tokens and GPU hours of the model card of Llama 3.1, all on H100.
TRAINED = (("llama3-8b", 15e12, 1.46e6), ("llama3-70b", 15e12, 7.0e6), ("llama3.1-405b", 15.6e12, 30.84e6))
TRAINED_ON = {"llama3-8b": 2048, "llama3-70b": 8192, "llama3.1-405b": 16384, "a trillion parameters": 16384}


def _scaling() -> dict[str, str]:
    """Return the page on scaling with its tables, and its figure."""
    curves = {
        (model.name, way): scaling(
            lambda n, model=model, way=way: Training(
                model, SEQ, BATCH if way == "strong" else n * BATCH // COUNTS[-1]
            ),
            "h100-80",
            software("megatron-bridge"),
            COUNTS,
        )
        for model in (read_model("llama3.1-405b"), TRILLION)
        for way in ("strong", "weak")
    }
    published = _published_runs()
    page = "docs/background/scaling.md"
    text = _filled(page, "published runs", _published_table(published))
    for (name, way), table in curves.items():
        text = _filled(page, f"{name}, {way}", _curve_table(table), text)
    text = _filled(page, "cost", _cost_table(curves), text)
    return {page: text, "docs/images/scaling.svg": _scaling_figure(curves, published)}


RECOVERY_DEVICES = (16, 64, 256, 1024, 4096, 16384)
RECOVERY_STEP_S, RECOVERY_PARAMETERS = 1.0, 4e9
ELASTIC_STEPS = "docs/background/elastic-steps.csv"
ELASTIC_SHARDS = "docs/background/elastic-shards.csv"
RECOVERY_LOSSES = "docs/background/recovery-losses.csv"
LOOP_LOSSES = "docs/background/recovery-losses-loops.csv"
STEP_RATIOS = {
    "wall_ratio": "time", "cpu_ratio": "CPU time", "loop_ratio": "a job's own loop",
    "shards_ratio": "optimizer in shards",
}  # fmt: skip
LOSS_NAMES = {
    "single": "one process",
    "double": "two processes at once",
    "hang": "one process that stops without a word, killed after 3 s",
}


def _recoveries() -> str:
    """Return the page on elastic training with times of steps, pauses, and costs as judged and predicted."""
    page = "docs/background/elastic-training.md"
    steps = pd.read_csv(ROOT / ELASTIC_STEPS).groupby(["case", "megabytes"], sort=False).median()
    rows = [
        (case, f"{megabytes} MB", *(f"{row[name]:.2f}" for name in STEP_RATIOS))
        for (case, megabytes), row in steps.iterrows()
    ]
    timed = _filled(page, "elastic steps", _table(("processes", "gradients", *STEP_RATIOS.values()), rows))
    rows = []
    for survives, part in pd.read_csv(ROOT / ELASTIC_SHARDS).groupby("survives"):
        ratios = part["sharded_step_s"] / part["plain_step_s"]
        span = f"{ratios.min():.2f} to {ratios.max():.2f}"
        rows.append((f"`survives={survives}`", f"{len(part)}", f"{ratios.median():.2f}", span))
    head = ("losses survived", "pairs of runs", "time with shards over time without", "range")
    timed = _filled(page, "elastic shards", _table(head, rows), timed)
    losses = pd.read_csv(ROOT / RECOVERY_LOSSES).query("is_sent")
    rows = []
    for (megabytes, kind), part in losses.groupby(["megabytes", "kind"], sort=False):
        pauses = part.query("number == 0")["pause_minus_step_s"]
        counts = (len(part), part["is_equal"].sum(), pauses.count())
        times = (f"{pauses.median():.2f}", f"{pauses.max():.2f}")
        rows.append((f"{megabytes} MB", LOSS_NAMES[str(kind)], *map(str, counts), *times))
    head = ("parameters", "lost", "losses", "equal bits", "timed", "median pause [s]", "longest [s]")
    timed = _filled(page, "recovery pauses", _table(head, rows), timed)
    rows = []
    for megabytes, part in pd.read_csv(ROOT / LOOP_LOSSES).query("is_sent").groupby("megabytes"):
        pauses = part.query("number == 0 and kind != 'hang'")["pause_minus_step_s"]
        rows.append(
            (
                f"{megabytes} MB",
                f"{len(part)}",
                f"{part['is_equal'].sum()}",
                f"{pauses.count()}",
                f"{pauses.median():.2f}",
                f"{pauses.max():.2f}",
            )
        )
    head = ("parameters", "losses", "equal bits", "timed", "median pause [s]", "longest [s]")
    timed = _filled(page, "recovery pauses of loops", _table(head, rows), timed)
    judged = judged_costs().assign(
        error=lambda table: (table["predicted_s"] / table["measured_s"] - 1).abs(),
        baseline_error=lambda table: (table["baseline_s"] / table["measured_s"] - 1).abs(),
    )
    rows = []
    for (quantity, buffer_bytes), part in judged.groupby(["quantity", "buffer_bytes"], sort=False):
        sizes, unit = (part["size"].min(), part["size"].max()), ""
        if quantity in ("sending", "receiving"):
            sizes, unit = (sizes[0] / 1e6, sizes[1] / 1e6), " MB"
        largest = part.loc[part["size"].idxmax()]
        rows.append(
            (
                COST_NAMES[str(quantity)].format(f"{buffer_bytes / 1e3:,.0f} KB"),
                f"{sizes[0]:,.3g}{unit}" if sizes[0] == sizes[1] else f"{sizes[0]:,g} to {sizes[1]:,g}",
                f"{1e3 * largest['measured_s']:.3g}",
                f"{1e3 * largest['predicted_s']:.3g}",
                f"{100 * part['error'].mean():.0f} %",
                f"{100 * part['baseline_error'].mean():.0f} %",
            )
        )
    head = ("CPU time", "judged on", "measured [ms]", "predicted [ms]", "mean error", "of the baseline")
    text = _filled(page, "recovery costs judged", _table(head, rows), timed)
    rows = []
    for n_devices in RECOVERY_DEVICES:
        one, three = (
            predict_recovery(
                n_devices, RECOVERY_STEP_S, parameter_bytes=RECOVERY_PARAMETERS, survives=survives
            )
            for survives in (1, 3)
        )
        shown = (one.agree_s, one.connect_s, one.copy_s, one.lost_s, one.pause_s, one.join_s)
        kept = (f"{1e3 * cost.keep_s:.2g}" for cost in (one, three))
        rows.append(
            (
                f"{n_devices:,}",
                *kept,
                *(f"{value:,.2g}" if value < 10 else f"{value:,.0f}" for value in shown),
            )
        )
    head = (
        "devices", "keep one copy [ms]", "keep three [ms]", "agree [s]", "connect [s]", "copy [s]",
        "repeat [s]", "pause [s]", "join [s]",
    )  # fmt: skip
    options: dict[str, Any] = {"parameter_bytes": RECOVERY_PARAMETERS}
    options["constants"] = measured_constants(on_few=True)
    agreed = " and ".join(
        f"{predict_recovery(n_devices, RECOVERY_STEP_S, **options).agree_s:,.2g} s with {n_devices:,}"
        for n_devices in RECOVERY_DEVICES[-3::2]
    )
    note = f"With the constants that were judged above, to agree would take {agreed} devices.\n\n"
    shown = _table(head, rows) + note
    return _filled(page, "recovery costs predicted", shown, text)


COST_NAMES = {
    "coordinator": "coordinator, per loss",
    "agreeing": "coordinator, per loss, of members that only answer",
    "connecting": "process that connects, per loss",
    "sending": "process that sends its state to one that joins",
    "receiving": "process that joins",
    "packing": "packing contexts with {} of buffers, per mini-batch",
    "copying": "receiving those of others, {} of buffers, per mini-batch",
}


def _published_runs() -> pd.DataFrame:
    """Return the published runs with what is predicted, rates in TFLOP/s per GPU."""
    runs = pd.read_csv(ROOT / "docs/background/scaling.csv")
    found = []
    for run in runs.to_dict("records"):
        if math.isnan(run["hidden"]):
            model = read_model(run["model"])
        else:
            layers, hidden, heads = (int(run[name]) for name in ("layers", "hidden", "heads"))
            attention = Attention(heads, heads, hidden // heads, hidden // heads)
            kinds = (Layers(layers, attention, FeedForward(4 * hidden, False)),)
            model = Architecture(run["model"], "gpt", hidden, kinds, 51200, is_tied=True)
        training = Training(model, run["seq"], run["batch"], run["precision"])
        machines = read_machines(f"{run['n_gpus']}x{run['device']}")
        one = Pricer(training, machines, software(run["stack"])).price(
            parse_layout(run["layout"], run["n_gpus"])
        )
        flop = training.global_batch * model.flop_per_sample(training.seq)
        if run["counts_recomputation"]:  # the formula of the paper, with the second forward pass
            share = 1 + run["seq"] / (6 * hidden) + 51200 / (16 * layers * hidden)
            flop = 96 * run["batch"] * run["seq"] * layers * hidden**2 * share
        rates = (flop / seconds / run["n_gpus"] / 1e12 for seconds in (one.step_s, one.high_s, one.low_s))
        found.append(dict(zip(("rate", "low", "high"), rates, strict=True)))
    return pd.concat([runs, pd.DataFrame(found)], axis=1)


def _published_table(runs: pd.DataFrame) -> str:
    head = ("model", "GPUs", "layout", "stack", "TFLOP/s per GPU, predicted", "published", "error", "source")
    rows = [
        (
            f"{run['model']}{'' if run['seq'] < 1e5 else ', 131,072 tokens'}",
            f"{run['n_gpus']:,} {run['device']}",
            f"`{run['layout']}`",
            run["stack"],
            f"{run['rate']:.0f} ({run['low']:.0f} to {run['high']:.0f})",
            f"{run['published_tflop_per_s_per_gpu']:.0f}",
            f"{run['rate'] / run['published_tflop_per_s_per_gpu'] - 1:+.0%}",
            run["source"],
        )
        for run in runs.to_dict("records")
    ]
    return _table(head, rows)


def _curve_table(table: pd.DataFrame) -> str:
    head = (
        "GPUs",
        "samples",
        "layout",
        "step",
        "90 % interval",
        "tokens/s per GPU",
        "MFU",
        "of the limit",
    )
    rows = [
        (
            f"{row['n_gpus']:,}",
            f"{row['batch']:,}",
            f"`{row['layout']}`",
            f"{row['step_s']:.3g} s",
            f"{row['low_s']:.3g} to {row['high_s']:.3g} s",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['mfu']:.0%}",
            f"{row['of_limit']:.0%}",
        )
        for row in table.to_dict("records")
    ]
    return _table(head, rows)


def _cost_table(curves: dict[tuple[str, str], pd.DataFrame]) -> str:
    """Return days, GPU hours and cost of whole training runs, beside the hours that were published."""
    rows = []
    for name, tokens, printed in (*TRAINED, (TRILLION.name, 20e12, None)):
        n_gpus = TRAINED_ON[name]
        model = TRILLION if name == TRILLION.name else read_model(name)
        pricer = Pricer(
            Training(model, SEQ, BATCH), read_machines(f"{n_gpus}xh100-80"), software("megatron-bridge")
        )
        one = plan(pricer, 1).best[0]
        hours = tokens / one.tokens_per_s_per_gpu / 3600
        low, high = (hours * seconds / one.step_s for seconds in (one.low_s, one.high_s))
        rows.append(
            (
                name,
                f"{tokens / 1e12:g} T",
                f"{n_gpus:,}",
                f"{hours / n_gpus / 24:.3g}",
                f"{hours / 1e6:.3g} M ({low / 1e6:.3g} to {high / 1e6:.3g})",
                "–" if printed is None else f"{printed / 1e6:g} M",
                f"${hours * GPU_HOUR_USD / 1e6:.3g} M",
            )
        )
    return _table(("model", "tokens", "GPUs", "days", "GPU hours", "published", "cost"), rows)


def _scaling_figure(curves: dict[tuple[str, str], pd.DataFrame], runs: pd.DataFrame) -> str:
    """Return the figure of the page as SVG: shares of the limit, and published beside predicted rates."""
    from makespan.plots import figure_style, new_figure, plain_numbers, save_figure

    @figure_style
    def draw() -> Figure:
        figure = new_figure(7.0, 2.8)
        left, right = figure.subplots(1, 2)
        for ((name, way), table), style in zip(curves.items(), ("C0-", "C0--", "C1-", "C1--"), strict=True):
            share = [float(f"{100 * value:.3g}") for value in table["of_limit"]]
            left.plot(table["n_gpus"], share, style, marker=".", label=f"{name}, {way}")
        left.set(ylabel="share of the kernels' limit [%]", ylim=(0, 100))
        first = runs.drop_duplicates(["model", "n_gpus", "seq"])  # one stack for each run
        for (label, own), color in zip(first.groupby("table", sort=False), ("C2", "C3"), strict=True):
            rate, low, high = (
                [float(f"{value:.3g}") for value in own[name]] for name in ("rate", "low", "high")
            )
            n_gpus, title = (
                own["n_gpus"],
                {"sc21": "GPT on A100 (SC'21)", "llama3": "Llama 3.1 405B on H100"}[label],
            )
            right.vlines(n_gpus, low, high, color=color, linewidth=0.8)
            right.plot(n_gpus, rate, f"{color}.", label=f"{title}, predicted")
            right.plot(n_gpus, own["published_tflop_per_s_per_gpu"], f"{color}x", label=f"{title}, published")
        right.set(ylabel="TFLOP/s per GPU", ylim=(0, 800))
        for axes, first in ((left, 256), (right, 32)):
            axes.set_xscale("log", base=4)
            axes.set(xlabel="GPUs", xticks=[first * 4**step for step in range(6) if first * 4**step <= 16384])
            axes.xaxis.set_major_formatter(plain_numbers())
            axes.minorticks_off()
            axes.legend(fontsize=6, loc="lower left" if axes is left else "upper left", handlelength=3.5)
        return figure

    with tempfile.TemporaryDirectory() as folder:
        save_figure(draw(), runs, Path(folder, "scaling"))
        return Path(folder, "scaling.svg").read_text("utf-8")


def _deviation_list(package: str) -> str:
    """Return what differs from a paper on purpose, as the report lists it."""
    items = [
        textwrap.fill(f"- {one}", 140, subsequent_indent="  ", break_on_hyphens=False)
        for one in paper_named(package).about().deviations
    ]
    return "\n" + "\n".join(items) + "\n\n"


def _contents(package: str) -> dict[str, str]:
    """Return every table of a paper with a line about its content; the ledger comes last."""
    experiments = paper_named(package).EXPERIMENTS
    tables = {name: content for one in experiments for name, content in one.tables.items()}
    return tables | {"claims": "the statements of the paper, judged by this source alone"}


def _tables(package: str, source: str) -> list[str]:
    """Return the tables of a paper that are built for a source by default."""
    return SETTINGS.papers()[package].tables_of(SETTINGS, source)


def _live_files() -> list[tuple[str, str]]:
    """Return the tables of the live runs with what they hold."""
    live = SETTINGS.live
    when = "measured only" if live.in_all else "measured only, on request"
    what = f"{live.workload} under {len(live.policies)} policies, {len(live.seeds)} seeds, beside predictions"
    return [("live", f"{what}; {when}"), ("live_summary", f"mean and worst error of these; {when}")]


def _live_sets() -> str:
    """Return the errors of every set of live runs that was made, and over all that were made as now.

    The two policies of a seed have the same jobs, so the interval of the mean is that over seeds. Before
    predictions were medians the one simulation with step times as profiled was the prediction.
    """
    runs = pd.read_csv(ROOT / "docs/papers/morphling-live-runs.csv")
    runs["size"] = runs["jct_difference_pct"].abs()
    runs["undisturbed"] = runs["undisturbed_jct_difference_pct"].abs()
    now = str(runs["made_with"].iloc[-1])
    of_now = runs[runs["made_with"] == now]
    seeds = of_now.groupby("seed")["size"].mean()
    (half,) = half_widths(seeds.groupby(lambda _: 0))
    sets = [(name, str(one["made_with"].iloc[0]), one) for name, one in runs.groupby("runs", sort=False)]
    rows = []
    for name, made_with, one in [*sets, ("all of the last kind", now, of_now)]:
        known = one["in_interval"].dropna()
        within = f"{known.astype(bool).sum()} of {len(known)}" if len(known) else "–"
        sizes = [f"{_pct(one[of].mean())}, {_pct(one[of].max())}" for of in ("size", "undisturbed")]
        rows.append((name, made_with, *sizes, within))
    mean = f"{_pct(seeds.mean())} ({_pct(seeds.mean() - half)} to {_pct(seeds.mean() + half)})"
    rows[-1] = (*rows[-1][:2], f"{mean}, {_pct(of_now['size'].max())}", *rows[-1][3:])
    head = ("mean size and largest", "of the one as profiled", "in the interval")
    return _table(("runs", "made with", *head), rows)


def _pct(value: float) -> str:
    return f"{value:.1f} %"


def _ledger(results: Path) -> pd.DataFrame | None:
    """Return the joined ledger of a directory of results, None if it is not built."""
    path = results / "claims.csv"
    if not path.is_file():
        return None
    table = read_csv(path, JOINED_CLAIMS)
    for source in SOURCES:
        table[f"reproduced_{source}"] = table.get(f"reproduced_{source}", pd.Series("", table.index)).fillna(
            ""
        )
    return table.fillna({"note": "", "published": ""})


def _verdict_counts(results: Path) -> str | None:
    """Return the number of statements of each paper by verdict, None unless all papers are judged."""
    ledger, rows = _ledger(results), []
    for title, venue, package in _cited():
        own = None if ledger is None or package is None else ledger[ledger["paper"] == _title(package)]
        if own is None or own.empty:
            return None
        counts = [str((own["verdict"] == verdict).sum()) for verdict in VERDICTS]
        rows.append((f"[{title}](docs/papers/{package}.md)", venue, str(len(own)), *counts))
    return _table(("paper", "venue", "statements", "hold", "fail", "undecided", "not run"), rows)


def _title(package: str) -> str:
    """Return the name of a paper in the ledger."""
    return paper_named(package).title


def _blocks_of(package: str, results: Path) -> dict[str, str]:
    """Return the blocks of a paper's pages that this script makes, by mark: verdicts, statements, tables."""
    ledger, blocks = _ledger(results), {}
    own = None if ledger is None else ledger[ledger["paper"] == _title(package)]
    if own is not None and not own.empty:
        counts = [(own["verdict"] == verdict).sum() for verdict in VERDICTS]
        held, failed, unsure, absent = counts
        blocks["verdicts"] = (
            f"\nOf {len(own)} statements, {held} hold. Failing: {failed}, undecided: {unsure}, "
            f"not run: {absent}.\n\n"
        )
        rest = own
        if package == "morphling":  # its other statements stand below the figure that they are about
            rest = own[~own["artifact"].isin(list(STATEMENTS.values()))]
        holds = rest["verdict"] == "holds"
        head = ("about", "statement", "paper", "found")
        if holds.any():
            blocks["what holds"] = _table(head, [_statement(row) for row in rest[holds].to_dict("records")])
        rows = [
            (*_statement(row), _cell(f"{row['verdict']}; {row['note']}".removesuffix("; ")))
            for row in rest[~holds].to_dict("records")
        ]
        blocks["what does not hold"] = _table((*head, "verdict and reason"), rows)
    if package == "easyscale":
        blocks |= {mark: text for mark, make in EASYSCALE.items() if (text := make(results)) is not None}
    return blocks


def _statement(row: dict[Hashable, Any]) -> tuple[str, str, str, str]:
    """Return artifact, statement, published value and what each source gives."""
    found = [f"{source}: {row[f'reproduced_{source}']}" for source in SOURCES if row[f"reproduced_{source}"]]
    cells = (row["artifact"], row["statement"], row["published"] or "–", "; ".join(found) or "–")
    artifact, statement, published, shown = map(_cell, cells)
    return artifact, statement, published, shown


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")


def _easyscale_table(results: Path, source: str, name: str) -> pd.DataFrame | None:
    path = results / source / "easyscale" / f"{name}.csv"
    return read_csv(path, paper_named("easyscale").schema_of(name)) if path.is_file() else None


def _completion_times(results: Path) -> str | None:
    """Return completion times and makespans of the policies of EasyScale, on both job lists."""
    found = [_easyscale_table(results, source, "fig14") for source in SIMULATED]
    if any(one is None for one in found):
        return None
    published, emulated = (one.set_index("policy") for one in found if one is not None)
    rows = []
    for policy, row in published.iterrows():
        cells = [
            "" if pd.isna(value) else f"{value:.0f}"
            for printed, column in (
                ("published_avg_jct_s", "avg_jct_s"),
                ("published_makespan_s", "makespan_from_zero_s"),
            )
            for value in (row[printed], row[column], emulated.loc[policy, column])
        ]
        rows.append((f"`{policy}`", *cells))
    lists = ("paper", "authors' list", "generated list")
    head = [f"{what}, {one}" for what in ("JCT", "makespan") for one in lists]
    return _table(("policy", *head), rows)


def _serving(results: Path) -> str | None:
    """Return the share of GPUs in use by serving alone and with training beside it."""
    found = [_easyscale_table(results, source, "serving") for source in SIMULATED]
    if any(one is None for one in found):
        return None
    tables = [one.set_index("policy") for one in found if one is not None]
    needed = [f"{100 * table['serving_ratio'].iloc[0]:.1f} %" for table in tables]
    rows = [("GPUs needed by serving", *needed)]
    for policy in tables[0].index:
        own = [table.loc[policy] for table in tables]
        cells = [f"{100 * row['shared_ratio']:.1f} % (+{row['gain_pct']:.0f} %)" for row in own]
        rows.append((f"with training under `{policy}`", *cells))
    for column, name in (("shrinks", "jobs scaled in"), ("suspensions", "jobs suspended")):
        rows += [
            (f"{name} under `{policy}`", *(f"{table.loc[policy, column]:.0f}" for table in tables))
            for policy in tables[0].index
        ]
    return _table(("", "authors' list", "generated list"), rows)


def _differences(results: Path) -> str | None:
    """Return the largest differences of losses of elastic training by level, model and stage."""
    table = _easyscale_table(results, "measured", "fig9_summary")
    if table is None:
        return None
    models = list(dict.fromkeys(table["model"]))
    rows = []
    for level in dict.fromkeys(table["setting"]):
        cells = []
        for model in models:
            own = table[(table["model"] == model) & (table["setting"] == level)].sort_values("stage")
            cells.append(", ".join(f"{value:.1g}" for value in own["max_abs_diff"]))
            cells.append(f"{own['published_max_abs_diff'].max():g}")
        rows.append((str(level), *cells))
    return _table(("level", *(head for model in models for head in (model, "paper"))), rows)


def _accuracies(results: Path) -> str | None:
    """Return accuracies by scheme and number of devices, and how far they spread."""
    gap, spreads = (_easyscale_table(results, "measured", name) for name in ("gap", "gap_spread"))
    if gap is None or spreads is None:
        return None
    whole = gap[gap["class"] == "all"].groupby(["scheme", "devices"])["accuracy_pct"].mean()
    devices = sorted(gap["devices"].unique())
    rows = []
    for scheme in dict.fromkeys(gap["scheme"]):
        cells = [f"{whole[scheme, n]:.1f}" for n in devices]
        for name in ("all", "worst"):
            (row,) = spreads[(spreads["scheme"] == scheme) & (spreads["class"] == name)].to_dict("records")
            values = [f"{row[column]:.1f}" for column in ("spread_pct", "seed_spread_pct")]
            printed = row["published_spread_pct"]
            cells += [*values, "" if pd.isna(printed) else f"{printed:g}"]
        rows.append((f"`{scheme}`", *cells))
    counts = [f"{n} device{'s' if n > 1 else ''}" for n in devices]
    spread = ("spread over devices", "over seeds", "paper")
    worst = ("class that spreads most", "over seeds", "paper")
    return _table(("scheme", *counts, *spread, *worst), rows)


SIMULATED = ("published", "emulated")
EASYSCALE: dict[str, Callable[[Path], str | None]] = {
    "completion times": _completion_times,
    "serving": _serving,
    "differences of losses": _differences,
    "accuracies": _accuracies,
}


def _error_list() -> str:
    """Return every exception that the package raises on purpose, with its base and what it says of itself."""
    classes = {
        cls.name: (".".join(path.relative_to(ROOT / "src").with_suffix("").parts), cls)
        for path in sorted((ROOT / "src/makespan").rglob("*.py"))
        for cls in ast.parse(path.read_text("utf-8")).body
        if isinstance(cls, ast.ClassDef)
    }

    def is_error(name: str) -> bool:
        if name == "MakespanError" or name not in classes:
            return name == "MakespanError"
        return any(is_error(ast.unparse(base)) for base in classes[name][1].bases)

    rows = []
    for name in sorted(filter(is_error, classes)):
        module, cls = classes[name]
        said = " ".join((ast.get_docstring(cls) or "").split("\n\n")[0].split())
        rows.append((f"`{name}`", f"`{module}`", f"`{ast.unparse(cls.bases[0])}`", _cell(said)))
    return _table(("class", "module", "is a", "raised when"), rows)


def _layers() -> list[list[str]]:
    """Return the layers of the import contract, lowest first, each with its modules."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    (contract,) = (one for one in tools["importlinter"]["contracts"] if one["id"] == "layers")
    return [re.split(r" [:|] ", layer) for layer in reversed(contract["layers"])]


def _layer_list() -> str:
    """Return every module with the first line of its docstring."""
    lines = []
    for number, layer in enumerate(_layers(), start=1):
        for name in layer:
            (summary, *_) = (import_module(f"makespan.{name}").__doc__ or "").splitlines()
            lines.append(f"| {number} | `{name}` | {summary} |\n")
    return "".join(["\n| layer | module | what it holds |\n| --- | --- | --- |\n", *lines, "\n"])


def _modules() -> list[str]:
    """Return the modules that users import, lowest layer first."""
    names = [f"makespan.{name}" for layer in _layers() for name in layer]
    return ["makespan", *names, *(f"makespan.papers.{name}" for name in PAPERS)]


def _api_entry(module: str) -> str:
    """Return the directive for a module; a package shows the names that it imports as themselves."""
    path = Path(str(import_module(module).__file__))
    if path.name != "__init__.py":
        return f"::: {module}\n"
    imports = (
        node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)
    )
    names = sorted(alias.asname for node in imports for alias in node.names if alias.asname)
    members = "".join(f"        - {name}\n" for name in names)
    return f"::: {module}\n    options:\n      members:\n{members}" if names else f"::: {module}\n"


def _primitives_page() -> str:
    """Return the page of the primitives, read off the text of their classes since those import torch."""
    found = {}
    for path in sorted((ROOT / "src/makespan/slapo").glob("*.py")):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for cls in (one for one in ast.parse(path.read_text("utf-8")).body if isinstance(one, ast.ClassDef)):
            if any(ast.unparse(one) == "register_primitive()" for one in cls.decorator_list):
                (said,) = (one for one in cls.body if isinstance(one, ast.FunctionDef) and one.name == "name")
                (name,) = (ast.literal_eval(one.value) for one in said.body if isinstance(one, ast.Return))
                entry = f"::: {module}.{cls.name}.apply\n    options:\n      show_root_heading: false\n"
                found[name] = f"## {name}\n\n{ast.get_docstring(cls)}\n\n{entry}"
    return "\n".join([PRIMITIVES_HEAD, *(found[name] for name in sorted(found))])


def main(*results: str) -> None:
    """Write every generated file, or the pages that a directory of results fills."""
    for name, text in (filled_pages(Path(*results)) if results else generated_files()).items():
        write_text(text, ROOT / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", help="directory of results")
    given = parser.parse_args().results
    if given is not None and not Path(given).is_dir():
        parser.error(f"{given} is no directory; expected one with results, or nothing")
    main(*[given] if given else [])
