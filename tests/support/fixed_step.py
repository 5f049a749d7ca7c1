"""A deliberately simple engine: it walks through time in equal steps. For comparison only."""

import math

from makespan.sim import Decision
from makespan.sim._nodes import Nodes
from makespan.sim._view import ClusterView, JobView

EPS = 1e-9


def simulate_fixed_step(jobs, cluster, catalogue, policy, *, restart_delay_s, step_s, interval_s=None):
    """Return finish times by job; exact in the limit of small steps."""
    catalogue, nodes = catalogue.on(cluster), Nodes(cluster)
    interval_s = policy.interval_s if interval_s is None else interval_s or None
    options = {"restart_delay_s": restart_delay_s, "interval_s": interval_s}
    view = ClusterView(cluster, catalogue, nodes, shows_remaining_work=policy.is_clairvoyant, **options)
    state = policy.initial_state(cluster, catalogue)
    order = sorted(jobs, key=lambda job: job.submit_time_s)
    live = [JobView(job, index, job.steps + 1.0, view) for index, job in enumerate(order)]
    finish_s, wake_s, changed, step = {}, math.inf, False, 0
    progress = {job.index: job._steps_left for job in live}
    while len(finish_s) < len(live):
        view.time_s = now_s = step * step_s
        for job in live:
            known = job.spec.job_id in finish_s or job.spec.job_id in view._pending or job.allocation
            if not known and job.spec.submit_time_s <= now_s + EPS:
                job.waiting_since_s = now_s
                view._pending[job.spec.job_id] = job
                changed = True
            elif job.allocation and now_s >= job.ready_time_s - EPS and progress[job.index] <= EPS:
                release(job, nodes, view)
                del view._running[job.spec.job_id]
                finish_s[job.spec.job_id] = now_s
                changed = True
        at_round = interval_s is None or abs(now_s / interval_s - round(now_s / interval_s)) < EPS
        due = changed or now_s >= wake_s - EPS
        if due and at_round and (view._pending or view._running):
            for job in live:
                job._steps_left = progress[job.index]
                if job.allocation and now_s > job.ready_time_s:
                    done = (now_s - job.ready_time_s) / job.allocation.configuration.iter_time_s
                    job._steps_left += done  # what the view subtracts again
            decision, state = policy.decide(view, state)
            changed, wake_s = False, decision.wake_up_s or math.inf
            apply(decision, nodes, view)
        for job in live:
            if job.allocation:
                advance_s = min(max(now_s + step_s - job.ready_time_s, 0.0), step_s)
                progress[job.index] -= advance_s / job.allocation.configuration.iter_time_s
        step += 1
    return finish_s


def release(job, nodes, view):
    """Take the devices of a job."""
    nodes.move(job.allocation, 1)
    job._held_gpu_s, job._running_s, job._restart_s = (
        job.attained_service_gpu_s,
        job.running_time_s,
        job.restart_time_s,
    )
    job.allocation, job.waiting_since_s = None, view.time_s


def apply(decision: Decision, nodes, view):
    """Make the changes of a decision."""
    changes = [(view.job(name), new) for name, new in sorted(decision.changes.items())]
    changes = [(job, new) for job, new in changes if new != job.allocation]
    for job, _ in changes:
        if job.allocation:
            release(job, nodes, view)
            view._pending[job.spec.job_id] = view._running.pop(job.spec.job_id)
    for job, new in changes:
        if new:
            nodes.move(new, -1)
            view._running[job.spec.job_id] = view._pending.pop(job.spec.job_id)
            job._waiting_s += view.time_s - job.waiting_since_s
            job.allocation, job.held_since_s = new, view.time_s
            job.ready_time_s = view.time_s + view.restart_delay_s
            job.restart_count += job.first_start_s is not None
            job.first_start_s = view.time_s if job.first_start_s is None else job.first_start_s
    for job in sorted(view._pending.values(), key=lambda job: job.index):
        view._pending.move_to_end(job.spec.job_id)
