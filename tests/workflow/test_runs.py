"""Complete small runs: what is built, and what is built again after a change."""

import json
import os
import re
import time
from pathlib import Path

import pandas as pd
import pytest

from makespan import tables
from makespan.config import check_settings, load_settings
from makespan.papers import PAPERS, paper_named
from makespan.tables import read_csv

ROOT = Path(__file__).parents[2]
FIGURES = [
    name
    for name, entry in paper_named("morphling").figures().items()
    if "emulated" in (entry.sources or ["emulated"])
]
SETTINGS = load_settings([], ROOT)
FURTHER = [
    (paper, source, name)
    for paper in PAPERS[1:]
    for source in ("emulated", *SETTINGS.papers()[paper].self_contained)
    for name, entry in paper_named(paper).figures().items()
    if entry.is_drawn(source, SETTINGS.papers()[paper].tables_of(SETTINGS, source))
]
N_SIMULATED_FIGURES = 15
SMALL = load_settings(sorted((ROOT / "config/test").glob("*.yaml")), ROOT)
TABLES = [
    (paper, source, table)
    for paper, options in SMALL.papers().items()
    for source in options.sources(SMALL)
    for table in options.tables_of(SMALL, source)
]
FIT_RULES = {"morphling_fit_models", "morphling_sampling"}
SIMULATION_RULES = {
    f"morphling_{name}"
    for name in (
        "getting_started",
        "table4",
        "lists",
        "rivals",
        "readings",
        "knowledge",
        "load",
        "large_models",
        "rounds",
        "scale",
        "today",
        "failures",
    )
}
CLUSTER_RULES = {"morphling_predictions"} | SIMULATION_RULES
EXPERIMENT_RULES = {
    "morphling_sensitivity",
    "morphling_fig7",
    "morphling_fig8",
    "morphling_threads",
} | CLUSTER_RULES
BESIDE = {"all", "evaluate_claims", "join_claims", "write_report"}
# Figures of Oobleck that rest on the schedule of the emulator.
PRICED = ["instantiation", "layer_throughput", "reconfiguration", "recycle"]
MEASURED_ONLY = {"morphling_fig8"}  # it compares measured times and fits nothing


def append(path, text):
    path.write_text(path.read_text() + text)


def test_every_product_of_a_paper_is_in_the_list_of_results(small_run):
    text = (ROOT / "docs/papers/index.md").read_text()
    rows = re.findall(r"^\|  \| .+ \| `(.+?)` \| (.*?) ?\|$", text, re.MULTILINE)
    tables = [re.sub(r"<\w+>", r"[\\w-]+", re.escape(name)) for name, _ in rows]
    figures = [
        rf"{name.partition('/')[0]}/figures/{figure}\."
        for name, shown in rows
        for figure in re.findall(r"`(\w+)`", shown)
    ]
    sources = [path for path in (small_run.root / "results").iterdir() if path.is_dir()]
    files = [
        path.relative_to(source).as_posix()
        for source in sources
        for paper in PAPERS
        for path in (source / paper).rglob("*")
        if path.is_file()
    ]
    found = {
        re.sub(r"(^|/)\.([\w-]+\.csv)\.sum$", r"\1\2", name) for name in files
    }  # a seal is part of its table
    assert len(found) > len(FIGURES)
    assert not [name for name in found if not any(re.match(one, name) for one in [*tables, *figures])]


@pytest.mark.parametrize(("paper", "source", "table"), TABLES)
def test_every_table_follows_its_schema_and_is_not_empty(small_run, paper, source, table):
    path = small_run.root / "results" / source / paper / f"{table}.csv"
    assert len(read_csv(path, paper_named(paper).schema_of(table)))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_there_as_pdf_png_table_and_caption(small_run, name):
    stem = small_run.root / "results/emulated/morphling/figures" / name
    assert stem.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(stem.with_suffix(".csv").read_text().splitlines()) > 1
    assert len(stem.with_suffix(".txt").read_text().split()) > 10


def test_the_claims_are_evaluated(small_run):
    claims = read_csv(small_run.root / "results/emulated/morphling/claims.csv", tables.CLAIMS)
    assert set(claims["verdict"]) <= {"holds", "fails", "undecided", "not run"}
    assert "holds" in set(claims["verdict"])
    every = read_csv(small_run.root / "results/claims.csv", tables.JOINED_CLAIMS)
    assert set(every["paper"]) == {"Morphling", "EasyScale", "Oobleck", "Slapo"}
    joined = every[every["paper"] == "Morphling"]
    assert joined["statement"].tolist() == claims["statement"].tolist()
    assert joined["verdict_emulated"].tolist() == claims["verdict"].tolist()


def test_the_merged_configuration_lies_beside_the_results(small_run):
    record = json.loads((small_run.root / "results/emulated/provenance.json").read_text())
    settings = check_settings(record["config"])
    assert settings.morphling.sensitivity.max_gpus == 8
    assert settings.cluster == "a800-64"


def test_every_job_leaves_its_log_and_its_cost(small_run):
    for rule in ("emulate_throughput", "morphling/morphling_fig7", "morphling/draw_figure/fig7"):
        assert (small_run.root / f"logs/emulated/{rule}.log").is_file()
        cost = (small_run.root / f"benchmarks/results/emulated/{rule}.tsv").read_text().splitlines()
        assert cost[0].startswith("s\th:m:s\tmax_rss")


def test_no_temporary_file_is_left(small_run):
    hidden = [path for path in (small_run.root / "results").rglob(".*") if path.is_file()]
    sealed = [path.with_name(path.name[1:].removesuffix(".sum")) for path in hidden]
    assert sealed and all(path.suffix == ".csv" and path.is_file() for path in sealed)
    assert all(path.suffix == ".sum" for path in hidden)


