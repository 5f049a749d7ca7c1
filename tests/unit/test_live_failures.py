"""Live scheduling while nodes fail and return, with a stand-in for training."""

import json
import signal
from dataclasses import replace

import pandas as pd
import pytest
from click.testing import CliRunner
from fake_trainer import FakeTrainer, drive_clocks
from live_runs import EVERY, SPEED, Down, Scripted, job, profiled, rows, run, setting

from makespan import live
from makespan.cli import main
from makespan.errors import InputError, MakespanError
from makespan.live.run import LiveProfile
from makespan.metrics import Goodput, job_goodput
from makespan.policies import policy
from makespan.runtime import held_directory
from makespan.sim import FailureModel, NodeEvent
from makespan.tables import LIVE, LIVE_FAILURES, LIVE_JOBS, LOSSES, read_csv
from makespan.units import DAY


@pytest.fixture(autouse=True)
def driven(monkeypatch):
    """Let every run drive its clock, and predict it with few simulations and the checkpoints of the run."""
    drive_clocks(monkeypatch)
    few = replace(live.live_settings(), noise_simulations=2, checkpoint_interval_s=EVERY * 0.6 / SPEED)
    monkeypatch.setattr("makespan.live.run.live_settings", lambda: few)


# --- nodes and slots --------------------------------------------------------------------------------


def test_segments_run_on_the_slots_of_the_nodes_that_the_policy_names():
    script = Scripted({0: {"a": ("ga", (1,))}, 1: {"b": ("ga", (0,))}, 2: {"c": ("zero-dp", (0, 1))}})
    jobs = [job("a", 0, 30), job("b", 5, 20), job("c", 6, 10, 2)]
    result, trainer = run(jobs, (), script, n_slots=4)
    assert [(one.job.job_id, one.slots) for one in trainer.segments] == [
        ("a", (2,)),
        ("b", (0,)),
        ("c", (1, 3)),
    ]
    assert result.violations == () and trainer.clashes == []


def test_nodes_group_slots_and_change_no_time():
    jobs = [job("a", 0, 60), job("b", 5, 40), job("c", 6, 30, 2)]
    one, _ = run(jobs, (), n_nodes=1)
    two, _ = run(jobs, (), n_nodes=2)
    assert two.jobs["live_jct_s"].tolist() == one.jobs["live_jct_s"].tolist()
    assert two.jobs["predicted_jct_s"].tolist() == one.jobs["predicted_jct_s"].tolist()
    for result in (one, two):  # and nothing is said about failures where there are none
        assert list(result.comparison.columns) == LIVE.names
        assert list(result.jobs.columns) == LIVE_JOBS.names
        assert "node_events" not in result.prediction.values


def test_slots_that_cannot_be_spread_evenly_are_refused():
    for n_slots, n_nodes in ((3, 2), (1, 2), (2, 0)):
        with pytest.raises(
            InputError, match=rf"{n_slots} slot\(s\) on {n_nodes} node\(s\); expected as many"
        ):
            live.slot_cluster(n_slots, n_nodes)


# --- a node fails -------------------------------------------------------------------------------------


def test_a_job_loses_its_node_returns_to_its_checkpoint_and_waits_for_devices():
    events = [(35.5, 0, "failed"), (50.5, 0, "joined")]
    result, trainer = run([job("a", 0, 60), job("b", 0, 60)], events)
    assert rows(result, "node_failed", "interrupted", "node_joined", "started") == [
        (0.0, "started", "a"),
        (0.0, "started", "b"),
        (35.5, "node_failed", "0"),
        (35.5, "interrupted", "a"),
        (50.5, "node_joined", "0"),
        (50.5, "started", "a"),
    ]
    # 33 of the steps that began at 2 s were reported, and 30 were saved.
    (lost,) = result.live_losses.to_dict("records")
    assert (lost["job_id"], lost["node_id"], lost["recovery"], lost["outcome"]) == (
        "a",
        0,
        "restart",
        "checkpoint",
    )
    assert (lost["lost_steps"], lost["lost_gpu_s"]) == (3.0, pytest.approx(3 / SPEED))
    assert trainer.saved == {"a": 60, "b": 60}
    assert result.violations == () and trainer.clashes == []
    ends_s = {one: end for end, _, one in rows(result, "finished")}
    assert ends_s == {"a": pytest.approx(50.5 + 2 + 30), "b": pytest.approx(62.0)}


