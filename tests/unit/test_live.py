"""Live scheduling with a stand-in for training: the loop, losses, interrupts, and taking a run over."""

import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fake_trainer import FakeTrainer, drive_clocks
from toy_cluster import throughput_rows

from makespan import live
from makespan.claims import judge
from makespan.cleanup import temporary_directory
from makespan.cli.live import _EventLines
from makespan.errors import InputError, TrainingError, UnknownNameError, WorkerError
from makespan.live import run as _run
from makespan.metrics import live_summary
from makespan.papers.morphling import PAPER
from makespan.policies import policy
from makespan.sim import Allocation, Decision, Event, PolicyError, StalledError
from makespan.tables import LIVE, LIVE_JOBS
from makespan.workloads import JobSpec

SPEED = 100.0
"""Seconds of the schedule in a second on the wall, where the clock is driven by the run."""

ROWS = [("ga", "1", 1.0), ("gc", "1", 1.3), ("ga", "2", 0.6), ("zero-dp", "2", 0.62)]


@pytest.fixture(autouse=True)
def driven(monkeypatch):
    """Let every run drive its clock."""
    drive_clocks(monkeypatch)


def setting(jobs, name="fifo", delay_wall_s=0.02):
    tables = {"tiny-gpt": throughput_rows("tiny-gpt", [(p, n, t / SPEED) for p, n, t in ROWS], 1)}
    delays_s = (delay_wall_s, delay_wall_s)
    return live.LiveSetting(name, "test", 2, 0, *delays_s, SPEED, tuple(jobs), {}, tables)


def job(name, submit_s, steps, n_gpus=1, plan="ga", **more):
    return JobSpec(name, submit_s / SPEED, "tiny-gpt", n_gpus, n_gpus, plan, steps, **more)


def run(jobs, name="fifo", chosen=None, trainer=None, **more):
    trainer = trainer or FakeTrainer(SPEED)
    what, where = setting(jobs, name), live.slot_cluster(2)
    chosen = chosen or policy(name)
    engine = live.run_live(what, chosen, where, trainer, **more)
    with temporary_directory("prediction") as folder:  # afterwards, so that a policy is asked live first
        prediction = live.predict_live(what, chosen, where, folder / "prediction.json")
    return live.compare_live(what, chosen, where, engine, prediction), trainer


class Scripted:
    """Does what it is told at each decision: a list of {job: (plan, slots) or None}."""

    name = title = "scripted"
    interval_s = None
    is_clairvoyant = True
    honours_guarantees = False
    references = ()

    def __init__(self, steps, wake_ups=()):
        self.steps = steps
        self.wake_ups = wake_ups

    def initial_state(self, cluster, catalogue):
        return 0

    def decide(self, view, state):
        changes = {}
        for name, what in self.steps.get(state, {}).items():
            allocation = None
            if what is not None:
                plan, slots = what
                found = view.catalogue.find("tiny-gpt", plan, str(slots), 1)
                allocation = Allocation(found, (0,))
            changes[name] = allocation
        wakes = [time_s for time_s in self.wake_ups if time_s > view.time_s]
        return Decision(changes, min(wakes, default=None)), state + 1


def test_a_policy_that_raises_or_never_returns_ends_a_run_with_what_was_done_kept():
    class Failing(Scripted):
        def decide(self, view, state):
            return self.fail() if view.running else super().decide(view, state)

        def fail(self):
            raise KeyError("x")

    class Endless(Failing):
        def fail(self):
            while True:
                pass

    for kind, expected in (
        (Failing, "decide raised KeyError: 'x'"),
        (Endless, "by the decision limit, 0.1 s"),
    ):
        trainer = FakeTrainer(SPEED)
        with pytest.raises(
            PolicyError, match=rf"test_live.py, line \d+: policy 'scripted' at .* s: .*{expected}"
        ):
            jobs, policy = [job("a", 0, 90), job("b", 40, 9)], kind({0: {"a": ("ga", 1)}})
            run(jobs, "scripted", policy, trainer, decision_limit_s=0.1)
        assert 0 < trainer.saved["a"] < 90


