"""Coordinator of a resilient run: starts processes, detects losses, and carries out the protocol.

The decisions are made by the state machine of `makespan.runtime.protocol`; this module supplies it with
time, sockets and processes. A node is lost when its connection closes, and only then: a node whose heartbeat
times out is killed first, so that its connection closes too.
"""

import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from makespan.errors import WorkerError
from makespan.files import write_json
from makespan.runtime import messages, protocol as actions
from makespan.runtime.forkserver import Process, how_ended
from makespan.runtime.messages import Connection
from makespan.runtime.node import ADDRESS_FILE, host_name

_log = logging.getLogger(__name__)

PlanT = TypeVar("PlanT")
_TICK_S = 0.05
_TURN_S = 0.5
"""Turn of the loop [s] beyond which heartbeat timeouts are extended, such as one that writes a checkpoint."""
_SEND_S = 5.0
_ENDING_S = 10.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of the coordinator [s].

    Parameters
    ----------
    hang_s
        Heartbeat timeout, after which a node is killed.
    start_s
        Time within which a started process must connect before it is killed.
    checkpoint_s
        Longest time between checkpoints, written after the iteration that runs then; 0 for no limit.
    """

    hang_s: float = 10.0
    start_s: float = 300.0
    checkpoint_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a run, in seconds of the monotonic clock of the coordinator."""

    kind: str
    time_s: float
    node: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


class ProcessStarter(Protocol):
    """Starts processes of a run, and ends one that hangs."""

    def start(self, node: int, replaced: int | None = None) -> Process:
        """Start the process of a node, for the lost node ``replaced`` if it replaces one."""

    def end(self, process: Process) -> None:
        """Kill a process with SIGKILL, wherever it runs."""


@dataclass(slots=True)
class _Peer:
    """Connection to a node, to the process that started one, or to a client not yet known."""

    link: Connection
    heard_s: float
    node: int | None = None
    is_watchdog: bool = False
    pid: int = 0
    host: str = ""
    rank: int | None = None
    is_killed: bool = False
    is_waiting: bool = False
    is_leaving: bool = False


