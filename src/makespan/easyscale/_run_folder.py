"""The directory of an elastic run: what lasts from one set of processes to the next.

``checkpoints/`` has the newest two, ``records/`` what happened between them, ``steps.csv`` and
``reconfigurations.csv`` the tables made of that, ``state.json`` whether the run goes on, and ``wanted.json``
what somebody asks for.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.easyscale._tables import ELASTIC_STEPS, RECONFIGURATIONS
from makespan.easyscale.runtime import TRAINING_LOCK
from makespan.errors import CheckpointError, InputError
from makespan.files import read_json, write_json
from makespan.runtime import Checkpoint, is_taken, sound_checkpoint, take
from makespan.tables import write_csv

__all__ = ["RunFolder"]

_ENDING_S = 60.0
_RECORD = re.compile(r"step-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run; one process at a time holds them."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def wanted_path(self) -> Path:
        """Where somebody asks for another mapping."""
        return self.path / "wanted.json"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the one process that runs here; an `InputError` says that there is another.

        Processes that train end soon after a run that was killed; until then they may write checkpoints.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        accepted = "a directory of its own for each run"
        handle = take(self.path / "lock")
        if handle is None:
            raise InputError(f"run_dir is {self.path}, where a run is going on; accepted: {accepted}")
        try:
            training = take(self.path / TRAINING_LOCK, _ENDING_S)
            if training is None:
                found = f"run_dir is {self.path}, where processes of an earlier run still train"
                raise InputError(f"{found} after {_ENDING_S:g} s; accepted: {accepted}")
            os.close(training)
            yield
        finally:
            os.close(handle)

    def is_held(self) -> bool:
        """Whether a run is going on here."""
        return is_taken(self.path / "lock")

    def checkpoint(self) -> Checkpoint | None:
        """Newest checkpoint that is as it was written, see `makespan.runtime.sound_checkpoint`."""
        return sound_checkpoint(self.checkpoints)

    def forget_after(self, step: int) -> None:
        """Remove records of mini-batches that no checkpoint has."""
        for path, end in self._records():
            if end > step:
                path.unlink()

    def _records(self) -> list[tuple[Path, int]]:
        """Files of records with the last mini-batch of each, in order."""
        found = [(path, _RECORD.fullmatch(path.name)) for path in sorted((self.path / "records").glob("*"))]
        return [(path, int(match[1])) for path, match in found if match is not None]

    def write_tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Make ``steps.csv`` and ``reconfigurations.csv`` of all records, and return them."""
        found = [read_json(path, CheckpointError) for path, _ in self._records()]
        changes = {record["rows"][0]["stage"]: record["change"] for record in found}
        tables = []
        for schema, rows in (
            (ELASTIC_STEPS, [row for record in found for row in record["rows"]]),
            (RECONFIGURATIONS, list(changes.values())),
        ):
            path = self.path / f"{schema.name}.csv"
            tables.append(schema.validate(pd.DataFrame(rows, columns=schema.names), str(path)))
            write_csv(tables[-1], path)
        return tables[0], tables[1]

    def write_state(self, state: str, step: int, job: dict[str, Any], *, mixes_devices: bool) -> None:
        """Write whether the run goes on, after which mini-batch, what it trains, and what it allows."""
        values = {"state": state, "step": step, "job": job, "mixes_devices": mixes_devices}
        write_json(values, self.path / "state.json")

    def state(self) -> dict[str, Any]:
        """Return what was written last; an `InputError` says that no run was here."""
        found = read_json(self.path / "state.json")
        if not isinstance(found, dict) or "job" not in found:
            raise InputError(f"run_dir is {self.path}, where no run was; accepted: the directory of a run")
        return found

    def want(self, values: dict[str, Any]) -> None:
        """Ask for the values of another placing, or with none of them for none."""
        write_json(values, self.wanted_path)

    def take_wanted(self) -> dict[str, Any] | None:
        """Return what somebody asked for, and forget it."""
        taken = self.path / "taken.json"
        try:
            self.wanted_path.replace(taken)  # what is asked for from now on is not touched
        except FileNotFoundError:
            return None
        found: dict[str, Any] | None = read_json(taken)
        return found
