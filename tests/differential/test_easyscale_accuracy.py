"""Fig. 9 and the accuracy of elastic schemes, trained for real at small sizes."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from forked import forking_servers

from makespan.claims import judge
from makespan.config import load_settings
from makespan.papers.easyscale import LEDGER, fig9_experiment, gap_experiment, read_published

pytestmark = pytest.mark.xdist_group("training")
ROOT = Path(__file__).parents[2]
SETTINGS = load_settings([ROOT / "config/test/easyscale.yaml"], ROOT).easyscale


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def cells(name):
    return {name: read_published(name, ROOT / f"config/published/easyscale_{name}.csv")}


def verdicts(tables, artifact):
    found = judge(LEDGER, tables, "measured", {})
    return found[found["artifact"] == artifact].set_index("statement")["verdict"]


def test_each_level_keeps_the_bits_for_as_long_as_it_promises():
    """Processes end with every stage; stages end within epochs, and epochs within stages."""
    options = SETTINGS.fig9.experiment() | {"models": ["resnet50", "vgg19"]}
    tables = fig9_experiment(cells("fig9"), **options)
    found = verdicts(tables, "Fig. 9")
    assert len(found) == 4 and set(found) == {"holds"}
    summary = tables["fig9_summary"]
    assert len(summary) == 2 * 4 * 3 and set(summary["steps"]) == {options["steps_per_stage"]}
    assert set(tables["fig9"]["reference"]) == {"ddp-homo", "ddp-heter"}


def test_accuracy_depends_on_the_devices_under_every_scheme_but_one():
    tables = gap_experiment(cells("gap"), **SETTINGS.gap.experiment())
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
