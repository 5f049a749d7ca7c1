"""Times of layers that are measured here, and iterations beside what planning says of them."""

import pandas as pd
import pytest
from chain_nodes import SMALL, plan_of, small_job
from click.testing import CliRunner
from ledgers import finding

from makespan.cli import main
from makespan.errors import InputError, WorkerError
from makespan.oobleck.fixed import FixedRun, profile_chain, run_fixed
from makespan.oobleck.profile import read_profile
from makespan.oobleck.stage import StageExecutor
from makespan.oobleck.templates import make_templates
from makespan.papers.experiment import Given
from makespan.papers.oobleck import PAPER
from makespan.papers.oobleck.training import Predictions

OPTIONS = {
    "n_layers": (1,), "n_microbatches": (1, 4), "microbatch_size": 1, "most_nodes": 2, "profile_repeats": 5,
    "warm_ups": 1, "iterations": 2,
}  # fmt: skip


def test_a_profile_has_what_planning_needs_of_each_layer(tmp_path):
    sizes = [f"model.{name}={value}" for name, value in SMALL.items()]
    arguments = [word for size in sizes for word in ("--set", size)]
    done = CliRunner().invoke(
        main,
        ["oobleck", "profile", "gpt", *arguments, "--replicas", "2", "--output", str(tmp_path / "p.json")],
    )
    assert done.exit_code == 0, done.output
    assert "6 layers" in done.output
    profile = read_profile(tmp_path / "p.json")
    executor = StageExecutor(small_job())
    executor.hold(range(6))
    for layer, one in enumerate(profile.layers):
        assert one.forward_s > 0
        assert one.backward_s > 0
        weights = [
            each for name, each in executor.layer_state(layer).items() if name.startswith("parameter/")
        ]
        assert one.parameter_bytes == sum(weight.nbytes for weight in weights)
        assert one.activation_bytes > 0
        assert one.allreduce_in_node_s == {1: 0.0}
        assert set(one.allreduce_across_nodes_s) == {1, 2}
        assert one.allreduce_across_nodes_s[2] > 0
    assert profile.micro_batch_size == 2
    assert make_templates(profile, [1, 2])[2].n_layers == 6


def test_activations_are_what_the_backward_pass_needs(root):
    file = root / "tests" / "support" / "own_chain.py"
    job = small_job(model=f"{file}:chain", model_options={}, n_microbatches=4, microbatch_size=4)
    layers = profile_chain(job, n_replicas=1).layers
    words, width, samples = 6, 16, 4
    kept = [one.activation_bytes for one in layers]
    assert kept[0] == 8 * words * samples, "the table keeps the words"
    assert kept[2] < kept[1], "frozen weights need no inputs kept"
    assert kept[1] >= 4 * words * width * samples
    assert layers[2].allreduce_across_nodes_s == {1: 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 4}, "repeats is 4; expected a whole number >= 5"),
        ({"warm_ups": -1}, "warm_ups is -1"),
        ({"n_replicas": 0}, "n_replicas is 0"),
    ],
)
def test_too_few_runs_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        profile_chain(small_job(), **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt", "--set", "model=3"], "--set 'model=3'; expected model.NAME=VALUE or optimizer.NAME=VALUE"),
        (["gpt", "--set", "loss.eps=3"], "--set 'loss.eps=3'; expected"),
        (["gpd"], "unknown model 'gpd'"),
        (["gone.py:build"], "gone.py: no such file"),
        (["gpt", "--set", "model.hidden=x"], "model_options are"),
        (["gpt", "--repeats", "2"], "repeats is 2"),
    ],
)
def test_mistakes_in_what_is_profiled_get_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["oobleck", "profile", *arguments, "--output", "p.json"])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not list(tmp_path.iterdir())


def test_every_plan_is_measured_beside_its_prediction():
    table = Predictions(**OPTIONS).run(Given("measured"))["predictions"]
    found = table[["n_microbatches", "n_nodes", "stages", "microbatches"]].to_numpy().tolist()
    assert [row for row in found if "/" not in row[2]] == [
        [1, 1, "3", "1"], [4, 1, "3", "4"], [4, 2, "3+3", "2 2"],
    ]  # fmt: skip
    assert sum("/" in row[2] for row in found) == 2
    assert (table["iter_wall_s"] > 0).all()
    assert (table["predicted_cores_iter_time_s"] >= table["predicted_iter_time_s"]).all()
    whole = table[table["n_nodes"] == 1].set_index("n_microbatches")["predicted_iter_time_s"]
    assert whole[4] == pytest.approx(4 * whole[1])


def test_a_rank_correlation_decides_whether_predictions_hold():
    def judged(rows):
        return finding(PAPER.ledger(), {"predictions": rows}, "measured", "rank as planning predicts")

    rows = pd.DataFrame({"predicted_iter_time_s": [1.0, 2.0, 3.0, 4.0], "iter_wall_s": [2.0, 2.5, 7.0, 9.0]})
    rows = rows.assign(n_cores=2, predicted_cores_iter_time_s=1.0)
    assert judged(rows)[:2] == ("holds", "1.00 over 4 plans on 2 cores")
    assert judged(rows.iloc[:1])[0] == "not run"
    rows["iter_wall_s"] = [9.0, 2.0, 7.0, 1.0]
    assert judged(rows)[0] == "fails"


def test_a_job_that_fails_in_a_process_names_what_is_wrong(root, tmp_path):
    file = root / "tests" / "support" / "own_chain.py"
    job = small_job(model=f"{file}:with_statistics", model_options={})
    with pytest.raises(WorkerError, match="BatchNorm1d keeps running statistics"):
        run_fixed([FixedRun(job, plan_of(((0,), (3,), 6)), 1)], tmp_path / "run")