def test_a_second_run_has_nothing_to_do(small_run):
    assert "Nothing to be done" in small_run.snakemake("--cores", "2").stdout


def test_touching_everything_without_a_change_reruns_nothing(finished):
    now = time.time() + 5
    for folder in ("src", "config", "workflow", "rules"):
        for path in (finished.root / folder).rglob("*"):
            os.utime(path, (now, now))
    assert "Nothing to be done" in finished.snakemake("--cores", "2").stdout


def test_editing_a_script_reruns_its_rule_and_what_depends_on_it(finished):
    script = finished.root / "workflow/scripts/draw_figure.py"
    before = script.read_text()
    script.write_text(before + "# an edit\n")
    assert finished.planned() == {"all": 1, "draw_figure": len(FIGURES + FURTHER), "write_report": 1}
    script.write_text(before)


def test_deleting_one_figure_rebuilds_that_figure_alone(finished):
    figure = finished.root / "results/emulated/morphling/figures/fig7.png"
    before = figure.read_bytes()
    figure.unlink()
    assert finished.planned() == {"all": 1, "draw_figure": 1, "write_report": 1}
    finished.built()
    assert figure.read_bytes() == before


def test_editing_the_performance_model_reruns_the_fits_and_what_depends_on_them_and_no_emulation(finished):
    module = finished.root / "src/makespan/perf/forms.py"
    append(module, "\n# changed\n")
    planned = finished.planned()
    assert set(planned) == FIT_RULES | EXPERIMENT_RULES - MEASURED_ONLY | {"draw_figure"} | BESIDE
    assert planned["draw_figure"] == len(FIGURES) - 1


def test_editing_the_emulator_reruns_everything_that_rests_on_it(finished):
    module = finished.root / "src/makespan/emulator/model.py"
    append(module, "\n# changed\n")
    planned = finished.planned()
    assert {"emulate_throughput"} | FIT_RULES | EXPERIMENT_RULES <= set(planned)
    modelled = [name for paper, source, name in FURTHER if paper == "slapo"]
    assert planned["draw_figure"] == len([*FIGURES, *PRICED, *modelled])


def test_editing_a_policy_reruns_the_simulations_that_run_it_and_what_depends_on_them(finished):
    append(finished.root / "src/makespan/policies/queues.py", "\n# changed\n")
    planned = finished.planned()
    without = {"morphling_knowledge", "morphling_rounds"}
    again = SIMULATION_RULES | {"easyscale_simulate", "morphling_threads", "draw_figure"} | BESIDE
    assert set(planned) == again - without - {"morphling_readings"}  # which has no figure
    # Training beside serving runs without FIFO.
    of_easyscale = {name for name, entry in paper_named("easyscale").figures().items() if not entry.sources}
    n_threads = 1
    n_of_easyscale = len(of_easyscale - {"serving"})
    assert planned["draw_figure"] == N_SIMULATED_FIGURES + n_threads - len(without) + n_of_easyscale


def test_what_no_rule_reaches_reruns_nothing(finished):
    package = finished.root / "src/makespan"
    for name in ("training/engine.py", "policies/gavel.py"):
        append(package / name, "\n# changed\n")
    for name in ("traces/readers.py", "perf/forms.py"):
        append(package / name, "\n\ndef _unused() -> int:\n    return 1\n")
    append(package / "tables/catalogue.py", "\nNEW = TableSchema('new', ())\n")
    assert finished.planned() == {}


def test_editing_the_generator_reruns_job_lists_and_studies_and_no_emulation(finished):
    append(finished.root / "src/makespan/traces/synthetic.py", "\n# changed\n")
    planned = set(finished.planned())
    assert "morphling_generate_workloads" in planned
    assert not planned & (FIT_RULES | {"emulate_throughput", "morphling_fig7", "morphling_fig8"})


def test_editing_a_plot_redraws_the_figures_and_nothing_else(finished):
    append(finished.root / "src/makespan/plots/style.py", "\n# changed\n")
    assert finished.planned() == {"all": 1, "draw_figure": len(FIGURES + FURTHER), "write_report": 1}


def test_changing_an_option_reruns_what_it_changes(finished):
    override = finished.root / "more.yaml"
    override.write_text("morphling: {fig7: {stage_duration_s: 60}}\n")
    small = [f"config/test/{paper}.yaml" for paper in PAPERS]
    planned = finished.planned("--configfile", *small, "more.yaml", small=False)
    assert planned == {"all": 1, "draw_figure": 1, "write_provenance": 1, "write_report": 1}


def test_two_runs_give_the_same_bytes_but_for_wall_times(small_run, finished):
    finished.built("--forceall", "results/emulated/morphling/claims.csv")
    for path in sorted((small_run.root / "results").rglob("*.csv")):
        again = finished.root / path.relative_to(small_run.root)
        if path.read_bytes() == again.read_bytes():
            continue
        first, second = (pd.read_csv(name, dtype=str) for name in (path, again))
        timed = [name for name in first.columns if name.endswith("wall_s")]
        assert timed, path
        pd.testing.assert_frame_equal(first.drop(columns=timed), second.drop(columns=timed))


def test_simulations_of_the_small_run_are_complete(small_run):
    folder = small_run.root / "results/emulated/morphling"
    table = read_csv(folder / "table4.csv", paper_named("morphling").schema_of("table4"))
    assert table.groupby("trace")["jobs"].unique().map(list).to_dict() == {"base": [40], "mt": [40]}
    kept = table[(table["trace"] == "mt") & table["policy"].str.startswith("morphling")]
    assert (kept["sla_attainment"] == 1).all()
    assert (table["gpu_allocation_ratio"] <= 1).all()