def test_lines_of_events_say_when_all_is_expected_to_be_done(capsys):
    jobs = [job("a", 0, 100), job("b", 50, 400), job("c", 3000, 10)]
    lines = _EventLines(setting(jobs), [10.0, 50.0, 80.0])  # as predicted, on the wall
    a, b, c = (SimpleNamespace(spec=spec) for spec in jobs)

    def left(wall_s, kind, running, pending=()):
        view = SimpleNamespace(running=running, pending=pending, n_free_gpus=0)
        lines.observe(Event(wall_s * SPEED, 0, kind, "a", "", 0, "", "", "", 0, 0.0, 0.0), view)
        return capsys.readouterr().err.split("; ")[1].strip()

    assert left(1.0, "started", [a], [b]) == "0/3 done, about 0:01:19 left"
    assert left(12.0, "started", [a, b]) == "0/3 done, about 0:01:10 left"  # a should be done by now
    assert left(15.0, "finished", [b]) == "1/3 done, about 0:01:10 left"
    assert left(31.0, "submitted", [b], [c]) == "1/3 done, about 0:00:54 left"
    assert left(47.0, "finished", [c]) == "2/3 done, about 0:00:30 left"
    assert left(79.0, "finished", []) == "3/3 done, about 0:00:00 left"


def test_an_expected_end_comes_true_without_disturbance(capsys, tmp_path):
    jobs = [job("a", 0, 60), job("b", 5, 40), job("c", 6, 30, 2, "ga")]
    what, where = setting(jobs), live.slot_cluster(2)
    result, _ = run(jobs)
    ends_s = sorted(result.prediction.jobs["finish_time_s"])
    lines = _EventLines(what, ends_s)
    engine = live.run_live(what, policy("fifo"), where, FakeTrainer(SPEED), observers=[lines])
    assert engine.view.time_s / SPEED == pytest.approx(ends_s[-1], abs=1e-3)
    shown = [line.split("; ")[1] for line in capsys.readouterr().err.splitlines() if " finished " in line]
    assert [line.split(",")[0] for line in shown] == ["1/3 done", "2/3 done", "3/3 done"]


# --- the loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fifo", "morphling-lookahead", "morphling-work", "srtf", "sia"])
def test_every_job_runs_all_its_steps_and_no_slot_is_used_twice(name):
    jobs = [job("a", 0, 30), job("b", 5, 20, 2, "zero-dp"), job("c", 6, 25), job("d", 20, 10, 1, "gc")]
    result, trainer = run(jobs, name)
    assert result.violations == ()
    assert trainer.clashes == []
    assert trainer.saved == {"a": 30, "b": 20, "c": 25, "d": 10}
    assert result.live_outcomes["job_id"].tolist() == ["a", "b", "c", "d"]
    times = result.live_outcomes
    parts = times["waiting_time_s"] + times["running_time_s"] + times["restart_time_s"]
    assert parts.tolist() == pytest.approx((times["finish_time_s"] - times["submit_time_s"]).tolist())


def test_without_disturbance_a_live_run_is_its_simulation():
    jobs = [job("a", 0, 60), job("b", 5, 40), job("c", 6, 30, 2, "ga")]
    result, _ = run(jobs)
    LIVE.validate(result.comparison, where="test")
    LIVE_JOBS.validate(result.jobs, where="test")
    row = result.comparison.iloc[0]
    assert row["jobs"] == 3
    assert row["jct_difference_pct"] == pytest.approx(0, abs=1e-3)
    assert row["makespan_difference_pct"] == pytest.approx(0, abs=1e-3)
    assert row["live_avg_jct_s"] == pytest.approx(result.jobs["live_jct_s"].mean())
    assert row["live_restart_delay_s"] == pytest.approx(row["restart_delay_s"])


def test_a_reconfiguration_stops_with_a_checkpoint_and_goes_on_under_the_new_plan():
    script = Scripted({0: {"a": ("ga", 1)}, 1: {"a": ("zero-dp", 2)}}, wake_ups=(20.0,))
    result, trainer = run([job("a", 0, 60)], chosen=script)
    plans = [(segment.configuration.plan, len(segment.slots)) for segment in trainer.segments]
    assert plans == [("ga", 1), ("zero-dp", 2)]
    assert result.violations == ()
    kinds = result.live_events["kind"].tolist()
    assert kinds == ["submitted", "started", "ready", "reconfigured", "ready", "finished"]
    assert result.jobs["n_restarts"].tolist() == [1]
    assert result.jobs["final_loss"].tolist() == [60.0]


