"""Runs that lose processes and continue from the memory of the others have the bits of an undisturbed run."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forked import forking_servers

from makespan.easyscale import ElasticTrainer, request_change
from makespan.errors import InputError
from makespan.runtime import LocalLauncher

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


def bits(result):
    """Losses of all logical workers, and parameters and optimizer at the end."""
    steps = result.steps.drop_duplicates(["step", "rank"], keep="last").sort_values(["step", "rank"])
    last = steps[steps["step"] == steps["step"].max()]
    ends = {(row.parameter_sha, row.optimizer_sha) for row in last.itertuples()}
    return list(steps["loss_hex"]), ends, list(last["context_sha"])


class Killer:
    """Kills processes in phases that they announce: triples of phase, mini-batch and victims."""

    def __init__(self, *faults, number=signal.SIGKILL):
        self.faults, self.number, self.pids, self.done = list(faults), number, {}, []
        self.events = []

    def __call__(self, event):
        self.events.append(event)
        if event.kind == "hello":
            self.pids[event.node] = event.values["pid"]
        if event.kind != "announce" or not self.faults:
            return
        phase, step, victims = self.faults[0]
        if (event.values["phase"], event.values["iteration"]) == (phase, step) and event.node in victims:
            self.done.append(self.faults.pop(0))
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(self.pids[victim], self.number)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return bits(trainer(tmp_path_factory.mktemp("straight")).run(STEPS))


def recovered(tmp_path, killer, survives=1, **options):
    result = trainer(tmp_path, options.pop("of_job", None)).run(
        STEPS, survives=survives, on_event=killer, **options
    )
    assert not killer.faults, f"not reached: {killer.faults}"
    return result


def test_losses_in_every_phase_of_a_mini_batch_cost_no_bit(straight, tmp_path):
    killer = Killer(("forward", 1, [0]), ("backward", 4, [3]), ("sum", 7, [1]), ("step", 10, [4]))
    result = recovered(tmp_path, killer)
    assert bits(result) == straight
    assert list(result.reconfigurations["cause"]) == ["start"] + 4 * ["recovery"]
    assert result.reconfigurations["new_mapping"].iloc[-1] == "0,1,2,3,4"


def test_two_processes_lost_at_once_and_another_one_in_the_recovery(straight, tmp_path):
    killer = Killer(("contexts", 4, [0, 3]), ("copy", 3, [2]))
    result = recovered(tmp_path, killer, survives=3)
    assert bits(result) == straight
    table = (tmp_path / "recoveries.csv").read_text().splitlines()
    assert len(table) == 2
    assert table[1].startswith("1,3,0 2 3,0 2 3,0,2,")


def test_processes_lost_while_others_connect_and_replicate(straight, tmp_path):
    killer = Killer(("sum", 3, [1]), ("connect", 2, [0]), ("done", 7, [4]), ("replicate", 6, [3]))
    assert bits(recovered(tmp_path, killer, survives=2, checkpoint_every=5)) == straight


def test_a_process_that_stops_is_killed_and_costs_no_bit(straight, tmp_path):
    killer = Killer(("sum", 5, [2]), number=signal.SIGSTOP)
    result = recovered(tmp_path, killer, hang_s=3.0)
    assert bits(result) == straight
    assert "hung" in {event.kind for event in killer.events}


def test_processes_one_mini_batch_apart_copy_from_the_one_that_is_ahead(straight, tmp_path):
    killer = Killer()
    tears = {"loss": {"tears": {"process": 4, "step": 6}}}
    result = recovered(tmp_path, killer, of_job=tears)
    assert bits(result) == straight
    row = (tmp_path / "recoveries.csv").read_text().splitlines()[1]
    assert row.startswith("1,6,4,4,3,")  # one of four was there, and three were behind


def test_too_many_losses_return_to_the_checkpoint(straight, tmp_path, caplog):
    killer = Killer(("sum", 7, [1, 2]))
    result = recovered(tmp_path, killer, checkpoint_every=4)
    assert bits(result) == straight
    assert "resuming from the last checkpoint" in caplog.text
    assert list(result.reconfigurations["cause"]) == ["start", "failure"]


def test_another_mapping_is_requested_and_a_process_asked_to_end_through_checkpoints(straight, tmp_path):
    asked = set()

    class Asker(Killer):
        def __call__(self, event):
            super().__call__(event)
            if event.kind == "announce" and event.values == {"phase": "sum", "iteration": 3} and not asked:
                asked.add("mapping")
                request_change(tmp_path, "3,1/0,2,4")
            if event.kind == "announce" and event.values == {"phase": "sum", "iteration": 7} and event.node:
                os.kill(self.pids[event.node], signal.SIGTERM)

    result = recovered(tmp_path, Asker())
    assert (result.state, result.step >= 7) == ("pending", True)
    assert list(result.reconfigurations["cause"]) == ["start", "request"]
    result = recovered(tmp_path, Killer(("step", 11, [0])))
    assert bits(result) == straight
    assert list(result.reconfigurations["cause"]) == ["start", "request", "run", "recovery"]


def test_what_cannot_be_recovered_is_rejected_before_the_start(tmp_path):
    for mapping, survives in (("0,1,2,3,4", 1), ("0,1/2,3,4", 2)):
        with pytest.raises(
            InputError, match=rf"survives is {survives} with \d process\(es\); expected at most"
        ):
            trainer(tmp_path).run(STEPS, mapping, survives=survives)
    with pytest.raises(InputError, match="on_event is given and survives is 0"):
        trainer(tmp_path).run(STEPS, on_event=print)
    with pytest.raises(InputError, match="hang_s is 1"):
        trainer(tmp_path).run(STEPS, survives=1, hang_s=1)
    for limit in ("timeout_s", "stall_timeout_s"):
        with pytest.raises(InputError, match=rf"survives is 1 and the launcher has {limit} 30.0; expected"):
            trainer(tmp_path).run(STEPS, survives=1, launcher=LocalLauncher(**{limit: 30.0}))
    loop = ElasticTrainer(loop=f"{JOB}:model", run_dir=tmp_path)
    with pytest.raises(InputError, match=r"survives is 1 and loop is .* expected a job whose functions"):
        loop.run(STEPS, survives=1)
    assert not list(tmp_path.iterdir())
