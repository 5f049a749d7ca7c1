"""What a profile has measured so far: kept in a file, so that an interrupted one goes on, and counted."""

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from makespan.files import read_text, write_text
from makespan.runtime import Launcher, describe_machine
from makespan.training import RunResult, TrainingJob, train_all

__all__ = ["Measurements", "train_missing"]

_EXPECTED = "what an interrupted profile measured"
_OF_A_MOMENT = ("load", "slurm")  # in the description of a machine


class Measurements:
    """Named values of a profile, each written to a file as soon as it is there.

    The file has a line for the settings and one for each value. A profile with equal settings on the same
    machine goes on with them; another one begins anew, and says so. Threads may share one.

    Parameters
    ----------
    path
        The file, which comes into being with the first value; None to keep nothing.
    settings
        Whatever a value depends on beside its name, plain.
    total
        Runs to measure in all.
    progress
        Is told how many runs are done, and of how many, with every value and every heartbeat; or None.
    tell
        Is told in a line what was found.
    """

    def __init__(
        self,
        path: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        total: int = 0,
        progress: Callable[[int, int], None] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path, self._total, self._tell = path, total, tell
        self._progress = progress or (lambda done, total: None)
        self._values: dict[str, tuple[int, Any]] = {}
        self._stream: IO[str] | None = None
        self._lock = threading.Lock()
        if path is not None:
            self._head = json.loads(json.dumps({"machine": _machine(), "settings": dict(settings or {})}))
            self._load(path)
        self._done = sum(n_runs for n_runs, _ in self._values.values())
        if self._done:
            tell(f"{path}: {self._done} of {total} runs are measured, going on")
        self._progress(self._done, total)

    def __contains__(self, name: str) -> bool:
        """Whether there is a value of this name."""
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        """Return a value by its name."""
        return self._values[name][1]

    def add(self, name: str, value: Any, n_runs: int = 1) -> None:
        """Keep a plain value, which took so many runs."""
        with self._lock:
            if self._path is not None:
                self._write(self._path, _line(name, n_runs, value))
            self._values[name] = (n_runs, value)
            self._done += n_runs
            self._progress(self._done, self._total)

    def measure(self, name: str, how: Callable[[], Any], n_runs: int = 1) -> Any:
        """Return the value of this name, which is measured if it is not there."""
        if name not in self:
            self.add(name, how(), n_runs)
        return self[name]

    def skip(self, n_runs: int) -> None:
        """Count runs that cannot be made as done."""
        self._done += n_runs

    def beat(self) -> None:
        """Tell that the measurement goes on."""
        with self._lock:
            self._progress(self._done, self._total)

    def remove(self) -> None:
        """Remove the file, when what is measured is written elsewhere."""
        if self._stream is not None:
            self._stream.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        if not path.exists():
            return
        first, *others = _lines(path) or [None]
        if first == self._head:
            self._values = {one["name"]: (one["n_runs"], one["value"]) for one in others}
            return
        found = first.get("machine") if isinstance(first, dict) else None
        what = "with other settings" if found == self._head["machine"] else "on another machine"
        self._tell(f"{path}: was measured {what}, beginning anew")

    def _write(self, path: Path, line: str) -> None:
        if self._stream is None:  # whole lines only: the last one of a killed process may be cut
            kept = (_line(name, *value) for name, value in self._values.items())
            write_text("".join([json.dumps(self._head), "\n", *kept]), path)
            self._stream = path.open("a", encoding="utf-8")
        self._stream.write(line)
        self._stream.flush()


def _line(name: str, n_runs: int, value: Any) -> str:
    return json.dumps({"name": name, "n_runs": n_runs, "value": value}) + "\n"


def _lines(path: Path) -> list[Any]:
    """Values of the whole lines of a file."""
    found: list[Any] = []
    for line in read_text(path, _EXPECTED).splitlines(keepends=True):
        try:
            found.append(json.loads(line if line.endswith("\n") else ""))
        except ValueError:
            break
    return found


def _machine() -> dict[str, Any]:
    """Describe what is the same as long as the machine is."""
    found = {name: value for name, value in describe_machine().items() if name not in _OF_A_MOMENT}
    return found | {"host": socket.gethostname()}


def train_missing(
    jobs: Mapping[str, TrainingJob],
    read: Callable[[RunResult], Any],
    launcher: Launcher,
    kept: Measurements,
    run_dir: str | Path | None = None,
    beside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Any]:
    """Return what is read of the runs of named jobs; those not kept are trained, beside others, and kept."""
    missing = [name for name in jobs if name not in kept]
    names = iter(missing)

    def note(results: Sequence[RunResult]) -> None:
        for result, name in zip(results, names, strict=False):
            kept.add(name, read(result))
        kept.beat()

    if missing:
        with beside():
            train_all([jobs[name] for name in missing], launcher=launcher, run_dir=run_dir, on_beat=note)
    return [kept[name] for name in jobs]
