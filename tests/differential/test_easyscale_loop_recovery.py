"""Own training loops that lose processes and continue from memory have the bits of an undisturbed run."""

import os
import signal
import threading
from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

from forked import SUPPORT, forking_servers
from killers import Gate, Killer

from makespan.easyscale import ElasticTrainer, join_run, request_change
from makespan.easyscale.randomness import value_sha
from makespan.easyscale.trainer import ELASTIC_RECOVERIES
from makespan.errors import WorkerError
from makespan.tables import read_csv

pytestmark = pytest.mark.xdist_group("training")

FILE = SUPPORT / "surviving_loop.py"
STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def trainer(run_dir, **options):
    return ElasticTrainer(
        loop=f"{FILE}:train", options={"loop": options}, run_dir=run_dir / "run", n_logical_workers=4,
        micro_batch_size=4, n_loaders=1, fold="ring",
    )  # fmt: skip


def bits(result):
    """Losses of all logical workers, contexts and hashes at the end, and all that the checkpoint shares."""
    steps = result.steps.drop_duplicates(["step", "rank"], keep="last").sort_values(["step", "rank"])
    last = steps[steps["step"] == steps["step"].max()]
    ends = {(row.parameter_sha, row.optimizer_sha) for row in last.itertuples()}
    shared = torch.load(result.checkpoint / "shared.pt", weights_only=True)
    return list(steps["loss_hex"]), ends, list(last["context_sha"]), {
        name: value_sha(value) for name, value in shared.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return bits(trainer(tmp_path_factory.mktemp("straight")).run(STEPS, "0/1/2,3"))


def survived(tmp_path, killer=None, mapping="0/1/2/3", faults=(), of_loop=None, **options):
    """Run a loop that processes are killed in, by themselves at faults, and by a killer."""
    killer = killer or Killer()
    of_loop = {"folder": str(tmp_path), "held": killer.hold(tmp_path / "held")} | (of_loop or {})
    ours = trainer(tmp_path, faults=[list(fault) for fault in faults], **of_loop)
    result = ours.run(STEPS, mapping, on_event=killer, **({"survives": 1} | options))
    assert not killer.faults, f"not reached: {killer.faults}"
    assert all((tmp_path / "{}-{}-{}".format(*fault)).exists() for fault in faults)
    return result


def changes(tmp_path):
    table = read_csv(tmp_path / "run" / "recoveries.csv", ELASTIC_RECOVERIES)
    return {name: [cell for cell in table[name] if cell] for name in ("kind", "lost", "drained", "joined")}


def test_losses_in_a_turn_between_two_steps_and_in_an_evaluation(straight, tmp_path):
    result = survived(tmp_path, faults=[("turn", 2, 0), ("step", 4, 1), ("evaluation", 6, 3)])
    assert bits(result) == straight
    assert list(result.reconfigurations["cause"]) == ["start"] + 3 * ["recovery"]
    assert changes(tmp_path)["lost"] == ["0", "0", "1"]
    assert [path.name for path in (tmp_path / "run" / "records").iterdir()] == [f"step-{STEPS:08d}.json"]
    # The function of the process that is left was called four times, and ended in order each time.
    assert [(tmp_path / f"{name}-2").read_text() for name in ("calls", "ends")] == ["xxxx", "xxxx"]
    assert (tmp_path / f"left-{STEPS}-2").read_text() == "x"


def test_losses_before_the_first_turn_in_the_second_one_and_at_the_end_of_a_body(straight, tmp_path):
    faults = [("begin", 1, 3), ("second turn", 3, 2), ("end", 5, 0)]
    assert bits(survived(tmp_path, faults=faults, checkpoint_every=3)) == straight


def test_losses_in_sums_and_while_contexts_are_sent(straight, tmp_path):
    killer = Killer(("sum", 2, [1]), ("contexts", 4, [2]), ("done", 6, [0]))
    assert bits(survived(tmp_path, killer)) == straight


def test_two_processes_lost_at_once_and_another_one_in_the_recovery(straight, tmp_path):
    killer = Killer(("contexts", 4, [0, 3]), ("replicate", 3, [2]))
    assert bits(survived(tmp_path, killer, survives=3)) == straight
    assert changes(tmp_path)["lost"] == ["0 2 3"]


def test_a_process_that_stops_is_killed_and_costs_no_bit(straight, tmp_path):
    killer = Killer(("sum", 5, [1]), number=signal.SIGSTOP)
    assert bits(survived(tmp_path, killer, "0,1/2/3", hang_s=3.0)) == straight
    assert "hung" in {event.kind for event in killer.events}


def test_processes_one_mini_batch_apart_copy_from_the_one_that_is_ahead(straight, tmp_path):
    class Ahead(Killer):
        """Kills process 2 once process 0, which alone has its results, begins the next mini-batch."""

        def __call__(self, event):
            super().__call__(event)
            begun = {"phase": "forward", "iteration": 6}
            if event.kind == "announce" and event.node == 0 and event.values == begun and 2 in self.pids:
                os.kill(self.pids.pop(2), signal.SIGKILL)

    tears = {"tears": {"process": 2, "step": 5}}
    assert bits(survived(tmp_path, Ahead(), "0,1/2/3", of_loop=tears, hang_s=300.0)) == straight
    table = read_csv(tmp_path / "run" / "recoveries.csv", ELASTIC_RECOVERIES)
    assert table[["step", "lost", "n_behind"]].to_numpy().tolist() == [[5, "2", 1]]


def test_processes_join_and_leave_and_one_that_joined_is_lost(straight, tmp_path):
    def join():
        with suppress(WorkerError):  # it is killed
            ended.append(join_run(tmp_path / "run"))

    ended, joining = [], threading.Thread(target=join)
    acts = [("forward", 2, joining.start), ("forward", 5, lambda: gate.notify(0))]
    gate = Gate(("sum", 7, [2]), enters={3: 2}, acts=acts)
    result = survived(tmp_path, gate, "0,1/2,3")
    joining.join()
    assert not gate.acts and not ended
    assert bits(result) == straight
    found = changes(tmp_path)
    assert (found["kind"], found["joined"], found["drained"]) == (["joined", "drained", "lost"], ["2"], ["0"])
    assert list(result.reconfigurations["cause"]) == ["start", "join", "drain", "recovery"]
    assert not (tmp_path / f"left-{STEPS}-0").exists()


def test_a_run_that_is_suspended_resumes_and_survives_again(straight, tmp_path):
    asks = ("sum", 4, lambda: request_change(tmp_path / "run", devices=""))
    result = survived(tmp_path, Gate(("sum", 2, [1]), acts=[asks]))
    assert (result.state, 4 <= result.step < STEPS) == ("pending", True)
    assert not list(tmp_path.glob("left-*"))
    result = survived(tmp_path, Killer(("sum", 7, [0])), "0,1/2,3")
    assert bits(result) == straight


def test_too_many_losses_return_to_the_checkpoint(straight, tmp_path, caplog):
    result = survived(tmp_path, Killer(("sum", 6, [1, 2])), checkpoint_every=4)
    assert bits(result) == straight
    assert "resuming from the last checkpoint" in caplog.text


def test_a_loop_that_stops_stays_stopped_after_losses_before_and_in_its_checkpoint(tmp_path):
    (tmp_path / "straight").mkdir()
    plain = trainer(tmp_path / "straight", stops=5).run(STEPS, "0,1,2,3")
    killer = Killer(("prepared", 0, [1]), ("committed", 0, [2]))
    result = survived(tmp_path, killer, of_loop={"stops": 5}, survives=2)
    assert (result.state, result.step) == ("finished", 5)
    (*found, _, shared), (*expected, _, of_plain) = bits(result), bits(plain)  # lost contexts had no hash yet
    assert (found, shared) == (expected, of_plain)
    assert (tmp_path / "left-5-0").read_text() == "x"


def test_whoever_is_lost_behind_the_loop_is_done_without(straight, tmp_path, caplog):
    result = survived(tmp_path, mapping="0,1/2/3", faults=[("behind", STEPS, 0)])
    assert (result.state, bits(result)) == ("finished", straight)
    assert "process(es) 0 lost behind the loop" in caplog.text
    assert list(result.reconfigurations["cause"]) == ["start"]


def test_an_error_behind_the_loop_ends_a_run_that_is_saved(straight, tmp_path):
    ours = trainer(tmp_path, raises="odd")
    with pytest.raises(WorkerError, match="failed behind its loop, which is saved: ValueError: odd"):
        ours.run(STEPS, "0,1/2,3", survives=1)
    assert bits(ours.run(STEPS)) == straight