def test_a_live_run_under_failures_is_its_simulation_under_the_same_ones():
    events = [(35.5, 0, "failed"), (50.5, 0, "joined"), (60.5, 1, "failed"), (70.5, 1, "joined")]
    result, _ = run([job("a", 0, 60), job("b", 0, 60), job("c", 1, 60)], events)
    row = LIVE_FAILURES.validate(LIVE.validate(result.comparison, "test"), "test").iloc[0]
    assert row["jct_difference_pct"] == pytest.approx(0, abs=0.1)
    assert row["n_interruptions"] == row["predicted_n_interruptions"] == 2
    # A job loses half a step more in the simulation, where training is continuous.
    assert row["lost_steps"] == 3 + 8
    assert row["predicted_lost_steps"] == pytest.approx(3.5 + 8.5)
    assert row["goodput"] == pytest.approx(row["predicted_goodput"], abs=0.01)
    jobs = LIVE_FAILURES.validate(LIVE_JOBS.validate(result.jobs, "test"), "test").set_index("job_id")
    assert jobs["lost_steps"].to_dict() == {"a": 3.0, "b": 8.0, "c": 0.0}
    assert jobs["predicted_lost_steps"].to_dict() == pytest.approx({"a": 3.5, "b": 8.5, "c": 0.0})


def test_goodput_of_a_live_run_is_the_share_of_steps_that_were_kept():
    events = [(35.5, 0, "failed"), (50.5, 0, "joined")]
    result, _ = run([job("a", 0, 60)], events, Scripted({0: {"a": ("ga", (0,))}, 2: {"a": ("ga", (0,))}}))
    jobs = job_goodput(result.live_events, result.live_losses)
    total = Goodput.of(jobs)
    assert total.useful_gpu_s == pytest.approx(60 / SPEED)
    assert total.lost_gpu_s == pytest.approx(3 / SPEED)
    # A job is found to be ready up to 0.1 s after a step.
    for restarts_gpu_s in (total.restart_gpu_s, total.recovery_gpu_s):
        assert 2 / SPEED <= restarts_gpu_s + 1e-9 <= 3.1 / SPEED
    assert (15 + 2) / SPEED <= total.recovery_s <= (15 + 2) / SPEED + 0.1
    held_s = 35.5 + (82.5 - 50.5)
    assert result.comparison["goodput"].iloc[0] == pytest.approx(60 / held_s, rel=0.02)


def test_policies_see_a_node_that_is_down_and_the_interrupted_jobs():
    seen = []

    class Looks(Scripted):
        def decide(self, view, state):
            pending = [one.spec.job_id for one in view.pending]
            seen.append((view.time_s, view.is_up(0), view.n_gpus, view.n_free_gpus, pending))
            return super().decide(view, state)

    looks = Looks({0: {"a": ("ga", (0,))}, 1: {}, 2: {"a": ("ga", (0,))}})
    run([job("a", 0, 60)], [(35.5, 0, "failed"), (50.5, 0, "joined")], looks)
    assert seen[:3] == [
        (0.0, True, 2, 2, ["a"]),
        (pytest.approx(35.5), False, 1, 1, ["a"]),
        (pytest.approx(50.5), True, 2, 2, ["a"]),
    ]


