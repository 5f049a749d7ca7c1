"""A deliberately simple engine: it walks through time in equal steps. For comparison only.

It shares no code with the event engine: jobs and nodes are kept in records of its own, which offer what
policies read of a view, and every quantity is a sum over steps. Policies that ask who shares devices are told
what the engine would tell them.
"""

import math
from collections import Counter

from makespan.sim import Sharing

EPS = 1e-9
UNKNOWN_PACE, MIN_SPEED = 0.34, 0.01  # of a guest, of what it does alone: where nothing is known, at least


class StepJob:
    """A job as policies see it."""

    def __init__(self, spec, index, catalogue):
        self.spec, self.index, self.steps_left = spec, index, spec.steps + 1.0
        self.reference, self.steps_by_configuration = catalogue.requested(spec), Counter()
        self.allocation = self.first_start_s = None
        self.ready_time_s = self.held_since_s = math.nan
        self.waiting_since_s = spec.submit_time_s
        self.restart_count = self.started_rank = self.generation = 0
        self.speed = 0.0
        self.waiting_time_s = self.restart_time_s = self.running_time_s = self.attained_service_gpu_s = 0.0

    def live(self, now_s, step_s, pace):
        """Add one step to every account."""
        if self.allocation is None:
            self.waiting_time_s += step_s
            return
        held, is_guest = self.allocation.configuration, self.allocation.is_guest
        active_s = min(max(now_s + step_s - self.ready_time_s, 0.0), step_s)
        self.running_time_s += active_s
        self.restart_time_s += step_s - active_s
        self.attained_service_gpu_s += 0.0 if is_guest else step_s * held.n_gpus
        self.speed = pace
        steps = pace * active_s / held.iter_time_s
        self.steps_left -= steps
        self.steps_by_configuration[held] += steps

    @property
    def observed(self):
        return frozenset(item for item in self.steps_by_configuration if self.has_observed(item))

    def has_observed(self, configuration):
        return self.steps_by_configuration[configuration] >= 1 - EPS

    def step_s(self, configuration):
        is_seen = self.has_observed(configuration)
        return configuration.iter_time_s if is_seen else configuration.predicted_iter_time_s

    def is_time_known(self, configuration):
        return configuration.is_known or self.has_observed(configuration)

    def guarantees(self, configuration):
        if configuration is self.reference:
            return True
        is_sure = self.is_time_known(configuration) and self.is_time_known(self.reference)
        return is_sure and self.step_s(configuration) <= self.step_s(self.reference) * (1 + EPS)


class StepView:
    """The cluster as policies see it; what is free is counted anew whenever somebody asks."""

    def __init__(self, cluster, catalogue, restart_delay_s, interval_s):
        self.cluster, self.catalogue, self.n_nodes = cluster, catalogue, len(cluster.nodes)
        self.restart_delay_s, self.interval_s = restart_delay_s, interval_s
        self.time_s, self.jobs, self.announced, self.shares_devices = 0.0, {}, (), True
        self.placement = "best-fit"
        self.gpus_per_node = [node.n_gpus for node in cluster.nodes]
        self.gpu_types = tuple(node.gpu.name for node in cluster.nodes)
        self.n_gpus = sum(self.gpus_per_node)
        self.gpus_by_type = Counter(name for node in cluster.nodes for name in [node.gpu.name] * node.n_gpus)

    @property
    def pending(self):
        return sorted((job for job in self.jobs.values() if not job.allocation), key=lambda job: job.index)

    def waiting_after(self, index):
        return [job for job in reversed(self.pending) if job.index > index]

    @property
    def running(self):
        return sorted((job for job in self.jobs.values() if job.allocation), key=lambda job: job.started_rank)

    def _free(self, capacity, of_share, of_whom=(False,)):
        free = [capacity(node) for node in self.cluster.nodes]
        for job in self.jobs.values():
            counts = job.allocation and job.allocation.is_guest in of_whom
            for node, count in job.allocation.shares if counts else ():
                free[node] -= count * of_share(job.allocation.configuration)
        assert min(free) >= -EPS, f"more is held than there is: {free}"
        return free

    @property
    def free_gpus(self):
        return self._free(lambda node: node.n_gpus, lambda held: 1)

    @property
    def unshared_gpus(self):
        return self._free(lambda node: node.n_gpus, lambda held: 1, (True,))

    @property
    def free_cpus(self):
        return self._free(lambda node: node.cpu_threads, lambda held: held.cpu_threads)

    @property
    def free_host_memory_bytes(self):
        both = (False, True)
        return self._free(
            lambda node: node.host_memory_bytes, lambda held: held.host_memory_bytes_per_gpu, both
        )

    def sharing(self):
        found = Sharing(self.cluster)
        for job in self.running:
            found.add(job.index, job.allocation)
        return found

    @property
    def n_free_gpus(self):
        return sum(self.free_gpus)

    @property
    def free_histogram(self):
        found = Counter(self.free_gpus)
        return [found[count] for count in range(max(self.gpus_per_node) + 1)]

    @property
    def nodes_by_free_gpus(self):
        free = self.free_gpus
        return [self._bits(free, count) for count in range(max(self.gpus_per_node) + 1)]

    @property
    def nodes_by_type(self):
        return {name: self._bits(self.gpu_types, name) for name in self.gpu_types}

    @staticmethod
    def _bits(values, wanted):
        return sum(2**node for node, value in enumerate(values) if value == wanted)

    def is_up(self, node):
        return True

    def job(self, job_id):
        return self.jobs[job_id]


