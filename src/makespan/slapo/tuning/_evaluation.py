"""One point, tried: what came of it, and a file in which it is found again."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from makespan.errors import InputError, TraceError
from makespan.files import read_bytes
from makespan.slapo.tuning._space import Point

__all__ = ["Database", "Evaluation", "Status", "key_of"]

Status = Literal["ok", "oom", "invalid", "fail"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came of one point.

    Parameters
    ----------
    point
        Values of the symbols.
    status
        ``ok``; ``oom``, it needs more memory than there is; ``invalid``, it contradicts itself, which costs
        nothing; ``fail``, anything else.
    value
        What is maximised; None unless the status is ``ok``.
    info
        Whatever else the objective tells, as JSON.

    Raises
    ------
    InputError
        The status is none of these, or a value is missing or not finite where there must be one.
    """

    point: Point
    status: Status
    value: float | None
    info: Mapping[str, Any]

    def __post_init__(self) -> None:
        accepted = self.status in STATUSES and (
            (self.value is not None and math.isfinite(self.value))
            if self.status == "ok"
            else self.value is None
        )
        if not accepted:
            raise InputError(
                f"point {dict(self.point)}: found status {self.status!r} with value {self.value!r}; "
                f"accepted: ok with a finite number, or {', '.join(STATUSES[1:])} with none"
            )

    @property
    def score(self) -> float:
        """The value; minus infinity where there is none."""
        return -math.inf if self.value is None else self.value


def key_of(point: Point) -> str:
    """Return a text that equal points share, whatever the order of their symbols; 1 is equal to 1.0."""
    plain = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in point.items()
    }
    return json.dumps(plain, sort_keys=True)


class Database:
    """Evaluations in a file of JSON lines, each on the disk before the next begins.

    A line that a killed process left unfinished is forgotten. Raises `TraceError` where another line is no
    evaluation; the message names file and line.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        content = read_bytes(self._path, "evaluations", TraceError) if self._path.exists() else b""
        self._whole_bytes = content.rfind(b"\n") + 1
        lines = content[: self._whole_bytes].splitlines()
        read = [self._read(line, number) for number, line in enumerate(lines, start=1)]
        self._known = {key_of(one.point): one for one in read}

    def _read(self, line: bytes, number: int) -> Evaluation:
        try:
            raw = json.loads(line)
            return Evaluation(dict(raw["point"]), raw["status"], raw["value"], dict(raw["info"]))
        except (ValueError, KeyError, TypeError, InputError) as error:
            raise TraceError(
                f"{self._path}: line {number}: {error}; accepted: an evaluation with point, status, value "
                "and info"
            ) from None

    def known(self, points: Iterable[Point]) -> dict[str, Evaluation]:
        """Return those of its evaluations that are of these points, by key."""
        return {key: self._known[key] for key in map(key_of, points) if key in self._known}

    def append(self, found: Evaluation) -> None:
        """Write one evaluation and wait until the disk has it."""
        record = {
            "point": dict(found.point),
            "status": found.status,
            "value": found.value,
            "info": dict(found.info),
        }
        line = json.dumps(record, allow_nan=False) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as stream:
            stream.truncate(self._whole_bytes)
            stream.seek(self._whole_bytes)
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())
        self._whole_bytes += len(line.encode())
        self._known[key_of(found.point)] = found
