"""Schedules of the library against their models, by the table of the workflow and from the command line."""

import json

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner

from makespan.claims import Claim
from makespan.cli import main
from makespan.papers.experiment import Given
from makespan.papers.slapo import PAPER
from makespan.papers.slapo.measured import Verification
from makespan.training.zoo import FAMILIES

pytestmark = pytest.mark.xdist_group("schedules")

SCHEDULES = {"tensor": {"shard_embedding": True}}
SMALL = {"device": "cpu", "size": "tiny", "samples": 2, "seed": 0, "left_out": {}}


@pytest.fixture(scope="module")
def table():
    """Every family on one, two and four processes, in three launches."""
    experiment = Verification(families=tuple(FAMILIES), processes=(1, 2, 4), schedules=SCHEDULES, **SMALL)
    return experiment.run(Given("measured"))["verify"]


@pytest.fixture(scope="module")
def claim():
    rows = PAPER.ledger().statements()
    (row,) = rows[rows["check"] == "verified"].to_dict("records")
    return Claim(row["subject"], float(row["limit"]), {}, row["table"])


def test_every_family_agrees_on_one_two_and_four_processes(table):
    assert list(table["family"]) == list(FAMILIES) * 3
    assert table["is_equal"].all(), table["fault"].tolist()
    assert (table["not_compared"] == 0).all() and (table["gradients"] > 15).all()
    assert (table.loc[table["n_processes"] > 1, "gradient_error"] > 0).all()  # another order of sums


def test_the_statement_needs_all_families_and_every_row(table, claim):
    check = PAPER.ledger().checks["verified"]
    assert check({"verify": table}, claim).holds is True
    assert check({"verify": table[table["n_processes"] < 4]}, claim) is None
    assert check({"verify": table[table["family"] != "t5"]}, claim) is None
    wrong = table.assign(is_equal=table.index != 3)
    assert check({"verify": wrong}, claim).holds is False
    assert check({"verify": table.assign(gradients=0)}, claim).holds is False


def run(*arguments):
    return CliRunner().invoke(main, ["slapo", *arguments])


def test_a_schedule_is_verified_and_shown_from_the_command_line():
    done = run("verify", "gpt", "--processes", "2", "--set", "ckpt_ratio=0.5", "--set", "attn=sdpa")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("the model agrees with the original on 2 processes")
    done = run("verify", "gpt", "--by-layers", "--json", "--set", "attn=sdpa")
    found = json.loads(done.stdout)
    assert found["is_equal"] and 0 < found["output_error"] < 1e-5
    assert "layers of the same structure were compared once" in found["report"]
    shown = run("show", "gpt", "--size", "tiny", "--set", "ckpt_ratio=1.0").output
    assert "| checkpoint()" in shown and "c_proj: " in shown
    steps = run("show", "gpt", "--steps").output
    assert "   1  shard(" in steps and "at 'transformer.h.0" in steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "gpt", "--set", "ckpt_ratio"], "--set is 'ckpt_ratio'; expected NAME=VALUE"),
        (["verify", "gpt", "--set", "ratio=1"], "no option 'ratio'"),
        (["verify", "gpt", "--size", "huge"], "--size is 'huge'; expected one of the sizes of gpt: tiny"),
        (["show", "gpt2"], "is not one of"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_in_one_message(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


def test_options_of_the_table_are_checked_with_the_configuration():
    given = {**SMALL, "families": ("gpt",), "processes": (1,), "schedules": SCHEDULES}
    with pytest.raises(ValueError, match=r"left_out\.gpt: 'stages'; expected tensor"):
        Verification.model_validate(given | {"left_out": {"gpt": ["stages"]}})
    with pytest.raises(ValueError, match="each entry once"):
        Verification.model_validate(given | {"processes": (2, 2)})
