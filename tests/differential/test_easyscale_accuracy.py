"""Fig. 9 and the accuracy of elastic schemes, trained for real at small sizes."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from forked import forking_servers

from makespan.claims import judge
from makespan.config import load_settings
from makespan.papers.easyscale import PAPER
from makespan.papers.experiment import read_inputs
from makespan.tables import read_csv, write_result

pytestmark = pytest.mark.xdist_group("training")
ROOT = Path(__file__).parents[2]
SETTINGS = load_settings([ROOT / "config/test/easyscale.yaml"], ROOT).easyscale


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def written(experiment, folder, **changes):
    """Run an experiment as the script of the workflow does, and read the tables that it wrote."""
    options = getattr(SETTINGS, experiment).model_copy(update=changes)
    chosen = type(options).from_json(options.to_json())
    cells = {"times": [], f"published_{experiment}": f"{ROOT}/config/published/easyscale_{experiment}.csv"}
    results = chosen.run(read_inputs(PAPER, chosen, "measured", cells, []))
    paths = {name: folder / f"{name}.csv" for name in chosen.tables}
    for name, path in paths.items():
        write_result(results[name], path)
    return {name: read_csv(path, PAPER.schema_of(name)) for name, path in paths.items()}


def verdicts(tables, artifact):
    found = judge(PAPER.ledger(), tables, "measured", {})
    return found[found["artifact"] == artifact].set_index("statement")["verdict"]


def test_each_level_keeps_the_bits_for_as_long_as_it_promises(tmp_path):
    """Processes end with every stage; stages end within epochs, and epochs within stages."""
    tables = written("fig9", tmp_path, models=("resnet50", "vgg19"))
    found = verdicts(tables, "Fig. 9")
    assert len(found) == 4 and set(found) == {"holds"}
    summary = tables["fig9_summary"]
    assert len(summary) == 2 * 4 * 3 and set(summary["steps"]) == {SETTINGS.fig9.steps_per_stage}
    assert set(tables["fig9"]["reference"]) == {"ddp-homo", "ddp-heter"}


def test_accuracy_depends_on_the_devices_under_every_scheme_but_one(tmp_path):
    tables = written("gap", tmp_path)
    gap, curves = tables["gap"], tables["gap_curves"]
    assert verdicts(tables, "Accuracy").iloc[0] == "holds"
    trained = gap.groupby(["scheme", "seed"])["param_sha"].nunique()
    assert (trained["easyscale"] == 1).all() and (trained[["linear", "adaptive"]] > 1).all()
    whole = gap[gap["class"] == "all"]
    assert (whole["samples"] == SETTINGS.gap.held_out_samples).all()
    counted = gap[gap["class"] != "all"].groupby(["scheme", "devices", "seed"])["samples"].sum()
    assert (counted == SETTINGS.gap.held_out_samples).all()
    # With a device for each logical worker all schemes are plain data parallelism.
    most = gap[gap["devices"] == SETTINGS.gap.logical_workers]
    assert (most.groupby("seed")["param_sha"].nunique() == 1).all()
    early = curves[(curves["scheme"] == "easyscale") & (curves["epoch"] <= SETTINGS.gap.decay_epoch)]
    assert (early.groupby("epoch")["param_sha"].nunique() == 1).all()
    late = curves[(curves["scheme"] == "easyscale") & (curves["epoch"] > SETTINGS.gap.decay_epoch)]
    assert late["param_sha"].nunique() == late.groupby(["epoch", "gamma"]).ngroups
