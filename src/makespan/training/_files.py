"""Names of the files in the directory of a run, and small JSON files written atomically."""

import json
import time
import traceback
from pathlib import Path
from typing import Any

from makespan.tables import write_text

__all__ = [
    "GRADIENTS", "PROGRESS", "REQUEST", "RESULT", "STOP", "STORE", "error_file", "log_file", "read_json",
    "write_error", "write_json",
]  # fmt: skip

REQUEST = "request.json"
RESULT = "result.json"
PROGRESS = "progress.json"
STOP = "stop"
STORE = "store.json"
GRADIENTS = "gradients.npz"


def error_file(run_dir: Path, rank: int) -> Path:
    """Return where a process reports why it failed."""
    return run_dir / f"error-{rank}.json"


def log_file(run_dir: Path, rank: int) -> Path:
    """Return where the output of a local process goes."""
    return run_dir / f"log-{rank}.txt"


def write_json(values: Any, path: Path) -> None:
    """Write plain values; a reader sees the old file or the new one."""
    write_text(json.dumps(values), path)


def write_error(error: BaseException, run_dir: Path, rank: int) -> None:
    """Report why a process failed, with the time and the traceback of what is being handled."""
    report = {"time_s": time.time(), "error": f"{type(error).__name__}: {error}"}
    write_json(report | {"traceback": traceback.format_exc()}, error_file(run_dir, rank))


def read_json(path: Path) -> Any:
    """Read plain values, None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
