"""Live jobs that resume from memory, with real processes: losses of nodes, crashes, further processes."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pandas as pd
import pytest
from live_runs import Grows
from toy_cluster import throughput_rows

from makespan import live
from makespan.live.elastic import ElasticRun, elastic_trainer, final_loss
from makespan.live.engine import LiveClock, slots_of
from makespan.live.run import ElasticProfiler, profile
from makespan.plans import Placement
from makespan.policies import policy
from makespan.profiling import ProfilePoint, model_of, point_plan
from makespan.sim import NodeEvent, events_table, losses_table
from makespan.training import TrainingJob, train
from makespan.workloads import JobSpec, workload

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots are CPU cores of Linux"),
    pytest.mark.xdist_group("live-recovery"),
]

SETTINGS = live.live_settings()
SEED, LONG = 3, 100_000


def setting(steps, kind, n_slots, events=()):
    rows = [("ga", "1", 0.1), ("ga", "2", 0.06)]
    nodes = tuple(NodeEvent(time_s, node, what) for time_s, node, what in events)
    return live.LiveSetting(
        "fifo", "live-smoke", n_slots, 0, 3.0, 3.0, 1.0,
        (JobSpec("a", 0.0, "tiny-gpt", 2, 2, "ga", steps),), {"a": SEED},
        {"tiny-gpt": throughput_rows("tiny-gpt", rows, 1)}, 2, nodes, {"tiny-gpt": 0.0},
        recovery=kind, pause_s=0.1, n_logical_workers=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed_loss(tmp_path_factory):
    """Return a function of steps: the loss after them of the same job, to which nothing happens."""
    path = tmp_path_factory.mktemp("undisturbed")
    losses = pd.Series(dtype=float)

    def loss(steps):
        nonlocal losses
        if steps not in losses.index:
            trainer, here = elastic_trainer("tiny-gpt", 2, LONG, SEED, path), slots_of("local", "cpu", 2)
            result = ElasticRun().train(trainer, (0,), here, 1, steps=max(steps, 20), checkpoint_every=0)
            losses = result.steps.groupby("step")["loss"].apply(fmean)
        return losses[steps]

    return loss


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class Stepping:
    """Runs a live job on a clock that moves by a thousand seconds with each step of it.

    ``until`` ends the run once it is true, as an interrupt of the keyboard would.
    """

    def __init__(self, tmp_path, monkeypatch, what, until=lambda run: False, settings=SETTINGS):
        self.path, self.what = tmp_path, what
        self.where = live.slot_cluster(what.n_slots, 2)
        self.trainer = live.process_trainer(
            tmp_path, what, self.where, slots_of("local", "cpu", what.n_slots), settings
        )
        self.pids, self.rows, self.engines = {}, [], []
        stepping = self

        class Clock(LiveClock):
            most = 0  # steps seen

            def now_s(self):
                runs = list(stepping.trainer._runs.values())
                if runs and until(runs[-1]):
                    raise KeyboardInterrupt
                self.most = max([self.most, *(run.done or 0 for run in runs)])
                return super().now_s() + 1000 * self.most

        monkeypatch.setattr("makespan.live.run.LiveClock", Clock)

    def observe(self, event, view):
        self.rows.append(event)
        for run in self.trainer._runs.values():
            self.pids |= run.pids

    def run(self, chosen):
        try:
            return live.run_live(self.what, chosen, self.where, self.trainer, self.path, [self])
        except KeyboardInterrupt:
            return None

    @property
    def kinds(self):
        return [event.kind for event in self.rows if event.job_id]

    @property
    def recoveries(self):
        return pd.read_csv(self.path / "jobs" / "a" / "run" / "recoveries.csv")

    def final(self):
        """Steps and final loss of a run that was interrupted."""
        steps = pd.read_csv(self.path / "jobs" / "a" / "run" / "steps.csv")
        last = steps[steps["step"] == steps["step"].max()]
        return int(last["step"].iloc[0]), fmean(last["loss"])


def test_samples_and_steps_are_those_of_a_job_that_restarts(tmp_path):
    node, here = live.slot_cluster(2).nodes[0], slots_of("local", "cpu", 2)
    plan = point_plan(ProfilePoint("ga", Placement((1,)), 1), workload("tiny-bert"), node)
    job = TrainingJob(model_of(workload("tiny-bert")), plan, 4, SEED, SEED)
    expected = train(job, launcher=here((0,))).losses
    run, trainer = ElasticRun(), elastic_trainer("tiny-bert", 2, 4, SEED, tmp_path)
    result = run.train(trainer, (0,), here, 1, steps=4, checkpoint_every=0)
    assert result.steps.groupby("step")["loss"].mean().tolist() == pytest.approx(expected, rel=1e-6)
    assert run.done == 4
    assert final_loss(result) == pytest.approx(expected[-1], rel=1e-6)


def test_a_resilient_job_survives_its_node_with_the_loss_of_an_undisturbed_run(
    tmp_path, monkeypatch, undisturbed_loss
):
    what = setting(16, "resilient", 2, [(8_000, 1, "failed")])
    live_run = Stepping(tmp_path, monkeypatch, what)
    engine = live_run.run(policy("fifo"))
    assert live_run.kinds == [
        "submitted",
        "started",
        "ready",
        "interrupted",
        "regrouped",
        "ready",
        "finished",
    ]
    losses = losses_table(engine.losses)
    assert losses["outcome"].tolist() == ["in memory"] and losses["lost_steps"].tolist() == [0.0]
    assert engine.final_losses["a"] == undisturbed_loss(16)
    # No checkpoint was read: one set of processes went on from memory.
    assert live_run.recoveries["kind"].tolist() == ["lost"]
    changes = pd.read_csv(tmp_path / "jobs" / "a" / "run" / "reconfigurations.csv")
    assert changes["cause"].tolist() == ["start", "recovery"]
    assert not any(alive(pid) for pid in live_run.pids.values())
    assert events_table(engine.rows)["n_gpus"].iloc[-2] == 1


def test_an_elastic_job_without_devices_in_time_resumes_from_its_checkpoint(
    tmp_path, monkeypatch, undisturbed_loss
):
    # The job asks for two slots, and fifo gives it no fewer; node 1 is back a second later.
    what = setting(16, "elastic", 2, [(8_000, 1, "failed"), (8_001, 1, "joined")])
    settings = replace(SETTINGS, checkpoint_interval_s=0.36)  # six steps
    live_run = Stepping(tmp_path, monkeypatch, what, settings=settings)
    engine = live_run.run(policy("fifo"))
    assert live_run.kinds[2:7] == ["ready", "interrupted", "rolled_back", "started", "ready"]
    losses = losses_table(engine.losses)
    assert losses["outcome"].tolist() == ["in memory", "checkpoint"]
    assert losses["lost_steps"].iloc[1] < 6
    assert engine.final_losses["a"] == undisturbed_loss(16)


def test_an_elastic_job_waits_and_goes_on_with_a_process_that_joins(tmp_path, monkeypatch, undisturbed_loss):
    def joined(run):
        """End once three sets of processes have trained: of the start, after the loss, and after the join."""
        return run.n_regroups >= 3 and run.done is not None and run.done > 12

    what = setting(LONG, "elastic", 4, [(8_000, 1, "failed")])
    live_run = Stepping(tmp_path, monkeypatch, what, joined)
    script = Grows({0: {"a": ("ga", (0, 1))}})
    assert live_run.run(script) is None
    assert live_run.kinds[:6] == ["submitted", "started", "ready", "interrupted", "started", "ready"]
    kinds = live_run.recoveries
    assert kinds["kind"].tolist() == ["lost", "joined"]
    assert set(live_run.trainer._runs[("a", 1)].pids) == {0, 1, 2}
    steps, loss = live_run.final()
    assert loss == undisturbed_loss(steps)


def test_a_process_that_crashes_is_replaced_and_the_losses_stay_the_same(
    tmp_path, monkeypatch, undisturbed_loss
):
    killed = []

    def crash(run):
        if not killed and run.done is not None and run.done >= 5:
            killed.append(run.pids[1])
            os.kill(killed[0], signal.SIGKILL)
        return run.n_regroups >= 3 and run.done is not None and run.done > 12

    live_run = Stepping(tmp_path, monkeypatch, setting(LONG, "resilient", 2), crash)
    assert live_run.run(policy("fifo")) is None
    assert live_run.kinds[:5] == ["submitted", "started", "ready", "interrupted", "regrouped"]
    assert live_run.recoveries["kind"].tolist() == ["lost", "joined"]
    steps, loss = live_run.final()
    assert loss == undisturbed_loss(steps)


def test_the_profile_of_elastic_jobs_has_steps_restarts_and_the_pause_after_a_loss(tmp_path):
    spec, where, here = live.live_workload("live-smoke"), live.slot_cluster(2), slots_of("local", "cpu", 2)
    quick, told = replace(SETTINGS, warmup_steps=0, steps=2, repetitions=1, restart_steps=2), []
    on_one = replace(spec, slots={1: 1.0}, plans={1: ("ga",)})  # beside a job on the other slot
    table = ElasticProfiler(on_one, 2, where.nodes[0], here, quick).tables()["tiny-gpt"]
    assert table["placement"].tolist() == ["1"] and (table["iter_time_s"] > 0).all()
    found = profile(
        replace(spec, slots={2: 1.0}, plans={2: ("ga",)}), where, here, quick, told.append,
        tmp_path / "profile.jsonl", None, spreads_checkpoints=False, recovery="resilient",
    )  # fmt: skip
    assert found.tables["tiny-gpt"]["placement"].tolist() == ["2"]
    assert found.first_start_s > 0 and found.restart_delay_s > 0 and found.checkpoint_s["tiny-gpt"] > 0
    assert found.pause_s > 0 and "resuming from memory" in told[-1]