def test_jobs_that_swap_their_slots_wait_for_each_other():
    script = Scripted({0: {"a": ("ga", 2)}, 1: {"a": None, "b": ("ga", 2)}, 2: {"a": ("ga", 1)}}, wake_ups=())
    result, trainer = run([job("a", 0, 40), job("b", 15, 20)], chosen=script)
    assert trainer.clashes == []
    assert result.violations == ()
    assert "suspended" in result.live_events["kind"].tolist()
    assert [segment.job.job_id for segment in trainer.segments] == ["a", "b", "a"]


def test_a_suspended_job_whose_last_step_is_done_finishes():
    class Late(FakeTrainer):
        def stop(self, segment):
            """Come too late."""

    script = Scripted({0: {"a": ("ga", 1)}, 1: {"a": None}, 2: {"a": ("ga", 1)}}, wake_ups=(15.0, 90.0))
    result, _ = run([job("a", 0, 30)], chosen=script, trainer=Late(SPEED))
    assert result.live_outcomes["job_id"].tolist() == ["a"]
    kinds = result.live_events["kind"].tolist()
    assert kinds[-2:] == ["suspended", "finished"] and result.violations == ()
    times = result.live_outcomes.iloc[0]
    parts = times["waiting_time_s"] + times["running_time_s"] + times["restart_time_s"]
    assert parts == pytest.approx(times["finish_time_s"] - times["submit_time_s"])


def test_policies_see_the_steps_that_processes_counted():
    seen = []

    class Looks(Scripted):
        def decide(self, view, state):
            seen.extend(item.steps_left for item in view.running)
            return super().decide(view, state)

    run([job("a", 0, 50)], chosen=Looks({0: {"a": ("ga", 1)}}, wake_ups=(25.0,)))
    left = seen[0]  # the first of the live run; the simulation follows
    assert left == int(left)
    assert 50 - 23 <= left <= 50 - 12  # 23 steps are done, and each was counted after a tenth of a second


def test_a_policy_that_leaves_jobs_behind_is_found_out():
    match = r"deadlock: 1 pending job\(s\).*; times are those of the policy, [\d.]+ s for each of the run"
    with pytest.raises(StalledError, match=match):
        run([job("a", 0, 5)], chosen=Scripted({}))


# --- losses ---------------------------------------------------------------------------------------


def test_a_job_whose_processes_die_goes_on_from_its_checkpoint():
    trainer = FakeTrainer(SPEED, deaths={"a": [13]}, checkpoint_every=5)
    result, trainer = run([job("a", 0, 30), job("b", 3, 20)], trainer=trainer)
    assert trainer.saved == {"a": 30, "b": 20}
    lost = result.live_events[result.live_events["kind"] == "interrupted"]
    assert lost["job_id"].tolist() == ["a"]
    assert lost["steps_left"].tolist() == [20.0]
    assert "SIGKILL" in lost["reason"].iloc[0]
    assert result.violations == ()


def test_a_job_that_dies_again_and_again_ends_the_run_with_its_error():
    trainer = FakeTrainer(SPEED, deaths={"a": [3, 3, 3]}, checkpoint_every=5)
    with pytest.raises(WorkerError, match="at step 3"):
        run([job("a", 0, 30)], trainer=trainer)
    assert len(trainer.segments) == 3


def test_an_error_of_another_kind_ends_all_segments():
    class Broken(FakeTrainer):
        def _train(self, segment):
            if segment.job.job_id == "b":
                raise TrainingError("no such model")
            return super()._train(segment)

    trainer = Broken(SPEED)
    with pytest.raises(TrainingError, match="no such model"):
        run([job("a", 0, 500), job("b", 5, 5)], trainer=trainer)
    assert trainer.busy == {}
    assert 0 < trainer.saved["a"] < 500


# --- taking a run over ------------------------------------------------------------------------------


class Interrupts:
    """An observer that interrupts the scheduler once a job has finished."""

    def __init__(self):
        self.has_fired = False

    def observe(self, event, view):
        if event.kind == "finished" and not self.has_fired:
            self.has_fired = True
            raise KeyboardInterrupt


