"""Losses of interrupted jobs: progress that is in a checkpoint, in memory alone, or gone."""

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from makespan.sim.recovery import Recovery
from makespan.sim.state import JobView

_ROUNDING = 1e-9  # relative to the steps of a job: a step that ends at this instant counts as done


class LossOutcome(StrEnum):
    """Place where the progress of an interrupted job is."""

    IN_MEMORY = "in memory"  # the devices that are left keep it, all but the running step
    CHECKPOINT = "checkpoint"  # the job returned to its last checkpoint


class Loss(NamedTuple):
    """Progress that a job lost: steps, the device time that they took [GPU s], and what it goes on from."""

    steps: float
    gpu_s: float
    outcome: LossOutcome


class _Unsaved:
    """Progress of a job that is in no checkpoint, the newest last: steps, and device time of each [GPU s]."""

    def __init__(self) -> None:
        self._pieces: list[tuple[float, float]] = []

    def add(self, steps: float, gpu_s_per_step: float) -> None:
        if steps > 0:
            self._pieces.append((steps, gpu_s_per_step))

    def lose(self, steps: float) -> tuple[float, float]:
        """Remove the newest steps, up to a number; return how many there were, and their GPU s."""
        lost, gpu_s = 0.0, 0.0
        while self._pieces and lost < steps:
            done, each_gpu_s = self._pieces.pop()
            gone = min(done, steps - lost)
            lost += gone
            gpu_s += gone * each_gpu_s
            if gone < done:
                self._pieces.append((done - gone, each_gpu_s))
        return lost, gpu_s


@dataclass(slots=True)
class _Waiting:
    """A job without devices whose state is in the memory of these nodes.

    ``reduced`` has the devices that are left on nodes which lost some of them.
    """

    job: JobView
    nodes: set[int]
    reduced: Mapping[int, int] = field(default_factory=dict)


