"""A new paper moves in: its own files and one name in one list, and nothing else is touched."""

import re
from pathlib import Path

import pandas as pd

from makespan.tables import JOINED_CLAIMS, read_csv

PACKAGE = "src/makespan/papers/toy"
FILES = {
    f"{PACKAGE}/__init__.py": '''"""The toy paper: the fastest step of each workload."""

import pandas as pd
from makespan.claims import Claim, Finding, Tables
from makespan.papers.experiment import Experiment, Figure, Given, Paper
from makespan.settings import option
from makespan.tables import table_schema

COLUMNS = (
    ("workload", "text", "", "key of the workload"),
    ("least_s", "float", "s", "fastest step"),
)


class Speeds(Experiment):
    """Find the fastest step of each workload."""

    name = "speeds"
    tables = {"speeds": "fastest step of each workload"}
    cells = ("speeds",)
    is_timed = True
    figures = (
        Figure(
            "speeds",
            "Fig. 1",
            "Fastest steps on {source} times.",
            tables=("speeds",),
            draw="makespan.papers.toy:draw",
            values={"color": "black"},
        ),
    )

    workloads: tuple[str, ...] = option("workloads that are compared", ("roberta", "t5_3B"), changes="speeds")

    def timed_workloads(self, source, profiled):
        """Return the workloads that are compared."""
        return self.workloads

    def compute(self, given: Given):
        """Return a row per workload."""
        rows = [{"workload": key, "least_s": rows["iter_time_s"].min()} for key, rows in given.times.items()]
        return {"speeds": pd.DataFrame(rows)}


class Toy(Paper):
    """Experiments of the toy paper."""

    title = "Toy"
    EXPERIMENTS = (Speeds,)
    judged_cells = ("speeds",)
    shared_schemas = {
        "speeds": table_schema("speeds", *COLUMNS),
        "published_speeds": table_schema("published_speeds", *COLUMNS),
    }

    speeds: Speeds = option("fastest steps", Speeds())


PAPER = Toy


def draw(tables, source, color):
    """Draw the fastest steps as bars."""
    from makespan.plots import new_figure

    table = tables["speeds"]
    figure = new_figure(3.3, 2.0)
    figure.subplots().bar(table["workload"], table["least_s"], color=color)
    return figure, table


def near_printed(tables: Tables, claim: Claim):
    """Compare the fastest step of the subject with the printed one; the limit is a ratio."""
    least = tables["speeds"].set_index("workload")["least_s"][claim.subject]
    printed = tables["speeds_published"].set_index("workload")["least_s"][claim.subject]
    ratio = max(least / printed, printed / least)
    return Finding(f"{least:.3g} s, printed {printed:.3g} s", bool(ratio <= claim.limit))
''',
    f"{PACKAGE}/claims.csv": """\
artifact,statement,published,tolerance,table,rows,pivot,value,operator,limit,shown,check,subject,sources,fails_on,note
Table 1,every step takes less than a minute,1 to 2 s,< 60 s,speeds,,,least_s,<,60,{least_s.max():.3g} s at most,,,,,
Table 1,RoBERTa is faster than T5 3B,"1 and 2 s",faster,speeds,,/ workload / least_s,roberta < t5_3B,,,{roberta:.3g} and {t5_3B:.3g} s,,,,,
Table 1,RoBERTa takes about as long as printed,1 s,within a factor of 100,,,,,,100,,near_printed,roberta,,,
""",  # noqa: E501
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
    own = claims[claims["paper"] == "Toy"]
    assert own["verdict"].tolist() == ["holds"] * 3, own["reproduced_emulated"].tolist()
    assert set(claims["paper"]) == {"Morphling", "EasyScale", "Oobleck", "Slapo", "Toy"}
    assert "Nothing to be done" in finished.snakemake("--cores", "1", "toy").stdout


def test_the_guide_shows_this_paper():
    guide = (Path(__file__).parents[2] / "docs/guides/add-a-paper.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", guide, re.MULTILINE)
    needed = {name.replace("toy", "<paper>") for name in FILES if "speeds" not in name}
    assert needed <= set(listed)
    assert FILES[f"{PACKAGE}/__init__.py"] in guide
    assert FILES[f"{PACKAGE}/claims.csv"] in guide
