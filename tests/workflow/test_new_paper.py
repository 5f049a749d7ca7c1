"""A new paper moves in: its own files and one name in one list, and nothing else is touched."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd

from makespan.tables import JOINED_CLAIMS, read_csv

PACKAGE = "src/makespan/papers/toy"
FILES = {
    f"{PACKAGE}/__init__.py": '''"""A paper of one statement."""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.papers.toy._settings import Toy as SETTINGS
    from makespan.papers.toy._commands import COMMANDS
    from makespan.papers.toy._speeds import LEDGER, SCHEMAS, fastest

__all__ = ["COMMANDS", "LEDGER", "SCHEMAS", "SETTINGS", "fastest"]

__getattr__ = lazy_exports(__name__, __file__)
''',
    f"{PACKAGE}/_settings.py": '''"""Options of the toy paper."""

from makespan.settings import PaperSettings, option

__all__ = ["Toy"]


class Toy(PaperSettings):
    """Experiments of the toy paper."""

    judged_cells = ("speeds",)

    workloads: tuple[str, ...] = option("workloads that are compared", changes="speeds", min_length=1)

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the one table, of sources that have the workloads."""
        return [] if is_profiled else ["speeds"]

    def throughput_workloads(self) -> tuple[str, ...]:
        """Return the workloads that are compared."""
        return self.workloads
''',
    f"{PACKAGE}/_speeds.py": '''"""The fastest step of each workload: table, figure and check."""

import pandas as pd
from makespan.claims import Finding, Ledger
from makespan.plots import new_figure
from makespan.tables import Column, TableSchema, read_csv

__all__ = ["LEDGER", "SCHEMAS", "draw", "fastest"]

SPEEDS = TableSchema(
    "speeds",
    (Column("workload", "text", "", "key of the workload"), Column("least_s", "float", "s", "fastest step")),
)
CELLS = TableSchema("published_speeds", SPEEDS.columns)
SCHEMAS = (SPEEDS,)


def fastest(frames):
    """Return the least iteration time of each workload."""
    rows = [{"workload": name, "least_s": frame["iter_time_s"].min()} for name, frame in frames.items()]
    return SPEEDS.validate(pd.DataFrame(rows), where="speeds")


def draw(paths, source, color):
    """Draw them as bars."""
    table = read_csv(paths["speeds"], SPEEDS)
    figure = new_figure(3.3, 2.0)
    figure.subplots().bar(table["workload"], table["least_s"], color=color)
    return figure, table


def _faster(tables, claim):
    table = tables["speeds"].set_index("workload")["least_s"]
    printed = tables["speeds_published"].set_index("workload")["least_s"]
    least = table[claim.subject]
    return Finding(f"{least:.3g} s, printed {printed[claim.subject]:.3g} s", bool(least < claim.limit))


LEDGER = Ledger(
    paper="Toy",
    package="makespan.papers.toy",
    checks={"faster": _faster},
    tables={"speeds": SPEEDS, "speeds_published": CELLS},
)
''',
    f"{PACKAGE}/_commands.py": '''"""Say what the toy paper states."""

import click

__all__ = ["COMMANDS"]


@click.group
def COMMANDS():
    """Say what the toy paper states."""


@COMMANDS.command
def say():
    """Say it."""
    click.echo("steps take less than a minute")
''',
    f"{PACKAGE}/claims.csv": (
        "artifact,statement,published,tolerance,check,subject,limit,sources,fails_on,note\n"
        "Table 1,RoBERTa steps take less than a minute,1 s,< 60 s,faster,roberta,60,,,\n"
    ),
    f"{PACKAGE}/figures.yaml": (
        "speeds:\n  title: Fig. 1\n  caption: Fastest steps on {source} times.\n"
        "  draw: makespan.papers.toy._speeds:draw\n  tables: [speeds]\n  values: {color: black}\n"
    ),
    "rules/toy.smk": """rule toy_speeds:
    input:
        tables=lambda wildcards: throughput_tables(wildcards.source, SETTINGS.toy.workloads),
    output:
        table="results/{source}/toy/speeds.csv",
    log:
        "logs/{source}/toy/toy_speeds.log",
    conda:
        CPU
    resources:
        **asks(minutes=5),
    params:
        workloads=list(SETTINGS.toy.workloads),
        code=code_hash("toy_speeds"),
    script:
        "../workflow/scripts/toy_speeds.py"
""",
    "workflow/scripts/toy_speeds.py": '''"""Write the fastest step of each workload."""

from makespan.papers.toy import fastest
from makespan.tables import THROUGHPUT, read_csv, write_csv

inputs = zip(snakemake.params.workloads, snakemake.input.tables, strict=True)
write_csv(fastest({name: read_csv(path, THROUGHPUT) for name, path in inputs}), snakemake.output.table)
''',
    "config/papers/toy.yaml": "toy:\n  workloads: [roberta, t5_3B]\n",
    "config/published/toy_speeds.csv": "workload,least_s\nroberta,1.0\nt5_3B,2.0\n",
    "docs/papers/toy.md": "# Toy\n",
}


def test_a_paper_is_its_files_and_one_name_in_one_list(finished):
    for name, text in FILES.items():
        path = finished.root / name
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    listed = finished.root / "src/makespan/papers/__init__.py"
    text, n_lists = re.subn(
        r'("morphling", "easyscale", "oobleck", "slapo")\)', r'\1, "toy")', listed.read_text()
    )
    assert n_lists == 1
    listed.write_text(text)

    assert {"emulate_throughput", "morphling_table4"}.isdisjoint(finished.planned("toy"))
    finished.built("toy", "claims", "--cores", "1")
    results = finished.root / "results"
    table = pd.read_csv(results / "emulated/toy/speeds.csv")
    assert table["workload"].tolist() == ["roberta", "t5_3B"] and (table["least_s"] > 0).all()
    for kind in ("pdf", "png", "csv", "txt"):
        assert (results / f"emulated/toy/figures/speeds.{kind}").stat().st_size
    claims = read_csv(results / "claims.csv", JOINED_CLAIMS)
    (row,) = claims[claims["paper"] == "Toy"].to_dict("records")
    assert (row["statement"], row["verdict"]) == ("RoBERTa steps take less than a minute", "holds")
    assert set(claims["paper"]) == {"Morphling", "EasyScale", "Oobleck", "Slapo", "Toy"}
    assert "Nothing to be done" in finished.snakemake("--cores", "1", "toy").stdout
    own = {"PYTHONPATH": str(finished.root / "src")}
    command = [sys.executable, "-c", "from makespan.cli import main; main()", "toy", "say"]
    said = subprocess.run(command, env=os.environ | own, cwd=finished.root, text=True, capture_output=True)
    assert said.stdout == "steps take less than a minute\n", said.stderr


def test_the_guide_lists_the_files_of_a_paper_and_no_others():
    guide = Path(__file__).parents[2] / "docs/guides/add-a-paper.md"
    listed = re.findall(r"^\| `([^`]+)` \|", guide.read_text(), re.MULTILINE)
    patterns = {
        name: re.sub(r"<\w+>", r"[a-z]\\w*", re.escape(name.replace("<paper>", "toy"))) for name in listed
    }
    found = {file: [name for name in listed if re.fullmatch(patterns[name], file)] for file in FILES}
    assert all(len(names) >= 1 for names in found.values()), found
    assert {name for names in found.values() for name in names} == set(listed)
