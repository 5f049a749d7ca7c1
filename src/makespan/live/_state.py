"""What a live run keeps on disk, so that another process can take it over."""

from pathlib import Path
from typing import Any

from makespan.errors import TrainingError
from makespan.files import read_json, write_json
from makespan.live._engine import LiveEngine, LiveJob
from makespan.sim import Configuration, EventKind

__all__ = ["read_state", "restore", "save_state"]

_VERSION = 3


def save_state(engine: LiveEngine, path: Path) -> None:
    """Write what happened so far; a reader finds the old file or the new one."""
    ends = {job.spec.job_id: time_s for job, time_s in engine.finished}
    state = {
        "version": _VERSION,
        "time_s": engine.view.time_s,
        "rows": engine.rows,
        "began_at": engine.began_at,
        "overheads_s": engine.overheads_s,
        "jobs": {
            name: _snapshot(job, ends.get(name)) | {"final_loss": engine.final_losses[name]}
            for name, job in engine.jobs.items()
        },
    }
    write_json(state, path)


def _snapshot(job: LiveJob, finish_time_s: float | None) -> dict[str, Any]:
    """Return the accounts of a job as they would be if it lost its devices now."""
    return {
        "generation": job.generation,
        "first_start_s": job.first_start_s,
        "finish_time_s": finish_time_s,
        "restart_count": job.restart_count,
        "held": job.allocation is not None,
        "running_s": job.running_time_s,
        "restart_s": job.restart_time_s,
        "held_gpu_s": job.attained_service_gpu_s,
        "waiting_s": job.waiting_time_s,
        "observed": [
            [item.plan, item.placement.text, item.cpu_threads, list(item.gpu_types)] for item in job.observed
        ],
    }


def read_state(path: Path) -> dict[str, Any] | None:
    """Read a state file of this version; None if there is none."""
    state: dict[str, Any] | None = read_json(path, TrainingError)
    if state is None:
        return None
    if state.get("version") != _VERSION:
        raise TrainingError(f"{path}: version {state.get('version')!r} of the state; accepted: {_VERSION}")
    return state


def restore(engine: LiveEngine, state: dict[str, Any]) -> None:
    """Bring an engine with the same jobs to where a run was left; all of them wait again."""
    if set(state["jobs"]) != set(engine.jobs):
        raise TrainingError("the state file belongs to other jobs; accepted: that of the same run")
    engine.rows[:] = [tuple(row) for row in state["rows"]]
    engine.began_at = state["began_at"]
    engine.overheads_s[:] = state["overheads_s"]
    engine.cluster_state.advance(state["time_s"])
    submitted = {row[3] for row in engine.rows if row[2] == EventKind.SUBMITTED.value}
    engine.begin_after(len(submitted))
    for name in [name for name in engine.jobs if name in submitted]:
        _restore_job(engine, engine.jobs[name], state["jobs"][name])


def _restore_job(engine: LiveEngine, job: LiveJob, saved: dict[str, Any]) -> None:
    engine.final_losses[job.spec.job_id] = saved["final_loss"]
    engine.cluster_state.restore(
        job,
        generation=saved["generation"] + 1,
        first_start_s=saved["first_start_s"],
        restart_count=saved["restart_count"],
        times_s=(saved["waiting_s"], saved["running_s"], saved["restart_s"]),
        held_gpu_s=saved["held_gpu_s"],
        observed=_observed(engine, job, saved["observed"]),
    )
    if saved["finish_time_s"] is None:
        engine.wait_again(job, "the scheduler ended" if saved["held"] else None)
        return
    engine.cluster_state.submit(job)
    engine.cluster_state.finish(job)
    engine.finished.append((job, saved["finish_time_s"]))


def _observed(engine: LiveEngine, job: LiveJob, saved: list[list[Any]]) -> list[Configuration]:
    """Return the configurations that a job has run; what the catalogue has no more, nobody can use."""
    found = [
        engine.view.catalogue.find(job.spec.workload, plan, placement, cpu_threads, tuple(gpu_types))
        for plan, placement, cpu_threads, gpu_types in saved
    ]
    return [item for item in found if item is not None]
