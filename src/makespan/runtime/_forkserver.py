"""Start Python workers by forking a process that has loaded their libraries already.

A worker that trains loads torch, which takes seconds of CPU time; a fork of a process that has it takes
milliseconds. One server belongs to each process that launches. It ends when that process is gone, and the
workers with it.
"""

import importlib
import json
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

__all__ = ["ForkedProcess", "Process", "can_fork", "fork_worker"]

_PACKAGE = "makespan"
_SIZE = struct.Struct("!Q")
_NUMBER = struct.Struct("!q")
_BLOCK = 1 << 16
_SERVING = f"import sys; from {__name__} import serve; serve(int(sys.argv[1]))"
_lock = threading.Lock()
_servers: dict[int, tuple[socket.socket, "subprocess.Popen[bytes]"]] = {}


class Process(Protocol):
    """What a launcher needs of a process: the part of `subprocess.Popen` that it uses."""

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; `subprocess.TimeoutExpired` after ``timeout`` seconds."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless it has ended."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkedProcess:
    """A worker that was forked by the server, seen from the process that launched it."""

    def __init__(self, status: int, pid: int) -> None:
        self._status, self.pid = status, pid
        self._ended: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._ended

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        if self._ended is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            told = os.read(self._status, _NUMBER.size)
            os.close(self._status)
            # Without a word the server was killed, and its workers end with it.
            self._ended = _NUMBER.unpack(told)[0] if told else -signal.SIGKILL
        return self._ended

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def can_fork(worker: str | Sequence[str] | None) -> TypeGuard[str]:
    """Whether a worker can be started so: a module of this package, on a system where forking is safe."""
    return sys.platform == "linux" and isinstance(worker, str) and worker.startswith(f"{_PACKAGE}.")


def fork_worker(module: str, argument: str, environment: Mapping[str, str], log: Path) -> ForkedProcess:
    """Run a module as a program of one argument in a process of its own, its output in ``log``."""
    request = {"module": module, "argument": argument, "environment": dict(environment)}
    request["directory"] = str(Path.cwd())
    read, write = os.pipe()
    try:
        with log.open("wb") as stream, _lock:
            try:
                _send(_server(), request, (write, stream.fileno()))
            except OSError:  # the server of before was killed
                _servers.clear()
                _send(_server(), request, (write, stream.fileno()))
        os.close(write)
        write = -1
        told = os.read(read, _NUMBER.size)
        if not told:
            raise ChildProcessError("the server that starts workers ended")
    except BaseException:
        os.close(read)
        raise
    finally:
        if write >= 0:
            os.close(write)
    return ForkedProcess(read, _NUMBER.unpack(told)[0])


def _server() -> socket.socket:
    """Return the connection to the server of this process, which is started the first time."""
    if (known := _servers.get(os.getpid())) is not None and known[1].poll() is None:
        return known[0]
    ours, theirs = socket.socketpair()
    with theirs:
        handle = theirs.fileno()
        command = [sys.executable, "-c", _SERVING, str(handle)]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[handle])
    _servers[os.getpid()] = ours, server
    return ours


def _send(server: socket.socket, request: Mapping[str, Any], handles: tuple[int, int]) -> None:
    text = json.dumps(request).encode()
    socket.send_fds(server, [_SIZE.pack(len(text))], handles)
    server.sendall(text)


class _Server:
    """The loop of the server: fork what is asked for, and tell how each worker ended."""

    def __init__(self, client: socket.socket) -> None:
        self.client, self.running = client, dict[int, int]()
        self.woken, wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(wake, False)
        self.own = [client.fileno(), self.woken, wake]
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> None:
        """Serve until the process that asks is gone."""
        while True:
            ready, _, _ = select.select([self.client.fileno(), self.woken], [], [])
            if self.woken in ready:
                os.read(self.woken, _BLOCK)
                self.reap()
            if self.client.fileno() in ready:
                told, handles, _, _ = socket.recv_fds(self.client, _SIZE.size, 2)
                if not told:
                    return
                self.fork(json.loads(self.receive(_SIZE.unpack(told)[0])), *handles)

    def receive(self, size: int) -> bytes:
        """Read so many bytes."""
        parts: list[bytes] = []
        while size > 0:
            parts.append(self.client.recv(min(size, _BLOCK)))
            size = size - len(parts[-1]) if parts[-1] else 0
        return b"".join(parts)

    def reap(self) -> None:
        """Tell the exit statuses of workers that have ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = self.running.pop(ended[0])
                with suppress(BrokenPipeError):
                    os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(ended[1])))
                os.close(status)

    def fork(self, request: Mapping[str, Any], status: int, log: int) -> None:
        """Start a worker, with its libraries loaded, and tell its process id."""
        with suppress(Exception):  # the worker says itself what is wrong
            worker = importlib.import_module(request["module"])
            if request["environment"].get("MAKESPAN_WORLD_SIZE") != "1":
                for name in getattr(worker, "OF_SEVERAL", ()):
                    importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            self.become(request, status, log)
        os.write(status, _NUMBER.pack(pid))
        self.running[pid] = status
        os.close(log)

    def become(self, request: Mapping[str, Any], status: int, log: int) -> NoReturn:
        """Be the worker."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
        for handle in (1, 2):
            os.dup2(log, handle)
        for handle in {*self.own, *self.running.values(), status, log}:
            os.close(handle)
        ended = 1
        try:
            os.chdir(request["directory"])
            os.environ.clear()
            os.environ.update(request["environment"] | {"MAKESPAN_PARENT": str(os.getppid())})
            sys.argv[:] = [request["module"], request["argument"]]
            sys.modules.pop(request["module"], None)
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            ended = 0
        except SystemExit as end:
            ended = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - a fork must never go on as the server
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(ended)


def serve(handle: int) -> None:
    """Serve the process at the other end of a socket."""
    with socket.socket(fileno=handle) as client:
        _Server(client).run()
