"""Live jobs that resume from memory after a loss: the engine with a stand-in for training."""

import json
import signal
from dataclasses import replace

import pytest
from click.testing import CliRunner
from fake_trainer import FakeTrainer, drive_clocks
from live_runs import EVERY, SPEED, Down, Grows, Scripted, job, profiled, rows, run, setting

from makespan import live
from makespan.cli import live as cli_live, main
from makespan.errors import InputError
from makespan.live.run import LiveProfile
from makespan.policies import policy
from makespan.sim import RECOVERY_KINDS, FailureModel
from makespan.tables import LIVE, LIVE_FAILURES, LOSSES, read_csv
from makespan.units import DAY

PAUSE_S = 6.0
"""Seconds of the schedule until a job trains again that resumes from memory."""


@pytest.fixture(autouse=True)
def driven(monkeypatch):
    """Let every run drive its clock, and predict it with few simulations and the checkpoints of the run."""
    drive_clocks(monkeypatch)
    few = replace(live.live_settings(), noise_simulations=2, checkpoint_interval_s=EVERY * 0.6 / SPEED)
    monkeypatch.setattr("makespan.live.run.live_settings", lambda: few)


class SurvivingTrainer(FakeTrainer):
    """A stand-in whose segments survive the loss of slots; the running step is lost.

    ``calls`` has what was asked of them: the call, the job, and slots.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls, self.waits, self.resumes, self.broken = [], set(), set(), set()
        self.now, self.first = {}, {}

    def key(self, segment):
        """Job and first generation of a segment."""
        own = (segment.job.job_id, segment.generation)
        return self.first.get(own, own)

    def _train(self, segment):
        name, key = segment.job.job_id, self.key(segment)
        self.now[key] = segment
        yield self.start_wall_s
        first = step = self.saved.get(name, 0)
        self.done[key] = step
        while step < segment.job.steps and key not in self.stops:
            if key in self.waits:
                yield 1e-3 / SPEED
                continue
            if key in self.resumes:
                self.resumes.discard(key)
                yield PAUSE_S / SPEED
            yield self.now[key].configuration.iter_time_s / self.speed
            if key in self.waits | self.resumes:
                continue
            step += 1
            self.done[key] = step
            if step % self.checkpoint_every == 0:
                self.saved[name] = step
        self.saved[name] = step
        return live.SegmentResult(step, step - first, 0.0, float(step))

    def steps_done(self, segment):
        return self.done.get(self.key(segment))

    def stop(self, segment):
        self.stops.add(self.key(segment))

    def kill(self, segment):
        self.killed.add(self.key(segment))

    def lose(self, segment, slots, *, waits):
        key = self.key(segment)
        self.calls.append(("lose", key[0], tuple(slots)))
        self.done[key] = None
        self.waits.add(key)
        for slot in slots:
            self.busy.pop(slot, None)
        return True

    def resume(self, segment, before):
        key = self.first[segment.job.job_id, segment.generation] = self.key(before)
        self.calls.append(("resume", key[0], segment.slots))
        self.now[key] = segment
        self.waits.discard(key)
        self.resumes.add(key)

    def join(self, segment, slots):
        self.calls.append(("join", segment.job.job_id, tuple(slots)))
        self.clashes += [slot for slot in slots if slot in self.busy]
        self.busy |= dict.fromkeys(slots, segment.job.job_id)

    def has_left(self, segment, slot):
        self.busy.pop(slot, None)
        return True

    def crashed(self, segment):
        key = self.key(segment)
        for step, slot in list(self.broken):
            if (self.done.get(key) or 0) >= step and slot in segment.slots:
                self.broken.discard((step, slot))
                return (slot,)
        return ()


def surviving(kind, jobs, events, chosen=None, trainer=None, **options):
    trainer = trainer or SurvivingTrainer(SPEED, checkpoint_every=EVERY)
    changes = {"recovery": kind, "pause_s": PAUSE_S / SPEED, "n_logical_workers": 2}
    return run(jobs, events, chosen, trainer, changes=changes, **options)


# --- resilient jobs ---------------------------------------------------------------------------------


def test_a_resilient_job_goes_on_at_once_with_the_slots_that_are_left():
    events = [(35.5, 1, "failed"), (90.0, 1, "joined")]
    result, trainer = surviving("resilient", [job("a", 0, 80, 2)], events)
    found = rows(result, "started", "interrupted", "regrouped", "finished", "reconfigured")
    assert found[:3] == [(0.0, "started", "a"), (35.5, "interrupted", "a"), (35.5, "regrouped", "a")]
    assert trainer.calls == [("lose", "a", (1,)), ("resume", "a", (0,))]
    (lost,) = result.live_losses.to_dict("records")
    assert (lost["node_id"], lost["recovery"], lost["outcome"]) == (1, "resilient", "in memory")
    assert lost["lost_steps"] == 0.0 and trainer.saved == {"a": 80}
    assert len(trainer.segments) == 1 and result.violations == () and trainer.clashes == []
    # 55 steps of 0.6 s since 2 s; the pause; 25 steps of 1 s on one slot
    assert found[-1] == (pytest.approx(35.5 + PAUSE_S + 25, abs=0.2), "finished", "a")


def test_a_live_run_of_resilient_jobs_is_its_simulation():
    events = [(35.5, 1, "failed"), (90.0, 1, "joined")]
    result, _ = surviving("resilient", [job("a", 0, 80, 2), job("b", 40, 20)], events)
    row = LIVE_FAILURES.validate(LIVE.validate(result.comparison, "test"), "test").iloc[0]
    assert row["n_interruptions"] == row["predicted_n_interruptions"] == 1
    assert row["lost_steps"] == 0 and row["predicted_lost_steps"] < 1
    assert row["jct_difference_pct"] == pytest.approx(0, abs=1.5)
    assert row["goodput"] == pytest.approx(row["predicted_goodput"], abs=0.02)
    assert result.prediction.values["recovery"] == "resilient"


def test_a_resilient_job_with_all_its_slots_on_the_node_returns_to_its_checkpoint():
    result, trainer = surviving("resilient", [job("a", 0, 60)], [(35.5, 0, "failed"), (50.5, 0, "joined")])
    assert rows(result, "interrupted", "regrouped", "started") == [
        (0.0, "started", "a"),
        (35.5, "interrupted", "a"),
        (35.5, "started", "a"),
    ]
    assert result.live_losses["outcome"].tolist() == ["checkpoint"]
    assert result.live_losses["lost_steps"].tolist() == [3.0] and trainer.calls == []


def test_a_resilient_job_that_the_policy_suspends_at_once_writes_a_checkpoint_and_frees_its_slot():
    script = Scripted(
        {0: {"a": ("ga", (0, 1))}, 1: {}, 2: {"a": None, "b": ("ga", (0,))}, 3: {"a": ("ga", (0,))}}
    )
    jobs = [job("a", 0, 80, 2), job("b", 10, 20)]
    result, trainer = surviving("resilient", jobs, [(35.5, 1, "failed")], script)
    found = rows(result, "regrouped", "suspended", "started", "rolled_back")[1:]
    assert found[:3] == [(35.5, "regrouped", "a"), (35.5, "suspended", "a"), (35.5, "started", "b")]
    assert [one.slots for one in trainer.segments] == [(0, 1), (0,), (0,)] and trainer.clashes == []
    assert result.live_losses["outcome"].tolist() == ["in memory"]
    assert trainer.saved == {"a": 80, "b": 20} and result.violations == ()
    (ready_s,) = [time_s for time_s, _, name in rows(result, "ready") if name == "b"]
    assert ready_s < 60.0  # it has the slot as soon as the checkpoint is there


# --- elastic jobs -----------------------------------------------------------------------------------


def test_an_elastic_job_waits_for_the_decision_and_goes_on_where_its_slots_are():
    script = Scripted({0: {"a": ("ga", (0, 1))}, 1: {"a": ("ga", (0,))}})
    result, trainer = surviving("elastic", [job("a", 0, 80, 2)], [(35.5, 1, "failed")], script)
    found = rows(result, "interrupted", "regrouped", "started", "rolled_back")
    assert found[1:] == [(35.5, "interrupted", "a"), (35.5, "started", "a")]
    assert trainer.calls == [("lose", "a", (1,)), ("resume", "a", (0,))]
    assert result.live_losses["outcome"].tolist() == ["in memory"] and len(trainer.segments) == 1
    assert result.violations == () and trainer.saved == {"a": 80}


def test_an_elastic_job_without_devices_in_the_next_decision_returns_to_its_checkpoint():
    script = Scripted({0: {"a": ("ga", (0, 1))}, 2: {"a": ("ga", (0, 1))}})
    events = [(35.5, 1, "failed"), (50.5, 1, "joined")]
    result, trainer = surviving("elastic", [job("a", 0, 80, 2)], events, script)
    assert rows(result, "interrupted", "rolled_back", "started")[1:] == [
        (35.5, "interrupted", "a"),
        (35.5, "rolled_back", "a"),
        (50.5, "started", "a"),
    ]
    lost = result.live_losses
    assert lost["outcome"].tolist() == ["in memory", "checkpoint"]
    assert lost["lost_steps"].tolist() == [0.0, 5.0]  # 55 steps were done, 50 were saved
    assert len(trainer.segments) == 2 and trainer.clashes == [] and result.violations == ()


def test_an_elastic_job_gets_further_slots_without_a_restart():
    script = Grows({0: {"a": ("ga", (0, 1))}})
    result, trainer = surviving("elastic", [job("a", 0, 80, 2)], [(35.5, 1, "failed")], script, n_slots=4)
    assert trainer.calls == [("lose", "a", (2,)), ("resume", "a", (0,)), ("join", "a", (1,))]
    assert len(trainer.segments) == 1 and trainer.clashes == [] and result.violations == ()


def test_an_elastic_job_that_moves_to_other_nodes_writes_a_checkpoint_first():
    script = Scripted({0: {"a": ("ga", (0, 1))}, 1: {"a": ("ga", (2,))}})
    result, trainer = surviving(
        "elastic", [job("a", 0, 80, 2)], [(35.5, 1, "failed")], script, n_slots=3, n_nodes=3
    )
    assert trainer.calls == [("lose", "a", (1,))]
    assert [one.slots for one in trainer.segments] == [(0, 1), (2,)]
    assert result.live_losses["lost_steps"].sum() == 0.0 and trainer.saved == {"a": 80}
    assert result.violations == () and trainer.clashes == []


# --- both -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["elastic", "resilient"])
def test_a_process_that_crashes_is_replaced_and_counts_as_an_interruption(kind):
    trainer = SurvivingTrainer(SPEED, checkpoint_every=EVERY)
    trainer.broken = {(13, 1)}
    result, _ = surviving(kind, [job("a", 0, 40, 2)], [(900.0, 1, "failed")], trainer=trainer)
    kinds = [what for _, what, _ in rows(result, "interrupted", "regrouped", "started", "finished")]
    assert kinds == ["started", "interrupted", "regrouped", "finished"]
    assert trainer.calls == [("lose", "a", (1,)), ("resume", "a", (0,)), ("join", "a", (1,))]
    assert result.live_losses["outcome"].tolist() == ["in memory"]
    assert result.comparison["n_interruptions"].tolist() == [1] and trainer.clashes == []


@pytest.mark.parametrize("kind", RECOVERY_KINDS)
@pytest.mark.parametrize("name", ["fifo", "morphling-lookahead", "srtf"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_job_finishes_and_no_slot_of_a_node_that_is_down_is_used(kind, name, seed):
    where = live.slot_cluster(4, 2)
    model = FailureModel(100 * DAY / 3600, repair_s=20.0, seed=seed, days=600 / DAY)
    events = [(event.time_s, event.node_id, event.kind) for event in model.events(where)]
    jobs = [job("a", 0, 90), job("b", 5, 60, 2), job("c", 6, 75, 2), job("d", 20, 40, 1)]
    down = Down()

    class Watched(SurvivingTrainer):
        def join(self, segment, slots):
            assert not down.has(segment.slots)
            super().join(segment, slots)

        def steps(self, segment):
            assert not down.has(segment.slots)
            return super().steps(segment)

    trainer = Watched(SPEED, checkpoint_every=EVERY)
    result, _ = surviving(kind, jobs, events, policy(name), trainer, n_slots=4, observers=[down])
    assert result.comparison["n_interruptions"].iloc[0] >= 2
    assert trainer.saved == {"a": 90, "b": 60, "c": 75, "d": 40} and trainer.clashes == []
    assert result.violations == () and trainer.busy == {}


def test_an_interrupt_while_a_job_waits_in_memory_keeps_its_steps(tmp_path):
    class Waits(Scripted):
        interval_s = 20.0

    class Interrupts:
        is_done = False

        def observe(self, event, view):
            if event.kind == "interrupted" and not self.is_done:
                self.is_done = True
                signal.raise_signal(signal.SIGINT)

    script = Waits({0: {"a": ("ga", (0, 1))}, 1: {"a": ("ga", (0,))}})
    first = SurvivingTrainer(SPEED, checkpoint_every=EVERY)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            surviving(
                "elastic", [job("a", 0, 80, 2)], [(35.5, 1, "failed")], script, first,
                directory=tmp_path, observers=[Interrupts()],
            )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    assert first.busy == {} and first.saved == {"a": 55}  # all that were done, and not 50
    second = SurvivingTrainer(SPEED, checkpoint_every=EVERY)
    second.saved = dict(first.saved)
    result, _ = surviving(
        "elastic", [job("a", 0, 80, 2)], [(35.5, 1, "failed")], Scripted({0: {"a": ("ga", (0,))}}), second,
        directory=tmp_path,
    )  # fmt: skip
    assert second.saved == {"a": 80} and result.violations == ()


def test_processes_that_end_while_their_job_waits_return_it_to_its_checkpoint():
    class Waits(Scripted):
        interval_s = 20.0

    class Ends(SurvivingTrainer):
        def lose(self, segment, slots, *, waits):
            super().lose(segment, slots, waits=waits)
            self.killed.add(self.key(segment))
            return True

    script = Waits({0: {"a": ("ga", (0, 1))}, 1: {"a": ("ga", (0,))}})
    trainer = Ends(SPEED, checkpoint_every=EVERY)
    result, _ = surviving("elastic", [job("a", 0, 80, 2)], [(35.5, 1, "failed")], script, trainer)
    kinds = [what for _, what, _ in rows(result, "interrupted", "rolled_back", "started")]
    assert kinds == ["started", "interrupted", "rolled_back", "started"]
    assert result.live_losses["lost_steps"].tolist() == [0.0, 5.0] and trainer.saved == {"a": 80}


def test_only_plans_of_data_parallelism_are_offered_to_elastic_jobs():
    spec = live.live_workload("live-small").data_parallel()
    assert spec.plans == {1: ("ga",), 2: ("ga",)}
    with pytest.raises(InputError, match=r"plans gc on 1 slot\(s\); expected 'ga' among them"):
        replace(spec, plans={1: ("gc",), 2: ("ga",)}).data_parallel()
    for largest in (3, 4):
        with pytest.raises(
            InputError, match="requests for 3 slots and 'tiny-gpt' a global batch of 8; expected a"
        ):
            replace(spec, plans=dict.fromkeys((1, 3, largest), ("ga",))).data_parallel()


def test_the_recovery_of_a_setting_comes_back_from_disk_and_another_one_is_refused(tmp_path):
    what = replace(setting([job("a", 0, 3)]), recovery="elastic", pause_s=0.5, n_logical_workers=2)
    what.save(tmp_path)
    back = live.LiveSetting.load(tmp_path)
    assert (back.recovery, back.pause_s, back.n_logical_workers) == ("elastic", 0.5, 2)
    with pytest.raises(InputError, match="has recovery 'elastic', but 'restart' is requested"):
        back.check_same("fifo", "test", 2, 0, 2)
    values = json.loads((tmp_path / "setting.json").read_text())
    for name in ("recovery", "pause_s", "n_logical_workers"):  # as written before jobs could survive
        del values[name]
    (tmp_path / "setting.json").write_text(json.dumps(values))
    assert live.LiveSetting.load(tmp_path).recovery == "restart"


# --- the command --------------------------------------------------------------------------------------


def test_the_command_says_that_the_restart_delay_is_unknown_if_every_job_resumed_from_memory():
    result, _ = surviving("resilient", [job("a", 0, 80, 2)], [(35.5, 1, "failed")])
    text = cli_live._comparison_text(result.comparison, result.jobs)
    assert "profiled, unknown in the run; slots held" in text and "nan" not in text


def test_the_command_runs_and_predicts_jobs_that_resume_from_memory(tmp_path, monkeypatch):
    asked = {}

    def measured(spec, *_, recovery, **__):
        asked.update(recovery=recovery, plans=dict(spec.plans))
        return LiveProfile(profiled(), 0.02, 0.02, {"tiny-gpt": 0.001}, PAUSE_S / SPEED)

    def trainer(directory, what, *_):
        asked.update(pause_s=what.pause_s, n_logical_workers=what.n_logical_workers)
        return SurvivingTrainer(what.scale, checkpoint_every=EVERY)

    monkeypatch.setattr("makespan.live.run.warm_up", lambda *_: None)
    monkeypatch.setattr("makespan.live.run.profile", measured)
    monkeypatch.setattr("makespan.live.run.process_trainer", trainer)
    listed = tmp_path / "failures.csv"
    times = [f"{0.5 * number + 0.3 * is_back},1,{('failed', 'joined')[is_back]}" for number in range(1, 20)
             for is_back in (0, 1)]  # fmt: skip
    listed.write_text("\n".join(["time_s,node_id,kind", *times, ""]))
    options = [
        "live",
        "--policy",
        "fifo",
        "--workload",
        "live-smoke",
        "--nodes",
        "2",
        "--recovery",
        "resilient",
    ]
    outcome = CliRunner().invoke(
        main, [*options, "--failures", str(listed), "--output", str(tmp_path / "out")]
    )
    assert outcome.exit_code == 0, outcome.output
    assert asked == {
        "recovery": "resilient", "plans": {1: ("ga",), 2: ("ga",)}, "pause_s": PAUSE_S / SPEED,
        "n_logical_workers": 2,
    }  # fmt: skip
    losses = read_csv(tmp_path / "out" / "live_losses.csv", LOSSES)
    assert "in memory" in set(losses["outcome"]) and set(losses["recovery"]) == {"resilient"}
    prediction = json.loads((tmp_path / "out" / "live_prediction.json").read_text())
    assert (prediction["recovery"], prediction["pause_s"]) == ("resilient", PAUSE_S / SPEED)
    assert prediction["n_interruptions"] >= 1