def simulate_fixed_step(jobs, cluster, catalogue, policy, *, restart_delay_s, step_s, interval_s=None):
    """Return finish times by job; exact in the limit of small steps."""
    catalogue = catalogue.on(cluster)
    interval_s = policy.interval_s if interval_s is None else interval_s or None
    view = StepView(cluster, catalogue, restart_delay_s, interval_s)
    state = policy.initial_state(cluster, catalogue)
    ordered = sorted(jobs, key=lambda job: job.submit_time_s)
    coming = [StepJob(job, index, catalogue) for index, job in enumerate(ordered)]
    finish_s, wake_s, changed, step = {}, math.inf, False, 0
    while coming or view.jobs:
        view.time_s = now_s = step * step_s
        for name, job in list(view.jobs.items()):
            if job.allocation and now_s >= job.ready_time_s - EPS and job.steps_left <= EPS:
                del view.jobs[name]
                finish_s[name], changed = now_s, True
        while coming and coming[0].spec.submit_time_s <= now_s + EPS:
            job = coming.pop(0)
            job.waiting_since_s = now_s
            view.jobs[job.spec.job_id], changed = job, True
        at_round = interval_s is None or abs(now_s / interval_s - round(now_s / interval_s)) < EPS
        if (changed or now_s >= wake_s - EPS) and at_round and view.jobs:
            decision, state = policy.decide(view, state)
            changed, wake_s = False, decision.wake_up_s or math.inf
            change(view, decision.changes)
        found = paces(view)
        for name, job in view.jobs.items():
            job.live(now_s, step_s, found.get(name, 1.0))
        step += 1
    return finish_s


def paces(view):
    """Return how fast guests go: the neediest first, each device by device where it is fastest."""
    found = {}
    for node, spec in enumerate(view.cluster.nodes):
        here = [
            (job, dict(job.allocation.shares)[node]) for job in view.running if node in job.allocation.nodes
        ]
        held = [
            (job.index, job.allocation.configuration, n) for job, n in here if not job.allocation.is_guest
        ]
        devices = [(index, item) for index, item, n in held for _ in range(n)]
        devices += [(math.inf, None)] * (spec.n_gpus - len(devices))
        guests = [(job, n) for job, n in here if job.allocation.is_guest]
        guests.sort(
            key=lambda use: (-use[0].allocation.configuration.device_memory_bytes_per_gpu, use[0].index)
        )
        for job, n in guests:
            item = job.allocation.configuration
            for _ in range(n):
                chosen = min(
                    (longer(item, other), index, other)
                    for index, other in devices
                    if needs(item) + needs(other) <= spec.gpu.usable_bytes * (1 + EPS)
                )
                devices.remove(chosen[1:])
                found[job.spec.job_id] = min(1 / chosen[0], found.get(job.spec.job_id, 1.0))
    return found


def needs(item):
    """Return the memory on a device [B]."""
    return item.device_memory_bytes_per_gpu if item else 0.0


def longer(item, holder):
    """Return how many times as long a step takes beside a holder."""
    if holder is None:
        return 1.0
    if item.busy is None or holder.busy is None:
        return 1 / UNKNOWN_PACE
    free = [1 - taken for taken in holder.busy]
    if any(own > 0 >= left for own, left in zip(item.busy, free, strict=True)):
        return 1 / MIN_SPEED
    extra = sum(own * (1 / left - 1) for own, left in zip(item.busy, free, strict=True) if own)
    return min(1 + extra, 1 / MIN_SPEED)


def change(view, changes):
    """Give jobs what a decision says, and charge the delay to all that change."""
    for name, new in changes.items():
        job, now_s = view.jobs[name], view.time_s
        if new == job.allocation:
            continue
        job.generation += job.allocation is not None
        if new is None:
            job.allocation, job.waiting_since_s = None, now_s
            job.ready_time_s = job.held_since_s = math.nan
            continue
        old, is_same = job.allocation, ("configuration", "nodes")
        if old is not None and all(getattr(old, name) == getattr(new, name) for name in is_same):
            job.allocation, job.held_since_s, job.ready_time_s = new, now_s, max(job.ready_time_s, now_s)
            continue  # shared from now on, or no longer
        if old is None:
            job.started_rank = 1 + max(other.started_rank for other in view.jobs.values())
        job.restart_count += job.first_start_s is not None
        job.first_start_s = now_s if job.first_start_s is None else job.first_start_s
        job.allocation, job.waiting_since_s = new, math.nan
        job.held_since_s, job.ready_time_s = now_s, now_s + view.restart_delay_s
    assert min(view.free_gpus) >= 0 and min(view.unshared_gpus) >= 0
