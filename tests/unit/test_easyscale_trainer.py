"""Elastic training of a user's own model: stages, requests, restarts, checkpoints, and what is refused."""

import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from elastic_job import BITS, JOB, OWN, bits, trainer

from makespan.cli import main
from makespan.easyscale import ElasticTrainer, export_model, request_change, run_together
from makespan.easyscale.job import ElasticJob
from makespan.easyscale.trainer import ELASTIC_STEPS, RunFolder, _suspended_by_signals, with_determinism_level
from makespan.errors import CheckpointError, InputError, LostWorkerError, WorkerError
from makespan.runtime import Checkpoint, checkpoints as _checkpoints
from makespan.tables import read_csv
from makespan.training import weights

pytestmark = pytest.mark.xdist_group("training")

STEPS = 8


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Directory and result of the job on a process for each logical worker, without any change."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, trainer(run_dir).run(STEPS, checkpoint_every=3)


@pytest.fixture
def copied(straight, tmp_path):
    return Path(shutil.copytree(straight[0], tmp_path / "run"))


def test_stages_on_other_processes_train_with_the_same_bits(straight, tmp_path):
    """The learning rate falls after 3 and 6 mini-batches, an epoch ends after 4."""
    ours, (_, whole), told = trainer(tmp_path), straight, []
    for steps, mapping in ((2, "3,1/0,2"), (5, "0,1,2,3"), (STEPS, "2/0,3/1")):
        result = ours.run(steps, mapping, on_progress=lambda *what: told.append(what))
    assert bits(result) == bits(whole)
    assert told == sorted(told, key=lambda what: what[0])
    assert {type(value) for what in told for value in what} == {int, float}
    assert len(bits(whole)) == STEPS * JOB["n_logical_workers"]
    assert (result.state, result.step) == ("finished", STEPS)
    changes = result.reconfigurations
    assert changes["cause"].tolist() == ["start", "run", "run"]
    assert changes["old_mapping"].tolist() == ["", "3,1/0,2", "0,1,2,3"]
    assert (changes["restart_s"] > 0).all()
    assert result.rates_per_s["A"] > 0
    again = ours.run(STEPS)
    assert len(again.reconfigurations) == 3
    assert bits(again) == bits(result)


def test_optimizers_in_shards_have_the_same_bits_and_checkpoints(straight, tmp_path):
    """Checkpoints go from runs with shards to runs without, and back, with other processes each time."""
    ours, (_, whole) = trainer(tmp_path), straight
    for steps, mapping, zero_stage in ((2, "0/1/2/3", 1), (4, "3,1/0,2", 0), (STEPS, "2/0,3/1", 1)):
        result = ours.run(steps, mapping, zero_stage=zero_stage, checkpoint_every=3)
    assert bits(result) == bits(whole)
    for name in ("model.pt", "shared.pt"):
        assert (result.checkpoint / name).read_bytes() == (whole.checkpoint / name).read_bytes()


COUNTING = """
from torch import nn
from torch.utils.data import TensorDataset
import torch
from makespan.runtime import KeptHeap

check = KeptHeap.check


def counted(heap):
    with open({path!r}, "a") as file:
        file.write("x")
    check(heap)


KeptHeap.check = counted


def model():
    return nn.Linear(4, 2)


def data():
    return TensorDataset(torch.ones(16, 4), torch.zeros(16, 2))


loss = nn.functional.mse_loss
"""


@pytest.mark.parametrize("survives", [0, 1])
def test_the_heap_of_each_process_is_checked_after_each_mini_batch(tmp_path, survives):
    counts, job = tmp_path / "counts", tmp_path / "job.py"
    job.write_text(COUNTING.format(path=str(counts)))
    parts = {part: f"{job}:{part}" for part in ("model", "data", "loss")}
    ours = ElasticTrainer(run_dir=tmp_path / "run", n_logical_workers=2, micro_batch_size=2, **parts)
    ours.run(3, survives=survives)
    assert counts.read_text() == 2 * 3 * "x"


@pytest.mark.parametrize("factor", [1.0, 1e18])
def test_scaled_losses_are_stepped_in_shards_too_or_not_at_all(tmp_path, factor):
    options = {"scaler": {"init_scale": 1e22, "growth_interval": 2}, "loss": {"factor": factor}}
    ours, another = (
        trainer(tmp_path / str(stage), scaler="grad", options=options).run(3, mapping, zero_stage=stage)
        for stage, mapping in ((0, "0,1,2,3"), (1, "0,1/2/3"))
    )
    assert bits(ours) == bits(another)


