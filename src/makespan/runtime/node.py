"""Node side of a resilient run: rendezvous with other members, and the loop that serves the coordinator.

One thread receives messages; the main thread carries them out in turn, and may wait for other nodes in a
transfer. It detects a new generation when it announces a phase, or when a transfer fails because the other
members dropped their groups.
"""

import base64
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from makespan.errors import CheckpointError, InputError, TrainingError, WorkerError, raised_in
from makespan.files import read_json
from makespan.runtime import protocol as tasks
from makespan.runtime.forkserver import is_readable
from makespan.runtime.messages import (
    Announce,
    Cause,
    Connection,
    Form,
    Freeze,
    Frozen,
    Heartbeat,
    Hello,
    Hold,
    Leave,
    Leaving,
    Message,
    Offered,
    Save,
    Shared,
    connected,
)

_log = logging.getLogger(__name__)


# --- Rendezvous -------------------------------------------------------------------------------------


class BroadcastStore:
    """Key-value store of a generation: each member's entries reach all others through the coordinator.

    A wait ends when a new generation begins. The store opens no port and resolves no name.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._newest, self._said = send, 0, dict[tuple[int, str], bytes]()
        self._changed = threading.Condition()

    def renew(self, generation: int) -> None:
        """Begin a generation: forget older entries, and end the waits that belong to them."""
        with self._changed:
            self._newest = generation
            self._said = {key: value for key, value in self._said.items() if key[0] >= generation}
            self._changed.notify_all()

    def take(self, message: Shared) -> None:
        """Enter values that members set."""
        with self._changed:
            for key, value in message.values.items():
                self._said[message.generation, key] = base64.b64decode(value)
            self._changed.notify_all()

    def tell(self, generation: int, key: str, value: bytes) -> None:
        """Set a value for all members, this one included."""
        message = Shared(generation, {key: base64.b64encode(value).decode()})
        self.take(message)
        self._send(message)

    def offer(self, generation: int, key: str, value: bytes) -> None:
        """Set a value that the members get together with those of all others, once each has offered one."""
        self._send(Offered(generation, {key: base64.b64encode(value).decode()}))

    def has(self, generation: int, key: str) -> bool:
        """Tell whether a key is set; raise `RuntimeError` if a new generation has begun."""
        with self._changed:
            self._check(generation)
            return (generation, key) in self._said

    def wait(self, generation: int, key: str, timeout_s: float) -> bytes:
        """Wait for a key; raise `RuntimeError` after the timeout, or when a new generation begins."""
        place = (generation, key)
        with self._changed:
            self._changed.wait_for(lambda: place in self._said or self._newest > generation, timeout_s)
            self._check(generation)
            if place not in self._said:
                raise RuntimeError(f"timed out after {timeout_s:g} s waiting for key {key!r}")
            return self._said[place]

    def _check(self, generation: int) -> None:
        if self._newest > generation:
            raise RuntimeError(f"generation {generation} is over")


def store_on(board: BroadcastStore, generation: int, timeout_s: float) -> Any:
    """Return a store of torch for a generation that keeps its values on the board."""

    def put(_: Any, key: str, value: Any) -> None:
        board.tell(generation, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(_: Any, key: str) -> bytes:
        return board.wait(generation, key, timeout_s)

    def wait(_: Any, keys: list[str], timeout: Any = None) -> None:
        until_s = time.monotonic() + (timeout_s if timeout is None else timeout.total_seconds())
        for key in keys:
            board.wait(generation, key, max(until_s - time.monotonic(), 0.0))

    def check(_: Any, keys: list[str]) -> bool:
        return all(board.has(generation, key) for key in keys)

    # The stubs of torch hide its public stores.
    base: Any = importlib.import_module("torch.distributed").Store
    methods = {"set": put, "get": get, "wait": wait, "check": check}
    return type("BoardStore", (base,), methods)()


# --- Process of a node ------------------------------------------------------------------------------

ADDRESS_FILE = "coordinator.json"
JOINING = 1 << 20
"""First rank of processes that join a run, whose number the coordinator assigns."""
_BEAT_S = 0.5
_CONNECT_S = 30.0
_ABANDONED = 3  # exit status of a node that lost its coordinator
_STANDING_S = 60.0


class SupersededError(WorkerError):
    """The work of a node belongs to a generation that is over."""


class Announcing(Protocol):
    """Announces phases of an iteration; raises `SupersededError` in work of an earlier generation."""

    def __call__(self, phase: str, iteration: int) -> None:
        """Announce that a phase begins."""


class Serving(Protocol):
    """Answers the coordinator from inside of `Engine.form`, for an engine that code of a user calls.

    Both functions then carry out tasks until an iteration is to be computed, and return its number. They
    raise `SupersededError` if the node is to regroup or to leave instead: `Engine.form` has to end.
    """

    def formed(self, checksums: Mapping[str, str]) -> int:
        """Report what `Engine.form` would return."""

    def computed(self, report: Any) -> int:
        """Report what `Engine.compute` would return."""


class Engine(Protocol):
    """Computation of a node, which the loop drives; one that code of a user calls computes within `form`."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers whose state is complete here, including those that the node does not own any more."""

    @property
    def is_waiting(self) -> bool:
        """True while the engine waits for another node, and so computes nothing."""

    def prepare(
        self, node: int, request: Any, announce: Announcing, board: BroadcastStore, serving: Serving
    ) -> None:
        """Load the job of the request."""

    def check_device(self) -> None:
        """Raise the error of a device that no longer computes."""

    def drop(self) -> None:
        """Drop every group, and with it the connections to other nodes."""

    def form(self, form: Form, forgets: bool) -> Mapping[str, str]:
        """Build groups, receive missing layers, and return the checksums of the layers that it owns."""

    def compute(self, iteration: int) -> Any:
        """Compute gradients and reduce them; the result goes into the record."""

    def apply(self, iteration: int) -> None:
        """Step with the gradients."""

    def write(self, save: Save) -> None:
        """Write layers."""


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of the host, which fails as a whole; Slurm may define several on one machine."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def take_part(run_dir: Path, engine: Engine, node: int | None = None) -> str:
    """Take part in the run of a directory until it ends; return the reason.

    ``node`` is the number that the coordinator gave when it started this process; None for one that joins.
    """
    address = read_json(run_dir / ADDRESS_FILE)
    if address is None:
        raise WorkerError(
            f"run_dir is {run_dir}, where no run is in progress; expected the directory of an active run"
        )
    try:
        link = connected(address["host"], address["port"], _CONNECT_S)
    except OSError as error:
        problem = f"run_dir is {run_dir}, whose coordinator does not respond ({error})"
        raise WorkerError(f"{problem}; expected the directory of an active run") from None
    rank = int(os.environ["MAKESPAN_RANK"])
    return _Node(link, engine).run(Hello(address["token"], os.getpid(), host_name(), node, rank=rank))


