"""Tables of planning from the configured options: what rows must obey, and what the page says of them."""

import re

import pytest
from ledgers import finding, findings
from legible_figures import assert_is_legible

from makespan.config import check_settings, load_settings
from makespan.errors import InputError
from makespan.hardware import cluster
from makespan.oobleck.profile import layer_times, paper_model, pipeline_workload
from makespan.papers.experiment import Given
from makespan.papers.oobleck import PAPER, figures

LEDGER = PAPER.ledger()
PLANNING = ("Section 4.1", "Section 4.2")
pytestmark = pytest.mark.xdist_group("tables of planning")


@pytest.fixture(scope="module")
def planned():
    settings = check_settings({})
    return settings.oobleck.experiments(settings)


@pytest.fixture(scope="module")
def throughput(root, planned):
    cells = PAPER.read_published("throughput", root / "config/published/oobleck_throughput.csv")
    return planned["layer_throughput"].run(Given("emulated", cells={"throughput": cells}))["layer_throughput"]


@pytest.fixture(scope="module")
def tables(root, planned):
    """Return the tables that statements are about, of few profiles."""
    changes = {
        "templates": {"scaled_layers": (32, 64, 96)},
        "instantiation": {"global_microbatches": (512,)},
        "studies": {"compared_nodes": 13},
    }
    cells = {
        name: PAPER.read_published(name, root / f"config/published/oobleck_{name}.csv")
        for name in ("instantiation", "throughput")
    }
    tables = {"instantiation_published": cells["instantiation"]}
    for name, change in changes.items():
        few = planned[name].model_copy(update={"random_seeds": 1, **change})
        tables |= few.run(Given("emulated", cells=cells))
    return tables | {"templates": tables["templates"].assign(wall_s=0.01)}  # whatever this machine needs


def test_templates_of_every_profile_hold_all_layers_on_all_nodes(tables):
    table = tables["templates"]
    layers = table["layers_per_stage"].map(lambda text: sum(map(int, text.split())))
    expected = table["profile"].map(lambda name: int(re.search("[0-9]+", name).group()))
    assert (layers == expected).all()
    assert (table["n_stages"] == table["n_nodes"]).all()
    counts = (
        table[table["mode"] == "exact"].groupby(["profile", "f", "n0"])["n_nodes"].agg(["min", "max", "size"])
    )
    assert counts.loc[("uniform24", 1, 3)].tolist() == [3, 12, 10]
    needed = table[(table["profile"] == "uniform24") & table["is_needed"] & (table["mode"] == "dc")]
    assert needed[(needed["f"] == 1) & (needed["n0"] == 3)]["n_nodes"].tolist() == list(range(3, 11))


def test_every_choice_uses_all_nodes_and_all_microbatches(tables):
    table = tables["instantiation"]
    for row in table.to_dict("records"):
        pairs = [tuple(map(int, part.split("x"))) for part in row["counts"].split()]
        assert sum(count * size for count, size in pairs) == row["n_nodes"]
        assert sum(count for count, _ in pairs) >= row["f"] + 1
        batches = list(map(int, row["microbatches"].split()))
        assert sum(batches) == row["global_microbatches"] and min(batches) >= 1
        assert row["gap_pct"] >= 0
    assert table["program_time_s"].notna().sum() == 6
    printed = table[table["profile"] == "printed"].set_index("batch_mode")["iter_time_s"]
    assert printed.round(5).to_dict() == {"per_pipeline": 3.59007, "per_template": 3.63908}


def test_studies_have_every_pair_of_n0_and_f(tables):
    table = tables["studies"]
    wide = table[table["study"] == "guarantee"].pivot(index="case", columns="quantity", values="value")
    assert len(wide) == 40
    assert (wide["least_templates"] == wide["formula_templates"]).all()
    lost = table[table["quantity"] == "most_lost_pct"]["value"]
    assert len(lost) == 4 and (lost >= 0).all()


# --- statements and figures -------------------------------------------------------------------------


def verdicts(tables):
    """Return the verdicts of the statements about planning."""
    return findings(LEDGER, tables, "emulated", PLANNING)["verdict"].to_dict()


def verdict(tables, part):
    """Return the verdict of the statement that has this part."""
    return finding(LEDGER, tables, "emulated", part)[0]


def test_every_statement_of_planning_holds_on_few_profiles(tables):
    found = verdicts(tables)
    assert found == dict.fromkeys(found, "holds") and len(found) == 15


def changed(table, column, change, rows=slice(None)):
    """Return a table with other values in a column."""
    result = table.copy()
    result.loc[rows, column] = change(result.loc[rows, column])
    return result


DOCTORED = {
    "makes ten templates": ("templates", "n_nodes", lambda old: old + 1),
    "a stage a node": ("templates", "n_stages", lambda old: old + 1),
    "templates of equal layers": ("templates", "iter_time_s", lambda old: old * 1.001),
    "as balanced as the artifact prints": ("templates", "imbalance", lambda old: old + 0.1),
    "on up to 4 nodes are balanced": ("templates", "imbalance", lambda old: old + 0.3),
    "a template of 96 layers": ("templates", "wall_s", lambda old: old + 2.0),
    "can be used in one way only": ("instantiation", "counts", lambda old: old + " 1x9"),
    "gives the printed plan": ("instantiation", "microbatches", lambda old: old + " 1"),
    "faster than ours": ("instantiation", "gap_pct", lambda old: old - 9.0),
    "as good as an integer program": ("instantiation", "program_time_s", lambda old: old * 0.999),
    "the estimated iteration": ("instantiation", "estimated_time_s", lambda old: old * 1.1),
}