def test_a_request_takes_effect_at_the_next_boundary_and_no_device_suspends(straight, tmp_path):
    asks = [[2, str(tmp_path), {"mapping": "0,1/2,3"}], [5, str(tmp_path), {"devices": ""}]]
    ours = trainer(tmp_path, options={"after_reduce": {"asks": asks}})
    result = ours.run(STEPS)
    assert (result.state, result.step) == ("pending", 5)
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "pending"
    result = ours.run(STEPS, "0,1,2,3")
    assert (result.state, result.step) == ("finished", STEPS)
    assert bits(result) == bits(straight[1])
    changes = result.reconfigurations
    assert changes["step"].tolist() == [0, 2, 5]
    assert changes["cause"].tolist() == ["start", "request", "run"]
    assert changes["new_mapping"].tolist() == ["0/1/2/3", "0,1/2,3", "0,1,2,3"]


def test_a_killed_process_costs_the_mini_batches_since_the_last_checkpoint_and_no_bit(straight, tmp_path):
    kills = {"process": 1, "at": 6, "file": str(tmp_path / "killed")}
    ours = trainer(tmp_path / "run", options={"after_reduce": {"kills": kills}})
    result, later = run_together(
        [ours, trainer(tmp_path / "later")], STEPS, "0,1/2,3", checkpoint_every=4, hash_every=1
    )
    assert bits(result) == bits(later) == bits(straight[1])
    assert result.reconfigurations["step"].tolist() == [0, 4]
    assert result.reconfigurations["cause"].tolist() == ["start", "failure"]
    assert later.reconfigurations["cause"].tolist() == ["start"]


def test_a_process_that_is_killed_again_and_again_is_given_up(tmp_path):
    kills = {"process": 0, "at": 2, "file": str(tmp_path / "nowhere" / "killed")}
    with pytest.raises(WorkerError):
        trainer(tmp_path / "run", options={"after_reduce": {"kills": kills}}).run(3, "0,1,2,3")
    kills["file"] = str(tmp_path / "killed")
    with pytest.raises(LostWorkerError, match="SIGKILL"):
        trainer(tmp_path / "run", options={"after_reduce": {"kills": kills}}).run(
            3, "0,1,2,3", max_restarts=0
        )


def test_jobs_that_share_processes_train_as_if_they_did_not(straight, tmp_path):
    several = [trainer(tmp_path / "a", seed=8), trainer(tmp_path / "b")]
    first = run_together(several, 4, "0,1/2,3", hash_every=1)
    assert [one.step for one in first] == [4, 4]
    other, same = run_together(several, STEPS, "0/1,2,3", hash_every=1)
    assert bits(same) == bits(straight[1]) != bits(other)
    assert run_together([], 1) == []


def test_hashes_are_taken_at_checkpoints_unless_they_are_asked_for(straight, tmp_path):
    ours = trainer(tmp_path)
    ElasticTrainer.run(ours, 3, "0,1/2,3", checkpoint_every=2)
    table = ElasticTrainer.run(ours, STEPS, "0,1,2,3", checkpoint_every=3).steps.set_index(["step", "rank"])
    found = table[BITS[3:]].ne("").groupby("step").all().all(axis=1)
    assert found.index[found].tolist() == [2, 3, 6, STEPS]
    expected = straight[1].steps.set_index(["step", "rank"])
    assert table["loss_hex"].equals(expected["loss_hex"])
    hashed = table.index.get_level_values("step").isin(found.index[found])
    assert table.loc[hashed, BITS[3:]].equals(expected.loc[hashed, BITS[3:]])
    assert table.loc[~hashed, BITS[3:]].eq("").all(axis=None)


def test_code_of_the_user_sees_its_logical_worker_and_no_process(tmp_path):
    ours = trainer(tmp_path, loss=f"{OWN}:tell_rank", n_logical_workers=3)
    result = ours.run(1, "2,0/1", hash_every=0)
    assert result.steps["loss"].tolist() == [3.0, 103.0, 203.0]
    assert set(result.steps["parameter_sha"]) | set(result.steps["context_sha"]) == {""}