def test_the_slot_of_an_idle_node_that_failed_is_used_once_it_has_joined():
    events = [(10.0, 1, "failed"), (60.0, 1, "joined")]
    result, trainer = run([job("a", 0, 100), job("b", 20, 10)], events)
    assert rows(result, "started", "interrupted") == [(0.0, "started", "a"), (60.0, "started", "b")]
    assert [(one.job.job_id, one.slots) for one in trainer.segments] == [("a", (0,)), ("b", (1,))]
    assert len(result.live_losses) == 0 and result.comparison["n_interruptions"].tolist() == [0]
    assert result.violations == ()


def test_a_node_that_is_absent_at_first_is_used_once_it_has_joined():
    result, _ = run([job("a", 0, 30), job("b", 0, 10)], [(5.0, 1, "joined")])
    assert rows(result, "node_failed", "node_joined", "started") == [
        (0.0, "node_failed", "1"),
        (0.0, "started", "a"),
        (5.0, "node_joined", "1"),
        (5.0, "started", "b"),
    ]
    assert result.violations == ()


def test_a_failure_while_a_job_starts_loses_nothing():
    events = [(1.0, 0, "failed"), (3.0, 0, "joined")]
    result, trainer = run(
        [job("a", 0, 20)], events, Scripted({0: {"a": ("ga", (0,))}, 2: {"a": ("ga", (0,))}})
    )
    assert rows(result, "interrupted", "finished") == [(1.0, "interrupted", "a"), (25.0, "finished", "a")]
    assert len(rows(result, "ready")) == 1
    assert result.live_losses["lost_steps"].tolist() == [0.0]
    assert len(trainer.segments) == 2 and result.violations == ()


def test_a_failure_while_a_suspended_job_writes_its_checkpoint_rolls_it_back():
    script = Scripted({0: {"a": ("ga", (0,))}, 1: {"a": None}, 3: {"a": ("ga", (1,))}}, wake_ups=(20.5, 30.0))
    trainer = FakeTrainer(SPEED, checkpoint_every=EVERY, save_wall_s=0.05)
    result, _ = run([job("a", 0, 40)], [(23.0, 0, "failed"), (90.0, 0, "joined")], script, trainer)
    kinds = rows(result, "suspended", "node_failed", "rolled_back", "started")[1:]
    assert kinds == [
        (20.5, "suspended", "a"),
        (23.0, "node_failed", "0"),
        (23.0, "rolled_back", "a"),
        (30.0, "started", "a"),
    ]
    assert result.live_losses["lost_steps"].tolist() == [9.0]  # the 19th step ended at 21 s; 10 were saved
    assert result.live_events.set_index("kind").loc["rolled_back", "steps_left"] == 30.0
    assert trainer.saved == {"a": 40} and result.violations == ()


def test_a_failure_while_a_job_that_moves_writes_its_checkpoint_interrupts_it():
    script = Scripted(
        {0: {"a": ("ga", (0,))}, 1: {"a": ("gc", (1,))}, 3: {"a": ("ga", (1,))}}, wake_ups=(20.5, 30.0)
    )
    trainer = FakeTrainer(SPEED, checkpoint_every=EVERY, save_wall_s=0.05)
    result, _ = run([job("a", 0, 40)], [(23.0, 0, "failed")], script, trainer)
    assert rows(result, "reconfigured", "node_failed", "interrupted", "started")[1:] == [
        (20.5, "reconfigured", "a"),
        (23.0, "node_failed", "0"),
        (23.0, "interrupted", "a"),
        (30.0, "started", "a"),
    ]
    assert result.live_losses["lost_steps"].tolist() == [9.0]
    assert [one.slots for one in trainer.segments] == [(0,), (1,)] and result.violations == ()