def _take_signals() -> None:
    """Make SIGTERM wake only the heartbeat thread, even while the main thread waits in a collective.

    The handler of Python does nothing; the interpreter writes the number of the signal to the wakeup file
    descriptor, which the heartbeat thread reads.
    """

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    signal.signal(signal.SIGTERM, ignore)


class _Node:
    """Process of a node: connection, heartbeat, phases and signals, whatever the engine trains."""

    def __init__(self, link: Connection, engine: Engine) -> None:
        self.link, self.engine, self.part = link, engine, tasks.WorkerProtocol()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.newest, self.node = 0, -1
        self.board = BroadcastStore(link.send)
        self.held: set[tuple[str, int]] = set()
        self.place: tuple[str, int] = ("", -1)
        self.pending: deque[tasks.Task] = deque()

    def run(self, hello: Hello) -> str:
        """Carry out the messages of the coordinator; return the reason for which the node leaves."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        _take_signals()
        self.link.send(hello)
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, args=(woken,), daemon=True).start()
        while not isinstance(task := self._next(), tasks.Depart):
            self.pending.extend(self._do(task))
        return task.reason

    def _next(self) -> tasks.Task:
        """Return the next task, from the next message if there is none."""
        while not self.pending:
            self.pending.extend(self.part.receive(self.inbox.get()))
        return self.pending.popleft()

    def formed(self, checksums: Mapping[str, str]) -> int:
        """Report that the node is formed, and serve the coordinator until an iteration is to be computed."""
        return self._serve(self.part.formed(checksums))

    def computed(self, report: Any) -> int:
        """Report an iteration, and serve the coordinator until the next one is to be computed."""
        self.announce("prepared", self.part.step)
        return self._serve(self.part.computed(report))

    def _serve(self, answers: list[tasks.Task]) -> int:
        self.pending.extend(answers)
        while not isinstance(task := self._next(), tasks.Compute):
            if isinstance(task, tasks.Drop | tasks.Join | tasks.Depart):
                self.pending.appendleft(task)  # for the loop that carries out `Engine.form`
                raise SupersededError("the node is to regroup or to leave")
            self.pending.extend(self._do(task))
        return task.iteration

    def _listen(self) -> None:
        is_over = False
        while (messages := self.link.receive()) is not None:
            for message in messages:
                match message:
                    case Hold():
                        self.held.add((message.phase, message.iteration))
                    case Shared():
                        self.board.take(message)
                    case _:
                        is_over |= isinstance(message, Leave)
                        if isinstance(message, Freeze):
                            self.newest = message.generation
                            self.board.renew(message.generation)
                        self.inbox.put(message)
        if not is_over:
            # The run is over without a coordinator, and the main thread may be stuck in a transfer.
            with suppress(OSError):
                sys.stderr.write("lost the connection to the coordinator; this node exits\n")
                sys.stderr.flush()
            os._exit(_ABANDONED)

    def _beat(self, woken: int) -> None:
        while True:
            told: Message = Heartbeat(self.engine.is_waiting)
            if is_readable(woken, _BEAT_S) and signal.SIGTERM in os.read(woken, 64):
                told = Leaving()
            with suppress(OSError):
                self.link.send(told)

    def announce(self, phase: str, iteration: int) -> None:
        """Announce a phase, and end the work if its generation is over."""
        self._enter(phase, iteration)
        if self.newest > self.part.generation:
            raise SupersededError("a new generation has begun")

    def _enter(self, phase: str, iteration: int) -> None:
        if self.place in self.held:
            # A fault is injected: this process is killed at the end of the phase.
            time.sleep(_STANDING_S)
            raise WorkerError(
                f"node {self.node} was not killed within {_STANDING_S:g} s of phase {self.place[0]}"
            )
        if self.place != (phase, iteration):
            self.place = (phase, iteration)
            self.link.send(Announce(phase, iteration))

    def _do(self, task: tasks.Task) -> list[tasks.Task]:
        """Carry out a task; return the tasks that follow from it."""
        match task:
            case tasks.Prepare():
                self.node = task.node
                self.engine.prepare(task.node, task.request, self.announce, self.board, self)
                _take_signals()  # code of the user that was loaded may have set handlers of its own
            case tasks.Drop():
                self.engine.drop()
                self._enter("regroup", task.step)
                return [tasks.Answer(Frozen(task.generation, task.step, self.engine.layers))]
            case tasks.Join():
                return self._try(lambda: self.part.formed(self.engine.form(task.form, task.forgets)))
            case tasks.Compute():
                return self._try(lambda: self._compute(task.iteration))
            case tasks.Apply():
                # A commit is applied even if a new generation has begun, so `_enter`, not `announce`.
                self._enter("committed", task.iteration)
                self.engine.apply(task.iteration)
            case tasks.Write():
                return self._try(lambda: self._write(task.save))
            case tasks.Answer():
                self.link.send(task.message)
        return []

    def _write(self, save: Save) -> list[tasks.Task]:
        self.engine.write(save)
        return self.part.saved(save)

    def _compute(self, iteration: int) -> list[tasks.Task]:
        report = self.engine.compute(iteration)
        self.announce("prepared", iteration)
        return self.part.computed(report)

    def _try(self, act: Callable[[], list[tasks.Task]]) -> list[tasks.Task]:
        """Do work that depends on other nodes; if it fails, drop the groups first to release the others."""
        text, cause = "", Cause.PEER
        try:
            return act()
        except SupersededError:
            pass
        except Exception as error:  # noqa: BLE001 - the coordinator decides whether it ends the run
            text = f"{type(error).__name__}: {error}"
            _log.warning("%s", text if isinstance(error, TrainingError) else traceback.format_exc())
            if place := raised_in(error.__traceback__):
                text = f"{text} ({place})"
            if isinstance(error, InputError):
                text, cause = str(error), Cause.INPUT
            elif isinstance(error, CheckpointError) or not isinstance(error, TrainingError):
                cause = Cause.OWN
        # Not within the except block: the traceback of the error would keep the groups alive.
        self.engine.drop()
        if cause == Cause.OWN:
            self.engine.check_device()  # an error ends this process: the others continue without it
        return self.part.failed(text, cause) if text else []