def test_the_exported_model_is_a_plain_state_dict(straight, tmp_path):
    path = export_model(straight[0], tmp_path / "model.pt")
    state = torch.load(path, weights_only=True)
    assert state["features.0.weight"].shape == (4, 3, 3, 3)
    assert state["n_passes"] == STEPS
    with pytest.raises(CheckpointError, match="which has no checkpoint"):
        trainer(tmp_path / "none").export(tmp_path / "other.pt")
    assert not (tmp_path / "other.pt").exists()


def test_an_export_replaces_no_file_of_its_run(copied):
    assert export_model(copied, export_model(copied, copied / "model.pt")) == copied / "model.pt"
    kept = [path for path in copied.rglob("*") if path != copied / "model.pt"]
    assert {"steps.csv", "checkpoints"} <= {path.name for path in kept}
    before = [path.read_bytes() for path in kept if path.is_file()]
    for path in kept:
        with pytest.raises(InputError, match="which is a file of the run; expected another one"):
            export_model(copied, path)
    assert [path.read_bytes() for path in kept if path.is_file()] == before


def test_without_its_package_no_file_of_safetensors_is_promised(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"model\.safetensors, but the package safetensors is not installed"):
        trainer(tmp_path / "none").export(tmp_path / "model.safetensors")


# --- signals --------------------------------------------------------------------------------------------


@pytest.fixture
def stopped_by():
    """Return a function that lets a signal stop this process as Ctrl-C does, until the end of the test."""
    before = {}

    def stop(number):
        before[number] = signal.signal(number, signal.default_int_handler)
        return {"at": 3, "number": number, "to": os.getpid()}

    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_ends_the_run_after_the_mini_batch_with_a_checkpoint(straight, tmp_path, stopped_by):
    """Processes of a terminal or of a cluster job get it, too."""
    ours = trainer(tmp_path, options={"after_reduce": {"signals": stopped_by(signal.SIGTERM)}})
    with pytest.raises(KeyboardInterrupt):
        ours.run(STEPS, "0,1/2,3", ends_on_signals=True)
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["state"], state["step"]) == ("pending", 3)
    result = ours.run(STEPS, "0,1,2,3")
    assert bits(result) == bits(straight[1])
    assert result.reconfigurations["step"].tolist() == [0, 3]


