"""Live runs of small job lists with a stand-in for training, on a clock that the run drives."""

from dataclasses import replace

from fake_trainer import FakeTrainer
from toy_cluster import throughput_rows

from makespan import live
from makespan.cleanup import temporary_directory
from makespan.policies import policy
from makespan.sim import Allocation, Decision, NodeEvent
from makespan.workloads import JobSpec

SPEED = 100.0
"""Seconds of the schedule in a second on the wall, where the clock is driven by the run."""
EVERY = 10
"""Steps between checkpoints."""
ROWS = [("ga", "1", 1.0), ("gc", "1", 1.3), ("ga", "2", 0.6), ("zero-dp", "2", 0.62)]


def profiled():
    return {"tiny-gpt": throughput_rows("tiny-gpt", [(p, n, t / SPEED) for p, n, t in ROWS], 1)}


def setting(jobs, events=(), n_slots=2, n_nodes=2, name="fifo"):
    """Return a setting; events are (time in seconds of the schedule, node, kind)."""
    nodes = tuple(NodeEvent(time_s / SPEED, node, kind) for time_s, node, kind in events)
    return live.LiveSetting(
        name, "test", n_slots, 0, 0.02, 0.02, SPEED, tuple(jobs), {}, profiled(), n_nodes, nodes,
        {"tiny-gpt": 0.0} if nodes else {},
    )  # fmt: skip


def job(name, submit_s, steps, n_gpus=1, plan="ga"):
    return JobSpec(name, submit_s / SPEED, "tiny-gpt", n_gpus, n_gpus, plan, steps)


def run(jobs, events, chosen=None, trainer=None, n_slots=2, n_nodes=2, *, changes=None, **more):
    """Run jobs live, with changes of the setting, and compare with the prediction."""
    trainer = trainer or FakeTrainer(SPEED, checkpoint_every=EVERY)
    what, where = setting(jobs, events, n_slots, n_nodes), live.slot_cluster(n_slots, n_nodes)
    what = replace(what, **(changes or {}))
    chosen = chosen or policy("fifo")
    engine = live.run_live(what, chosen, where, trainer, **more)
    with temporary_directory("prediction") as folder:
        prediction = live.predict_live(what, chosen, where, folder / "prediction.json")
    return live.compare_live(what, chosen, where, engine, prediction), trainer


def rows(result, *kinds):
    """Return the rows of some kinds: time of the schedule, kind, and job or node."""
    events = result.live_events
    chosen = events[events["kind"].isin(kinds)] if kinds else events
    who = chosen["job_id"].where(chosen["job_id"] != "", chosen["nodes"])
    return list(zip((chosen["time_s"] * SPEED).round(6), chosen["kind"], who, strict=True))


class Scripted:
    """Does what it is told at each decision, {job: (plan, nodes) or None}, and asks to be asked."""

    name = title = "scripted"
    interval_s = None
    is_clairvoyant = honours_guarantees = False
    references = ()

    def __init__(self, steps, wake_ups=()):
        self.steps, self.wake_ups = steps, wake_ups

    def initial_state(self, cluster, catalogue):
        return 0

    def decide(self, view, state):
        changes = {}
        for name, what in self.steps.get(state, {}).items():
            if what is None:
                changes[name] = None
                continue
            plan, nodes = what
            found = view.catalogue.find("tiny-gpt", plan, "1" * len(nodes), 1)
            changes[name] = Allocation(found, nodes)
        return Decision(changes, min((t for t in self.wake_ups if t > view.time_s), default=None)), state + 1


class Grows(Scripted):
    """Gives job a both slots of node 0 after the loss of a node, instead of one on each node."""

    def decide(self, view, state):
        decision, after = super().decide(view, state)
        if state == 1:
            item = view.catalogue.find("tiny-gpt", "ga", "2", 1)
            decision = replace(decision, changes={"a": item.on([0])})
        return decision, after


class Down:
    """Observer that knows the nodes that are down, and the slots of nodes with two of them each."""

    def __init__(self):
        self.nodes = set()

    def observe(self, event, view):
        if event.kind == "node_failed":
            self.nodes.add(int(event.nodes))
        elif event.kind == "node_joined":
            self.nodes.discard(int(event.nodes))

    def has(self, slots):
        return bool(self.nodes & {slot // 2 for slot in slots})