def test_a_job_whose_last_checkpoint_is_complete_when_its_node_fails_is_finished():
    class Saves(FakeTrainer):
        def kill(self, segment):
            self.saved[segment.job.job_id] = segment.job.steps  # a moment before
            super().kill(segment)

    events = [(35.5, 0, "failed"), (50.5, 0, "joined")]
    result, _ = run([job("a", 0, 40)], events, trainer=Saves(SPEED, checkpoint_every=EVERY))
    assert rows(result, "finished", "node_failed") == [(35.5, "finished", "a"), (35.5, "node_failed", "0")]
    assert len(result.live_losses) == 0 and result.violations == ()


@pytest.mark.parametrize("second_s", [35.5, 36.0])
def test_all_nodes_fail_at_once_or_one_after_the_other(second_s):
    events = [(35.5, 0, "failed"), (second_s, 1, "failed"), (50.0, 1, "joined"), (55.0, 0, "joined")]
    result, trainer = run([job("a", 0, 60), job("b", 0, 50), job("c", 0, 40, 2)], events)
    assert [one for _, _, one in rows(result, "interrupted")] == ["a", "b"]
    assert trainer.saved == {"a": 60, "b": 50, "c": 40} and trainer.clashes == []
    assert result.violations == ()
    started = rows(result, "started")
    assert started[2:4] == [(50.0, "started", "a"), (55.0, "started", "b")]


def test_a_job_on_several_nodes_is_killed_with_any_of_them():
    events = [(35.5, 1, "failed"), (40.0, 1, "joined")]
    result, trainer = run([job("a", 0, 100, 2)], events)
    assert rows(result, "interrupted", "started")[1:] == [(35.5, "interrupted", "a"), (40.0, "started", "a")]
    assert result.live_losses["lost_steps"].tolist() == [5.0]  # 55 steps of 0.6 s since 2 s
    assert [one.slots for one in trainer.segments] == [(0, 1)] * 2 and result.violations == ()


def test_nodes_that_fail_again_and_again_are_no_crashes_of_a_job():
    events = [(5.1 + 5 * n, 0, "failed" if n % 2 == 0 else "joined") for n in range(10)]
    trainer = FakeTrainer(SPEED, checkpoint_every=1000)
    result, _ = run([job("a", 0, 20, 2)], events, trainer=trainer)
    assert result.comparison["n_interruptions"].tolist() == [5]
    assert set(result.live_losses["lost_steps"]) <= {4.0, 5.0}  # all that there were, as none was saved
    assert trainer.saved == {"a": 20} and result.violations == ()


def test_crashes_count_as_losses_too():
    trainer = FakeTrainer(SPEED, deaths={"a": [13]}, checkpoint_every=EVERY)
    result, _ = run([job("a", 0, 30)], [(900.0, 1, "failed")], trainer=trainer)
    lost = result.live_losses
    assert (lost["node_id"].tolist(), lost["lost_steps"].tolist()) == ([-1], [3.0])
    assert result.comparison["lost_steps"].tolist() == [3.0]


@pytest.mark.parametrize("name", ["fifo", "morphling-lookahead", "sia", "srtf"])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_slot_of_a_node_that_is_down_is_used_and_every_job_finishes(name, seed):
    where = live.slot_cluster(4, 2)
    model = FailureModel(100 * DAY / 3600, repair_s=20.0, seed=seed, days=600 / DAY)
    events = [(event.time_s, event.node_id, event.kind) for event in model.events(where)]
    jobs = [job("a", 0, 90), job("b", 5, 60, 2, "zero-dp"), job("c", 6, 75), job("d", 20, 40, 1, "gc")]
    down = Down()

    class Watched(FakeTrainer):
        def steps(self, segment):
            assert not down.has(segment.slots)
            return super().steps(segment)

    trainer = Watched(SPEED, checkpoint_every=EVERY, save_wall_s=0.01)
    result, _ = run(jobs, events, policy(name), trainer, 4, observers=[down])
    assert result.comparison["n_interruptions"].iloc[0] >= 2
    assert trainer.saved == {"a": 90, "b": 60, "c": 75, "d": 40} and trainer.clashes == []
    assert result.violations == ()
    held = job_goodput(result.live_events, result.live_losses)
    outcomes = result.live_outcomes.set_index("job_id")["attained_service_gpu_s"]
    # Up to a step more at each start: a job is found to be ready some time after a step.
    assert held.set_index("job_id")["held_gpu_s"].to_dict() == pytest.approx(outcomes.to_dict(), rel=0.05)
    assert held["goodput"].between(0, 1).all()