def test_the_second_signal_does_what_it_did_before(tmp_path, stopped_by):
    folder = trainer(tmp_path).folder
    stopped_by(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as first, _suspended_by_signals([folder]):
        signal.raise_signal(signal.SIGINT)
        assert folder.pop_requested_placing() == {}
    with pytest.raises(KeyboardInterrupt) as second, _suspended_by_signals([folder]):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("goes on")
    assert first.value is not second.value
    told = []

    def begin():
        with pytest.raises(InputError) as error, _suspended_by_signals([folder]):
            pass
        told.append(str(error.value))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert told == ["ends_on_signals is True in a background thread; expected False, or the main thread"]


# --- checkpoints ----------------------------------------------------------------------------------------


def test_a_checkpoint_has_a_format_and_a_checksum_of_every_file(copied):
    steps = sorted(path.name for path in (copied / "checkpoints").iterdir())
    assert steps == ["step-00000006", "step-00000008"]
    newest = copied / "checkpoints" / steps[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert set(manifest["files"]) == {path.name for path in newest.iterdir()} - {"manifest.json"}
    assert all(re.fullmatch("[0-9a-f]{64}", one) for one in manifest["files"].values())


def spoil(path, how):
    if how == "cut short":
        path.write_bytes(path.read_bytes()[:-7])
    elif how == "changed":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut short", "changed", "removed"])
@pytest.mark.parametrize("name", ["model.pt", "worker-3.pt", "manifest.json"])
def test_after_a_damaged_checkpoint_comes_the_one_before(copied, how, name, caplog):
    spoil(copied / "checkpoints/step-00000008" / name, how)
    assert trainer(copied).folder.checkpoint().step == 6
    assert name in caplog.text
    assert "resuming from" in caplog.text


def test_training_goes_on_from_the_one_before(straight, copied):
    spoil(copied / "checkpoints/step-00000008/model.pt", "changed")
    result = trainer(copied).run(STEPS, "0,1,2,3")
    assert bits(result) == bits(straight[1])
    assert result.reconfigurations["step"].tolist()[-1] == 6


def test_without_a_sound_checkpoint_nothing_is_begun_anew(copied):
    spoil(copied / "checkpoints/step-00000008/shared.pt", "changed")
    spoil(copied / "checkpoints/step-00000006/manifest.json", "removed")
    with pytest.raises(CheckpointError, match=r"all checkpoints are damaged.*shared\.pt.*manifest"):
        trainer(copied).run(STEPS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 8}, ["seed: found 7, expected 8"]),
        (
            {"n_loaders": 3, "bucket_cap_bytes": None},
            ["n_loaders: found 2", "bucket_cap_bytes: found 2048, expected None"],
        ),
        ({"scaling": "post", "micro_batch_size": 5}, ["scaling: found 'pre'", "micro_batch_size"]),
        ({"n_logical_workers": 2}, ["n_logical_workers: found 4, expected 2"]),
        ({"options": {"model": {"width": 8}}}, ["options: found {}"]),
        ({"fold": "rank"}, ["fold: found 'ring', expected 'rank'"]),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_job_is_refused_with_every_field(copied, changes, told):
    with pytest.raises(CheckpointError) as error:
        trainer(copied, **changes).run(STEPS + 1)
    assert all(one in str(error.value) for one in told)


def rewrite(path, **changes):
    manifest = json.loads(path.read_text()) | changes
    del manifest["digest"]
    path.write_text(json.dumps(manifest | {"digest": _checkpoints._digest_of(manifest)}))


def test_another_format_is_refused_and_another_torch_is_warned_of(straight, copied, caplog):
    manifest = copied / "checkpoints/step-00000008/manifest.json"
    rewrite(manifest, format=2)
    with pytest.raises(CheckpointError, match=r"format is 2; expected 1"):
        trainer(copied).run(STEPS)
    machine = json.loads(manifest.read_text())["machine"]
    machine |= {"versions": {"torch": "1.8.0"}, "processor": "another one"}
    rewrite(manifest, format=1, machine=machine, devices=["A", "B"], code={str(OWN): "0"})
    assert trainer(copied).run(STEPS).step == STEPS
    assert "written with torch 1.8.0" in caplog.text
    assert "written on another one, resumed on" in caplog.text
    assert "own_job.py has changed since; equal bits are not guaranteed" in caplog.text
    assert "written on devices A,B, resumed on A without D2" in caplog.text


# --- the determinism level ------------------------------------------------------------------------------

AUTO = {"determinism": "auto", "options": {"model": {"width": 16}, "data": {"n_samples": 16}}}


@pytest.mark.parametrize(("model", "level"), [("resnet50", "D1"), ("neumf", "D1+D2"), ("bert", "D1+D2")])
def test_a_level_that_is_left_open_depends_on_the_operators_of_the_model(tmp_path, model, level):
    open_one = ElasticTrainer(model, run_dir=tmp_path, **AUTO)
    assert with_determinism_level(open_one.job, open_one.folder).determinism == level


def test_a_run_goes_on_with_the_level_that_it_has_settled_for(copied, caplog):
    caplog.set_level("INFO")
    ours = trainer(copied, determinism="auto")
    assert ours.run(STEPS).step == STEPS
    manifest = copied / "checkpoints/step-00000008/manifest.json"
    rewrite(manifest, job=json.loads(manifest.read_text())["job"] | {"determinism": "D0"})
    assert with_determinism_level(ours.job, ours.folder).determinism == "D0"
    assert "determinism" not in caplog.text
    with pytest.raises(CheckpointError, match="determinism: found 'D0', expected 'D1'"):
        trainer(copied).run(STEPS)


def test_what_a_level_that_is_left_open_finds_is_told(tmp_path, caplog):
    caplog.set_level("INFO")
    result = trainer(tmp_path / "own", determinism="auto").run(1, "0,1/2,3")
    assert json.loads((result.checkpoint / "manifest.json").read_text())["job"]["determinism"] == "D1"
    assert "determinism D1; slow under D2: features.0: Conv2d" in caplog.text
    with pytest.raises(InputError, match=r"model: .*:data_set returned Samples; expected a torch.nn"):
        trainer(tmp_path / "none", determinism="auto", model=f"{OWN}:data_set").run(1)


def test_several_types_at_a_time_have_to_be_wanted(tmp_path):
    asks = [[1, str(tmp_path), {"devices": "seq,A"}]]
    ours = trainer(tmp_path, options={"after_reduce": {"asks": asks}})
    result = ours.run(2, "0,1/2,3", "A,seq", mixes_devices=True)
    assert result.reconfigurations["new_devices"].tolist() == ["A,seq", "seq,A"]
    with pytest.raises(InputError, match="devices is A,seq, several types under D1; expected one type"):
        ours.run(3, "0,1/2,3", "A,seq")
    pinned = ElasticTrainer("neumf", run_dir=tmp_path / "pinned", **(AUTO | {"determinism": "D1+D2"}))
    assert pinned.run(0, "0,1/2,3", "A,seq").state == "finished"


# --- the command line -----------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(main, ["easyscale", *map(str, words)], catch_exceptions=False)


def test_the_command_line_does_the_same(straight, tmp_path, stopped_by):
    run_dir = tmp_path / "run"
    job = [f"--{name.replace('_', '-')}={value}" for name, value in JOB.items() if name != "model"]
    asks = json.dumps([[2, str(run_dir), {"devices": ""}]])
    signals = json.dumps(stopped_by(signal.SIGINT) | {"until": str(run_dir / "wanted.json")})
    words = ["run", JOB["model"], "--run-dir", run_dir, *job, "--steps", STEPS, "--hash-every", 1]
    words += ["--set", f"after_reduce.asks={asks}", "--set", f"after_reduce.signals={signals}"]
    done = command(*words)
    assert done.exit_code == 0, done.output
    assert "pending after 2 mini-batches and 1 stage(s)" in done.output
    done = command(*words)
    assert done.exit_code == 130
    assert f"stopped; 3 mini-batches are saved; the same command resumes the run in {run_dir}" in done.output
    assert json.loads((run_dir / "state.json").read_text())["step"] == 3
    done = command(*words, "--mapping", "0,1,2,3")
    assert done.exit_code == 0, done.output
    assert f"finished after {STEPS} mini-batches" in done.output
    table = read_csv(run_dir / "steps.csv", ELASTIC_STEPS)
    assert table[BITS].to_numpy().tolist() == bits(straight[1])
    assert command("export", "--run-dir", run_dir, "--output", tmp_path / "m.pt").exit_code == 0
    assert (tmp_path / "m.pt").read_bytes() == Path(straight[1].checkpoint / "model.pt").read_bytes()


def test_the_command_line_sets_after_how_long_a_stall_is_an_error(tmp_path):
    job = [f"--{name.replace('_', '-')}={value}" for name, value in JOB.items() if name != "model"]
    words = ["run", JOB["model"], "--run-dir", tmp_path / "run", *job, "--steps", 3, "--mapping", "0,1/2,3"]
    done = command(*words, "--set", "after_reduce.stops=2", "--stall-timeout", 3)
    assert done.exit_code == 2, done.output
    assert "no progress within 3 s (stall_timeout_s); the run was killed" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "resnet5", "--steps", 1), "unknown model 'resnet5'"),
        (("run", "resnet50", "--steps", 1, "--set", "lr=0.1"), "--set 'lr=0.1'; expected PART.NAME=VALUE"),
        (("run", "resnet50", "--steps", 1, "--set", "net.size=tiny"), "unknown part in options 'net'"),
        (
            ("run", "resnet50", "--steps", 1, "--devices", "A,A,A,A,A"),
            "devices has 5 names; expected 1 to 4",
        ),
        (("request",), "no change requested; expected --mapping, --devices or --suspend"),
        (("request", "--suspend", "--devices", "A"), "--suspend together with --mapping or --devices"),
        (("request", "--suspend"), "run_dir is run, which holds no run"),
        (("export", "--output", "model.pt"), "run_dir is run, which has no checkpoint"),
    ],
)
def test_mistakes_on_the_command_line_are_one_message(tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    done = command(*words)
    assert done.exit_code == 2
    assert told in done.output
    assert not list(tmp_path.rglob("*.pt"))


def test_the_verbs_of_a_paper_are_found_without_importing_it():
    listed = CliRunner().invoke(main, ["--help"]).output
    group = main.get_command(click.Context(main), "easyscale")
    assert group.get_short_help_str(limit=200) in " ".join(listed.split())
    assert group.list_commands(click.Context(group)) == ["drain", "export", "join", "request", "run"]


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": lambda: None}, "model is the function '<lambda>'; expected the name of a function"),
        ({"model": "resnet5"}, "unknown model 'resnet5'; expected"),
        ({"model": f"{OWN}:build_mode"}, "unknown name in .* 'build_mode'; .*Did you mean 'build_model'"),
        ({"model": "nowhere.py:build"}, "nowhere.py: no such file; expected model, a file of Python"),
        ({"data": None}, "data is None; expected the name of a function"),
        ({"optimizer": "sdg"}, "unknown optimizer 'sdg'"),
        ({"loss": "mse"}, "loss is 'mse'; expected the name of a function"),
        ({"determinism": "D3"}, "unknown determinism level 'D3'; expected D0.*auto, none"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; expected a whole number >= 1"),
        ({"buffers": "none"}, "unknown buffers 'none'; expected per_rank, rank0"),
        ({"shuffle": 1}, "shuffle is 1; expected True or False"),
        ({"options": {"network": {}}}, "unknown part in options 'network'"),
        ({"options": {"model": {"width": object()}}}, "options of model are .*; expected names and plain"),
        ({"options": {"optimizer": {1: 0.1}}}, "options of optimizer are {1: 0.1}; expected names and plain"),
        ({"determinism": None}, "unknown determinism level None; expected D0"),
        ({"run_dir": None}, "run_dir is None; expected text or a path"),
        ({"n_worker": 4}, "unknown field of an elastic job 'n_worker'"),
        ({"n_logical_workers": 10**30}, "n_logical_workers is 1000.*; expected a whole number, 1 to 100,000"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616; expected a whole number, 0 to "),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_anything_starts(changes, told):
    with pytest.raises(InputError, match=told):
        ElasticTrainer(**(JOB | changes))


@pytest.mark.parametrize(
    ("placing", "told"),
    [
        ({"devices": "A,A,A,A,A"}, "devices has 5 names; expected 1 to 4, because each must host"),
        ({"mapping": "0,1/2"}, "mapping 0,1/2 has 3 logical workers; expected 4"),
        ({"mapping": "0/1/2/3", "devices": "A,B"}, "devices has 2 names; expected 4, one for each process"),
        ({"mapping": "0/1,1/2"}, "mapping 0/1,1/2 has virtual ranks"),
        ({"devices": "A,D"}, "unknown device 'D'"),
        (
            {"devices": "A,B"},
            "devices is A,B, several types under D1; expected one type, a level with D2, "
            "or mixes_devices=True",
        ),
        ({"devices": ""}, "devices has 0 names; expected 1 to 4"),
        ({"hash_evry": 1}, "unknown option of a run 'hash_evry'; expected .*Did you mean 'hash_every'"),
        ({"hash_every": -1}, "hash_every is -1; expected a whole number >= 0"),
        ({"zero_stage": 2}, r"zero_stage is 2; expected 0, or 1 .* gradients \(2\) and parameters \(3\) are"),
        ({"zero_stage": True}, "zero_stage is True; expected 0, or 1 for shards of the optimizer state"),
        ({"steps": -1}, "steps is -1; expected a whole number >= 0"),
        ({"steps": 2.5}, "steps is 2.5; expected a whole number >= 0"),
        ({"survives": True}, "survives is True; expected a whole number"),
        ({"resume": "no"}, "resume is 'no'; expected True or False"),
        ({"on_progress": 3}, "on_progress is 3; expected a function or None"),
        ({"launcher": "slurm"}, "launcher is 'slurm'; expected a launcher, such as LocalLauncher()"),
        ({"mapping": [[0, 1], [2, 3]]}, r"mapping is \[\[0, 1\], \[2, 3\]\]; expected ranks by process, for"),
        ({"devices": 2}, "devices is 2; expected names of devices, for example A,A,B"),
    ],
)
def test_places_that_do_not_fit_are_refused(tmp_path, placing, told):
    with pytest.raises(InputError, match=told):
        trainer(tmp_path / "run").run(**({"steps": 3} | placing))
    assert not (tmp_path / "run" / "processes").exists()


def test_optimizers_in_shards_are_refused_where_a_step_may_need_more_than_its_shard(tmp_path):
    with pytest.raises(
        InputError, match=r"zero_stage is 1 and loop is '.*:train'; expected zero_stage=0, bec"
    ):
        ElasticTrainer(loop=f"{Path(__file__)}:train", run_dir=tmp_path / "loop").run(1, zero_stage=1)
    assert not (tmp_path / "loop").exists()
    told = (
        r"zero_stage is 1 and the optimizer is .*Halving; expected one of torch.optim: Adadelta, .*, SGD, or"
    )
    with pytest.raises(InputError, match=told) as error:
        trainer(tmp_path / "own", optimizer=f"{OWN}:halving").run(1, "0,1/2,3", zero_stage=1)
    assert "\n" not in str(error.value)


def train(run):
    """Stand for a loop, which is refused before it is called."""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"options": {"model": {"kind": "sync"}}},
            "module features.1 is a SyncBatchNorm.*expected BatchNorm",
        ),
        ({"options": {"model": {"kind": "sparse"}}}, "words.weight has a sparse gradient; expected dense"),
        ({"options": {"model": {"wide": 4}}}, "options of model are .*wide.*unexpected keyword argument"),
        (
            {"optimizer": "adam", "options": {"optimizer": {"lr": -1}}},
            "options of optimizer are {'lr': -1}: Invalid learning rate: -1",
        ),
        (
            {"lr_scheduler": "step", "options": {"lr_scheduler": {"step_size": 1, "gamma": "x"}}},
            "options of lr_scheduler have gamma 'x'; expected a number",
        ),
        ({"loss": f"{OWN}:N_SAMPLES"}, "loss is .* and N_SAMPLES is 60 there; expected a function"),
        ({"model": f"{OWN}:data_set"}, "model: .*:data_set returned Samples; expected a torch.nn"),
    ],
)
def test_what_only_a_process_can_know_is_told_in_one_line(tmp_path, changes, told):
    with pytest.raises(InputError, match=told) as error:
        trainer(tmp_path, **changes).run(1, "0,1,2,3")
    assert "\n" not in str(error.value)


