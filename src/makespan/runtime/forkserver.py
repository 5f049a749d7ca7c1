"""Fork server: start Python workers by forking a process that has already loaded their libraries.

Loading torch takes seconds of CPU time; forking a process that has loaded it takes milliseconds. Servers
belong to the launching process, one for each set of values of the variables that libraries read only once,
when they are loaded. Servers and workers end with the launching process.

Each worker has a pipe to its launcher, with this protocol:

- the server writes the process id of the worker, and later its exit status
- a pipe that closes without an exit status means that both the server and the worker are gone
- a launcher that closes its end asks the server to kill the worker
"""

import gc
import importlib
import io
import json
import math
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeGuard

from makespan.errors import WorkerError

_PACKAGE = "makespan"
_SIZE = struct.Struct("!Q")
_NUMBER = struct.Struct("!q")
_BLOCK = 1 << 16
_CHECK_S = 0.5
_ATTEMPTS = 3
_ABANDONED = -1
_SERVING = f"""
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM):  # the server ends with the launching process
    signal.signal(number, signal.SIG_IGN)
from {__name__} import serve
serve(*map(int, sys.argv[1:]))
"""
TUNABLES = "GLIBC_TUNABLES"
"""Variable with choices of the GNU C library."""
_READ_ONCE = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
              "THP_MEM_ALLOC_ENABLE", TUNABLES)  # fmt: skip
"""Variables by which torch and other libraries choose their kernels and their memory for good."""
_Key = tuple[int, tuple[str | None, ...]]
_lock = threading.Lock()
_servers: dict[_Key, tuple[socket.socket, "subprocess.Popen[bytes]"]] = {}


class Process(Protocol):
    """Interface of a process that a launcher uses; `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit; raise `subprocess.TimeoutExpired` after ``timeout`` seconds."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless the process has exited."""

    def kill(self) -> None:
        """Send SIGKILL."""


def how_ended(state: int) -> str:
    """Say how a process ended, by its exit status or, if negative, by a signal."""
    if state >= 0:
        return f"ended with status {state}"
    with suppress(ValueError):  # most signals of real time have no name
        return f"was ended by signal {signal.Signals(-state).name}"
    return f"was ended by signal {-state}"


def is_readable(handle: int, timeout_s: float | None = None) -> bool:
    """Wait until a pipe can be read, or is closed, for ``timeout_s`` or for ever; return False if it cannot.

    Unlike `select.select`, this takes handles above 1023, as programs with many open files have.
    """
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))


