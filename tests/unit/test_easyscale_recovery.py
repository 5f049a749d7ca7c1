"""Decisions about recoveries from memory, and the links that release processes that wait for a lost one."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from makespan.easyscale.job import RankMapping
from makespan.easyscale.recovery import (
    Assembly,
    RecoveryPlanner,
    RecoveryProtocol,
    backups,
    boundary_key,
    holdings,
)
from makespan.errors import LostWorkerError, TrainingError, WorkerError
from makespan.runtime.links import LostPeerError, PeerLinks
from makespan.runtime.memory import PeerMemory, Window, address_of
from makespan.runtime.messages import Cause, Failed, Leave, Prepared, Saved, Shared
from makespan.runtime.node import BroadcastStore
from makespan.runtime.protocol import Abort, Begin, ClusterState, End, Phase, Send, Store

MAPPING = RankMapping.parse("0/1/2/3")
STARTED = Assembly("0/1/2/3", (0, 1, 2, 3), 4 * ("",), 0, 0, is_start=True)


def state(held, leaving=(), plan=STARTED):
    return ClusterState(plan, tuple(sorted(held)), leaving, 0, held)


def after(step, own, kept, done=None):
    """A process that has done some mini-batches, with contexts of its own and of another logical worker."""
    return holdings(step if done is None else done, {step: (own, kept)})


def test_the_processes_that_follow_keep_the_contexts():
    assert backups(0, 4 * "a", 1) == [1]
    assert backups(3, 4 * "a", 2) == [0, 1]
    assert backups(1, 2 * "a", 3) == [0]
    assert backups(0, "a", 1) == []


def test_contexts_are_kept_on_other_hosts_by_as_many_processes_as_there_are():
    assert [backups(process, "aabb", 1) for process in range(4)] == [[2], [3], [0], [1]]
    assert [backups(process, "aab", 2) for process in range(3)] == [[2, 1], [2, 0], [0, 1]]
    hosts = RecoveryPlanner(MAPPING, hosts={0: "a", 1: "b", 3: "c"})
    held = {0: after(5, 0, 3), 1: after(5, 1, 0), 3: after(5, 3, 2)}
    assert hosts(state(held)).plan.hosts == ("a", "b", "c")


def test_all_begin_together_with_the_processes_that_are_there():
    planner = RecoveryPlanner(MAPPING, stage=2, step=7)
    decision = planner(state(dict.fromkeys(range(4), ()), plan=None))
    assert decision.plan == Assembly("0/1/2/3", (0, 1, 2, 3), 4 * ("",), 2, 7, is_start=True)
    fewer = planner(state(dict.fromkeys((0, 2, 3), ()), plan=None)).plan
    assert (fewer.mapping, fewer.nodes, fewer.is_start) == ("0,1/2/3", (0, 2, 3), True)


def test_survivors_take_over_neighbours_from_whoever_keeps_their_contexts():
    held = {0: after(5, 0, 3), 1: after(5, 1, 0), 3: after(5, 3, 2)}
    assembly = RecoveryPlanner(MAPPING)(state(held)).plan
    assert assembly == Assembly("0,1/2/3", (0, 1, 3), 3 * ("",), 1, 5, holders=(0, 1, 3, 3))


def test_processes_that_are_behind_copy_from_one_that_is_ahead():
    held = {0: after(5, 0, 3, done=4), 1: after(5, 1, 0), 3: after(5, 3, 2, done=4)}
    assembly = RecoveryPlanner(MAPPING)(state(held)).plan
    assert (assembly.step, assembly.source, assembly.behind) == (5, 1, (0, 3))


def test_a_process_that_failed_amid_a_step_copies_too():
    torn = holdings(None, {5: (0, 3)})
    assembly = RecoveryPlanner(MAPPING)(state({0: torn, 1: after(5, 1, 0), 3: after(5, 3, 2)})).plan
    assert (assembly.step, assembly.source, assembly.behind) == (5, 1, (0,))


def test_an_earlier_mini_batch_is_chosen_if_only_that_is_complete():
    held = {0: after(5, 0, 3), 1: holdings(4, {4: (0, 1, 2, 3), 5: (1, 0)})}
    assembly = RecoveryPlanner(MAPPING)(state(held)).plan
    assert (assembly.step, assembly.source, assembly.behind) == (4, 1, (0,))


def test_leaving_processes_host_nothing_and_send_what_nobody_else_has():
    held = {0: after(5, 0, 3), 1: after(5, 1, 0), 2: after(5, 2, 1), 3: after(5, 3, 2)}
    assembly = RecoveryPlanner(MAPPING)(state(held, leaving=(2,))).plan
    assert (assembly.nodes, assembly.holders, assembly.source) == ((0, 1, 3), (0, 1, 3, 3), None)
    alone = {0: after(5, 0, 0), 1: after(5, 1, 1), 2: after(5, 2, 2), 3: after(5, 3, 3)}
    assert RecoveryPlanner(MAPPING)(state(alone, leaving=(2,))).plan.holders == (0, 1, 2, 3)


def test_lost_contexts_end_the_attempt_with_the_reason():
    held = {0: after(5, 0, 3), 3: after(5, 3, 2)}
    decision = RecoveryPlanner(MAPPING)(state(held))
    assert isinstance(decision, Abort)
    assert isinstance(decision.error, LostWorkerError)
    assert "processes 1, 2 were lost" in str(decision.error)
    torn = dict.fromkeys(range(4), holdings(None, {5: (0, 1, 2, 3)}))
    reason = WorkerError("process 1 failed: RuntimeError: odd")
    assert RecoveryPlanner(MAPPING, reason=lambda: reason)(state(torn)).error is reason
    nobody = RecoveryPlanner(MAPPING)(state({}))
    assert "all processes were lost" in str(nobody.error)


# --- protocol ---


def protocol(n_processes=3):
    """A protocol in training, and what was asked of it."""
    suspended = []
    made = RecoveryProtocol(
        RecoveryPlanner(MAPPING), range(n_processes), 100, suspend=lambda: suspended.append(True)
    )
    made.expected, made.members = set(), set(range(n_processes))
    made.phase, made.generation = Phase.TRAINING, 1
    return made, suspended


def test_processes_end_a_mini_batch_early_only_if_somebody_waits_for_that():
    made, suspended = protocol()
    asked = [Send(node, Shared(1, {boundary_key(0): ""})) for node in range(3)]
    assert made.drain([1]) == asked
    assert made.ready(7) == asked
    made.phase = Phase.SAVING  # between two transactions already
    assert made.ready(8) == [] and made.waiting == {7, 8}
    assert not suspended


def test_whoever_hosts_nothing_leaves_at_once():
    made, _ = protocol()
    made.spare, made.waiting = {5}, {6}
    assert made.drain([5, 6]) == [Send(5, Leave("drained")), Send(6, Leave("drained"))]
    assert not made.spare and not made.waiting and not made.leaving


def test_a_run_that_all_are_to_leave_is_suspended_and_nobody_is_released():
    made, suspended = protocol()
    made.drain([0, 2])
    assert made.leaving == {0, 2} and not suspended
    assert made.drain([1]) == [] and suspended and not made.leaving
    made, suspended = protocol()
    made.drain([0, 2])
    made.lost(1)
    assert suspended and not made.leaving
    made, suspended = protocol()
    assert made.drain(()) == [] and suspended


def prepared(made, *nodes, **report):
    """Let processes report the end of the transaction; the first one says what follows."""
    told = []
    for node in nodes:
        told += made.receive(node, Prepared(made.generation, made.step, report if node == nodes[0] else None))
    return told


def test_code_behind_a_loop_needs_no_other_process():
    made, _ = protocol()
    made.holdings = {node: (f"worker-{node}",) for node in range(3)}
    assert Begin() in prepared(made, 0, 1, 2, saves=True, then="behind")
    for node in range(3):
        told = made.receive(node, Saved(made.generation, made.step))
    assert Store(1) in told and made.phase is Phase.TRAINING
    assert prepared(made, 1, saves=False, then="end") == []
    assert made.lost(2) == [] and made.members == {0, 1}
    told = made.lost(0)  # the first process too, so all that are left have ended
    assert End(None) in told and Begin() not in told


def test_a_failure_behind_a_loop_ends_the_run():
    made, _ = protocol(1)
    made.holdings = {0: ("worker-0",)}
    prepared(made, 0, saves=True, then="behind")
    made.receive(0, Saved(1, 1))
    (end,) = [each for each in made.receive(0, Failed(1, "odd", Cause.OWN)) if isinstance(each, End)]
    assert "node 0 failed behind its loop, which is saved: odd" in str(end.error)


def test_a_process_lost_while_the_last_checkpoint_is_written_is_a_loss():
    made, _ = protocol()
    made.holdings = {node: (f"worker-{node}",) for node in range(3)}
    prepared(made, 0, 1, 2, saves=True, then="behind")
    made.lost(2)
    assert made.phase is Phase.FREEZING


# --- links ---


def boards(count):
    """Stores whose values reach each other."""
    made = []
    for _ in range(count):
        made.append(BroadcastStore(lambda message: [board.take(message) for board in made]))
    return made


WINDOW = Window()
reads_memory = pytest.mark.skipif(
    PeerMemory.behind(WINDOW.text) is None, reason="the system lets no process read the memory of another"
)


@pytest.fixture(params=[pytest.param("lent", marks=reads_memory), "sent"])
def way(request, monkeypatch):
    """Long pieces are read from the memory of their sender, or, where that is not allowed, travel."""
    if request.param == "sent":
        monkeypatch.setattr("makespan.runtime.memory._library", dict)
    return request.param


def together(size, act, **options):
    """Run a function with the links of each process in a thread of its own; return results or errors."""
    found, stores = [None] * size, boards(size)

    def work(rank):
        try:
            links = PeerLinks(rank, size, stores[rank], 1, 20.0, **options)
            try:
                found[rank] = act(links)
            finally:
                links.close()
        except TrainingError as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    return found


def test_all_send_and_receive_large_pieces_at_the_same_time(way):
    n_bytes = 1 << 23  # more than the buffers of a connection hold

    def act(links):
        received = {peer: bytearray(n_bytes) for peer in range(links.size) if peer != links.rank}
        sent = bytes([links.rank]) * n_bytes
        for peer, place in received.items():
            links.post(peer, f"from {links.rank}".encode())
            links.send(peer, memoryview(sent))
            links.receive(peer, memoryview(place))
        links.finish()
        messages = links.take_all(received)
        lends = {link._lends for link in links._links.values()}
        assert lends == {way == "lent"}
        for peer, place in received.items():  # now all know who reads their memory
            place[:] = bytes(n_bytes)
            links.send(peer, memoryview(sent))
            links.receive(peer, memoryview(place))
        assert all(bool(link.lent) == (way == "lent") for link in links._links.values())
        links.finish()
        return {peer: (set(place), messages[at]) for at, (peer, place) in enumerate(received.items())}

    for rank, received in enumerate(together(3, act)):
        assert received == {peer: ({peer}, b"from %d" % peer) for peer in range(3) if peer != rank}


@reads_memory
def test_a_lent_piece_is_not_taken_from_a_process_that_has_dropped_its_links():
    """It may have changed the piece since; a piece that is taken by then is whole."""
    n_bytes, is_dropped = 1 << 20, threading.Event()
    piece = bytearray(b"a") * n_bytes

    def act(links):
        links.gather(b"")  # all know who reads their memory
        other = 1 - links.rank
        if links.rank:
            assert is_dropped.wait(30.0)
            place = bytearray(n_bytes)
            links.receive(other, memoryview(place))
            links.finish()
            return place
        links.send(other, memoryview(piece))
        while links._links[other].outgoing:
            links._links[other].write()
        links.close()
        piece[:] = b"b" * n_bytes
        is_dropped.set()
        return None

    assert isinstance(together(2, act)[1], LostPeerError)


@reads_memory
@pytest.mark.parametrize("ends", ["before", "amid"])
def test_a_lent_piece_of_a_process_that_ends_is_not_taken(ends):
    """Amid: the process ends at some moment while it is read over and over."""
    source = """