class Coordinator(Generic[PlanT]):
    """Carries out a protocol until it ends.

    Parameters
    ----------
    protocol
        State machine that decides.
    run_dir, request
        Directory in which the address is published, and the request that every node receives.
    starter
        Starts and kills processes.
    watch
        Called with every event.
    begin_checkpoint, finish_checkpoint
        Prepare the folder of a checkpoint, which nodes know from the request; complete it for a number of
        iterations.
    limits, n_replacements
        Time limits, and the number of processes that may be started to replace lost ones.
    """

    def __init__(
        self,
        protocol: "actions.CoordinatorProtocol[PlanT]",
        run_dir: Path,
        request: Mapping[str, Any],
        starter: ProcessStarter,
        watch: Callable[[Event], None],
        *,
        begin_checkpoint: Callable[[], object] = lambda: None,
        finish_checkpoint: Callable[[int], object] = lambda step: None,
        limits: Timeouts | None = None,
        n_replacements: int = 0,
    ) -> None:
        self.protocol, self.run_dir, self.request = protocol, run_dir, request
        self.starter, self.watch = starter, watch
        self.begin_checkpoint, self.finish_checkpoint = begin_checkpoint, finish_checkpoint
        self.limits = limits or Timeouts()
        self.n_replacements, self.token = n_replacements, secrets.token_hex(16)
        self.processes: dict[int, Process] = {}
        self.started_s: dict[int, float] = {}
        self.looked_s = time.monotonic()
        self.nodes: dict[int, _Peer] = {}
        self.hosts: dict[int, str] = {}
        self.next_node = max(protocol.expected, default=-1) + 1
        self.selector = selectors.DefaultSelector()
        self.ending: actions.End | None = None
        self.notice, self._is_told = "", False
        self._shared, self._offered = list[messages.Shared](), list[messages.Offered]()
        self._encoded: tuple[messages.Message | None, bytes] = None, b""
        self._stuck: tuple[int, frozenset[int]] | None = None
        self._stuck_s = 0.0
        self._lost = list[int]()  # nodes, in the order in which they were lost
        self.checkpoint_s = time.monotonic()

    # --- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end; raise the error with which the run ends, if any."""
        try:
            with self._listening() as door:
                self.selector.register(door, selectors.EVENT_READ, None)
                for node in sorted(self.protocol.expected):
                    self._start(node)
                while self.ending is None:
                    self._turn(door)
        finally:
            self._shut()
        if self.ending.error is not None:
            raise self.ending.error

    def _listening(self) -> socket.socket:
        """Listen on this machine only, or in a Slurm job on all its networks, and publish the address."""
        # All nodes may connect at once.
        backlog = 64 + len(self.protocol.expected)
        host, door = messages.listening("SLURM_JOB_ID" not in os.environ, backlog)
        door.settimeout(_SEND_S)
        address = {"host": host, "port": door.getsockname()[1], "token": self.token, "pid": os.getpid()}
        write_json(address, self.run_dir / ADDRESS_FILE)
        (self.run_dir / ADDRESS_FILE).chmod(0o600)  # the token permits to drain the run
        return door

    def ends(self, name: str) -> str:
        """Say how the processes of lost nodes ended, for the error of a run that is over; empty if unknown.

        ``name`` is what the run calls them, ``process`` or ``node``.
        """
        states = {node: self.processes[node].poll() for node in self._lost if node in self.processes}
        return ", ".join(f"{name} {node} {how_ended(state)}" for node, state in states.items() if state)

    def stop(self, why: str) -> None:
        """End the run with a checkpoint after the running iteration; a signal handler may call it."""
        self.notice = why  # the loop acts on it: a handler may interrupt the state machine anywhere

    def _turn(self, door: socket.socket) -> None:
        for key, _ in self.selector.select(_TICK_S):
            if key.data is None:
                self._admit(door)
            else:
                self._hear(key.data)
        self._pass_on()
        self._look_after()
        if self.notice and not self._is_told:
            self._is_told = True
            self._tell("notice", signal=self.notice)
            self._carry_out(self.protocol.drain(()))
        interval_s = self.limits.checkpoint_s
        if interval_s and time.monotonic() - self.checkpoint_s > interval_s:
            self.checkpoint_s = time.monotonic()
            self.protocol.save_next()

    def _tell(self, kind: str, node: int | None = None, **values: Any) -> None:
        self.watch(Event(kind, time.monotonic(), node, values))

    # --- connections --------------------------------------------------------------------------

    def _admit(self, door: socket.socket) -> None:
        with suppress(OSError):
            link = door.accept()[0]
            link.settimeout(_SEND_S)
            peer = _Peer(Connection(link), time.monotonic())
            self.selector.register(peer.link, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> None:
        peer.heard_s = time.monotonic()
        try:
            messages = peer.link.receive()
        except WorkerError as error:
            _log.warning("%s; the connection is closed", error)
            messages = None
        for message in messages or ():
            self._handle(peer, message)
        if messages is None:
            self._part(peer)

    def _handle(self, peer: _Peer, message: messages.Message) -> None:
        if peer.node is None:
            if not peer.is_watchdog:
                self._greet(peer, message)
            elif isinstance(message, messages.Leaving):
                peer.is_leaving = True
                for started in [other for other in self.nodes.values() if other.rank == peer.rank]:
                    self._release(started)
            return
        match message:
            case messages.Heartbeat():
                peer.is_waiting = message.is_waiting
            case messages.Announce():
                self._tell("announce", peer.node, phase=message.phase, iteration=message.iteration)
            case messages.Shared():
                self._shared.append(message)
            case messages.Offered():
                self._offered.append(message)
            case messages.Leaving():
                self._release(peer)
            case messages.Ready():
                self._tell("ready", peer.node, pid=peer.pid, host=peer.host)
                self._carry_out(self.protocol.ready(peer.node))
                if peer.is_leaving:  # the notice came before it was ready
                    self._carry_out(self.protocol.drain([peer.node]))
            case messages.Failed():
                self._tell("failed", peer.node, error=message.error, cause=message.cause)
                self._carry_out(self.protocol.receive(peer.node, message))
            case _:
                self._tell(type(message).__name__.lower(), peer.node)
                self._carry_out(self.protocol.receive(peer.node, message))

    def _release(self, peer: _Peer) -> None:
        """Let a node leave that has a notice; one that is not ready yet leaves when it is."""
        if peer.node is not None:
            peer.is_leaving = True
            self._tell("leaving", peer.node)
            self._carry_out(self.protocol.drain([peer.node]))

    def _greet(self, peer: _Peer, message: messages.Message) -> None:
        """Handle the first message of a connection, from a node, from its starter, or a request to drain."""
        is_known = isinstance(message, messages.Hello | messages.Drain) and secrets.compare_digest(
            message.token, self.token
        )
        if isinstance(message, messages.Drain) and is_known:
            self._drain(peer, message.nodes)
        if not isinstance(message, messages.Hello) or not is_known:
            self._part(peer)
            return
        if message.is_watchdog:
            peer.is_watchdog, peer.rank = True, message.rank
            return
        node = self.next_node if message.node is None else message.node
        if node in self.nodes or (message.node is not None and message.node not in self.processes):
            self._part(peer)
            return
        self.next_node = max(self.next_node, node + 1)
        peer.node, peer.pid, peer.host, peer.rank = node, message.pid, message.host, message.rank
        self.nodes[node], self.hosts[node] = peer, message.host
        if message.node is None and (keeper := self._keeper(peer)) is not None:
            peer.is_leaving = keeper.is_leaving
        self._tell("hello", node, pid=message.pid, host=message.host)
        self._send(node, messages.Welcome(node, self.request))

    def _drain(self, peer: _Peer, asked: tuple[int, ...]) -> None:
        """Let nodes leave, or end the run, and tell who asked for it which nodes are not there."""
        self._tell("drain", nodes=list(asked))
        unknown = sorted(set(asked) - set(self.nodes))
        if unknown:
            _log.warning("asked to drain %s, not in the run", ", ".join(map(str, unknown)))
        with suppress(OSError):  # who asked from a callback of this process does not wait
            peer.link.send(messages.Asked(tuple(unknown), tuple(sorted(self.nodes))))
        self._carry_out(self.protocol.drain(asked))

    def _part(self, peer: _Peer) -> None:
        """Close a connection; a node is lost with its connection."""
        with suppress(KeyError, ValueError):
            self.selector.unregister(peer.link)
        peer.link.close()
        if peer.node is not None and self.nodes.get(peer.node) is peer:
            del self.nodes[peer.node]
            self._lose(peer.node)

    def _lose(self, node: int) -> None:
        is_member = node in self.protocol.members
        is_replaced = is_member and node not in self.protocol.leaving
        self._lost.append(node)
        self._tell("lost" if is_member or node in self.protocol.expected else "gone", node)
        self._carry_out(self.protocol.lost(node))
        if is_replaced and self.n_replacements > 0 and self.ending is None:
            self.n_replacements -= 1
            self._start(self.next_node, node)

    def hold(self, node: int, phase: str, iteration: int) -> None:
        """Hold a node at the end of a phase, so that it can be killed there."""
        self._send(node, messages.Hold(phase, iteration))

    def _pass_on(self) -> None:
        """Send what members shared, together: one message to each, however many shared something."""
        generation, members = self.protocol.generation, self.protocol.members
        current: list[messages.Shared | messages.Offered] = [
            message for message in self._shared if message.generation == generation
        ]
        self._shared.clear()
        if len(self._offered) >= len(members):
            self._offered = [message for message in self._offered if message.generation == generation]
            if len(self._offered) == len(members):
                current += self._offered
                self._offered.clear()
        if current:
            values = {key: value for message in current for key, value in message.values.items()}
            together = messages.Shared(generation, values)
            for node in sorted(members):
                self._send(node, together)

    def _send(self, node: int, message: messages.Message) -> None:
        peer = self.nodes.get(node)
        if peer is None:
            return
        if self._encoded[0] is not message:  # the same message often goes to all members
            self._encoded = message, messages.encoded(message)
        try:
            peer.link.send_encoded(self._encoded[1])
        except TimeoutError:
            self._kill(peer)
        except OSError:
            pass  # the selector reports the end of the connection next

    # --- actions of the protocol --------------------------------------------------------------

    def _carry_out(self, wanted: list[actions.Action]) -> None:
        if wanted:
            self._pass_on()  # in the order in which members sent it
        for action in wanted:
            match action:
                case actions.Send(node, message):
                    self._send(node, message)
                case actions.Begin():
                    self.begin_checkpoint()
                case actions.Store(step):
                    self.finish_checkpoint(step)
                    self.checkpoint_s = time.monotonic()
                    self._tell("checkpoint", step=step)
                case actions.LogEvent(kind, values):
                    self._tell(kind, **values)
                case actions.End():
                    self.ending = action

    # --- processes ----------------------------------------------------------------------------

    def _start(self, node: int, replaced: int | None = None) -> None:
        self.next_node = max(self.next_node, node + 1)
        self.processes[node] = self.starter.start(node, replaced)
        self.started_s[node] = time.monotonic()
        self._tell("start", node)

    def _look_after(self) -> None:
        """Detect processes that do not connect in time, and nodes whose heartbeat times out."""
        now = time.monotonic()
        if now - self.looked_s < _TICK_S:
            return  # with many nodes, messages come faster than all of them can be looked at
        # Extend every wait by the time in which the coordinator could not receive.
        deaf, self.looked_s = max(now - self.looked_s - _TURN_S, 0.0), now
        waited = {node: begun for node, begun in self.started_s.items() if node not in self.nodes}
        self.started_s = {node: min(begun + deaf, now) for node, begun in waited.items()}
        for node, begun in list(self.started_s.items()):
            process = self.processes[node]
            if process.poll() is not None:
                del self.started_s[node]
                self._lose(node)
            elif now - begun > self.limits.start_s:
                self.starter.end(process)
        for peer in list(self.nodes.values()):
            peer.heard_s = min(peer.heard_s + deaf, now)
            silent = now - peer.heard_s
            if silent > 2 * self.limits.hang_s and peer.is_killed:
                self._part(peer)  # its machine does not respond, so the process cannot be killed
            elif silent > self.limits.hang_s and not peer.is_killed:
                self._kill(peer)
        self._release_stuck(now, deaf)

    def _release_stuck(self, now: float, deaf: float) -> None:
        """Break a deadlock: kill a node that waits for others when no node is left that could release it.

        The backend may leave a survivor in a transfer with a lost peer. As long as one of the nodes that have
        not dropped their groups still computes, the others may be waiting for that one.
        """
        self._stuck_s = min(self._stuck_s + deaf, now)
        unfrozen = self.protocol.unfrozen & set(self.nodes)
        is_stuck = bool(unfrozen) and all(self.nodes[node].is_waiting for node in unfrozen)
        stuck = (self.protocol.generation, frozenset(unfrozen)) if is_stuck else None
        if stuck != self._stuck:
            self._stuck, self._stuck_s = stuck, now
        elif stuck is not None and now - self._stuck_s > self.limits.hang_s:
            self._kill(self.nodes[min(unfrozen)])
            self._stuck_s = now

    def _kill(self, peer: _Peer) -> None:
        """Kill the process of a hung node; its connection closes, and so the node is lost."""
        peer.is_killed = True
        self._tell("hung", peer.node)
        process = None if peer.node is None else self.processes.get(peer.node)
        if process is not None:
            self.starter.end(process)
        # A node that joined belongs to another process: its starter kills it, else this one if on its host.
        elif (keeper := self._keeper(peer)) is not None:
            with suppress(OSError):
                keeper.link.send(messages.Kill(peer.pid))
        elif peer.host == host_name():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(peer.pid, signal.SIGKILL)

    def _keeper(self, peer: _Peer) -> _Peer | None:
        """Return the connection of the process that started a node which joined, None if there is none."""
        others = [key.data for key in self.selector.get_map().values() if isinstance(key.data, _Peer)]
        keepers = [other for other in others if other.is_watchdog and other.rank == peer.rank]
        return keepers[0] if keepers else None

    def _shut(self) -> None:
        """Give processes time to end, kill the rest, and close all connections."""
        (self.run_dir / ADDRESS_FILE).unlink(missing_ok=True)
        deadline = time.monotonic() + (_ENDING_S if self.ending is not None else 0.0)
        for process in self.processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                self.starter.end(process)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
        for key in list((self.selector.get_map() or {}).values()):
            if key.data is not None:
                key.data.link.close()
        self.selector.close()
