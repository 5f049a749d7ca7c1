"""Live runs without processes and without waiting: steps take their time on a clock that the run drives."""

import math

from makespan.errors import LostWorkerError, MakespanError, WorkerError
from makespan.live import SegmentResult
from makespan.live.engine import Executor, LiveClock, SegmentEnd

_LEAST_WALL_S = 1e-9  # by which a wait moves the clock, however it rounds


class DrivenClock(LiveClock):
    """A clock on which time passes only where the executor lets it pass."""

    passed_wall_s = 0.0

    def now_s(self):
        return self._start_s + self.scale * self.passed_wall_s


class DrivenExecutor(Executor):
    """Runs segments step by step while the engine waits; slots and stops are those of every executor."""

    def __init__(self, trainer, n_slots, n_nodes, clock):
        super().__init__(trainer, n_slots, n_nodes)
        self.clock = clock
        self.wakes = {}

    def _start(self, segment):
        job_id = segment.job.job_id
        self._active[job_id] = segment
        self._proceed(self.clock.passed_wall_s, segment, self.trainer.steps(segment))

    def _proceed(self, now_wall_s, segment, steps):
        try:
            self.wakes[segment.job.job_id] = (now_wall_s + next(steps), segment, steps)
        except StopIteration as end:
            self._ends.put(SegmentEnd(segment, end.value, None))
        except MakespanError as error:
            self._ends.put(SegmentEnd(segment, None, error))

    def kill_node(self, node, survivors=()):
        """Let the processes of a node see at once that they are killed."""
        for job_id, segment in self._active.items():
            on_node = [slot for slot in segment.slots if slot // self._per_node == node]
            if on_node and not (job_id in survivors and len(on_node) < len(segment.slots)):
                self._see_kill(job_id, segment)
        return super().kill_node(node, survivors)

    def kill_waiting(self, job_id):
        self._see_kill(job_id, self._active[job_id])
        return super().kill_waiting(job_id)

    def _see_kill(self, job_id, segment):
        if job_id in self.wakes:
            self.trainer.kill(segment)
            _, _, steps = self.wakes.pop(job_id)
            self._proceed(self.clock.passed_wall_s, segment, steps)

    def next_end(self, timeout_s):
        until = self.clock.passed_wall_s + max(timeout_s, _LEAST_WALL_S)
        while self._ends.empty() and self.clock.passed_wall_s < until:
            job_id = min(self.wakes, key=lambda name: (self.wakes[name][0], name), default=None)
            if job_id is None or self.wakes[job_id][0] > until:
                self.clock.passed_wall_s = until
                break
            wake_wall_s, segment, steps = self.wakes.pop(job_id)
            self.clock.passed_wall_s = wake_wall_s
            self._proceed(wake_wall_s, segment, steps)
        return super().next_end(0)


class FakeTrainer:
    """Steps take the time of their configuration over a speed; the loss tells the steps done.

    Parameters
    ----------
    speed
        Seconds of the schedule in a second on the wall.
    start_wall_s
        Time before the first step.
    deaths
        By job: steps after which its processes die, in turn.
    checkpoint_every
        Steps between checkpoints.
    save_wall_s
        Time of the checkpoint of a segment that stops.
    """

    def __init__(self, speed, start_wall_s=0.02, deaths=None, checkpoint_every=1, save_wall_s=0.0):
        self.speed = speed
        self.start_wall_s = start_wall_s
        self.deaths = {name: list(steps) for name, steps in (deaths or {}).items()}
        self.checkpoint_every = checkpoint_every
        self.saved = {}
        self.done = {}
        self.save_wall_s = save_wall_s
        self.stops = set()
        self.killed = set()
        self.segments = []
        self.busy = {}
        self.clashes = []

    def steps(self, segment):
        """Yield each time on the wall that passes; the value at the end is the result."""
        self.segments.append(segment)
        self.clashes += [slot for slot in segment.slots if slot in self.busy]
        self.busy |= dict.fromkeys(segment.slots, segment.job.job_id)
        try:
            steps = self._train(segment)
            while True:
                try:
                    passes = next(steps)
                except StopIteration as end:
                    return end.value
                yield passes
                if (segment.job.job_id, segment.generation) in self.killed:
                    raise LostWorkerError("the processes were killed on request")
        finally:
            for slot in [slot for slot, name in self.busy.items() if name == segment.job.job_id]:
                del self.busy[slot]

    def _train(self, segment):
        name, key = segment.job.job_id, (segment.job.job_id, segment.generation)
        yield self.start_wall_s
        first = step = self.saved.get(name, 0)
        self.done[key], step_wall_s = step, segment.configuration.iter_time_s / self.speed
        while step < segment.job.steps and key not in self.stops:
            yield step_wall_s
            step += 1
            self.done[key] = step
            if self.deaths.get(name) and step >= self.deaths[name][0]:
                self.deaths[name].pop(0)
                raise WorkerError(f"process 0 of 1 was ended by signal SIGKILL at step {step}")
            if step % self.checkpoint_every == 0:
                self.saved[name] = step
        if key in self.stops and self.save_wall_s:
            yield self.save_wall_s
        self.saved[name] = step
        loss = float(step) if step else math.nan
        return SegmentResult(step, step - first, (step - first) * step_wall_s, loss)

    def stop(self, segment):
        self.stops.add((segment.job.job_id, segment.generation))

    def kill(self, segment):
        self.killed.add((segment.job.job_id, segment.generation))

    def steps_done(self, segment):
        return self.done.get((segment.job.job_id, segment.generation))

    def saved_steps(self, job):
        return self.saved.get(job.job_id, 0)


def drive_clocks(monkeypatch):
    """Let every live run drive its clock."""
    clocks = []

    def clock(*arguments):
        clocks.append(DrivenClock(*arguments))
        return clocks[-1]

    def executor(*arguments):
        return DrivenExecutor(*arguments, clocks[-1])

    monkeypatch.setattr("makespan.live.run.LiveClock", clock)
    monkeypatch.setattr("makespan.live.run.Executor", executor)
