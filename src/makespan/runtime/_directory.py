"""The directory of a run: where its processes, and those that started them, leave word for each other."""

import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from makespan.errors import MakespanError
from makespan.files import read_json, write_json

__all__ = ["RunDirectory"]

_OF_A_RUN = (
    "request.json", "result-*.json", "progress.json", "stop", "met-*.json", "store-*.json", "error-*.json",
    "lost-*.json", "log-*.txt", "alive-*", "ready-*", "beat-*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Files by which the processes of a run are asked, watched and stopped; all must see them.

    Every file is whole or not there. Values are plain: what JSON can hold.
    """

    path: Path

    def prepare(self, request: Any) -> None:
        """Create the directory, remove what an earlier run left, and write the request of a new one."""
        self.path.mkdir(parents=True, exist_ok=True)
        for pattern in _OF_A_RUN:
            for path in self.path.glob(pattern):
                path.unlink()
        write_json(request, self.path / "request.json")

    def request(self) -> Any:
        """Request of the run."""
        return read_json(self.path / "request.json")

    def write_result(self, result: Any, number: int = 0) -> None:
        """Write what came of the run, or of one of its jobs by number; one process does."""
        write_json(result, self.path / f"result-{number}.json")

    def result(self, number: int = 0) -> Any:
        """Outcome of the run, or of one of its jobs; None before it is written."""
        return read_json(self.path / f"result-{number}.json")

    def write_progress(self, values: Any) -> None:
        """Write a heartbeat; one process does, and the time without one is limited."""
        write_json(values, self.path / "progress.json")

    def progress(self) -> Any:
        """Newest heartbeat; None before the first."""
        return read_json(self.path / "progress.json")

    def write_beat(self, rank: int) -> None:
        """Say that a process has got a piece further; the time without that is limited, too."""
        (self.path / f"beat-{rank}").touch()

    def write_sign_of_life(self, rank: int) -> None:
        """Say that a process is there, whatever it is doing."""
        (self.path / f"alive-{rank}").touch()

    def remove_sign_of_life(self, rank: int) -> None:
        """Say that a process gives no more signs, because it ends."""
        (self.path / f"alive-{rank}").unlink(missing_ok=True)

    def signs_of_life_ns(self) -> dict[int, int]:
        """Time of the newest sign of life of each process that gives some, by rank [ns]."""
        found = {}
        for path in self.path.glob("alive-*"):
            with suppress(FileNotFoundError):
                found[int(path.name.partition("-")[2])] = path.stat().st_mtime_ns
        return found

    def write_ready(self, rank: int) -> None:
        """Say that a process is about to meet the others for the first time."""
        (self.path / f"ready-{rank}").touch()

    def n_ready(self) -> int:
        """Return how many processes are about to meet, or have met."""
        return sum(1 for _ in self.path.glob("ready-*"))

    def request_stop(self) -> None:
        """Ask the processes to end when they can."""
        (self.path / "stop").touch()

    def is_stop_requested(self) -> bool:
        """Whether someone asked the processes to end."""
        return (self.path / "stop").exists()

    def write_meeting(self, meeting: int, pids: list[int]) -> None:
        """Write that the processes have met, with the process id of each; from then on stalls count."""
        write_json(pids, self.path / f"met-{meeting}.json")

    def meeting(self, number: int = 0) -> list[int] | None:
        """Process ids of those who met, by rank in the meeting; None before they have."""
        pids: list[int] | None = read_json(self.path / f"met-{number}.json")
        return pids

    def store_path(self, meeting: int) -> Path:
        """Path of the address at which the processes of a meeting find each other."""
        return self.path / f"store-{meeting}.json"

    def log_path(self, rank: int) -> Path:
        """Path of the output of a local process."""
        return self.path / f"log-{rank}.txt"

    def write_error(self, rank: int, error: BaseException) -> None:
        """Report why a process failed, with the time and the traceback of what is being handled.

        There is none of our own errors, whose message says what was found and what is accepted.
        """
        report = {"time_s": time.time(), "error": f"{type(error).__name__}: {error}"}
        trace = "" if isinstance(error, MakespanError) else traceback.format_exc()
        write_json(report | {"traceback": trace}, self.path / f"error-{rank}.json")

    def error(self, rank: int) -> Any:
        """Report of a process that failed: ``time_s``, ``error``, ``traceback``; None without one."""
        return read_json(self.path / f"error-{rank}.json")

    def write_lost(self, rank: int, reason: str) -> None:
        """Tell the processes that go on that one is gone, and why."""
        write_json(reason, self.path / f"lost-{rank}.json")

    def lost(self) -> dict[int, str]:
        """Who is gone, by rank, with the reason."""
        ranks = sorted(int(path.stem.partition("-")[2]) for path in self.path.glob("lost-*.json"))
        return {rank: read_json(self.path / f"lost-{rank}.json") for rank in ranks}

    def last_beat_ns(self) -> int | None:
        """Time of the newest heartbeat or meeting [ns]; None before the processes have met."""
        times = []
        places = (self.path.glob(pattern) for pattern in ("met-*.json", "beat-*"))
        for path in (self.path / "progress.json", *(path for found in places for path in found)):
            with suppress(FileNotFoundError):
                times.append(path.stat().st_mtime_ns)
        return max(times, default=None)