def test_an_interrupted_scheduler_leaves_nothing_behind_and_is_taken_over(tmp_path):
    jobs = [job("a", 0, 20), job("b", 0, 60), job("c", 40, 20), job("d", 200, 5)]
    first = FakeTrainer(SPEED)
    with pytest.raises(KeyboardInterrupt):
        run(jobs, trainer=first, directory=tmp_path, observers=[Interrupts()])
    assert first.busy == {}
    assert first.saved["a"] == 20
    assert 0 < first.saved["b"] < 60
    second = FakeTrainer(SPEED)
    second.saved = dict(first.saved)
    result, _ = run(jobs, trainer=second, directory=tmp_path)
    assert "a" not in {segment.job.job_id for segment in second.segments}
    assert second.saved == {"a": 20, "b": 60, "c": 20, "d": 5}
    assert result.violations == ()
    assert result.live_outcomes["job_id"].tolist() == ["a", "b", "c", "d"]
    assert result.jobs["n_restarts"].sum() >= 1
    times = result.live_outcomes
    parts = times["waiting_time_s"] + times["running_time_s"] + times["restart_time_s"]
    assert parts.tolist() == pytest.approx((times["finish_time_s"] - times["submit_time_s"]).tolist())


def test_a_scheduler_that_vanished_is_taken_over_from_its_last_state(tmp_path):
    jobs = [job("a", 0, 10), job("b", 0, 80)]
    states = []

    class Reads:
        def observe(self, event, view):
            if event.kind == "finished":
                states.append((tmp_path / "state.json").read_text())

    run(jobs, directory=tmp_path, observers=[Reads()])
    assert [state.count('"finished"') for state in states] == [0, 1]
    (tmp_path / "state.json").write_text(states[1])
    second = FakeTrainer(SPEED)
    second.saved = {"a": 10, "b": 50}
    result, _ = run(jobs, trainer=second, directory=tmp_path)
    assert [segment.job.job_id for segment in second.segments] == ["b"]
    rows = result.live_events
    assert rows[rows["kind"] == "interrupted"]["reason"].tolist() == ["the scheduler ended"]
    assert result.violations == ()


def test_what_a_job_has_run_is_still_known_when_its_run_is_taken_over(tmp_path):
    seen = []

    class Looks(Scripted):
        def decide(self, view, state):
            plans = [view.catalogue.find("tiny-gpt", plan, "1", 1) for plan in ("ga", "gc")]
            there = [one for one in (*view.running, *view.pending) if one.spec.job_id == "b"]
            seen.extend([one.has_observed(item) for item in plans] for one in there)
            return super().decide(view, state)

    jobs = [job("a", 0, 20), job("b", 0, 60)]
    starts = {0: {"a": ("ga", 1), "b": ("ga", 1)}}
    first = FakeTrainer(SPEED)
    with pytest.raises(KeyboardInterrupt):
        run(jobs, chosen=Looks(starts), trainer=first, directory=tmp_path, observers=[Interrupts()])
    assert seen[0] == [False, False]
    second = FakeTrainer(SPEED)
    second.saved = dict(first.saved)
    seen.clear()
    live.run_live(setting(jobs), Looks({0: {"b": ("gc", 1)}}), live.slot_cluster(2), second, tmp_path)
    assert seen[0] == [True, False]