@pytest.mark.parametrize("part", DOCTORED)
def test_a_statement_fails_on_other_results(tables, part):
    name, column, change = DOCTORED[part]
    assert verdict(tables | {name: changed(tables[name], column, change)}, part) == "fails"


def test_statements_that_compare_rows_fail_on_other_results(tables):
    templates, plans, studies = tables["templates"], tables["instantiation"], tables["studies"]
    slower = changed(templates, "iter_time_s", lambda old: old * 1.01, templates["mode"] == "exact")
    assert verdict(tables | {"templates": slower}, "nowhere better than the exact search") == "fails"
    ours = (plans["batch_mode"] == "per_pipeline") & (plans["profile"] != "printed")
    late = changed(plans, "iter_time_s", lambda old: old * 2, ours)
    assert verdict(tables | {"instantiation": late}, "for the same plan") == "fails"
    printed = (plans["batch_mode"] == "per_pipeline") & (plans["profile"] == "printed")
    late = changed(plans, "iter_time_s", lambda old: old * 1.01, printed)
    assert verdict(tables | {"instantiation": late}, "faster than the printed plan") == "fails"
    more = changed(studies, "value", lambda old: old + 1, studies["quantity"] == "least_templates")
    assert verdict(tables | {"studies": more}, "template sizes are enough") == "fails"


def test_statements_without_rows_are_not_run(tables):
    empty = {name: table.iloc[:0] for name, table in tables.items()}
    assert set(verdicts(empty).values()) == {"not run"}


@pytest.mark.parametrize("figure", ["templates", "instantiation", "layer_throughput", "guarantee"])
def test_figures_of_planning_are_legible(tables, throughput, figure):
    plans = tables["instantiation"]  # drawn for the largest batch, which these few do not have
    most = plans.assign(
        global_microbatches=plans["global_microbatches"].where(plans["profile"] == "printed", 4096)
    )
    shown = tables | {"layer_throughput": throughput, "instantiation": most}
    drawn, data = getattr(figures, figure)(shown, "emulated")
    assert len(data)
    assert_is_legible(drawn)


# --- layer times from the emulator ------------------------------------------------------------------


def test_the_page_says_how_far_throughput_from_layer_times_is_from_the_printed_one(root, throughput):
    page = (root / "docs/papers/oobleck.md").read_text()
    for model, rows in throughput.groupby("model", sort=False):
        ratio, lost = rows["ratio"], rows["lost_pct"].clip(lower=0)
        cells = [
            model,
            str(rows["n0"].iloc[0]),
            f"{ratio.min():.2f} to {ratio.max():.2f}",
            f"{lost.min():.1f} to {lost.max():.1f} %",
        ]
        assert f"| {' | '.join(cells)} |" in page


def test_throughput_from_layer_times_grows_with_nodes(throughput):
    for _, rows in throughput.groupby("model"):
        rates = rows.sort_values("n_nodes")["throughput_samples_per_s"]
        assert (rates.diff().dropna() >= -1e-9 * rates.max()).all()
    assert set(throughput["model"]) == {"BERT-Large", "GPT-2", "GPT-3 Medium", "GPT-3 2.7B", "GPT-3 6.7B"}


def test_emulated_layers_add_up_to_the_model():
    place = cluster("a40-32")
    model = paper_model("GPT-3 2.7B")
    profile = layer_times(pipeline_workload(model, 512), place.node, place.network, 2, most_replicas=4)
    assert profile.n_layers == model.n_layers == 32
    assert sum(layer.parameter_bytes for layer in profile.layers) == pytest.approx(2 * model.parameters)
    inner = profile.layers[1:-1]
    assert len({(layer.forward_s, layer.backward_s, layer.parameter_bytes) for layer in inner}) == 1
    first, last = profile.layers[0], profile.layers[-1]
    assert first.parameter_bytes > inner[0].parameter_bytes  # the embedding
    assert last.forward_s > inner[0].forward_s  # the output head
    assert inner[0].backward_s == pytest.approx(2 * inner[0].forward_s, rel=0.3)
    assert inner[0].allreduce_across_nodes_s.keys() == {2, 3, 4}
    assert inner[0].allreduce_in_node_s.keys() == {2, 4}
    times = [inner[0].allreduce_across_nodes_s[count] for count in (2, 3, 4)]
    assert times == sorted(times) and times[0] > 0
    double = layer_times(pipeline_workload(model, 512), place.node, place.network, 4, most_replicas=1)
    assert double.layers[1].activation_bytes == pytest.approx(2 * inner[0].activation_bytes)
    with pytest.raises(InputError, match="microbatch of 0"):
        layer_times(pipeline_workload(model, 512), place.node, place.network, 0)


def test_a_micro_batch_size_of_an_unknown_model_is_refused(root, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("oobleck: {planning: {layer_throughput: {micro_batch_sizes: {Mine: 1}}}}")
    with pytest.raises(InputError, match="micro_batch_sizes has Mine"):
        load_settings([path], root)