# --- interrupted runs ---------------------------------------------------------------------------------


class Interrupts:
    """An observer that interrupts the scheduler at an event."""

    def __init__(self, kind):
        self.kind = kind

    def observe(self, event, view):
        if event.kind == self.kind:
            self.kind = None
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible():
    """Let an interrupt count, even where the tests themselves were started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", ["finished", "node_failed", "node_joined"])
def test_node_events_go_on_in_the_time_of_a_run_that_is_resumed(tmp_path, kind):
    jobs = [job("a", 0, 20), job("b", 0, 60), job("c", 40, 20)]
    events = [(15.0, 1, "failed"), (45.0, 1, "joined"), (70.0, 0, "failed"), (80.0, 0, "joined")]
    first = FakeTrainer(SPEED, checkpoint_every=EVERY)
    with pytest.raises(KeyboardInterrupt):
        run(jobs, events, trainer=first, directory=tmp_path, observers=[Interrupts(kind)])
    assert first.busy == {}
    second = FakeTrainer(SPEED, checkpoint_every=EVERY)
    second.saved = dict(first.saved)
    result, _ = run(jobs, events, trainer=second, directory=tmp_path)
    assert second.saved == {"a": 20, "b": 60, "c": 20} and second.clashes == []
    assert rows(result, "node_failed", "node_joined") == [
        (time_s, f"node_{what}", str(node)) for time_s, node, what in events
    ]
    assert result.violations == ()


@pytest.mark.usefixtures("interruptible")
def test_what_was_due_while_a_run_stopped_happens_when_it_goes_on(tmp_path):
    jobs = [job("a", 0, 20), job("b", 0, 60), job("c", 27, 10)]
    events = [(26.0, 1, "failed"), (45.0, 1, "joined")]
    first = FakeTrainer(SPEED, checkpoint_every=EVERY, save_wall_s=0.08)  # until 30 s
    with pytest.raises(KeyboardInterrupt):
        run(jobs, events, trainer=first, directory=tmp_path, observers=[Interrupts("finished")])
    second = FakeTrainer(SPEED, checkpoint_every=EVERY)
    second.saved = dict(first.saved)
    result, _ = run(jobs, events, trainer=second, directory=tmp_path)
    (submitted_s, _, _), (failed_s, _, _), joined = rows(result, "submitted", "node_failed", "node_joined")[
        2:
    ]
    assert 30.0 <= submitted_s == failed_s <= 45.0 and joined == (45.0, "node_joined", "1")
    assert second.saved == {"a": 20, "b": 60, "c": 10}
    assert result.violations == ()


def test_steps_that_a_killed_scheduler_lost_are_counted(tmp_path):
    jobs, states = [job("a", 0, 60), job("b", 0, 80)], []

    class Reads:
        def observe(self, event, view):
            if event.kind == "finished":
                states.append((tmp_path / "state.json").read_text())

    events = [(500.0, 1, "failed")]
    run(jobs, events, directory=tmp_path, observers=[Reads()])
    state = json.loads(states[1])
    n_done = state["jobs"]["b"]["steps_done"]
    assert n_done > 50
    (tmp_path / "state.json").write_text(states[1])
    second = FakeTrainer(SPEED)
    second.saved = {"a": 60, "b": 50}
    result, _ = run(jobs, events, trainer=second, directory=tmp_path)
    assert result.live_losses["lost_steps"].tolist() == [n_done - 50]
    assert result.violations == ()


def test_a_setting_with_failures_comes_back_from_disk_and_other_failures_are_refused(tmp_path):
    what = setting([job("a", 0, 3)], [(35.5, 0, "failed")])
    what.save(tmp_path)
    back = live.LiveSetting.load(tmp_path)
    assert (back.node_events, back.n_nodes, back.checkpoint_s) == (what.node_events, 2, {"tiny-gpt": 0.0})
    back.check_same("fifo", "test", 2, 0, 2, what.node_events)
    with pytest.raises(InputError, match="n_nodes 2, but 1 is requested"):
        back.check_same("fifo", "test", 2, 0, 1, what.node_events)
    with pytest.raises(InputError, match="has 1 node events, other than the 0 that are requested"):
        back.check_same("fifo", "test", 2, 0, 2)
    values = json.loads((tmp_path / "setting.json").read_text())
    for name in ("node_events", "n_nodes", "checkpoint_s"):  # as written before nodes could fail
        del values[name]
    (tmp_path / "setting.json").write_text(json.dumps(values))
    assert live.LiveSetting.load(tmp_path).n_nodes == 1


# --- the command --------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch):
    """Let the command profile nothing and train with the stand-in; return its trainers."""
    trainers = []

    def profile(*_, spreads_checkpoints, **__):
        assert not spreads_checkpoints
        return LiveProfile(profiled(), 0.02, 0.02, {"tiny-gpt": 0.001})

    def trainer(directory, what, *_):
        trainers.append(FakeTrainer(what.scale, checkpoint_every=EVERY))
        return trainers[-1]

    monkeypatch.setattr("makespan.live.run.warm_up", lambda *_: None)
    monkeypatch.setattr("makespan.live.run.profile", profile)
    monkeypatch.setattr("makespan.live.run.process_trainer", trainer)
    return trainers


def invoke(*options):
    return CliRunner().invoke(main, ["live", "--policy", "fifo", "--workload", "live-smoke", *options])


def test_the_command_takes_failures_in_seconds_of_real_time(tmp_path, stand_in):
    listed = tmp_path / "failures.csv"
    listed.write_text("time_s,node_id,kind\n0.5,0,failed\n1.5,0,joined\n")
    outcome = invoke("--nodes", "2", "--failures", str(listed), "--output", str(tmp_path / "out"))
    assert outcome.exit_code == 0, outcome.output
    assert "1 failures, 1 other events, of 1 nodes, read from" in outcome.stderr
    assert "0.5 s  node_failed  node 0" in outcome.stderr
    (line,) = [line for line in outcome.stdout.splitlines() if line.startswith("interruptions: ")]
    assert line.startswith("interruptions: 1 (1 predicted); lost steps: ")
    comparison = LIVE_FAILURES.validate(read_csv(tmp_path / "out" / "live.csv", LIVE), "test")
    assert comparison["n_interruptions"].tolist() == [1]
    losses = read_csv(tmp_path / "out" / "live_losses.csv", LOSSES)
    assert losses["time_s"].tolist() == [pytest.approx(0.5)] and losses["lost_steps"].iloc[0] > 0
    jobs = LIVE_FAILURES.validate(read_csv(tmp_path / "out" / "live_jobs.csv", LIVE_JOBS), "test")
    assert jobs["n_interruptions"].sum() == 1
    prediction = json.loads((tmp_path / "out" / "live_prediction.json").read_text())
    assert prediction["node_events"] == [[0.5, 0, "failed"], [1.5, 0, "joined"]]


def test_the_command_generates_failures(tmp_path, stand_in):
    options = ("--failures-per-hour", "300", "--repair-seconds", "0.5", "--nodes", "2", "--slots", "2")
    found = []
    for seed in ("3", "4"):
        outcome = invoke(*options, "--failure-seed", seed, "--output", str(tmp_path / seed))
        assert outcome.exit_code == 0, outcome.output
        assert f"generated: 7200 a day for 2 hours, seed {seed}; times count from the start" in outcome.stderr
        found.append(json.loads((tmp_path / seed / "live_prediction.json").read_text())["node_events"])
    assert found[0] != found[1]
    times_s = pd.Series([time_s for time_s, _, kind in found[0] if kind == "failed"])
    assert times_s.max() <= 7200
    assert len(times_s) == pytest.approx(600, rel=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--slots", "3", "--nodes", "2"), "3 slot(s) on 2 node(s); expected as many slots on each node"),
        (("--recovery", "elastic", "--device", "cuda"), "device 'cuda': jobs resume from the memory"),
        (("--recovery", "resilient", "--launcher", "slurm"), "launcher 'local' and device"),
        (("--launcher", "slurm", "--nodes", "2"), "only processes of this machine can be killed at once"),
        (("--launcher", "slurm", "--failures-per-hour", "1"), "expected launcher 'local'"),
        (("--repair-seconds", "3"), "--repair-seconds 3 is for generated failures; use it with"),
        (("--failure-seed", "3"), "use it with --failures-per-hour"),
        (("--failures", "FILE", "--failures-per-hour", "1"), "both say what fails; leave one of them out"),
        (("--failures", "FILE"), "node_id"),
        (("--failures", "none.csv"), "none.csv"),
    ],
)  # fmt: skip
def test_what_a_live_run_cannot_do_is_refused_in_one_line_before_anything_runs(tmp_path, options, message):
    listed = tmp_path / "failures.csv"
    listed.write_text("time_s,node_id,kind\n0.5,1,failed\n")  # there is one node, 0
    given = [str(listed) if option == "FILE" else option for option in options]
    outcome = invoke(*given, "--output", str(tmp_path / "out"))
    assert outcome.exit_code != 0
    (line,) = [line for line in outcome.stderr.splitlines() if line.strip()]
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_directory_of_a_live_run_is_refused_to_another_run(tmp_path):
    with (
        held_directory(tmp_path / "work", "run"),
        pytest.raises(InputError, match=r"work: another run is active here; wait for its end"),
    ):
        live.live_experiment(policy("fifo"), "live-smoke", tmp_path / "work")
    assert [path.name for path in tmp_path.rglob("*")] == ["work", "lock"]


def test_a_directory_with_other_files_is_refused_because_it_is_removed_at_the_end(tmp_path):
    (tmp_path / "profile.jsonl").touch()
    (tmp_path / ".state-1.json").touch()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(
        InputError, match=r"thesis\.tex is no file of a live run, whose directory is removed at"
    ):
        live.live_experiment(policy("fifo"), "live-smoke", tmp_path)


def test_a_setting_of_something_else_is_refused(tmp_path):
    (tmp_path / "setting.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match=r"setting.json: is no setting of a live run \(KeyError\('jobs'\)\)"):
        live.LiveSetting.load(tmp_path)


@pytest.mark.parametrize(
    "option", [{"n_slots": "2"}, {"n_slots": 0}, {"seed": 1.5}, {"decision_limit_s": "1"}]
)
def test_options_of_a_live_run_of_other_kinds_are_refused(tmp_path, option):
    with pytest.raises(InputError, match=f"{next(iter(option))} is .*; expected a"):
        live.live_experiment(policy("fifo"), "live-smoke", tmp_path, **option)


def test_devices_of_a_live_node_cannot_be_withdrawn(tmp_path):
    event = NodeEvent(3.0, 0, "withdrawn", 1)
    with pytest.raises(
        InputError, match="devices of node 0 are withdrawn; expected nodes of a live run that"
    ):
        live.live_experiment(policy("fifo"), "live-smoke", tmp_path, failures=[event])
    with pytest.raises(MakespanError, match="devices of node 0 are withdrawn"):
        run([job("a", 0, 3)], [(3.0, 0, "withdrawn")])
