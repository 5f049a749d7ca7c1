"""What happens in a resilient run, gathered from the events of its coordinator into tables."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from makespan.oobleck._tables import ITERATIONS, RECOVERIES
from makespan.oobleck.planning import HybridPlan
from makespan.oobleck.runtime import Event, plan_from

__all__ = ["Record", "Recovery"]


@dataclass(slots=True)
class Recovery:
    """What lies between two stretches of training, in seconds of the coordinator's clock."""

    begin_s: float
    cause: str
    call: int = 1
    lost: dict[int, str] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    generation: int = 0
    iteration: int = 0
    frozen_s: float = 0.0
    decided_s: float = 0.0
    built_s: float = 0.0
    copied_s: float = 0.0
    first_s: float | None = None
    work: dict[str, Any] = field(default_factory=dict)

    def row(self, start_s: float, plan: HybridPlan) -> dict[str, Any]:
        """Row of the table of recoveries."""
        marks = ("frozen", "decided", "built", "copied", "first")
        times = {
            f"{name}_wall_s": (getattr(self, f"{name}_s") or self.begin_s) - self.begin_s for name in marks
        }
        return {
            "call": self.call, "generation": self.generation, "iteration": self.iteration,
            "cause": self.cause,
            "lost": " ".join(f"{node}:{phase}" for node, phase in sorted(self.lost.items())),
            "joined": " ".join(map(str, sorted(self.joined))),
            "action": " ".join(self.work.get("kinds", ())) or "none",
            "n_microbatches": "+".join(str(one.n_microbatches) for one in plan.pipelines),
            "layers": "+".join(
                "/".join(str(len(stage.layers)) for stage in one.template.stages) for one in plan.pipelines
            ),
            "nodes": "+".join("/".join(map(str, one.nodes)) for one in plan.pipelines),
            "copies_bytes": float(self.work.get("copies_bytes", 0.0)),
            "begin_wall_s": self.begin_s - start_s, **times,
        }  # fmt: skip


class Record:
    """Listens to a coordinator."""

    def __init__(self) -> None:
        self.call = 1
        self.start_s: float | None = None
        self.pids: dict[int, int] = {}
        self.hosts: dict[int, str] = {}
        self.phases: dict[int, tuple[str, int]] = {}
        self.plans: list[tuple[int, HybridPlan]] = []
        self.rows: list[dict[str, Any]] = []
        self.recoveries: list[Recovery] = []
        self.attempts: Counter[int] = Counter()
        self.members: set[int] = set()
        self.generation, self.n_reads = 0, 0
        self.n_greetings: Counter[int] = Counter()
        self._open: Recovery | None = None
        self._begun = (0, -1)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if self.start_s is None:
            self.start_s = event.time_s
            self._open = Recovery(event.time_s, "start", self.call)
        if (take := getattr(self, f"_on_{event.kind}", None)) is not None:
            take(event)

    @property
    def n_repeated(self) -> int:
        """Iterations that were begun again."""
        return sum(count - 1 for count in self.attempts.values())

    @property
    def first_wall_s(self) -> float:
        """When training began, from the start of the run."""
        return (self.recoveries[0].copied_s or 0.0) - (self.start_s or 0.0)

    @property
    def keeps_processes(self) -> bool:
        """Whether each node that was there had one process."""
        return all(count == 1 for count in self.n_greetings.values())

    def iterations(self) -> pd.DataFrame:
        """Table of iterations."""
        rows = [row | {"attempts": self.attempts[row["iteration"]]} for row in self.rows]
        return ITERATIONS.validate(pd.DataFrame(rows, columns=ITERATIONS.names), "iterations of the run")

    def recovery_table(self) -> pd.DataFrame:
        """Table of recoveries."""
        rows = [
            one.row(self.start_s or 0.0, plan)
            for one, (_, plan) in zip(self.recoveries, self.plans, strict=True)
        ]
        return RECOVERIES.validate(pd.DataFrame(rows, columns=RECOVERIES.names), "recoveries of the run")

    # --- events -------------------------------------------------------------------------------

    def _begin(self, event: Event, cause: str) -> Recovery:
        if self._open is None:
            self._open = Recovery(event.time_s, cause, self.call)
        return self._open

    def _on_hello(self, event: Event) -> None:
        if event.node is not None:
            self.n_greetings[event.node] += 1
            self.pids[event.node], self.hosts[event.node] = event.values["pid"], event.values["host"]

    def _on_announce(self, event: Event) -> None:
        phase, iteration = event.values["phase"], event.values["iteration"]
        if event.node is not None:
            self.phases[event.node] = phase, iteration
        if self._open is not None:
            if phase == "copy":
                self._open.built_s = event.time_s
            return
        if phase == "forward":
            latest = self.recoveries[-1]
            if latest.first_s is None:
                latest.first_s = event.time_s
            if self._begun != (self.generation, iteration):
                self._begun = self.generation, iteration
                self.attempts[iteration] += 1

    def _on_lost(self, event: Event) -> None:
        if event.node is not None:
            phase, _ = self.phases.get(event.node, ("start", 0))
            self._begin(event, "loss").lost[event.node] = phase

    def _on_failure(self, event: Event) -> None:
        self._begin(event, "failure")

    def _on_freeze(self, event: Event) -> None:
        joined = set(event.values["members"]) - self.members
        self._begin(event, "join" if joined else "drain").joined = joined

    def _on_frozen(self, event: Event) -> None:
        if self._open is not None:
            self._open.frozen_s = event.time_s

    def _on_plan(self, event: Event) -> None:
        if self._open is not None:
            self._open.decided_s, self._open.work = event.time_s, dict(event.values["work"])
            self.n_reads += event.values["work"]["origin"] is not None

    def _on_copied(self, event: Event) -> None:
        if self._open is not None:
            self._open.copied_s = event.time_s

    def _on_resume(self, event: Event) -> None:
        if (found := self._open) is None:
            return
        found.generation, found.iteration = event.values["generation"], event.values["step"]
        plan = plan_from(found.work["plan"])
        self.generation, self.members = found.generation, set(plan.nodes)
        self.plans.append((found.iteration, plan))
        self.recoveries.append(found)
        self._open, self._begun = None, (0, -1)

    def _on_commit(self, event: Event) -> None:
        reports = [one for one in event.values["reports"].values() if one]
        plan = self.plans[-1][1]
        loss = reports[0]["loss"] if reports else float("nan")
        self.rows.append(
            {
                "call": self.call, "iteration": event.values["iteration"], "loss": loss,
                "generation": self.generation, "attempts": 0, "n_pipelines": len(plan.pipelines),
                "n_nodes": len(plan.nodes), "end_wall_s": event.time_s - (self.start_s or 0.0),
            }
        )  # fmt: skip
