"""Runs that lose processes and continue from the memory of the others have the bits of an undisturbed run."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner
from elastic_job import last_bits
from forked import forking_servers
from killers import Gate, Killer

from makespan.cli import main
from makespan.easyscale import ElasticTrainer, drain_processes, join_run, request_change, run_together
from makespan.easyscale.randomness import value_sha
from makespan.easyscale.trainer import ELASTIC_RECOVERIES, RunFolder
from makespan.errors import InputError, WorkerError
from makespan.runtime import LocalLauncher, SlurmLauncher
from makespan.tables import read_csv

pytestmark = pytest.mark.xdist_group("training")

JOB = Path(__file__).parents[1] / "support" / "recovering_job.py"
STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def trainer(run_dir, options=None):
    names = {name: f"{JOB}:{name}" for name in ("data", "loss", "after_reduce")}
    options = {"lr_scheduler": {"step_size": 3}} | (options or {})
    return ElasticTrainer(
        f"{JOB}:model", "adam", run_dir=run_dir, lr_scheduler="step", n_logical_workers=5, micro_batch_size=4,
        options=options, **names,
    )  # fmt: skip


def wait_until(is_met):
    while not is_met():
        time.sleep(0.05)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return last_bits(trainer(tmp_path_factory.mktemp("straight")).run(STEPS))


def recovered(tmp_path, killer, survives=1, **options):
    of_job = {"model": {"held": killer.hold(tmp_path / "held")}} | options.pop("of_job", {})
    result = trainer(tmp_path / "run", of_job).run(STEPS, survives=survives, on_event=killer, **options)
    assert not killer.faults, f"not reached: {killer.faults}"
    return result


def test_losses_in_every_phase_of_a_mini_batch_cost_no_bit(straight, tmp_path):
    killer = Killer(("forward", 1, [0]), ("backward", 4, [3]), ("sum", 7, [1]), ("step", 10, [4]))
    result = recovered(tmp_path, killer)
    assert last_bits(result) == straight
    assert list(result.reconfigurations["cause"]) == ["start"] + 4 * ["recovery"]
    assert result.reconfigurations["new_mapping"].iloc[-1] == "0,1,2,3,4"


def test_two_processes_lost_at_once_and_another_one_in_the_recovery(straight, tmp_path):
    killer = Killer(("contexts", 4, [0, 3]), ("copy", 3, [2]))
    result = recovered(tmp_path, killer, survives=3)
    assert last_bits(result) == straight
    table = (tmp_path / "run" / "recoveries.csv").read_text().splitlines()
    assert len(table) == 2
    # The set without 0 and 3 may have become stage 1 before 2 was lost.
    assert re.match("[12],3,lost,0 2 3,,,0 2 3,0,2,", table[1])


def test_a_run_that_loses_all_processes_says_how_they_ended_and_continues_from_its_checkpoint(
    straight, tmp_path, caplog
):
    killer = Killer(("forward", 7, [0, 1, 2, 3, 4]))
    assert last_bits(recovered(tmp_path, killer, checkpoint_every=5)) == straight
    (said,) = [text for text in caplog.messages if "resuming from the last checkpoint" in text]
    assert said.startswith("all processes were lost: process ")
    assert said.count("was ended by signal SIGKILL") == 5


def test_processes_lost_while_others_connect_and_replicate(straight, tmp_path):
    killer = Killer(("sum", 3, [1]), ("connect", 2, [0]), ("done", 7, [4]), ("replicate", 6, [3]))
    assert last_bits(recovered(tmp_path, killer, survives=2, checkpoint_every=5)) == straight


def test_a_process_that_stops_is_killed_and_costs_no_bit(straight, tmp_path):
    killer = Killer(("sum", 5, [2]), number=signal.SIGSTOP)
    result = recovered(tmp_path, killer, hang_s=3.0)
    assert last_bits(result) == straight
    assert "hung" in {event.kind for event in killer.events}


def test_processes_one_mini_batch_apart_copy_from_the_one_that_is_ahead(straight, tmp_path):
    class Ahead(Killer):
        """Kills process 4 once process 0, which alone has its results, has taken the step."""

        def __call__(self, event):
            super().__call__(event)
            begun = {"phase": "forward", "iteration": 7}
            if event.kind == "announce" and event.node == 0 and event.values == begun and 4 in self.pids:
                os.kill(self.pids.pop(4), signal.SIGKILL)

    tears = {"loss": {"tears": {"process": 4, "step": 6}}}
    result = recovered(tmp_path, Ahead(), of_job=tears, hang_s=300.0)
    assert last_bits(result) == straight
    row = (tmp_path / "run" / "recoveries.csv").read_text().splitlines()[1]
    assert row.startswith("1,6,lost,4,,,4,3,")  # one of four was there, and three were behind


def test_too_many_losses_return_to_the_checkpoint(straight, tmp_path, caplog):
    killer = Killer(("sum", 7, [1, 2]))
    result = recovered(tmp_path, killer, checkpoint_every=4)
    assert last_bits(result) == straight
    assert "resuming from the last checkpoint" in caplog.text
    assert list(result.reconfigurations["cause"]) == ["start", "failure"]


def test_several_jobs_in_one_call_survive_a_loss_each(straight, tmp_path):
    killers, begun = [Killer(("sum", 4, [1])), Killer(("contexts", 2, [0]))], []

    def pass_on(event):
        if event.kind == "start" and event.node == 0:
            begun.append(killers[len(begun)])
        begun[-1](event)

    jobs = [
        trainer(tmp_path / name, {"model": {"held": killer.hold(tmp_path / f"held-{name}")}})
        for name, killer in zip("ab", killers, strict=True)
    ]
    results = run_together(jobs, STEPS, THREE, survives=1, on_event=pass_on)
    assert [last_bits(result) for result in results] == [straight, straight]
    assert [changes(tmp_path / name)["lost"] for name in "ab"] == [["1"], ["0"]]


# --- optimizers in shards ---

IN_SHARDS = {"zero_stage": 1, "hash_every": 1}


def all_bits(result):
    """Losses, parameters, optimizer of every mini-batch; contexts are known at the end."""
    steps = result.steps.sort_values(["step", "rank"])
    last = steps[steps["step"] == steps["step"].max()]
    names = ["step", "rank", "loss_hex", "parameter_sha", "optimizer_sha"]
    return steps[names].to_numpy().tolist(), list(last["context_sha"])


@pytest.fixture(scope="module")
def hashed(tmp_path_factory):
    """Bits of every mini-batch, without shards, and the last checkpoint."""
    result = trainer(tmp_path_factory.mktemp("hashed")).run(STEPS, hash_every=1)
    return all_bits(result), saved_values(result)


def saved_values(result):
    """Hashes of the model and the whole optimizer in the last checkpoint, as anybody reads them."""
    model, shared = (torch.load(result.checkpoint / name) for name in ("model.pt", "shared.pt"))
    return value_sha(model), value_sha(shared["optimizer"])


def test_shards_survive_losses_before_a_step_in_it_and_before_its_parameters_are_there(hashed, tmp_path):
    killer = Killer(("done", 4, [2]), ("contexts", 6, [0]), ("step", 8, [4]), ("sum", 11, [1]))
    result = recovered(tmp_path, killer, checkpoint_every=9, **IN_SHARDS)
    assert (all_bits(result), saved_values(result)) == hashed
    assert list(result.reconfigurations["cause"]) == ["start"] + 4 * ["recovery"]


def test_shards_survive_two_losses_at_once_and_others_in_the_recovery(hashed, tmp_path):
    killer = Killer(("done", 5, [0, 1]), ("copy", 4, [3]))
    result = recovered(tmp_path, killer, survives=3, **IN_SHARDS)
    assert all_bits(result) == hashed[0]
    assert len((tmp_path / "run" / "recoveries.csv").read_text().splitlines()) == 2


class Torn(Killer):
    """Kills process 4 when process 0, which alone has its results, has stepped; and then others, too."""

    def __call__(self, event):
        super().__call__(event)
        stepped = {"phase": "done", "iteration": 7}
        if event.kind == "announce" and event.node == 0 and event.values == stepped and 4 in self.pids:
            os.kill(self.pids.pop(4), signal.SIGKILL)


TEARS = {"loss": {"tears": {"process": 4, "step": 6}}}


def test_processes_that_are_ready_take_the_step_of_their_shards_in_the_recovery(hashed, tmp_path):
    """Nobody has all parameters: process 0 waits for those that the others have yet to step."""
    result = recovered(tmp_path, Torn(), of_job=TEARS, hang_s=300.0, **IN_SHARDS)
    assert all_bits(result) == hashed[0]
    row = (tmp_path / "run" / "recoveries.csv").read_text().splitlines()[1]
    assert row.startswith("1,6,lost,4,,,4,3,")


@pytest.mark.parametrize("phase", ["copy", "replicate"])
def test_the_only_process_that_has_stepped_is_lost_in_the_recovery(hashed, tmp_path, phase):
    """The others have stepped too by then, or stay where they are; each shard is on three processes."""
    killer = Torn((phase, 6, [0]))
    result = recovered(tmp_path, killer, survives=2, of_job=TEARS, hang_s=300.0, **IN_SHARDS)
    assert all_bits(result) == hashed[0]


def test_more_losses_than_a_shard_has_copies_return_to_the_checkpoint(hashed, tmp_path, caplog):
    killer = Killer(("done", 7, [1, 2]))
    result = recovered(tmp_path, killer, checkpoint_every=4, **IN_SHARDS)
    assert (all_bits(result), saved_values(result)) == hashed
    assert "resuming from the last checkpoint" in caplog.text


# --- processes that leave and join ---

THREE = "0,1/2,3/4"


def changes(run_dir):
    """Processes that were lost, drained and joined, in order; a change may take in another one."""
    table = read_csv(run_dir / "recoveries.csv", ELASTIC_RECOVERIES)
    return {name: [cell for cell in table[name] if cell] for name in ("kind", "lost", "drained", "joined")}


def joining(run_dir, ended):
    def join():
        try:
            ended.append(join_run(run_dir))
        except WorkerError as error:
            ended.append(str(error))

    threading.Thread(target=join, daemon=True).start()


def changed(tmp_path, gate, mapping=THREE, **options):
    """Run a job whose processes leave and join."""
    result = recovered(tmp_path, gate, mapping=mapping, **options)
    assert not gate.acts
    return result


def test_another_mapping_is_requested_and_the_run_suspended_through_checkpoints(straight, tmp_path):
    another = ("sum", 3, lambda: request_change(tmp_path / "run", "3,1/0,2,4"))
    none = ("sum", 7, lambda: request_change(tmp_path / "run", devices=""))
    result = changed(tmp_path, Gate(acts=[another, none]), mapping=None)
    assert (result.state, 7 <= result.step < STEPS) == ("pending", True)
    assert list(result.reconfigurations["cause"]) == ["start", "request"]
    result = recovered(tmp_path, Killer(("step", 11, [0])))
    assert last_bits(result) == straight
    assert list(result.reconfigurations["cause"]) == ["start", "request", "run", "recovery"]


def test_a_process_with_a_notice_leaves_and_nothing_is_repeated_or_read(straight, tmp_path):
    gate = Gate(acts=[("sum", 4, lambda: gate.notify(1))])
    result = changed(tmp_path, gate)
    assert last_bits(result) == straight
    assert not [event for event in gate.events if event.kind == "lost"]
    begun = [
        event.values["iteration"]
        for event in gate.events
        if event.kind == "announce" and event.node == 0 and event.values["phase"] == "forward"
    ]
    assert begun == list(range(1, STEPS + 1))
    assert changes(tmp_path / "run") == {"kind": ["drained"], "lost": [], "drained": ["1"], "joined": []}
    assert list(result.reconfigurations["cause"]) == ["start", "drain"]
    assert result.reconfigurations["new_mapping"].iloc[-1] == "0,1,2/3,4"
    assert not result.steps["micro_batch_s"].isna().any()  # the one that left told its times before
    # The first checkpoint is that of the end, so there was none to read.
    assert [path.name for path in (tmp_path / "run" / "records").iterdir()] == [f"step-{STEPS:08d}.json"]


def test_a_drain_is_no_loss_so_that_as_many_losses_may_follow(straight, tmp_path, caplog):
    def ask():
        said.append(CliRunner().invoke(main, f"easyscale drain --run-dir {tmp_path}/run --json 1 77".split()))

    said = []
    gate = Gate(("contexts", 7, [0]), acts=[("sum", 3, ask)])
    result = changed(tmp_path, gate, checkpoint_every=4)
    assert json.loads(said[0].stdout)["processes"] == [1, 77]
    assert "asked to drain 77, not in the run" in caplog.text
    assert last_bits(result) == straight
    found = changes(tmp_path / "run")
    assert (found["lost"], found["drained"], found["kind"][-1]) == (["0"], ["1"], "lost")
    assert result.reconfigurations["new_mapping"].iloc[-1] == "0,1,2,3,4"


def test_processes_are_lost_while_one_leaves_and_that_one_too(straight, tmp_path):
    gate = Gate(("copy", 3, [2]), ("copy", 3, [0]), acts=[("sum", 3, lambda: gate.notify(0))])
    assert last_bits(changed(tmp_path, gate, "0/1/2/3,4", survives=2)) == straight


def test_lost_processes_are_replaced_and_copy_from_the_others(straight, tmp_path):
    gate = Gate(("sum", 4, [1]), ("forward", 8, [0]), enters={6: 3, 10: 4})
    result = changed(tmp_path, gate, n_replacements=2)
    assert last_bits(result) == straight
    found = changes(tmp_path / "run")
    assert (found["lost"], found["joined"]) == (["1", "0"], ["2", "2"])
    assert result.reconfigurations["new_mapping"].iloc[-1] == THREE
    assert [path.name for path in (tmp_path / "run" / "records").iterdir()] == [f"step-{STEPS:08d}.json"]


def test_a_replacement_has_the_kernel_set_of_the_process_that_it_replaces(tmp_path):
    gate = Gate(("sum", 4, [1]), enters={6: 2})
    of_run = {"devices": "A,seq", "mixes_devices": True, "n_replacements": 1}
    result = recovered(tmp_path, gate, **of_run)
    assert list(result.reconfigurations["new_devices"]) == ["A,seq", "A", "A,seq"]
    steps = result.steps[result.steps["step"] == STEPS]
    assert list(steps["device"]) == ["A"] * 3 + ["seq"] * 2  # as the processes themselves know it


def test_processes_join_beyond_those_of_the_start_which_then_leave(straight, tmp_path):
    """Two processes become four, of which the later two go on alone; one of these is lost."""
    ended, run_dir = [], tmp_path / "run"

    def two_join():
        joining(run_dir, ended)
        joining(run_dir, ended)

    def first_leave():
        gate.notify(1)
        drain_processes(run_dir, [0])

    acts = [("forward", 2, two_join), ("sum", 6, first_leave)]
    gate = Gate(("contexts", 10, [3]), enters={3: 2, 4: 3}, acts=acts)
    result = changed(tmp_path, gate, "0,1,2/3,4", checkpoint_every=9)
    assert last_bits(result) == straight
    assert result.reconfigurations["new_mapping"].iloc[-1] == "0,1,2,3,4"
    found = changes(run_dir)
    assert found["joined"] and found["drained"] and found["lost"] == ["1"]
    wait_until(lambda: len(ended) == 2)
    assert "finished" in ended and any("ended with status -9" in text for text in ended)


def test_shards_move_to_processes_that_join_and_from_those_that_leave(hashed, tmp_path):
    """Three processes become four, one leaves, one is lost; each holds its part before each step."""
    counts, run_dir, ended = tmp_path / "counts", tmp_path / "run", []
    counts.mkdir()
    acts = [("forward", 2, lambda: joining(run_dir, ended)), ("sum", 7, lambda: gate.notify(1))]
    gate = Gate(("step", 10, [0]), enters={4: 3}, acts=acts)
    of_job = {"after_reduce": {"counts": str(counts)}}
    result = changed(tmp_path, gate, of_job=of_job, checkpoint_every=5, **IN_SHARDS | {"hash_every": 0})
    expected, saved = hashed
    assert [row[2] for row in all_bits(result)[0]] == [row[2] for row in expected[0]]
    assert saved_values(result) == saved
    found = changes(run_dir)
    assert (found["joined"], found["drained"], found["lost"]) == (["3"], ["1"], ["0"])
    wait_until(lambda: ended)
    assert ended == ["finished"]
    held = {}
    for path in counts.glob("[0-9]*"):
        held.setdefault(int(path.name.partition("-")[0]), []).append(int(path.read_text()))
    whole, largest = 2 * 244, 2 * 128  # elements of the two moments of Adam
    assert len(held[1]) == 3 and len(held[5]) == 4
    for each in (held[2], held[5], held[9]):
        assert sum(each) == 2 * whole
        assert max(each) <= 2 / len(each) * whole + largest


def test_a_process_beyond_the_logical_workers_waits_until_one_is_lost(straight, tmp_path):
    ended = []
    joins = ("forward", 2, lambda: joining(tmp_path / "run", ended))
    gate = Gate(("sum", 9, [0]), enters={4: 5}, acts=[joins])
    result = changed(tmp_path, gate, "0/1/2/3/4")
    assert last_bits(result) == straight
    found = changes(tmp_path / "run")
    assert (found["lost"], found["joined"]) == (["0"], ["4"])
    assert result.reconfigurations["new_mapping"].iloc[-1] == "0/1/2/3/4"
    wait_until(lambda: ended == ["finished"])


def test_a_process_that_dies_while_it_joins_is_done_without(straight, tmp_path):
    class Joined(Gate):
        def __call__(self, event):
            super().__call__(event)
            if event.kind == "announce" and event.node == 3 and event.values["phase"] == "replicate":
                os.kill(self.pids[3], signal.SIGKILL)

    gate = Joined(("sum", 3, [2]), enters={6: 3})
    result = changed(tmp_path, gate, n_replacements=1)
    assert last_bits(result) == straight
    assert set(changes(tmp_path / "run")["kind"]) == {"lost"}
    assert result.reconfigurations["new_mapping"].iloc[-1] == "0,1,2/3,4"


def test_notices_to_all_processes_suspend_the_run(straight, tmp_path):
    gate = Gate(acts=[("sum", 5, lambda: gate.notify(0, 1, 2))])
    result = changed(tmp_path, gate)
    assert (result.state, 5 <= result.step < STEPS) == ("pending", True)
    assert last_bits(changed(tmp_path, Gate())) == straight


def test_what_cannot_be_recovered_is_rejected_before_the_start(tmp_path, monkeypatch):
    for mapping, survives in (("0,1,2,3,4", 1), ("0,1/2,3,4", 2)):
        with pytest.raises(
            InputError, match=rf"survives is {survives} with \d process\(es\); expected at most"
        ):
            trainer(tmp_path).run(STEPS, mapping, survives=survives)
    for name in ("on_event", "on_regroup"):
        with pytest.raises(InputError, match=f"{name} is given and survives is 0"):
            trainer(tmp_path).run(STEPS, **{name: print})
    with pytest.raises(InputError, match="progress_s is -1; expected a number >= 0"):
        trainer(tmp_path).run(STEPS, progress_s=-1)
    with pytest.raises(InputError, match="hang_s is 1"):
        trainer(tmp_path).run(STEPS, survives=1, hang_s=1)
    for limit in ("timeout_s", "stall_timeout_s"):
        with pytest.raises(InputError, match=rf"survives is 1 and the launcher has {limit} 30.0; expected"):
            trainer(tmp_path).run(STEPS, survives=1, launcher=LocalLauncher(**{limit: 30.0}))
    with pytest.raises(InputError, match=r"has silence_timeout_s 60.0; expected a launcher without limits"):
        trainer(tmp_path).run(STEPS, survives=1, launcher=SlurmLauncher("cpu", silence_timeout_s=60.0))
    with pytest.raises(InputError, match="survives is 1 with a str; expected a LocalLauncher or a Slurm"):
        trainer(tmp_path).run(STEPS, survives=1, launcher="local")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for launcher in (SlurmLauncher("cpu"), SlurmLauncher()):
        with pytest.raises(InputError, match="survives is 1 with SlurmLauncher outside an allocation; exp"):
            trainer(tmp_path).run(STEPS, survives=1, launcher=launcher)
    with pytest.raises(InputError, match="n_replacements is 1 and survives is 0"):
        trainer(tmp_path).run(STEPS, n_replacements=1)
    assert not list(tmp_path.iterdir())


def test_nobody_joins_or_leaves_a_run_without_copies_of_contexts(tmp_path):
    for reach in (join_run, lambda run_dir: drain_processes(run_dir, [0])):
        with pytest.raises(InputError, match="where no run is active"):
            reach(tmp_path)
        with RunFolder(tmp_path).hold(), pytest.raises(InputError, match="expected a run with survives >= 1"):
            reach(tmp_path)
    with pytest.raises(InputError, match="no process to drain"):
        drain_processes(tmp_path, [])


def test_processes_join_runs_on_devices_of_the_same_kind_only(tmp_path):
    def ask(event):
        if event.kind == "resume":
            with pytest.raises(InputError) as raised:
                join_run(tmp_path, LocalLauncher("cuda"))
            told.append(str(raised.value))

    told = []
    trainer(tmp_path).run(1, "0,1,2/3,4", survives=1, on_event=ask)
    assert told[0].startswith(
        f"a process joins on device cuda and the run in {tmp_path} trains on cpu; expected"
    )


def test_a_step_of_slurm_joins_no_run_that_listens_on_its_own_machine_only(tmp_path, monkeypatch):
    def ask(event):
        if event.kind == "resume":
            with pytest.raises(InputError) as raised:
                join_run(tmp_path, SlurmLauncher("cpu"))
            told.append(str(raised.value))

    told = []
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    trainer(tmp_path).run(1, "0,1,2/3,4", survives=1, on_event=ask)
    assert "whose run takes processes of its own machine only; expected a run that was started" in told[0]