import time
from makespan.runtime.memory import Window, address_of
window, piece = Window(), bytearray(b"a") * (1 << 22)
print(window.text, address_of(memoryview(piece)), flush=True)
time.sleep(60.0)
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        try:
            text, address = process.stdout.readline().split()
            memory, place = PeerMemory.behind(text), bytearray(1 << 22)
            assert memory is not None
            memory.read(int(address), memoryview(place))
            assert set(place) == {ord("a")}
            if ends == "before":
                process.kill()
                process.wait()
            else:
                threading.Timer(0.05, process.kill).start()
            with pytest.raises(ConnectionResetError, match="its memory cannot be read any more"):
                for _ in range(100_000):
                    place[:1024] = bytes(1024)
                    memory.read(int(address), memoryview(place))
                    assert place[0] == ord("a")
        finally:
            process.kill()
    assert PeerMemory.behind(text) is None


@reads_memory
def test_memory_behind_another_word_is_not_read():
    """The number of a process may be that of another one on another machine."""
    pid, address, word = WINDOW.text.split("/")
    assert PeerMemory.behind(f"{pid}/{address}/{int(word) ^ 1}") is None
    assert PeerMemory.behind(f"{pid}/8/{word}") is None


@reads_memory
def test_more_bytes_than_one_call_copies_are_read_whole(monkeypatch):
    monkeypatch.setattr("makespan.runtime.memory._AT_ONCE", 1000)
    window, piece, place = Window(), np.arange(5000, dtype=np.uint16), np.zeros(5000, np.uint16)
    memory = PeerMemory.behind(window.text)
    memory.read(address_of(piece.data.cast("B")), place.data.cast("B"))
    assert (place == piece).all()
    window.close()
    with pytest.raises(ConnectionResetError):
        memory.read(address_of(piece.data.cast("B")), place.data.cast("B"))


