"""EasyScale's Figs 10 to 13: measured at the smallest sizes, drawn, and judged on made-up cells."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from legible_figures import assert_is_legible

from makespan.claims import judge
from makespan.config import check_settings, load_settings
from makespan.errors import ConfigError
from makespan.papers.easyscale import PAPER, figures as draw
from makespan.papers.experiment import Given
from makespan.tables import read_csv, write_csv
from makespan.training.zoo import STAND_INS

ROOT = Path(__file__).parents[2]
AUTHORS = Path(os.environ.get("MAKESPAN_PUBLISHED_DIR", "/none")) / "easyscale"
LEDGER = PAPER.ledger()
FIGURES = {name: PAPER.schema_of(name) for name in ("fig10", "fig11", "fig12", "fig13")}
CELLS = {
    name: PAPER.read_published(name, ROOT / f"config/published/easyscale_{name}.csv") for name in FIGURES
}
TINY = {"depth": 1, "extent": 16, "n_rows": 64}
RESNET = {"name": "resnet50", "width": 32, "micro_batch_size": 16, "small_micro_batch_size": 4} | TINY
NEUMF = {"name": "neumf", "width": 16, "micro_batch_size": 32, "small_micro_batch_size": 16} | TINY
SMALL = {"procedure": {"warmup_steps": 1, "steps": 2, "repetitions": 1, "seed": 3}, "logical_workers": 2}
SMALL |= {"models": [RESNET, NEUMF], "ranks": 2, "devices": ["A"]}


# --- measured -------------------------------------------------------------------------------------------


SHARING = {
    "warmup_steps": 1, "steps": 2, "workers": [1, 2],
    "models": [{name: value for name, value in RESNET.items() if name != "small_micro_batch_size"}],
}  # fmt: skip
in_processes = pytest.mark.xdist_group("training")


@pytest.fixture(scope="module")
def measured():
    """Return all tables, and that of a device whose memory suffices for one process and not for two."""
    pytest.importorskip("torch")
    found = {name: table for each in FIGURES for name, table in measure(each, memory_mib=1e4).items()}
    memory_mib = float(1.5 * found["fig10"]["peak_mem_mib"].min())
    return found | {"small device": measure("fig10", memory_mib=memory_mib, workers=[2])["fig10"]}


def measure(figure, **sharing):
    settings = check_settings({"easyscale": {"overheads": SMALL | {"sharing": SHARING | sharing}}})
    return settings.easyscale.experiments(settings)[figure].run(Given("measured", cells=CELLS))


@in_processes
def test_packed_processes_add_up_and_logical_workers_do_not(measured):
    table = measured["fig10"].set_index(["method", "k"])
    memory, sets = table["peak_mem_mib"], table["gradient_sets_mib"]
    assert memory["packing", 2] >= 1.8 * memory["packing", 1]
    assert memory["easyscale", 2] <= 1.2 * memory["easyscale", 1]
    assert sets["packing"].tolist() == [0.0, 0.0]
    assert sets["easyscale", 2] == pytest.approx(2 * sets["easyscale", 1])
    assert (table["total_mem_mib"] == memory + sets).all()
    assert not table["oom"].any() and (table["samples"] == 2).all()
    assert table["norm_throughput"]["packing", 1] == 1.0


@in_processes
def test_memory_is_measured_without_huge_pages_and_with_what_a_user_tells_the_c_library(monkeypatch):
    class Launched(Exception):
        pass

    class Launcher:
        def run(self, launch):
            raise Launched([options.environment["GLIBC_TUNABLES"] for options in launch.options])

    monkeypatch.setattr("makespan.papers.easyscale.overheads.LocalLauncher", Launcher)
    for told, expected in (("", ""), ("glibc.malloc.perturb=0", "glibc.malloc.perturb=0:")):
        monkeypatch.setenv("GLIBC_TUNABLES", told)
        with pytest.raises(Launched) as seen:
            measure("fig10")
        assert seen.value.args[0] == [f"{expected}glibc.malloc.hugetlb=0"]


@in_processes
def test_what_exceeds_the_memory_of_the_device_ends_without_a_time(measured):
    table = measured["small device"].set_index("method")
    assert table["oom"].to_dict() == {"packing": True, "easyscale": False}
    assert table["micro_batch_s"].isna().to_dict() == table["oom"].to_dict()
    assert table["samples"].to_dict() == {"packing": 0, "easyscale": 2}
    assert (table["peak_mem_mib"] > table["memory_mib"]).to_dict() == table["oom"].to_dict()
    assert table["published_micro_batch_s"]["packing"] == 0.1981


@in_processes
def test_ratios_are_those_of_the_medians_beside_them(measured):
    switching, levels, copying = (measured[name] for name in ("fig11", "fig12", "fig13"))
    for table, ratio, own, base in (
        (switching, "ratio", "enable", "disable"),
        (levels, "d1_norm", "d1", "baseline"),
        (levels, "d1d2_norm", "d1d2", "baseline"),
        (copying, "first_norm", "est_first", "ddp"),
        (copying, "last_norm", "est_last", "ddp"),
    ):
        assert (table[f"{base}_s"] > 0).all() and (table[f"{ratio}_iqr"] >= 0).all()
        assert table[ratio].to_numpy() == pytest.approx((table[f"{own}_s"] / table[f"{base}_s"]).to_numpy())
        assert table["model"].tolist() == ["resnet50", "neumf"]
        assert (table["cpu_share"] > 0).all()
    assert switching["samples"].tolist() == [4, 4] and copying["samples"].tolist() == [2, 2]
    assert levels["d2_cheap"].tolist() == [False, True]


@in_processes
def test_printed_cells_stand_beside_what_was_measured(measured):
    assert measured["fig11"]["published_ratio"].tolist() == pytest.approx([0.9972, 0.9993], abs=1e-4)
    assert measured["fig12"]["published_d1d2_norm"].tolist() == pytest.approx([2.341, 1.039], abs=1e-3)
    assert measured["fig13"]["published_last_norm"].tolist() == pytest.approx([0.588, 0.866], abs=1e-3)


def test_without_context_switches_nothing_else_is_left_out():
    """A model without random draws and buffers then trains to the same bits."""
    torch = pytest.importorskip("torch")
    from makespan.easyscale import timing_worker as worker
    from makespan.easyscale.hosting import HostedESTs
    from makespan.easyscale.job import RankMapping
    from makespan.easyscale.kernels import DeterminismLevel
    from makespan.easyscale.parts import TrainedParts
    from makespan.easyscale.randomness import parameter_sha
    from makespan.easyscale.reduction import Reduction, over_group
    from makespan.training.zoo import StandIn, build_stand_in, stand_in_loss

    spec, found = StandIn("neumf", width=16), []
    batch = worker._batch(spec, 100, 1)
    for swaps in (True, False):
        model = build_stand_in(spec, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        parts = TrainedParts(model, optimizer, partial(stand_in_loss, spec))
        hosted = HostedESTs(
            parts, torch.device("cpu"), RankMapping.even(3, 1), 0, Reduction(3),
            DeterminismLevel.named("D1"), seed=1, swaps_contexts=swaps,
        )  # fmt: skip
        batches = [over_group(hosted.mini_batch(lambda rank: batch)) for _ in range(3)]
        assert all(len(one.micro_batch_s) == 3 for one in batches)
        found.append([parameter_sha(parts.model), [one.losses for one in batches]])
    assert found[0] == found[1]
    assert batch[0].shape == (100, 2) and torch.equal(batch[0][0], batch[0][64])


def test_sizes_that_cannot_be_built_are_refused():
    odd = RESNET | {"name": "bert", "width": 250}
    with pytest.raises(ConfigError, match="width of bert is 250; expected a multiple of 8"):
        check_settings({"easyscale": {"overheads": {"models": [odd]}}})


def test_the_full_configuration_has_all_stand_ins_and_every_number_on_a_device():
    full = load_settings([ROOT / "config/easyscale-full.yaml"], ROOT).easyscale.overheads
    assert sorted(one.name for one in full.models) == sorted(STAND_INS)
    assert full.sharing.workers == tuple(range(1, 17)) and full.logical_workers == 8
    assert [(one.warmup_steps, one.steps) for one in (full.procedure, full.sharing)] == [(4, 16), (2, 8)]


def test_options_of_a_figure_are_those_that_it_reads():
    settings = check_settings({"easyscale": {"overheads": {"procedure": {"steps": 9, "repetitions": 5}}}})
    found = settings.easyscale.experiments(settings)
    options = {name: json.loads(found[name].to_json()) for name in FIGURES}
    often = {"warmup_steps", "steps", "repetitions", "seed"}
    assert set(options["fig10"]) == {*often, "models", "workers", "memory_mib"}
    assert set(options["fig12"]) == {"procedure", "models", "logical_workers", "devices"}
    assert {name: options["fig10"][name] for name in often} == {
        "warmup_steps": 2, "steps": 4, "repetitions": 5, "seed": 1,
    }  # fmt: skip
    assert options["fig11"]["procedure"] == {"warmup_steps": 2, "steps": 9, "repetitions": 5, "seed": 1}
    assert all(found[name].tables_of("measured", ("tiny-gpt",)) == found[name].tables for name in FIGURES)


# --- printed --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not AUTHORS.is_dir(), reason="MAKESPAN_PUBLISHED_DIR has no folder easyscale")
def test_printed_cells_are_those_of_the_authors_files():
    table = CELLS["fig10"].set_index(["model", "method", "k"]).sort_index()
    for file, column, digits in (("mem", "peak_mem_mib", 2), ("time", "micro_batch_s", 4)):
        theirs = pd.read_csv(AUTHORS / f"{file}.csv", index_col="mp").round(digits)
        for name, row in theirs.iterrows():
            model, _, kind = name.partition("_")
            own = table.loc[model, "packing" if kind == "ddp" else "easyscale"][f"published_{column}"]
            np.testing.assert_allclose(own.to_numpy(), row.to_numpy(float), atol=0.51 * 10.0**-digits)
    theirs = pd.read_csv(AUTHORS / "gradient_worker.csv").round(5)
    own = CELLS["fig13"].drop(columns=["micro_batch_size", "source"])
    assert own.to_numpy().tolist() == theirs.to_numpy().tolist()
    theirs = pd.read_csv(AUTHORS / "context_switch.csv").round(5)
    own = CELLS["fig11"][["model", "published_disable_s", "published_enable_s"]]
    assert sorted(own.to_numpy().tolist()) == sorted(theirs[theirs.columns[:3]].to_numpy().tolist())


# --- figures --------------------------------------------------------------------------------------------


@in_processes
@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_from_the_saved_tables(measured, name, tmp_path):
    path = tmp_path / f"{name}.csv"
    write_csv(measured[name], path, FIGURES[name])
    figure, table = getattr(draw, name)({name: read_csv(path, FIGURES[name])}, "measured")
    assert_is_legible(figure)
    assert len(table) == len(measured[name])


@pytest.mark.parametrize("name", ["fig11", "fig12", "fig13"])
def test_figures_of_all_eight_models_are_legible(made_up, name):
    table = pd.concat(
        [made_up[name][made_up[name]["model"] == "resnet50"].assign(model=model) for model in STAND_INS]
    )
    valid = FIGURES[name].validate(table, where="test")
    assert_is_legible(getattr(draw, name)({name: valid}, "measured")[0])


# --- the ledger -----------------------------------------------------------------------------------------


def rows_of(name, rows, **shared):
    """Table of a figure; what is not given is 0, and printed cells are missing."""
    columns = FIGURES[name].columns
    blank = {one.name: np.nan if one.nullable else 0 for one in columns}
    table = pd.DataFrame([blank | {"samples": 100, "cpu_share": 0.99} | shared | row for row in rows])
    return FIGURES[name].validate(table, where="test")


def sharing(time_s, memory):
    """Rows of Fig. 10 from times, None out of memory, and memories by method, for k = 1, 2, 4."""
    return [
        {"method": method, "k": k, "micro_batch_s": time or np.nan, "oom": time is None}
        | {"peak_mem_mib": size, "micro_batch_iqr_s": 0.001}
        for method in time_s
        for k, time, size in zip((1, 2, 4), time_s[method], memory[method], strict=True)
    ]


FITS = ({"packing": (0.05, 0.05, 0.05), "easyscale": (0.055, 0.052, 0.05)},
        {"packing": (20, 40, 80), "easyscale": (20, 20.2, 20.5)})  # fmt: skip
EXCEEDS = ({"packing": (0.1, None, None), "easyscale": (0.1, 0.1, 0.1)},
           {"packing": (60, 120, 120), "easyscale": (60, 60, 60)})  # fmt: skip


@pytest.fixture
def made_up():
    """Return tables with which all statements that a CPU can decide hold."""
    resnet, shufflenet = sharing(*FITS), sharing(*EXCEEDS)
    models = ("resnet50", "neumf", "bert")
    switching = [{"model": name, "disable_s": 0.06, "enable_s": 0.0603, "ratio": 1.005} for name in models]
    levels = [
        {"model": name, "device": device, "gpu": "v100", "d1_norm": 1.05, "d2_cheap": name != "resnet50"}
        | {"d1d2_norm": 2.5 if name == "resnet50" else 1.5}
        for name in models
        for device in "AB"
    ]
    levels += [one | {"device": "C", "d1d2_norm": 1.0} for one in levels[::2]]
    copying = [{"model": name, "first_norm": 0.8, "last_norm": 1.05} for name in models]
    return {
        "fig10": rows_of("fig10", [one | {"model": "resnet50"} for one in resnet]
                         + [one | {"model": "shufflenetv2"} for one in shufflenet]),
        "fig11": rows_of("fig11", switching, ratio_iqr=0.01, logical_workers=4),
        "fig12": rows_of("fig12", levels, d1_norm_iqr=0.05, d1d2_norm_iqr=0.05),
        "fig13": rows_of("fig13", copying, first_norm_iqr=0.05, last_norm_iqr=0.05,
                         logical_workers=2, cores=2),
    }  # fmt: skip


def verdicts(tables, source="measured"):
    """Verdicts of the statements of Figs 10 to 13 that a source decides, by check and subject."""
    statements = LEDGER.statements()
    printed = {f"{name}_published": cells for name, cells in CELLS.items()}
    found = judge(LEDGER, tables | printed, source, {})
    kept = statements["artifact"].isin(["Fig. 10", "Fig. 11", "Fig. 12", "Fig. 13"])
    kept &= statements["sources"].str.split().map(lambda names: source in names)
    keys = statements["check"] + " " + statements["subject"].str.split().str[1:].str.join(" ")
    return dict(zip(keys[kept].str.strip(), found["verdict"][kept], strict=True)), found[kept]


OPEN = {"out_of_memory resnet50": "undecided", "d2_free_for_others": "undecided"}


def test_statements_hold_where_the_tables_say_so(made_up):
    found, rows = verdicts(made_up)
    assert found == dict.fromkeys(found, "holds") | OPEN and len(found) == 15
    notes = rows["note"][rows["verdict"] == "undecided"].tolist()
    assert "fit the device up to 4" in notes[0] and "vector instructions" in notes[1]


CHANGES = {
    "memory_of_sharing": ("fig10", {"method": "easyscale", "k": 4}, {"peak_mem_mib": 70.0}),
    "memory_of_packing": ("fig10", {"method": "packing", "k": 4}, {"peak_mem_mib": 45.0}),
    "out_of_memory shufflenetv2": ("fig10", {"method": "easyscale", "k": 4}, {"micro_batch_s": np.nan}),
    "throughput_of_sharing": ("fig10", {"method": "easyscale", "k": 1}, {"micro_batch_s": 0.07}),
    "flat_throughput": ("fig10", {"method": "easyscale", "k": 2}, {"micro_batch_s": 0.07}),
    "switch_median": ("fig11", {}, {"ratio": 1.05}),
    "switch_largest": ("fig11", {"model": "bert"}, {"ratio": 1.2}),
    "d1_nearly_free": ("fig12", {}, {"d1_norm": 1.3}),
    "d2_costly": ("fig12", {"model": "resnet50"}, {"d1d2_norm": 1.2}),
    "d2_order": ("fig12", {"model": "bert"}, {"d1d2_norm": 4.0}),
    "d2_scan": ("fig12", {"model": "bert"}, {"d2_cheap": False}),
    "last_synchronises": ("fig13", {"model": "bert"}, {"last_norm": 0.7}),
    "below_stock": ("fig13", {}, {"first_norm": 1.2, "last_norm": 1.3}),
}


def changed(tables, name, where, values):
    table = tables[name].copy()
    hit = np.ones(len(table), dtype=bool)
    for key, value in where.items():
        hit &= (table[key] == value).to_numpy()
    for column, value in values.items():
        table.loc[hit, column] = value
    return tables | {name: table}


@pytest.mark.parametrize("check", CHANGES)
def test_every_statement_can_fail(made_up, check):
    found, _ = verdicts(changed(made_up, *CHANGES[check]))
    assert found[check] == "fails"


def test_memory_that_differs_between_repetitions_leaves_a_statement_open(made_up):
    where = {"method": "easyscale", "k": 4, "model": "resnet50"}
    # 20.5 MiB over 20, and at most 1.05 times as much
    for spread, verdict in {0.0: "holds", 0.9: "holds", 1.2: "undecided"}.items():
        found, rows = verdicts(changed(made_up, "fig10", where, {"peak_mem_range_mib": spread}))
        assert found["memory_of_sharing"] == verdict
    assert "measurements spread across the limit: resnet50" in "".join(rows["note"])


def test_the_control_has_no_say(made_up):
    tables = changed(made_up, "fig12", {"device": "C"}, {"d1_norm": 9.0, "d1d2_norm": 9.0})
    assert verdicts(tables)[0] == verdicts(made_up)[0]


@pytest.mark.parametrize(
    ("check", "change", "note"),
    [
        ("switch_median", ("fig11", {}, {"ratio_iqr": 0.2}), "measurements spread across the limit"),
        ("switch_largest", ("fig11", {}, {"disable_s": 0.03}), "micro-batches of 30 ms; only 50 ms or more"),
        ("last_synchronises", ("fig13", {}, {"samples": 1}), "measurements spread across the limit"),
        ("d2_order", ("fig12", {}, {"d1d2_norm_iqr": 9.0}), "measurements spread across the limit"),
        ("below_stock", ("fig13", {}, {"cores": 1}), "fewer cores than stock processes"),
        (
            "out_of_memory resnet50",
            ("fig10", {"method": "packing", "k": 4}, {"micro_batch_s": np.nan}),
            "alone",
        ),
    ],
)
def test_what_measurements_cannot_tell_is_undecided_with_the_reason(made_up, check, change, note):
    found, rows = verdicts(changed(made_up, *change))
    assert found[check] == "undecided"
    assert rows["note"].str.contains(note).any()


def test_nothing_is_decided_by_times_that_were_taken_while_something_else_ran(made_up):
    tables = {name: table.assign(cpu_share=0.6) for name, table in made_up.items()}
    found, rows = verdicts(tables)
    decided = {check for check, verdict in found.items() if verdict != "undecided"}
    assert decided == {"memory_of_sharing", "memory_of_packing", "out_of_memory shufflenetv2", "d2_scan"}
    assert rows["note"].str.contains("had 60 % of a core, because something else ran").sum() == 9


def test_tables_without_rows_decide_nothing():
    empty = {name: pd.DataFrame({one.name: [] for one in schema.columns}) for name, schema in FIGURES.items()}
    assert set(verdicts(empty)[0].values()) == {"not run"}


def test_statements_about_gpus_are_judged_on_printed_cells():
    for source in ("emulated", "published"):
        found, rows = verdicts({}, source)
        assert len(found) == 14 and set(found.values()) == {"holds"}
        assert rows["note"].str.contains("judged on the printed cells: ").all()
    shown = rows.set_index("statement")["reproduced"]
    assert shown["on a V100 switching contexts costs little for every model"] == "1.0197"
    assert shown["on GPUs determinism on several types is costly for convolutions"] == "3.05x"


def test_tables_are_judged_as_they_are_read(made_up, tmp_path):
    for name, table in made_up.items():
        write_csv(table, tmp_path / name, FIGURES[name])
    tables = {name: read_csv(tmp_path / name, schema) for name, schema in FIGURES.items()}
    assert verdicts(tables)[0] == verdicts(made_up)[0]