def test_a_directory_belongs_to_one_run(straight, copied, tmp_path):
    ours = trainer(copied)
    with (
        ours.folder.hold(),
        pytest.raises(InputError, match="where another run is active; expected a directory"),
    ):
        ours.run(STEPS)
    with pytest.raises(InputError, match=r"has a checkpoint after 8 mini-batches; expected resume=True"):
        ours.run(STEPS, resume=False)
    with pytest.raises(InputError, match="steps is 3; expected at least 8, which are already done"):
        ours.run(3)
    with pytest.raises(InputError, match="where no run is active"):
        ours.request(devices="A,A")
    with pytest.raises(InputError, match="which holds no run"):
        request_change(tmp_path / "none", devices="A,A")
    with (
        ours.folder.hold(),
        pytest.raises(InputError, match="mapping 0/1 has 2 logical workers; expected 4"),
    ):
        ours.request("0/1")
    with ours.folder.hold(), pytest.raises(InputError, match="devices is A,B, several types under D1"):
        ours.request(devices="A,B")


def test_what_only_the_end_of_a_run_would_find_is_refused_before_it_trains(copied, monkeypatch):
    monkeypatch.setattr("makespan.easyscale.trainer._launch", lambda runs, options: pytest.fail("it trains"))
    (copied / "steps.csv").unlink()
    (copied / "steps.csv").mkdir()
    with pytest.raises(InputError, match=r"steps\.csv: is a directory; expected a file"):
        trainer(copied).run(STEPS + 1)
    (copied / "steps.csv").rmdir()
    record = next((copied / "records").glob("*"))
    for damage, told in (
        ("{", "cannot be read as JSON"),
        ('{"rows": []}', "is no record"),
        ("[]", "is no record"),
    ):
        record.write_text(damage)
        with pytest.raises(CheckpointError, match=f"{record.name}: {told}"):
            trainer(copied).run(STEPS + 1)
    monkeypatch.setattr(
        RunFolder, "checkpoint", lambda folder: Checkpoint(copied, 1, 0.0, {"format": 1, "job": {}}, {})
    )
    with pytest.raises(CheckpointError, match="is that of another kind of run; expected an elastic run"):
        trainer(copied).run(STEPS + 1)


def test_a_job_is_made_again_of_its_values():
    job = ElasticJob("resnet50", options={"data": {"n_samples": 8}})
    assert ElasticJob(**job.values()) == job
    assert ElasticJob(**job.values() | {"seed": 3}).differences(job.values()) == ["seed: found 0, expected 3"]
    former = {name: value for name, value in job.values().items() if name != "find_unused_parameters"}
    assert job.differences(former) == []
    (difference,) = ElasticJob(**job.values() | {"find_unused_parameters": True}).differences(former)
    assert difference == "find_unused_parameters: found False, expected True"
