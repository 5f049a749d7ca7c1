"""A schedule as text: the tree of modules, each with what was applied to it."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["printed"]


def printed(sch: "Schedule") -> str:
    """Return the tree below a node; equal siblings in a row are printed once."""
    calls: dict[str, list[str]] = {}
    places = {path for path, _ in sch.root.named_schedules()}
    for entry in sch.metadata.journal:
        place, inside = entry.path, ""
        while place not in places:
            place, _, last = place.rpartition(".")
            inside = f"{last}.{inside}".rstrip(".")
        calls.setdefault(place, []).append(f"{inside}: {entry.call}" if inside else entry.call)
    return "\n".join(_lines(sch, calls))


def _lines(sch: "Schedule", calls: dict[str, list[str]]) -> Iterator[str]:
    yield type(sch.mod).__name__ if sch.child else repr(sch.mod).partition("\n")[0]
    yield from (f"  | {call}" for call in calls.get(sch.path, ()))
    texts = [(name, tuple(_lines(node, calls))) for name, node in sch.child.items()]
    for body, alike in groupby(texts, key=lambda text: text[1]):
        names = [name for name, _ in alike]
        head = ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"
        yield f"  {head}: {body[0]}" + (f", {len(names)} alike" if len(names) > 3 else "")
        yield from (f"  {line}" for line in body[1:])
