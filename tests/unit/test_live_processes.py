"""Live scheduling with real processes: kill -9, an interrupt from the keyboard, a short profile."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from toy_cluster import throughput_rows

from makespan import live
from makespan.cli import main
from makespan.errors import LostWorkerError
from makespan.live import run as _prepare
from makespan.live.engine import Executor, LiveClock, Target, configuration_plan, slots_of
from makespan.live.run import Profiler
from makespan.policies import policy
from makespan.profiling import profile as _measurements
from makespan.profiling.profile import model_of
from makespan.runtime import LocalLauncher, latest_checkpoint
from makespan.sim import NodeEvent, events_table, losses_table, validate_schedule
from makespan.tables import LIVE, LIVE_JOBS, read_csv
from makespan.training import TrainingJob, read_progress, train
from makespan.workloads import JobSpec, workload

pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="slots are CPU cores of Linux")

ODD = Path(__file__).parents[1] / "support" / "odd_worker.py"
WHERE, HERE = live.slot_cluster(2), slots_of("local", "cpu", 2)
SETTINGS = live.live_settings()
QUICK = replace(SETTINGS, warmup_steps=0, steps=1, repetitions=1, restart_steps=1)
# An interrupt counts, even where the tests themselves were started to ignore it.
START = """import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
from makespan.cli.live import live_command; live_command()"""
COMMAND = [sys.executable, "-c", START]


def setting(jobs, name="fifo"):
    rows = [("ga", "1", 0.1), ("gc", "1", 0.13), ("ga", "2", 0.06), ("zero-dp", "2", 0.07)]
    tables = {"tiny-gpt": throughput_rows("tiny-gpt", rows, 1)}
    return live.LiveSetting(
        name, "live-smoke", 2, 0, 3.0, 3.0, 26.0, tuple(jobs), {job.job_id: 3 for job in jobs}, tables
    )


def job(name, submit_s, steps, n_gpus=1, plan="ga"):
    return JobSpec(name, submit_s, "tiny-gpt", n_gpus, n_gpus, plan, steps)


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, limit_s=3600.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def undisturbed_loss(what, name):
    spec = next(item for item in what.jobs if item.job_id == name)
    item = what.catalogue().requested(spec)
    plan = configuration_plan(item, WHERE.nodes[0])
    model = model_of(workload(spec.workload))
    seed = what.seeds[name]
    return train(TrainingJob(model, plan, spec.steps, seed=seed, data_seed=seed)).losses[-1]


def test_a_job_killed_with_kill_9_finishes_with_the_loss_of_an_undisturbed_run(tmp_path):
    what = setting([job("a", 0.0, 30), job("b", 0.1, 12, 1, "gc")])
    killing = [(sys.executable, str(ODD), "kill:0:12")]

    def launch_on(slots):
        """Let the first segment on slot 0, that of job a, get a kill -9 in the middle of a step."""
        launcher = HERE(slots)
        return replace(launcher, interpreter=killing.pop()) if killing and slots == (0,) else launcher

    settings = replace(SETTINGS, checkpoint_interval_s=0.6)  # ten steps
    trainer = live.process_trainer(tmp_path, what, WHERE, launch_on, settings)
    prediction = live.predict_live(what, policy("fifo"), WHERE, tmp_path / "prediction.json")
    engine = live.run_live(what, policy("fifo"), WHERE, trainer, tmp_path)
    result = live.compare_live(what, policy("fifo"), WHERE, engine, prediction)
    lost = result.live_events[result.live_events["kind"] == "interrupted"]
    assert lost["job_id"].tolist() == ["a"]
    assert "SIGKILL" in lost["reason"].iloc[0]
    assert lost["steps_left"].tolist() == [20.0]
    assert result.violations == ()
    (first, second) = sorted((tmp_path / "jobs" / "a").glob("segment-*"))
    assert not any(alive(pid) for pid in read_progress(first).pids + read_progress(second).pids)
    losses = dict(zip(result.jobs["job_id"], result.jobs["final_loss"], strict=True))
    assert losses["a"] == pytest.approx(undisturbed_loss(what, "a"), rel=1e-6)


def test_an_interrupt_leaves_no_process_and_the_same_command_goes_on(tmp_path, monkeypatch):
    work = tmp_path / "work"
    endless = setting([job("a", 0.0, 5), job("b", 0.0, 1_000_000), job("c", 1.0, 5, 2, "zero-dp")])
    endless.save(work)
    options = ["--policy", "fifo", "--workload", "live-smoke"]
    options += ["--work-dir", str(work), "--output", str(tmp_path)]
    state = work / "state.json"
    with subprocess.Popen([*COMMAND, *options], start_new_session=True, stderr=subprocess.PIPE) as scheduler:
        try:
            until(lambda: state.exists() and '"finished"' in state.read_text())
            until(lambda: any(map(read_progress, (work / "jobs" / "b").glob("segment-*"))))
            pids = read_progress(next((work / "jobs" / "b").glob("segment-*"))).pids
            os.killpg(scheduler.pid, signal.SIGINT)
            assert scheduler.wait(3600) == 1
        finally:
            scheduler.kill()
        assert b"the same command resumes" in scheduler.stderr.read()
    assert not any(alive(pid) for pid in pids)
    done = latest_checkpoint(work / "jobs" / "b" / "checkpoints").step
    setting([replace(one, steps=min(one.steps, done + 5)) for one in endless.jobs]).save(work)
    monkeypatch.setattr("makespan.live.run.live_settings", lambda: QUICK)
    outcome = CliRunner().invoke(main, ["live", *options, "--quiet"])
    assert outcome.exit_code == 0, outcome.output
    assert "average JCT" in outcome.stdout
    comparison = read_csv(tmp_path / "live.csv", LIVE)
    jobs = read_csv(tmp_path / "live_jobs.csv", LIVE_JOBS).set_index("job_id")
    assert comparison["jobs"].tolist() == [3]
    prediction = (tmp_path / "live_prediction.json").read_bytes()
    assert comparison["prediction_sha256"].tolist() == [hashlib.sha256(prediction).hexdigest()]
    assert (comparison["predicted_at"] <= comparison["began_at"]).all()
    assert jobs["n_restarts"].to_dict() == {"a": 0, "b": 1, "c": 0}
    assert jobs["final_loss"].notna().all()
    assert not work.exists()


def test_an_interrupted_profile_goes_on_where_it_was(tmp_path, monkeypatch):
    spec, counts, told = live.live_workload("live-smoke"), [], []
    settings = replace(SETTINGS, warmup_steps=0, steps=1, repetitions=2, restart_steps=1)
    turns = Profiler._turns

    def prepare():
        counts.append([])
        return _prepare.prepare_setting(
            tmp_path, "fifo", spec, WHERE, 0, HERE, settings, told.append, lambda *at: counts[-1].append(at)
        )

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Profiler, "_turns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare()
    assert counts[0][0] == (0, 8) and counts[0][-1] == (4, 8)  # on one slot, and on both: two runs each
    monkeypatch.setattr(Profiler, "_turns", turns)
    monkeypatch.setattr(_measurements, "train_all", interrupted)  # nothing is left to train
    setting = prepare()
    assert f"{tmp_path / 'profile.jsonl'}: resuming, 4 of 8 runs are measured" in told
    assert counts[1][0] == (4, 8) and counts[1][-1] == (8, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["setting.json"]
    table = setting.tables["tiny-gpt"]
    assert table["placement"].tolist() == ["1", "2"] and (table["iter_time_s"] > 0).all()


def test_the_profile_measures_every_plan_and_what_a_restart_costs(monkeypatch):
    spec, beside = live.live_workload("live-smoke"), []
    twice, neighbours = replace(QUICK, repetitions=2), Profiler._neighbours
    profiler = Profiler(spec, 2, WHERE.nodes[0], HERE, twice)

    @contextmanager
    def watched(self, places):
        with neighbours(self, places):
            beside.append(places)
            yield

    monkeypatch.setattr(Profiler, "_neighbours", watched)
    table = profiler.tables()["tiny-gpt"]
    assert set(zip(table["exec_plan"], table["placement"], strict=True)) == {("ga", "1"), ("ga", "2")}
    assert (table["iter_time_s"] > 0).all()
    # one slot is measured while the other one trains, then both, and all of it once more
    assert beside == [{(1,): "tiny-gpt"}, {}] * 2
    restarts = profiler.restarts()
    assert [one.is_first for one in restarts] == [True, False] * 2
    assert min(one.overhead_s for one in restarts) > 0
    assert min(one.save_s for one in restarts) > 0
    assert beside[4:] == beside[:2]


def test_neighbours_end_even_where_an_interrupt_comes_before_they_begin(monkeypatch):
    stopped = []

    def train_until_stopped(self, key, slots, place):
        asked.wait()
        place.mkdir()
        while not (place / "stop").exists():
            time.sleep(0.01)
        stopped.append(key)

    def interrupted(place):
        asked.set()
        raise KeyboardInterrupt

    asked = threading.Event()
    monkeypatch.setattr(Profiler, "_train", train_until_stopped)
    monkeypatch.setattr(_prepare, "read_progress", interrupted)
    profiler = Profiler(live.live_workload("live-smoke"), 2, WHERE.nodes[0], HERE, QUICK)
    with pytest.raises(KeyboardInterrupt), profiler._neighbours({(1,): "tiny-gpt"}):
        pass
    assert stopped == ["tiny-gpt"]


# --- nodes that fail --------------------------------------------------------------------------------


def test_a_node_that_fails_kills_its_processes_and_the_job_ends_with_the_loss_of_an_undisturbed_run(
    tmp_path, monkeypatch
):
    # Node 0 fails once job a has saved 12 steps, and again a second later, while the job starts. The job is
    # so long that it does not end before a slow machine has noticed that, and job b keeps node 1 until then.
    jobs = [job("a", 0.0, 48), job("b", 0.0, 12, 1, "gc")]
    events = [(12_000, "failed"), (12_001, "joined"), (12_002, "failed"), (12_003, "joined")]
    what = replace(
        setting(jobs),
        n_nodes=2,
        scale=1.0,
        node_events=tuple(NodeEvent(time_s, 0, kind) for time_s, kind in events),
        checkpoint_s={"tiny-gpt": 0.0},
    )
    where, checkpoints = live.slot_cluster(2, 2), tmp_path / "jobs" / "a" / "checkpoints"
    pids, seen, both_failed = {}, [], tmp_path / "both-failed"

    def launch_on(slots):
        """Let job b, on slot 1, wait in its fifth step for the second failure."""
        launcher, waiting = HERE(slots), (sys.executable, str(ODD), f"wait:4:{both_failed}")
        return replace(launcher, interpreter=waiting) if slots == (1,) else launcher

    class Clock(LiveClock):
        """A thousand seconds for each step of the newest checkpoint of job a, plus those that passed.

        It waits for the second start of the job before the second failure, however slow the machine is.
        """

        latest_s = 0.0

        def now_s(self):
            newest = latest_checkpoint(checkpoints)
            now_s = super().now_s() + (0 if newest is None else 1000 * newest.step)
            if len(list(checkpoints.parent.glob("segment-*"))) < 2:
                now_s = min(now_s, 12_001.5)
            self.latest_s = max(self.latest_s, now_s)
            return self.latest_s

    class Notes:
        def observe(self, event, view):
            for path in (tmp_path / "jobs").glob("*/segment-*"):
                if (progress := read_progress(path)) is not None:
                    pids[path.parent.name, path.name] = progress.pids
            if event.kind == "node_failed":
                of_a = [pid for (name, _), found in pids.items() if name == "a" for pid in found]
                seen.append((len(of_a), [pid for pid in of_a if alive(pid)]))
                if len(seen) == 2:
                    both_failed.touch()

    monkeypatch.setattr("makespan.live.run.LiveClock", Clock)
    settings = replace(SETTINGS, checkpoint_interval_s=0.36)  # six steps
    trainer = live.process_trainer(tmp_path, what, where, launch_on, settings)
    engine = live.run_live(what, policy("fifo"), where, trainer, tmp_path, [Notes()])
    rows, losses = events_table(engine.rows), losses_table(engine.losses)
    interrupted = rows[rows["kind"] == "interrupted"]
    assert interrupted["job_id"].tolist() == ["a"] * 2
    assert set(48 - interrupted["steps_left"]) <= set(range(12, 48, 6))
    assert (losses["node_id"] == 0).all() and losses["lost_steps"].between(0, 6).all()
    assert seen[0][0] >= 1 and [left for _, left in seen] == [[]] * 2
    of_b = [number for number, left in enumerate(rows["job_id"]) if left == "b"]
    assert rows["kind"].iloc[of_b].tolist() == ["submitted", "started", "ready", "finished"]
    fails = validate_schedule(
        rows, what.scaled_jobs(), where, what.catalogue().on(where), what.scaled_delays(), extra_steps=0,
        is_live=True,
    )  # fmt: skip
    assert not [one for one in fails if one.rule in ("order", "row", "life", "capacity", "failure")]
    assert engine.final_losses["a"] == pytest.approx(undisturbed_loss(what, "a"), rel=1e-6)


def test_processes_that_are_only_starting_are_killed_with_their_node(tmp_path):
    started = []

    @dataclass(frozen=True, slots=True)
    class Noting(LocalLauncher):
        """Keeps every process that it starts."""

        def start(self, launch, rank):
            started.append(LocalLauncher.start(self, launch, rank))
            return started[-1]

    what = setting([job("a", 0.0, 1_000_000, 2, "zero-dp")])
    trainer = live.process_trainer(
        tmp_path, what, WHERE, lambda slots: Noting(cpus=HERE(slots).cpus), SETTINGS
    )
    item = what.catalogue().requested(what.jobs[0])
    executor = Executor(trainer, 2, 2)
    executor.reconcile({"a": Target(what.jobs[0], 0, item, ((0, 1), (1, 1)))})
    until(lambda: started)
    (end,) = executor.kill_node(1)
    assert isinstance(end.error, LostWorkerError) and trainer.steps_done(end.segment) is None
    assert {process.poll() for process in started} == {-signal.SIGKILL}
    assert executor.active == () and executor.kill_node(0) == []
