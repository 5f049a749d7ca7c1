"""A trainer without processes for tests of live scheduling: steps are short sleeps."""

import math
import threading
import time

from makespan.errors import WorkerError
from makespan.live import Segment, SegmentResult


class FakeTrainer:
    """Steps take the time of their configuration over a speed; the loss tells the steps done.

    Parameters
    ----------
    speed
        Seconds of the schedule in a second on the wall.
    start_wall_s
        Time before the first step, and after a stop.
    deaths
        By job: steps after which its processes die, in turn.
    checkpoint_every
        Steps between checkpoints.
    """

    def __init__(self, speed, start_wall_s=0.01, deaths=None, checkpoint_every=1):
        self.speed = speed
        self.start_wall_s = start_wall_s
        self.deaths = {name: list(steps) for name, steps in (deaths or {}).items()}
        self.checkpoint_every = checkpoint_every
        self.saved = {}
        self.done = {}
        self.stops = set()
        self.segments = []
        self.busy = {}
        self.clashes = []
        self.lock = threading.Lock()

    def train(self, segment: Segment) -> SegmentResult:
        name = segment.job.job_id
        with self.lock:
            self.segments.append(segment)
            self.clashes += [slot for slot in segment.slots if slot in self.busy]
            self.busy |= dict.fromkeys(segment.slots, name)
        try:
            return self._train(segment)
        finally:
            with self.lock:
                for slot in segment.slots:
                    self.busy.pop(slot, None)

    def _train(self, segment):
        name, key = segment.job.job_id, (segment.job.job_id, segment.generation)
        time.sleep(self.start_wall_s)
        first = step = self.saved.get(name, 0)
        self.done[key] = step
        begun = time.monotonic()
        while step < segment.job.steps and key not in self.stops:
            time.sleep(segment.configuration.iter_time_s / self.speed)
            step += 1
            self.done[key] = step
            if self.deaths.get(name) and step >= self.deaths[name][0]:
                self.deaths[name].pop(0)
                raise WorkerError(f"process 0 of 1 was ended by signal SIGKILL at step {step}")
            if step % self.checkpoint_every == 0:
                self.saved[name] = step
        self.saved[name] = step
        return SegmentResult(step, step - first, time.monotonic() - begun, float(step) if step else math.nan)

    def stop(self, segment):
        self.stops.add((segment.job.job_id, segment.generation))

    def kill(self, segment):
        self.stop(segment)

    def steps_done(self, segment):
        return self.done.get((segment.job.job_id, segment.generation))

    def saved_steps(self, job):
        return self.saved.get(job.job_id, 0)