def test_values_are_gathered_in_the_order_of_the_processes():
    assert together(3, lambda links: links.gather(b"%d" % links.rank)) == 3 * [[b"0", b"1", b"2"]]


def test_the_end_of_a_process_releases_those_that_wait_for_it_and_then_the_others(way):
    def act(links):
        if links.rank == 2:
            return "gone"
        return links.take(2 if links.rank == 1 else 1)  # process 0 waits for 1, which waits for 2

    found = together(3, act)
    assert found[2] == "gone"
    assert all(isinstance(one, LostPeerError) for one in found[:2])
    assert "process 1 lost process 2" in str(found[1])


def test_pieces_of_another_length_are_rejected():
    def act(links):
        other = 1 - links.rank
        links.send(other, memoryview(bytes(4 + links.rank)))
        links.receive(other, memoryview(bytearray(4 + links.rank)))
        links.finish()

    found = together(2, act)
    assert any("received a piece of 5 bytes, expected a piece of 4 bytes" in str(one) for one in found)


def test_a_new_generation_ends_the_wait_for_a_machine_that_closed_nothing():
    """One process answers no more, as if its machine had disappeared, and its connections stay open."""
    released = threading.Event()

    def act(links):
        if links.rank:
            assert released.wait(30.0)
            return "silent"
        threading.Timer(0.2, links._board.renew, [2]).start()
        try:
            links.take(1)
        finally:
            released.set()

    found = together(2, act)
    assert found[1] == "silent"
    assert isinstance(found[0], LostPeerError)
    assert "stopped waiting for another one: generation 1 is over" in str(found[0])


def test_processes_of_several_machines_connect_by_the_names_of_these(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    told = together(
        3, lambda links: links.gather(links._board.wait(1, f"link/{links.rank}", 0.0)), is_alone=False
    )
    assert all(address.startswith(b"localhost ") for address in told[0])


def test_a_new_generation_ends_the_wait_for_processes_that_never_connect():
    board = BroadcastStore(lambda message: None)
    threading.Timer(0.2, board.renew, [2]).start()
    with pytest.raises(LostPeerError, match="process 0 of 2 could not connect to the others: generation 1"):
        PeerLinks(0, 2, board, 1, 60.0)
