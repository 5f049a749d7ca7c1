"""What a resilient run shows while it goes on: a line for each change, or a table on a terminal."""

import time
from typing import Any, TextIO

from makespan.oobleck.runtime import Event

__all__ = ["LiveView"]

_REFRESH_S = 0.25
_CLEAR = "\x1b[2K"
_SAID = {
    "ready": "node {node} is ready, process {pid} on {host}",
    "lost": "node {node} is lost in phase {phase}",
    "hung": "node {node} is silent and is killed",
    "leaving": "node {node} wants to leave",
    "drain": "nodes {nodes} are asked to leave",
    "gone": "node {node} is gone",
    "freeze": "generation {generation}: {members} stop and give up their groups",
    "failure": "node {node} failed: {error}",
    "resume": "generation {generation} goes on with iteration {step}",
    "checkpoint": "checkpoint after {step} iterations",
    "notice": "{signal}: the run ends after this iteration, with a checkpoint; once more ends it at once",
    "stopped": "stopped by {signal} after {step} iterations; {saved}",
}


class LiveView:
    """Listens to a coordinator and writes to a stream."""

    def __init__(self, iterations: int, stream: TextIO) -> None:
        self.iterations, self.stream, self.is_terminal = iterations, stream, stream.isatty()
        self.begun_s: float | None = None
        self.places: dict[int, tuple[str, int]] = {}
        self.nodes: dict[int, dict[str, Any]] = {}
        self.plan: list[dict[str, Any]] = []
        self.done, self.loss, self.is_stopped = 0, float("nan"), False
        self._drawn, self._drawn_s = 0, 0.0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        self.begun_s = event.time_s if self.begun_s is None else self.begun_s
        node, values = event.node, event.values
        if event.kind == "announce" and node is not None:
            self.places[node] = values["phase"], values["iteration"]
        elif event.kind == "ready" and node is not None:
            self.nodes[node] = dict(values)
        elif event.kind == "plan":
            self.plan = list(values["work"]["plan"])
            self._say(event, self._planned(values["work"]))
        elif event.kind == "commit":
            self.done = values["iteration"] + 1
            self.loss = next((one["loss"] for one in values["reports"].values() if one), self.loss)
        self.is_stopped |= event.kind == "stopped"
        if event.kind in _SAID:
            phase = self.places.get(-1 if node is None else node, ("start", 0))[0]
            self._say(event, _SAID[event.kind].format(**{"node": node, "phase": phase, **values}))
        if event.kind in ("lost", "gone") and node is not None:
            self.nodes.pop(node, None)
        if self.is_terminal and time.monotonic() - self._drawn_s > _REFRESH_S:
            self._draw()

    def close(self) -> None:
        """Draw a last time."""
        if self.is_terminal and self.begun_s is not None:
            self._draw()

    def _planned(self, work: dict[str, Any]) -> str:
        """Return pipelines, what was done, and what is copied, in a line."""
        pipelines = ", ".join(
            "/".join(map(str, one["nodes"])) + f" with {one['n_microbatches']}" for one in work["plan"]
        )
        what = " ".join(work["kinds"]) or "as before"
        return f"{what}: pipelines {pipelines} microbatches; {len(work['copies'])} layer(s) to copy"

    def _say(self, event: Event, text: str) -> None:
        self._erase()
        self.stream.write(f"{event.time_s - (self.begun_s or 0.0):8.2f} s  {text}\n")
        self.stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A" + f"{_CLEAR}\n" * self._drawn + f"\x1b[{self._drawn}A")
            self._drawn = 0

    def _draw(self) -> None:
        """Draw the table of the nodes in place of the one before."""
        lines = [f"{self.done}/{self.iterations} iterations, loss {self.loss:.4f}"]
        for number, one in enumerate(self.plan):
            for stage, node in enumerate(one["nodes"]):
                cut = one["template"]["stages"][stage]
                layers = f"layers {cut['first_layer']}-{cut['end_layer'] - 1}"
                phase, iteration = self.places.get(node, ("start", 0))
                pid = self.nodes.get(node, {}).get("pid", "")
                lines.append(f"  pipeline {number}  node {node:<4} {pid:<8} {layers:<14} {phase} {iteration}")
        self._erase()
        self.stream.write("".join(f"{_CLEAR}{line}\n" for line in lines))
        self.stream.flush()
        self._drawn, self._drawn_s = len(lines), time.monotonic()