class Interruptions:
    """Progress of jobs with a `Recovery` that is in memory alone, and what they lose of it.

    Invariant: between two events a job is in ``_waiting`` only if it is pending, got no devices since it was
    interrupted, and the policy has not decided since.
    """

    def __init__(self, extra_steps: float) -> None:
        self._extra_steps = extra_steps
        self._unsaved: dict[int, _Unsaved] = {}  # of allocations before the present one, by `JobView.index`
        self._n_lost: dict[int, int] = {}  # nodes that a job lost since it had last recovered
        self._waiting: dict[int, _Waiting] = {}
        self._restarting: set[int] = set()  # jobs that start from a checkpoint the next time

    def interrupt(self, job: JobView, recovery: Recovery, node: int, now_s: float, n_left: int = 0) -> Loss:
        """Return what a job loses that still holds its devices, all but ``n_left`` on a node being lost [s].

        The caller releases the devices, and gives the job the steps back.
        """
        held, index = job.allocation, job.index
        reduced = {node: n_left} if n_left else {}
        left = set() if held is None else set(held.nodes) - ({node} - reduced.keys())
        unsaved = self._progress(job, recovery, now_s)
        is_recovering = index in self._n_lost and now_s < job.ready_time_s
        n_lost = self._n_lost[index] + 1 if is_recovering else 1
        if not left or n_lost > recovery.survives:
            return self._return_to_checkpoint(job, unsaved)
        self._unsaved[index], self._n_lost[index] = unsaved, n_lost
        self._waiting[index] = _Waiting(job, left, reduced)
        total = job.spec.steps + self._extra_steps
        done = total - job._steps_left_now()
        return Loss(*unsaved.lose(done - math.floor(done + _ROUNDING * total)), LossOutcome.IN_MEMORY)

    def lose_node(self, node: int) -> Iterator[tuple[JobView, Loss]]:
        """Yield the waiting jobs whose state went with a node, and their losses."""
        for index, waiting in list(self._waiting.items()):
            recovery = waiting.job._recovery
            if recovery is not None and node in waiting.nodes:
                waiting.nodes.discard(node)
                self._n_lost[index] += 1
                if not waiting.nodes or self._n_lost[index] > recovery.survives:
                    yield waiting.job, self._return_to_checkpoint(waiting.job, self._unsaved[index])

    def give_up(self) -> Iterator[tuple[JobView, Loss]]:
        """Yield the jobs that got no devices in the decision after their interruption, and their losses."""
        for index, waiting in list(self._waiting.items()):
            yield waiting.job, self._return_to_checkpoint(waiting.job, self._unsaved[index])

    def wait_in_memory(self, job: JobView, nodes: Set[int]) -> None:
        """Note that a job of a live run waits with its state in the memory of nodes."""
        self._waiting[job.index] = _Waiting(job, set(nodes))
        self._restarting.discard(job.index)

    def return_to_checkpoint(self, job: JobView) -> None:
        """Note that the state of a job of a live run is in its last checkpoint only."""
        self._return_to_checkpoint(job, _Unsaved())

    @property
    def jobs(self) -> list[JobView]:
        """Jobs without devices whose state is in memory."""
        return [waiting.job for waiting in self._waiting.values()]

    @property
    def waiting(self) -> bool:
        """Whether a job without devices has its state in memory."""
        return bool(self._waiting)

    def nodes_left(self, job: JobView) -> set[int]:
        """Return the nodes that have the state of a waiting job in memory; empty if none do."""
        waiting = self._waiting.get(job.index)
        return set() if waiting is None else waiting.nodes

    def devices_left(self, job: JobView) -> dict[int, int]:
        """Return the devices that have the state of a waiting job in memory, by node; empty if none do."""
        waiting, before = self._waiting.get(job.index), job._last
        if waiting is None or before is None:
            return {}
        return {
            node: waiting.reduced.get(node, count) for node, count in before.shares if node in waiting.nodes
        }

    def start(self, job: JobView, recovery: Recovery) -> float | None:
        """Note that a job gets devices; return its time without progress [s], None for the usual delay."""
        if self._waiting.pop(job.index, None) is not None:
            return recovery.paused_s
        if job.index in self._restarting:
            self._restarting.discard(job.index)
            return recovery.restart_s
        return None

    def save(self, job: JobView) -> None:
        """Note that all progress of a job is in a checkpoint, or that the job is finished."""
        self._waiting.pop(job.index, None)
        self._unsaved.pop(job.index, None)
        self._n_lost.pop(job.index, None)

    def _progress(self, job: JobView, recovery: Recovery, now_s: float) -> _Unsaved:
        """Return the progress of a job that holds devices since its last checkpoint."""
        held = job.allocation
        elapsed_s = now_s - job.ready_time_s
        n_written = recovery.n_checkpoints(elapsed_s)
        unsaved = _Unsaved() if n_written else self._unsaved.get(job.index, _Unsaved())
        if held is None or elapsed_s <= 0:
            return unsaved
        saved_s = n_written * (recovery.checkpoint_interval_s or 0.0)
        if not held.is_guest:
            steps = (recovery.trained_s(elapsed_s) - saved_s) / job._step_s
            unsaved.add(steps, held.n_gpus * job._step_s)
            return unsaved
        # The speed of a guest changes during an allocation: interpolate its steps between the changes.
        times_s, steps_left = zip(*job._marks, (now_s, job._steps_left_now()), strict=True)
        trained_s = [recovery.trained_s(time_s - job.ready_time_s) for time_s in times_s]
        steps = float(np.interp(saved_s, trained_s, steps_left) - steps_left[-1])
        if steps > 0:  # so that the mean time of a step on devices that nobody holds exists
            gpu_s = job._unheld_gpu_s(lambda time_s: recovery.trained_s(time_s - job.ready_time_s), saved_s)
            unsaved.add(steps, gpu_s / steps)
        return unsaved

    def _return_to_checkpoint(self, job: JobView, unsaved: _Unsaved) -> Loss:
        self.save(job)
        self._waiting.pop(job.index, None)
        self._restarting.add(job.index)
        return Loss(*unsaved.lose(math.inf), LossOutcome.CHECKPOINT)