class ForkedProcess:
    """Worker forked by the server, as seen by the launching process."""

    def __init__(self, status: int, pid: int) -> None:
        self._status, self.pid = status, pid
        self._ended: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._ended

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit; raise `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        if self._ended is None:
            if not is_readable(self._status, timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            status = os.read(self._status, _NUMBER.size)
            os.close(self._status)
            # The worker holds the pipe too: if it closes without a status, both of them are gone.
            self._ended = _NUMBER.unpack(status)[0] if status else -signal.SIGKILL
        return self._ended

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless the process has exited."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def can_fork(worker: str | Sequence[str] | None) -> TypeGuard[str]:
    """Return True if a worker can be forked: a module of this package, on a system where forking is safe."""
    return sys.platform == "linux" and isinstance(worker, str) and worker.startswith(f"{_PACKAGE}.")


def fork_worker(module: str, argument: str, environment: Mapping[str, str], log: Path) -> ForkedProcess:
    """Run a module as a program with one argument in a forked process, with its output in ``log``.

    A killed server is replaced; a `WorkerError` is raised when every attempt failed.
    """
    request = {"module": module, "argument": argument, "environment": dict(environment)}
    text = json.dumps(request | {"directory": str(Path.cwd())}).encode()
    for _ in range(_ATTEMPTS):
        read, write = os.pipe()
        pid = b""
        try:
            try:
                with log.open("wb") as stream, _lock:
                    server = _server(environment)
                    socket.send_fds(server, [_SIZE.pack(len(text))], (write, stream.fileno()))
                    server.sendall(text)
            finally:
                os.close(write)  # the server has its own copy; ours would keep the pipe open forever
            pid = os.read(read, _NUMBER.size)
        except ConnectionError:
            pass
        except BaseException:
            os.close(read)
            raise
        if pid:
            return ForkedProcess(read, _NUMBER.unpack(pid)[0])
        os.close(read)  # the server was killed before it sent a process id
        with _lock:
            _discard(server)
    raise WorkerError(f"the fork server was killed {_ATTEMPTS} times")


def _server(environment: Mapping[str, str]) -> socket.socket:
    """Return the connection to the server for an environment; start the server at the first request."""
    # The process id is part of the key: a fork of this process must not use the servers of its parent.
    key = os.getpid(), tuple(environment.get(name) for name in _READ_ONCE)
    if (running := _servers.get(key)) is not None:
        if running[1].poll() is None:
            return running[0]
        _discard(running[0])
    ours, theirs = socket.socketpair()
    with theirs:
        handle = theirs.fileno()
        command = [sys.executable, "-c", _SERVING, str(handle), str(os.getpid())]
        others = {name: value for name, value in os.environ.items() if name not in _READ_ONCE}
        fixed = {name: environment[name] for name in _READ_ONCE if name in environment}
        server = subprocess.Popen(command, env=others | fixed, stdin=subprocess.DEVNULL, pass_fds=[handle])
    _servers[key] = ours, server
    return ours


def _discard(server: socket.socket) -> None:
    """Remove a server that was killed, unless another thread has done so."""
    for key, (connection, process) in list(_servers.items()):
        if connection is server:
            del _servers[key]
            server.close()
            process.kill()
            process.wait()


class _Server:
    """Loop of the server: fork the requested workers, and report the exit status of each.

    ``running`` maps the process id of each worker to the pipe of its launcher, or to `_ABANDONED` once the
    launcher has closed its end.
    """

    def __init__(self, client: socket.socket, parent: int) -> None:
        self.client, self.parent, self.running = client, parent, dict[int, int]()
        self.woken, wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(wake, False)
        self.handles = [client.fileno(), self.woken, wake]
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # A timer rather than a thread: it ticks while libraries load, and forking with threads is unsafe.
        signal.signal(signal.SIGALRM, self.end_with_parent)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, _CHECK_S, _CHECK_S)

    def end_with_parent(self, *_: object) -> None:
        """Exit at once when the launching process has ended."""
        if os.getppid() != self.parent:
            os._exit(1)

    def run(self) -> None:
        """Serve until the launching process closes the connection."""
        while True:
            ready = self.wait()
            if self.woken in ready:
                os.read(self.woken, _BLOCK)
                self.reap()
            for pid, status in self.running.items():
                if status in ready:  # the launcher closed its end of the pipe
                    os.kill(pid, signal.SIGKILL)
                    os.close(status)
                    self.running[pid] = _ABANDONED
            if self.client.fileno() in ready:
                header, handles, _, _ = socket.recv_fds(self.client, _SIZE.size, 2)
                size = _SIZE.unpack(header)[0] if header else 0
                text = self.receive(size)
                if not header or len(text) < size:
                    return
                self.fork(json.loads(text), *handles)

    def wait(self) -> set[int]:
        """Wait for a request, the exit of a worker or a closed pipe; return the handles that are ready."""
        poll = select.poll()
        for handle in (self.client.fileno(), self.woken):
            poll.register(handle, select.POLLIN)
        for status in set(self.running.values()) - {_ABANDONED}:
            poll.register(status, 0)  # no events: errors such as a closed reader are always reported
        return {handle for handle, _ in poll.poll()}

    def receive(self, size: int) -> bytes:
        """Read ``size`` bytes, or fewer if the connection ends."""
        parts: list[bytes] = []
        while size > 0:
            parts.append(self.client.recv(min(size, _BLOCK)))
            size = size - len(parts[-1]) if parts[-1] else 0
        return b"".join(parts)

    def reap(self) -> None:
        """Report the exit statuses of workers that have exited."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = self.running.pop(ended[0])
                if status != _ABANDONED:
                    self.report(status, os.waitstatus_to_exitcode(ended[1]))
                    os.close(status)

    def report(self, status: int, number: int) -> None:
        """Write a number to the launcher of a worker, unless it has closed its end."""
        with suppress(BrokenPipeError):
            os.write(status, _NUMBER.pack(number))

    def fork(self, request: Mapping[str, Any], status: int, log: int) -> None:
        """Start a worker, with its libraries loaded, and report its process id."""
        with suppress(Exception):  # the worker will fail on the same import and report it
            worker = importlib.import_module(request["module"])
            if request["environment"].get("MAKESPAN_WORLD_SIZE") != "1":
                for name in getattr(worker, "PRELOAD", ()):
                    importlib.import_module(name)
        gc.freeze()  # else the first collection in a worker would copy all pages shared with the server
        pid = os.fork()
        if pid == 0:
            self.become(request, status, log)
        self.report(status, pid)
        self.running[pid] = status
        os.close(log)

    def become(self, request: Mapping[str, Any], status: int, log: int) -> NoReturn:
        """Become the worker; it keeps the pipe open, which closes when both server and worker are gone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        for handle in (1, 2):
            os.dup2(log, handle)
        for handle in {*self.handles, *self.running.values(), log} - {_ABANDONED}:
            os.close(handle)
        os.set_inheritable(status, False)
        ended = 1
        try:
            os.chdir(request["directory"])
            os.environ.clear()
            os.environ.update(request["environment"] | {"MAKESPAN_PARENT": str(os.getppid())})
            if os.environ.get("PYTHONUNBUFFERED") and isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)  # Python reads the variable at its start only
            sys.argv[:] = [request["module"], request["argument"]]
            sys.modules.pop(request["module"], None)
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            ended = 0
        except SystemExit as end:
            ended = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - a fork must never continue as the server
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(ended)


def serve(handle: int, parent: int) -> None:
    """Serve the launching process, which holds the other end of a socket and started this process."""
    with socket.socket(fileno=handle) as client:
        _Server(client, parent).run()