def test_a_state_of_other_jobs_is_refused(tmp_path):
    run([job("a", 0, 3)], directory=tmp_path)
    with pytest.raises(TrainingError, match="other jobs"):
        run([job("b", 0, 3)], directory=tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(TrainingError, match=r"state\.json: cannot be read as JSON"):
        run([job("a", 0, 3)], directory=tmp_path)
    (tmp_path / "state.json").write_text('{"version": 0}')
    with pytest.raises(TrainingError, match="version 0"):
        run([job("a", 0, 3)], directory=tmp_path)


def test_a_setting_comes_back_from_disk_as_it_was(tmp_path):
    what = setting([job("a", 0, 3), job("b", 1, 4, 2, "zero-dp", duration_s=2.0)])
    what.tables["tiny-gpt"]["iter_time_s"] += 1 / 3e4  # more digits than a table for reading has
    assert live.LiveSetting.load(tmp_path) is None
    what.save(tmp_path)
    back = live.LiveSetting.load(tmp_path)
    assert back.jobs == what.jobs
    pd.testing.assert_frame_equal(
        back.tables["tiny-gpt"], what.tables["tiny-gpt"], check_dtype=False, check_exact=True
    )
    assert replace(back, tables={}) == replace(what, tables={})
    back.check_same("fifo", "test", 2, 0)
    with pytest.raises(InputError, match="n_slots 2, but 4 is requested"):
        back.check_same("fifo", "test", 4, 0)


def test_two_profiles_are_averaged_point_by_point():
    what = setting([job("a", 0.0, 5)])
    (key,) = what.tables
    table = what.tables[key]
    other = table.iloc[::-1].iloc[: len(table) - 1].assign(iter_time_s=lambda t: 3 * t["iter_time_s"])
    mean = what.averaged(
        {key: other.reset_index(drop=True)}, 5 * what.first_start_s, 3 * what.restart_delay_s
    )
    assert mean.first_start_s == pytest.approx(3 * what.first_start_s)
    ratio = (mean.tables[key]["iter_time_s"] / table["iter_time_s"]).tolist()
    assert ratio == pytest.approx([1.0] + [2.0] * (len(table) - 1))
    assert mean.restart_delay_s == pytest.approx(2 * what.restart_delay_s)
    assert (mean.jobs, mean.scale) == (what.jobs, what.scale)


# --- workloads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_seed_of_a_workload_has_the_same_work(seed):
    spec = live.live_workload("live-small")
    jobs = live.live_jobs(spec, lambda key, slots, plan: 0.05 / slots, seed)
    assert 8 <= len(jobs) <= 12
    assert jobs == live.live_jobs(spec, lambda key, slots, plan: 0.05 / slots, seed)
    assert sorted(item.n_gpus for item in jobs) == [1] * 3 + [2] * 7
    assert jobs[0].submit_time_s == 0
    gaps = pd.Series([item.submit_time_s for item in jobs]).diff().dropna()
    assert gaps.between(0.6 * spec.mean_interval_s, 1.4 * spec.mean_interval_s).all()
    durations = pd.Series([item.duration_s for item in jobs])
    assert durations.median() == pytest.approx(spec.median_duration_s, rel=0.1)
    assert all(item.steps == round(item.duration_s / (0.05 / item.n_gpus)) for item in jobs)
    assert all(item.plan in spec.plans[item.n_gpus] for item in jobs)


def test_seeds_differ_and_unknown_workloads_are_refused():
    spec = live.live_workload("live-small")
    first, second = (live.live_jobs(spec, lambda *what: 0.05, seed) for seed in (0, 1))
    assert first != second
    with pytest.raises(UnknownNameError, match="live-small"):
        live.live_workload("live-smal")
    with pytest.raises(UnknownNameError):
        live.live_workload("measurement")


def test_requests_for_more_slots_than_there_are_are_left_out():
    spec = live.live_workload("live-small").fitting(1)
    jobs = live.live_jobs(spec, lambda *what: 0.05, 0)
    assert {item.n_gpus for item in jobs} == {1}
    assert len(jobs) == 10


# --- the prediction ---------------------------------------------------------------------------------


def test_a_prediction_is_what_the_setting_says_and_stays_as_it_was_first_written(tmp_path):
    path, where = tmp_path / "prediction.json", live.slot_cluster(2)
    jobs = [job("a", 0, 60), job("b", 5, 40), job("c", 6, 30, 2, "ga")]
    first = live.predict_live(setting(jobs), policy("fifo"), where, path)
    assert first.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    a, b, c = first.jobs.to_dict("records")
    assert a["finish_time_s"] == pytest.approx(0.02 + 60 / SPEED)  # a start, and steps of a second
    assert b["finish_time_s"] == pytest.approx(0.05 + 0.02 + 40 / SPEED)
    assert c["first_start_s"] == pytest.approx(a["finish_time_s"])
    assert c["finish_time_s"] == pytest.approx(c["first_start_s"] + 0.02 + 0.6 * 30 / SPEED)
    values = first.values
    assert values["undisturbed_makespan_s"] == pytest.approx(c["finish_time_s"])
    ends = first.jobs["finish_time_s"] - first.jobs["submit_time_s"]
    assert values["undisturbed_avg_jct_s"] == pytest.approx(ends.mean())
    again = live.predict_live(setting(jobs, delay_wall_s=5.0), policy("fifo"), where, path)
    assert again == first


def test_a_prediction_says_between_what_it_would_be_with_step_times_that_are_off(tmp_path):
    what, where = setting([job("a", 0, 100)]), live.slot_cluster(2)
    first = live.predict_live(what, policy("fifo"), where, tmp_path / "prediction.json")
    low_s, high_s = first.interval_s
    deviation = 1.645 * 2**0.5 * live.live_settings().noise_log_sd  # of the 95th percentile, for two factors
    assert low_s == pytest.approx(0.02 + np.exp(-deviation), rel=0.02)
    assert high_s == pytest.approx(0.02 + np.exp(deviation), rel=0.02)
    again = live.predict_live(what, policy("fifo"), where, tmp_path / "again.json")
    assert again.interval_s == first.interval_s
    row = as_live(what, first).iloc[0]
    assert (row["predicted_low_avg_jct_s"], row["predicted_high_avg_jct_s"]) == (low_s, high_s)


def test_a_prediction_does_not_hang_on_the_instant_that_one_simulation_does(tmp_path):
    # Whether c, which is short, arrives before a ends, at 62 s, decides whether it waits for b or b for it.
    def foreseen(arrives_s):
        jobs = [job("a", 0, 100, 2), job("b", 5, 200, 2), job("c", arrives_s, 5, 2)]
        path = tmp_path / f"{arrives_s}.json"
        first = live.predict_live(setting(jobs), policy("sjf"), live.slot_cluster(2), path)
        return first.values["undisturbed_avg_jct_s"], first.values["avg_jct_s"], first.interval_s

    (early_s, early_median_s, _), (late_s, late_median_s, _) = foreseen(61.9), foreseen(62.1)
    assert late_s > 1.4 * early_s
    assert late_median_s < 1.2 * early_median_s
    for arrives_s, is_above in (
        (50, False),
        (75, True),
    ):  # where no step time that is likely changes who waits
        simulated_s, median_s, _ = foreseen(arrives_s)
        assert median_s == pytest.approx(simulated_s)
        assert (median_s > 1.0) == is_above
    _, median_s, (low_s, high_s) = foreseen(62.1)
    assert low_s < median_s < high_s
    assert high_s > 1.3 * low_s


def test_simulations_with_disturbed_step_times_come_in_pairs_of_opposite_ones():
    what = setting([job("a", 0, 100)])
    (table,) = what.tables.values()
    times_s = [
        what.perturbed(np.random.default_rng(3), sign * 0.05).tables["tiny-gpt"]["iter_time_s"]
        for sign in (1, -1)
    ]
    assert (times_s[0] * times_s[1]).tolist() == pytest.approx((table["iter_time_s"] ** 2).tolist())
    assert not np.allclose(times_s[0], times_s[1])


def test_a_prediction_without_an_interval_has_an_unknown_one(tmp_path):
    what, path = setting([job("a", 0, 100)]), tmp_path / "prediction.json"
    first = live.predict_live(what, policy("fifo"), live.slot_cluster(2), path)
    bounds = ("low_avg_jct_s", "high_avg_jct_s")
    values = {name: value for name, value in first.values.items() if name not in bounds}
    path.write_text(json.dumps(values))
    left = live.predict_live(what, policy("fifo"), live.slot_cluster(2), path)
    row = as_live(what, left).iloc[0]
    assert np.isnan(row["predicted_low_avg_jct_s"])
    assert np.isnan(row["predicted_high_avg_jct_s"])
    assert row["predicted_avg_jct_s"] == pytest.approx(1.02)


def as_live(what, prediction):
    where, chosen = live.slot_cluster(2), policy("fifo")
    engine = live.run_live(what, chosen, where, FakeTrainer(SPEED))
    return live.compare_live(what, chosen, where, engine, prediction).comparison


def test_disturbed_step_times_are_off_together_and_each_on_its_own():
    what = setting([job("a", 0, 100)])
    (table,) = what.tables.values()
    rng = np.random.default_rng(0)
    found = [what.perturbed(rng, 0.05).tables["tiny-gpt"]["iter_time_s"].to_numpy() for _ in range(4000)]
    logs = np.log(np.array(found) / table["iter_time_s"].to_numpy())
    assert logs.std(axis=0) == pytest.approx(0.05 * 2**0.5, rel=0.05)
    assert np.corrcoef(logs.T)[~np.eye(len(table), dtype=bool)] == pytest.approx(0.5, abs=0.05)
    same = what.perturbed(rng, 0.0)
    pd.testing.assert_frame_equal(same.tables["tiny-gpt"], table)


def test_nobody_shares_a_device_in_a_prediction(tmp_path):
    what = setting([job("a", 0, 60, 2), job("b", 5, 40)], "antman")
    where, path = live.slot_cluster(2), tmp_path / "prediction.json"
    a, b = live.predict_live(what, policy("antman"), where, path).jobs.to_dict("records")
    assert b["first_start_s"] == a["finish_time_s"]
    events = live.run_live(what, policy("antman"), where, FakeTrainer(SPEED)).rows
    assert not any(row[-1] for row in events)  # nor in the run


def test_a_hindcast_has_the_decision_limit_of_its_run(tmp_path, monkeypatch):
    what, chosen, where = setting([job("a", 0, 100)]), policy("fifo"), live.slot_cluster(2)
    prediction = live.predict_live(what, chosen, where, tmp_path / "prediction.json")
    engine, limits_s = live.run_live(what, chosen, where, FakeTrainer(SPEED)), []
    simulate = _run.simulate

    def recorded(scenario, chosen):
        limits_s.append(scenario.decision_limit_s)
        return simulate(scenario, chosen)

    monkeypatch.setattr(_run, "simulate", recorded)
    live.compare_live(what, chosen, where, engine, prediction, decision_limit_s=77.0)
    assert len(limits_s) > 1 and set(limits_s) == {77.0}


def test_a_run_is_judged_by_its_prediction_and_not_by_what_is_profiled_later(tmp_path):
    jobs, where = [job("a", 0, 100)], live.slot_cluster(2)
    what, chosen = setting(jobs), policy("fifo")
    prediction = live.predict_live(what, chosen, where, tmp_path / "prediction.json")
    engine = live.run_live(what, chosen, where, FakeTrainer(SPEED / 2))  # half as fast as profiled
    tables = {"tiny-gpt": what.tables["tiny-gpt"].assign(iter_time_s=lambda t: 3 * t["iter_time_s"])}
    profiled = what.averaged(
        tables, what.first_start_s, what.restart_delay_s
    )  # the mean is the speed of the run
    result = live.compare_live(what, chosen, where, engine, prediction, profiled)
    row = result.comparison.iloc[0]
    assert row["predicted_avg_jct_s"] == pytest.approx(1.02)
    assert row["live_avg_jct_s"] == pytest.approx(2.02, rel=1e-3)
    assert row["jct_difference_pct"] == pytest.approx(100 * (1.02 / 2.02 - 1), abs=0.1)
    assert row["retrodiction_jct_difference_pct"] == pytest.approx(0, abs=0.1)
    assert row["profile_drift_pct"] == pytest.approx(200)
    assert row["predicted_at"] <= row["began_at"]
    assert row["prediction_sha256"] == prediction.sha256
    assert result.jobs["retrodiction_jct_s"].tolist() == pytest.approx([2.02])


def test_a_run_that_is_taken_over_still_says_when_its_first_job_began(tmp_path):
    jobs = [job("a", 0, 20), job("b", 0, 60)]
    first = FakeTrainer(SPEED)
    with pytest.raises(KeyboardInterrupt):
        run(jobs, trainer=first, directory=tmp_path, observers=[Interrupts()])
    began_at = json.loads((tmp_path / "state.json").read_text())["began_at"]
    second = FakeTrainer(SPEED)
    second.saved = dict(first.saved)
    result, _ = run(jobs, trainer=second, directory=tmp_path)
    assert result.comparison["began_at"].tolist() == [began_at]


def test_a_first_start_and_a_continuation_take_what_was_profiled_of_each(tmp_path):
    jobs = [job("a", 0, 60)]
    what = replace(setting(jobs), first_start_s=0.01, restart_delay_s=0.04)
    script = Scripted({0: {"a": ("ga", 1)}, 1: {"a": ("gc", 1)}}, wake_ups=(21.0,))
    prediction = live.predict_live(what, script, live.slot_cluster(2), tmp_path / "prediction.json")
    (one,) = prediction.jobs.to_dict("records")
    assert one["n_restarts"] == 1
    assert one["finish_time_s"] == pytest.approx(0.21 + 0.04 + 40 * 1.3 / SPEED)  # 20 steps came before
    engine = live.run_live(what, script, live.slot_cluster(2), FakeTrainer(SPEED))
    row = live.compare_live(what, script, live.slot_cluster(2), engine, prediction).comparison.iloc[0]
    assert row["restart_delay_s"] == pytest.approx((0.01 + 0.04) / 2)


# --- the claim --------------------------------------------------------------------------------------


def live_run(difference_pct, name="morphling", began_at="2026-01-01T00:00:01.000+00:00"):
    """Return a run of schema LIVE whose prediction was written a second after midnight at the latest."""
    return dict.fromkeys(LIVE.names, 1.0) | {
        "policy": name,
        "workload": "live-small",
        "seed": 1,
        "jobs": 10,
        "n_restarts": 1,
        "predicted_n_restarts": 1,
        "jct_difference_pct": difference_pct,
        "retrodiction_jct_difference_pct": -difference_pct / 2,
        "predicted_at": "2026-01-01T00:00:00.000+00:00",
        "began_at": began_at,
        "prediction_sha256": "0" * 64,
    }


@pytest.mark.parametrize(
    ("differences", "began_at", "verdict"),
    [
        ((-4.2, 6.0), "2026-01-01T00:00:01.000+00:00", "holds"),
        ((-9.0, 9.0), "2026-01-01T00:00:01.000+00:00", "fails"),
        ((-4.2, 6.0), "2025-12-31T23:59:59.000+00:00", "fails"),
    ],
)
def test_the_claim_on_fidelity_judges_the_mean_size_of_what_was_predicted_before(
    differences, began_at, verdict
):
    table = pd.DataFrame([live_run(one, began_at=began_at) for one in differences])
    claims = judge(PAPER.ledger(), {"live": table}, "measured", {"form": "extended"})
    own = claims[claims["artifact"] == "Live run"]
    assert own["verdict"].tolist() == [verdict]
    sizes = [abs(one) for one in differences]
    assert own["reproduced"].iloc[0] == f"{sum(sizes) / 2:.1f} %"
    assert f"worst {max(sizes):.1f} %" in own["note"].iloc[0]


def test_a_summary_of_runs_averages_sizes_and_keeps_the_worst():
    late = live_run(10.0, "srtf", "2025-12-31T00:00:00.000+00:00")
    runs = LIVE.validate(pd.DataFrame([live_run(-6.0), live_run(2.0), late]), where="test")
    summary = live_summary(runs).set_index("policy")
    assert summary["runs"].to_dict() == {"morphling": 2, "srtf": 1, "all": 3}
    assert summary["mean_jct_difference_pct"].to_dict() == {"morphling": 4.0, "srtf": 10.0, "all": 6.0}
    assert summary["worst_jct_difference_pct"].to_dict() == {"morphling": 6.0, "srtf": 10.0, "all": 10.0}
    assert summary["bias_jct_difference_pct"].to_dict() == {"morphling": -2.0, "srtf": 10.0, "all": 2.0}
    assert summary["mean_retrodiction_jct_difference_pct"]["all"] == 3.0
    assert summary["all_predicted_before"].to_dict() == {"morphling": True, "srtf": False, "all": False}


def test_a_summary_counts_the_runs_that_lie_in_their_interval():
    bounds = ((1.0, 2.0), (1.1, 2.0), (0.5, 0.9), (np.nan, np.nan))  # the live run took 1 s
    names = ("predicted_low_avg_jct_s", "predicted_high_avg_jct_s")
    runs = [live_run(1.0) | dict(zip(names, pair, strict=True)) for pair in bounds]
    summary = live_summary(LIVE.validate(pd.DataFrame(runs), where="test"))
    assert summary["interval_runs"].tolist() == [1, 1]
