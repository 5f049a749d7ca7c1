"""Tables of a run directory that several calls write, and what is said of its checkpoints."""

from types import SimpleNamespace

import pandas as pd
import pytest

from makespan.errors import InputError, LostWorkerError
from makespan.files import write_json
from makespan.oobleck import trainer as _trainer
from makespan.oobleck.reconfiguration import StateLost
from makespan.oobleck.trainer import (
    ITERATIONS,
    RECOVERIES,
    LiveOptions,
    Record,
    _History,
    _Run,
    saved_text,
)
from makespan.runtime import LocalLauncher, finish_checkpoint, start_checkpoint

HEADER = ",".join(ITERATIONS.names) + "\n"


def rows(call, *iterations):
    values = [(call, one, 0.5, 1, 1, 2, 4, 0.25) for one in iterations]
    return pd.DataFrame(values, columns=ITERATIONS.names)


def test_every_call_appends_its_rows_and_the_earlier_ones_keep_their_bytes(tmp_path):
    first = _History(ITERATIONS, tmp_path, 0)
    assert first.n_calls == 0
    first.write(rows(1, 0))
    first.write(rows(1, 0, 1))  # at the next checkpoint
    early = (tmp_path / "iterations.csv").read_text()
    second = _History(ITERATIONS, tmp_path, 2)  # of a record that has those of the first call
    assert second.n_calls == 1
    second.write(pd.concat([rows(1, 0, 1), rows(2, 1, 2)]))
    text = (tmp_path / "iterations.csv").read_text()
    assert text == early + rows(2, 1, 2).to_csv(index=False, header=False)
    assert _History(ITERATIONS, tmp_path, 0).n_calls == 2


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    (tmp_path / "iterations.csv").write_text(HEADER + "1,0,0.5,1,1,2,4,0.25\n1,1,0.")
    found = _History(ITERATIONS, tmp_path, 0)
    found.write(rows(2, 1))
    assert pd.read_csv(tmp_path / "iterations.csv")["call"].tolist() == [1, 2]


def test_a_table_of_a_version_without_rerouting_gets_the_new_columns(tmp_path):
    names = [name for name in RECOVERIES.names if name not in ("fallback", "rerouted")]
    row = ["1", "3", "7", "loss", "", "", "drop", "6+6", "2/3", "0/1", *["0.10000000000000001"] * 7]
    (tmp_path / "recoveries.csv").write_text(",".join(names) + "\n" + ",".join(row) + "\n")
    found = _History(RECOVERIES, tmp_path, 0)
    assert found.n_calls == 1
    found.write(pd.DataFrame(columns=RECOVERIES.names))
    table = pd.read_csv(tmp_path / "recoveries.csv", dtype=str, keep_default_na=False)
    assert table.columns.tolist() == list(RECOVERIES.names)
    assert table[names].to_numpy().tolist() == [row] and set(table["rerouted"]) == {""} == set(
        table["fallback"]
    )


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "", "iteration,loss\n"])
def test_another_table_of_that_name_is_refused_before_anything_starts(tmp_path, text):
    (tmp_path / "iterations.csv").write_text(text)
    with pytest.raises(InputError, match=r"iterations\.csv has the columns .*expected call,iteration"):
        _History(ITERATIONS, tmp_path, 0)
    assert (tmp_path / "iterations.csv").read_text() == text


def test_what_is_said_of_a_stop_is_what_the_directory_has(tmp_path):
    assert "no checkpoint; the same call starts from iteration 0" in saved_text(tmp_path)
    start_checkpoint(tmp_path / "checkpoints")
    path = finish_checkpoint(tmp_path / "checkpoints", 7, 0.0, {})
    assert saved_text(tmp_path) == f"saved: {path}, 7 iteration(s); the same call resumes from there"


def test_checkpoints_by_time_are_on_unless_asked_otherwise():
    assert LiveOptions(2).checkpoint_interval_s == 600.0
    with pytest.raises(InputError, match="checkpoint_interval_s is -1"):
        LiveOptions(2, checkpoint_interval_s=-1)


def test_a_run_whose_nodes_all_failed_says_why_the_first_one_did(tmp_path):
    write_json({"error": "TypeError: no number"}, tmp_path / "error-1.json")
    run = SimpleNamespace(
        launch=SimpleNamespace(run_dir=tmp_path),
        options=SimpleNamespace(n_nodes=2),
        protocol=SimpleNamespace(plan="any"),
    )
    told = _Run._explained(run, StateLost([0]))
    assert isinstance(told, StateLost)
    assert str(told).endswith("resume from the last checkpoint; node 1 ended: TypeError: no number")


@pytest.mark.parametrize("has_notice", [True, False])
def test_a_loss_after_a_notice_ends_a_run_that_would_be_relaunched(tmp_path, monkeypatch, has_notice):
    """Otherwise `train_relaunching` would launch the run again, and the signal would have no effect."""
    pytest.importorskip("torch")
    import live_job

    seen, options = [], LiveOptions(4, policy="relaunch")
    run = _Run(
        live_job.JOB, live_job.profile(), 5, tmp_path, options, LocalLauncher(), seen.append, None, Record()
    )

    def lose():
        if has_notice:
            run.take_notice("SIGTERM")
        raise LostWorkerError("a node was lost; resuming from the last checkpoint")

    coordinator = SimpleNamespace(hosts={}, run=lose, stop=lambda name: None)
    monkeypatch.setattr(_trainer, "Coordinator", lambda *arguments, **options: coordinator)
    if not has_notice:
        with pytest.raises(LostWorkerError):
            run.run()
        return
    assert run.run().step == 0
    assert [(event.kind, event.values["signal"]) for event in seen] == [("stopped", "SIGTERM")]
