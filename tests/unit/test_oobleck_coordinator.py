"""The coordinator and nodes that only count: losses of every kind, joins, drains, hung nodes, checkpoints."""

import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from forked import forking_servers

from makespan.files import read_json
from makespan.oobleck import trainer as _faults
from makespan.oobleck.trainer import Fault, Faults
from makespan.runtime import (
    Launch,
    LocalLauncher,
    RunDirectory,
    coordinator as _coordinator,
    messages as said,
)
from makespan.runtime.coordinator import Coordinator, Event, Timeouts
from makespan.runtime.node import ADDRESS_FILE
from makespan.runtime.protocol import Abort, CoordinatorProtocol, Decision

LAYERS = ("a", "b", "c", "d")
TOTAL = {n: sum(one * one for one in range(1, n + 1)) for n in range(100)}


@pytest.fixture(scope="module", autouse=True)
def servers():
    with forking_servers():
        yield


def halves(situation):
    """Two pipelines: the first nodes share the layers, and so do the others."""
    nodes = [one for one in situation.members if one not in situation.leaving]
    if len(nodes) < 2:
        whole = {layer for held in situation.holdings.values() for layer in held} == set(LAYERS)
        return Abort(RuntimeError(f"{len(nodes)} node(s) are too few"), saves=whole)
    layers = {}
    for part in (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]):
        for place, node in enumerate(part):
            layers[str(node)] = [one for index, one in enumerate(LAYERS) if index * len(part) // 4 == place]
    missing = [one for one in LAYERS if not any(one in held for held in situation.holdings.values())]
    if situation.plan is not None and missing:
        return Abort(RuntimeError(f"lost layers {missing}"), saves=False)
    sums = dict.fromkeys(LAYERS, TOTAL[situation.step])
    return Decision(layers, {"layers": layers, "sums": sums})


class ProcessStarter:
    def __init__(self, directory):
        self.launcher = LocalLauncher()
        self.launch = Launch("counting_node", {}, 1, directory)

    def start(self, node, replaced=None):
        return self.launcher.start(self.launch, node)

    def end(self, process):
        self.launcher.end(process)


class Run:
    """A run whose events are kept, and answered by a function."""

    def __init__(
        self, path, n_nodes, end, *, react=None, limits=None, n_replacements=0, save_every=0, **request
    ):
        self.path, self.events, self.react = path, [], react or (lambda event: None)
        RunDirectory(path).prepare({})
        self.protocol = CoordinatorProtocol(halves, range(n_nodes), end, save_every=save_every)
        self.saved, self.starter = {}, ProcessStarter(path)
        self.coordinator = Coordinator(
            self.protocol, path, request, self.starter, self.watch,
            begin_checkpoint=self.begin, finish_checkpoint=self.store, limits=limits,
            n_replacements=n_replacements,
        )  # fmt: skip

    def watch(self, event):
        self.events.append(event)
        self.react(event)

    def begin(self):
        (self.path / "partial").mkdir(exist_ok=True)

    def store(self, step):
        self.saved[step] = {path.stem: read_json(path) for path in (self.path / "partial").iterdir()}

    def pid(self, node):
        return next(one.values["pid"] for one in self.events if one.kind == "hello" and one.node == node)

    def of(self, kind):
        return [one for one in self.events if one.kind == kind]

    def noted(self, node):
        return [json.loads(line) for line in (self.path / f"node-{node}.jsonl").read_text().splitlines()]

    def check(self, end, survivors):
        """Each iteration was applied once by whoever was there, and the sums are those of all."""
        assert [one.values["iteration"] for one in self.of("commit")] == list(range(end))
        assert self.saved[end] == dict.fromkeys(LAYERS, TOTAL[end])
        for node in survivors:
            applied = [one["applied"] for one in self.noted(node) if "applied" in one]
            assert applied == list(range(applied[0], end)) and len({self.pid(node)}) == 1
            assert len({one["pid"] for one in self.noted(node) if "pid" in one}) == 1


def killing(moments):
    """React to announcements by a signal: ``{(node, phase, iteration): signal}``, each once.

    Who shall be killed stays where that happens, however late the signal comes.
    """
    left = dict(moments)

    def react(event):
        if event.kind == "hello":
            for (node, phase, iteration), number in moments.items():
                if node == event.node and number == signal.SIGKILL:
                    run.coordinator.hold(node, phase, iteration)
        if event.kind == "announce":
            key = (event.node, event.values["phase"], event.values["iteration"])
            if (number := left.pop(key, None)) is not None:
                os.kill(run.pid(event.node), number)

    def bind(one):
        nonlocal run
        run = one
        run.react = react
        return run

    run = None
    return bind


def test_without_a_loss_every_iteration_is_committed_once(tmp_path):
    run = Run(tmp_path, 4, 10)
    run.coordinator.run()
    run.check(10, range(4))
    assert not run.of("lost") and run.protocol.generation == 1
    assert not (tmp_path / ADDRESS_FILE).exists()


@pytest.mark.parametrize("phase", ["forward", "reduction", "prepared"])
def test_a_node_that_is_killed_costs_at_most_the_iteration(tmp_path, phase):
    run = killing({(3, phase, 4): signal.SIGKILL})(Run(tmp_path, 4, 8))
    run.coordinator.run()
    run.check(8, range(3))
    assert [one.node for one in run.of("lost")] == [3]


def test_losses_during_a_regroup_begin_another_generation(tmp_path):
    # Node 2 is not the last that holds a layer, so none is lost with it, even before others copied.
    moments = {(4, "forward", 3): signal.SIGKILL, (2, "copy", 3): signal.SIGKILL}
    run = killing(moments)(Run(tmp_path, 5, 6, copy_s=0.05))
    run.coordinator.run()
    run.check(6, (0, 1, 3))
    assert len(run.of("lost")) == 2 and run.protocol.generation >= 3


def test_a_stopped_process_is_killed_before_it_counts_as_lost(tmp_path):
    run = killing({(2, "forward", 3): signal.SIGSTOP})(Run(tmp_path, 4, 6, limits=Timeouts(hang_s=15.0)))
    run.coordinator.run()
    run.check(6, (0, 1, 3))
    hung, lost = run.of("hung"), run.of("lost")
    assert [one.node for one in hung] == [one.node for one in lost] == [2]
    assert hung[0].time_s < lost[0].time_s
    assert run.coordinator.processes[2].poll() == -signal.SIGKILL


def test_a_survivor_that_stays_in_a_transfer_with_a_lost_peer_is_killed(tmp_path):
    run = Run(tmp_path, 5, 6, sticks=[[2, 3]], limits=Timeouts(hang_s=15.0))

    def react(event):
        """Kill node 3, which is held in its forward pass, once node 2 is in the transfer, however late."""
        if event.kind == "hello" and event.node == 3:
            run.coordinator.hold(3, "forward", 3)
        if event.kind == "announce" and (event.node, event.values["phase"]) == (2, "transfer"):
            os.kill(run.pid(3), signal.SIGKILL)

    run.react = react
    run.coordinator.run()
    run.check(6, (0, 1, 4))
    assert [one.node for one in run.of("hung")] == [2] and {one.node for one in run.of("lost")} == {2, 3}


def test_a_node_that_waits_for_one_that_computes_is_left_alone(tmp_path):
    """One waits, another computes for longer than the limit of silence before it gives up its groups."""
    moments = {(3, "forward", 3): signal.SIGKILL}
    limits = Timeouts(hang_s=15.0)
    run = killing(moments)(Run(tmp_path, 4, 4, compute_s=18.0, computes_from=3, waits=[0], limits=limits))
    run.coordinator.run()
    assert not run.of("hung") and {one.node for one in run.of("lost")} == {3}


def test_what_a_node_was_asked_to_train_and_cannot_ends_the_run_at_once(tmp_path):
    run = Run(tmp_path, 3, 6, rejects=[[1, 2]])
    with pytest.raises(ValueError, match=r"^layer 3 is odd$"):
        run.coordinator.run()
    assert not run.of("failure") and len(run.of("freeze")) == 1


def test_a_long_iteration_is_no_hang(tmp_path):
    run = Run(tmp_path, 2, 1, compute_s=18.0, limits=Timeouts(hang_s=15.0))
    run.coordinator.run()
    assert not run.of("hung") and not run.of("lost")


def test_time_in_which_the_coordinator_did_not_listen_is_no_silence(tmp_path, monkeypatch):
    def look_after(seconds):
        now[0] += seconds
        run.coordinator._look_after()

    now = [100.0]
    monkeypatch.setattr(_coordinator, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = Run(tmp_path, 2, 1, limits=Timeouts(hang_s=4.0, start_s=20.0))
    ended = []
    run.coordinator.starter = SimpleNamespace(
        start=lambda node, replaced: SimpleNamespace(poll=lambda: None), end=ended.append
    )
    run.coordinator._start(1)
    run.coordinator.nodes[0] = _coordinator._Peer(SimpleNamespace(close=lambda: None), now[0], 0)
    look_after(60.0)
    assert not ended and not run.of("hung")
    for _ in range(9):
        look_after(0.5)
    assert [one.node for one in run.of("hung")] == [0] and not ended
    for _ in range(40):
        look_after(0.5)
    assert ended[-1] is run.coordinator.processes[1]


def test_lost_nodes_are_replaced_ten_times(tmp_path):
    def react(event):
        members = run.protocol.members
        if event.kind != "announce" or event.values["phase"] != "forward" or len(members) < 3:
            return
        if len(run.of("commit")) <= len(struck):
            return  # each loss finds progress, so that the run has something to keep at its end
        if len(struck) == 10:
            run.protocol.drain(())
        elif event.node == min(members - {0}) and event.node not in struck:
            struck.append(event.node)
            os.kill(run.pid(event.node), signal.SIGKILL)

    struck = []
    run = Run(tmp_path, 3, 2000, react=react, compute_s=0.02, n_replacements=10)
    run.coordinator.run()
    assert [one.node for one in run.of("lost")] == list(range(1, 11)) == struck
    run.check(len(run.of("commit")), (0,))
    assert len([one for one in run.of("start") if one.node >= 3]) == 10


def test_a_terminated_node_leaves_at_a_boundary_and_nothing_is_repeated(tmp_path):
    run = killing({(1, "forward", 3): signal.SIGTERM})(Run(tmp_path, 4, 12, compute_s=0.05))
    run.coordinator.run()
    run.check(12, (0, 2, 3))
    assert [one.node for one in run.of("leaving")] == [1] and not run.of("lost")
    assert run.coordinator.processes[1].wait(5) == 0
    computed = [
        one.values["iteration"]
        for one in run.of("announce")
        if one.node == 0 and one.values["phase"] == "forward"
    ]
    assert computed == list(range(12))


def test_a_node_that_was_to_leave_is_not_replaced_when_it_is_lost(tmp_path):
    def react(event):
        if event.kind == "announce" and event.node == 1 and event.values["iteration"] == 3 and not drained:
            drained.append(run.protocol.drain([1]))
            os.kill(run.pid(1), signal.SIGKILL)

    drained = []
    run = Run(tmp_path, 4, 8, react=react, n_replacements=5, compute_s=0.05)
    run.coordinator.run()
    run.check(8, (0, 2, 3))
    assert [event.node for event in run.of("lost")] == [1] and len(run.of("start")) == 4


def test_somebody_outside_drains_a_node_or_stops_the_run(tmp_path):
    def ask(nodes):
        address = read_json(tmp_path / ADDRESS_FILE)
        with socket.create_connection((address["host"], address["port"])) as link:
            link.sendall(said.encoded(said.Drain(address["token"], nodes)))

    def react(event):
        if event.kind == "commit" and event.values["iteration"] in (3, 10):
            ask((2,) if event.values["iteration"] == 3 else ())

    run = Run(tmp_path, 4, 100, react=react, compute_s=0.05)
    run.coordinator.run()
    (step,) = run.saved
    assert 10 < step < 20 and run.saved[step] == dict.fromkeys(LAYERS, TOTAL[step])
    assert not run.of("lost") and 2 not in run.protocol.members


def test_a_node_that_dies_at_the_start_is_done_without(tmp_path):
    run = Run(tmp_path, 4, 4, dies_at_start=[3])
    run.coordinator.run()
    run.check(4, range(3))


def test_too_few_write_a_checkpoint_and_stop(tmp_path):
    moments = {(1, "forward", 3): signal.SIGKILL, (2, "forward", 5): signal.SIGKILL}
    run = killing(moments)(Run(tmp_path, 3, 8, compute_s=0.05))
    with pytest.raises(RuntimeError, match="too few"):
        run.coordinator.run()
    assert run.saved == {5: dict.fromkeys(LAYERS, TOTAL[5])}


def test_a_lost_layer_ends_the_run_without_a_checkpoint(tmp_path):
    def react(event):
        if event.kind == "announce" and event.values == {"phase": "forward", "iteration": 3}:
            seen.add(event.node)
            if seen == {0, 1, 2, 3}:
                for node in (0, 2):
                    os.kill(run.pid(node), signal.SIGKILL)

    seen = set()
    run = Run(tmp_path, 4, 8, react=react, compute_s=0.3)
    with pytest.raises(RuntimeError, match=r"lost layers \['a', 'b'\]"):
        run.coordinator.run()
    assert not run.saved


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_victims_that_follow_each_other_die_at_once_however_late_one_of_them_is(monkeypatch, ends_by_itself):
    def tell(kind, node=None, **values):
        faults(Event(kind, 0.0, node, values))

    def begin(node, phase, iteration):
        tell("announce", node, phase=phase, iteration=iteration)
        return [pid - 100 for pid in killed]

    killed, held = [], []
    at_once = SimpleNamespace(Timer=lambda _, call, values: SimpleNamespace(start=lambda: call(*values)))
    monkeypatch.setattr(_faults, "threading", at_once)
    monkeypatch.setattr(_faults, "os", SimpleNamespace(kill=lambda pid, number: killed.append(pid)))
    faults = Faults([Fault("forward", 3, 1), Fault("forward", 3, 2, follows=True), Fault("copy", victim=0)])
    faults.hold = lambda *what: held.append(what)
    for node in range(4):
        tell("hello", node, pid=100 + node)
    tell("plan", work={"plan": [{"nodes": [0, 1, 2, 3]}]})
    tell("commit", iteration=2)
    assert held == [(1, "forward", 3), (3, "forward", 3), (0, "copy", 3)]
    assert begin(1, "forward", 3) == begin(0, "forward", 3) == []
    if ends_by_itself:
        tell("lost", 3)
        assert begin(2, "forward", 3) == [1]
    else:
        assert begin(3, "forward", 3) == [1, 3]
    assert begin(0, "copy", 3)[-1] == 0 and len(faults.done) == len(killed)


def test_a_failure_without_a_loss_is_tried_once_more(tmp_path):
    run = Run(tmp_path, 2, 8, fails=[[1, 4]])
    with pytest.raises(RuntimeError, match="node 1 failed twice after step 4: RuntimeError: counted wrongly"):
        run.coordinator.run()
    assert len(run.of("failure")) == 1


def test_checkpoints_come_every_so_many_iterations(tmp_path):
    run = Run(tmp_path, 3, 10, save_every=4)
    run.coordinator.run()
    assert sorted(run.saved) == [4, 8, 10]


def test_strangers_and_nonsense_do_no_harm(tmp_path):
    def react(event):
        if event.kind == "commit" and event.values["iteration"] == 2:
            address = read_json(tmp_path / ADDRESS_FILE)
            greetings = (
                said.encoded(said.Hello("wrong", 1, "h")), said.encoded(said.Drain("wrong", ())),
                b"GET / HTTP/1.0\r\n",
                struct.pack("!I", 5) + b"hello", said.encoded(said.Hello(address["token"], 1, "h", node=0)),
                said.encoded(said.Ready()),
            )  # fmt: skip
            links.extend(socket.create_connection((address["host"], address["port"])) for _ in greetings)
            for link, greeting in zip(links, greetings, strict=True):
                link.sendall(greeting)

    links = []
    run = Run(tmp_path, 3, 30, react=react, compute_s=0.02)
    run.coordinator.run()
    run.check(30, range(3))
    assert run.protocol.generation == 1


def test_nodes_end_when_the_coordinator_is_gone(tmp_path):
    class Gone(Exception):
        pass

    def react(event):
        if event.kind == "commit" and event.values["iteration"] == 2:
            for peer in run.coordinator.nodes.values():
                peer.link.close()
            raise Gone

    run = Run(tmp_path, 3, 30, react=react)
    ended = run.coordinator.starter.end = lambda process: None
    assert ended
    with pytest.raises(Gone):
        run.coordinator.run()
    assert [process.wait(20) for process in run.coordinator.processes.values()] == [3, 3, 3]


def test_a_node_joins_a_run_that_goes_on(tmp_path):
    def react(event):
        if event.kind == "commit" and event.values["iteration"] == 3:
            joined.append(LocalLauncher().start(Launch("counting_node", {}, 1, tmp_path), 1000))
        if event.kind == "commit" and 2 in event.values["members"]:
            run.protocol.drain(())

    joined = []
    run = Run(tmp_path, 2, 2000, react=react, compute_s=0.05)
    run.coordinator.run()
    run.check(len(run.of("commit")), range(3))
    assert joined[0].wait(3600) == 0
    generations = [one["generation"] for one in run.noted(2) if "generation" in one]
    assert generations == [2]


def test_the_starter_of_a_node_that_joined_lets_it_leave(tmp_path):
    def react(event):
        if event.kind == "commit" and event.values["iteration"] == 3:
            address = read_json(tmp_path / ADDRESS_FILE)
            starters.append(said.connected(address["host"], address["port"], 30.0))
            starters[0].send(said.Hello(address["token"], 1, "elsewhere", is_watchdog=True, rank=1000))
            joined.append(LocalLauncher().start(Launch("counting_node", {}, 1, tmp_path), 1000))
        if event.kind == "commit" and 2 in event.values["members"] and not asked:
            asked.append(event.values["iteration"])
            starters[0].send(said.Leaving())
        if event.kind == "commit" and asked and 2 not in event.values["members"]:
            run.protocol.drain(())

    starters, joined, asked = [], [], []
    run = Run(tmp_path, 2, 2000, react=react, compute_s=0.05)
    run.coordinator.run()
    starters[0].close()
    run.check(len(run.of("commit")), range(2))
    assert [one.node for one in run.of("leaving")] == [2]
    assert joined[0].wait(3600) == 0 and len(run.of("commit")) < 2000


def test_limits_hold_from_the_first_process_on(tmp_path, monkeypatch):
    """Time stands still until the others are there, however slowly they start."""

    def monotonic():
        now[0] += 0.1 if {0, 2} <= {one.node for one in run.of("hello")} else 0.0
        return now[0]

    class Stuck(ProcessStarter):
        def start(self, node, replaced=None):
            if node != 1:
                return super().start(node)
            never_connects = [sys.executable, "-c", "import time; time.sleep(3600)"]
            return self.launcher.start(replace(self.launch, worker=never_connects), node)

    now = [100.0]
    run = Run(tmp_path, 3, 3, limits=Timeouts(start_s=6.0, hang_s=1e9))
    run.coordinator.starter = Stuck(tmp_path)
    monkeypatch.setattr(_coordinator, "time", SimpleNamespace(monotonic=monotonic))
    run.coordinator.looked_s = now[0]
    run.coordinator.run()
    run.check(3, (0, 2))
    assert now[0] >= 106.0 and threading.active_count() < 20


def test_checkpoints_are_written_by_time_too(tmp_path):
    run = Run(tmp_path, 3, 12, limits=Timeouts(checkpoint_s=1e-6))
    run.coordinator.run()
    run.check(12, range(3))
    assert len(run.saved) > 2 and max(run.saved) == 12
    assert [one.values["step"] for one in run.of("checkpoint")] == sorted(run.saved)


def test_a_run_that_is_stopped_at_its_start_ends_without_a_checkpoint(tmp_path):
    run = Run(tmp_path, 2, 5)
    run.react = lambda event: run.coordinator.stop("SIGTERM") if event.kind == "start" else None
    run.coordinator.run()
    assert not run.of("commit") and not run.saved and run.protocol.step == 0
    assert [one.values for one in run.of("notice")] == [{"signal": "SIGTERM"}]


def test_a_run_without_a_watcher_logs_what_a_signal_leaves(tmp_path, monkeypatch, caplog):
    """By a stand-in of a run that a signal ends after its third iteration."""

    def run(folder, *arguments):
        def end():
            os.kill(os.getpid(), signal.SIGTERM)
            stopped = {"signal": "SIGTERM", "step": 3, "saved": _faults.saved_text(folder)}
            watch(Event("stopped", 0.0, None, stopped))

        watch = arguments[2]
        notice = lambda name: watch(Event("notice", 0.0, None, {"signal": name}))  # noqa: E731
        return SimpleNamespace(run=end, take_notice=notice)

    monkeypatch.setattr(_faults, "_Run", lambda job, profile, iterations, *rest: run(*rest))
    train = partial(_faults.train_resilient.__wrapped__, None, None, 5, tmp_path, SimpleNamespace(n_nodes=1))
    came, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: came.append(len(caplog.messages)))
    try:
        with caplog.at_level(logging.WARNING):
            train()
            train(watch=lambda event: None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [2, 2]
    assert caplog.messages == [
        "SIGTERM: ending after this iteration, with a checkpoint; a second signal ends at once",
        f"{tmp_path}: stopped after 3 iterations, with tables; {tmp_path} has no checkpoint; the same call "
        "starts from iteration 0",
    ]
