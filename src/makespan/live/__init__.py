"""Live scheduling: policies decide, and processes really train.

- `live_experiment` does everything that follows
- `live_workload` and `take_setting` say what is run: they profile the machine at hand and make jobs
- `run_live` runs them under any policy of the simulator with a `Trainer`; `process_trainer` is the
  one that starts processes, on `local_slots` or `slurm_slots`
- `compare_live` simulates the same and compares
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.live._engine import LiveClock, LiveEngine, LiveJob
    from makespan.live._prepare import (
        fitting_workload,
        live_experiment,
        process_trainer,
        slot_cluster,
        take_setting,
    )
    from makespan.live._run import (
        LiveResult,
        LiveSetting,
        compare_live,
        discard_run,
        run_live,
        stretched_catalogue,
    )
    from makespan.live._segments import Executor, Segment, SegmentEnd, SegmentResult, Target, Trainer
    from makespan.live._trainer import LaunchOn, ProcessTrainer, local_slots, slots_of, slurm_slots
    from makespan.live._workload import (
        LiveSettings,
        LiveWorkload,
        live_jobs,
        live_settings,
        live_workload,
        live_workloads,
    )

__all__ = [
    "Executor",
    "LaunchOn",
    "LiveClock",
    "LiveEngine",
    "LiveJob",
    "LiveResult",
    "LiveSetting",
    "LiveSettings",
    "LiveWorkload",
    "ProcessTrainer",
    "Segment",
    "SegmentEnd",
    "SegmentResult",
    "Target",
    "Trainer",
    "compare_live",
    "discard_run",
    "fitting_workload",
    "live_experiment",
    "live_jobs",
    "live_settings",
    "live_workload",
    "live_workloads",
    "local_slots",
    "process_trainer",
    "run_live",
    "slot_cluster",
    "slots_of",
    "slurm_slots",
    "stretched_catalogue",
    "take_setting",
]

__getattr__ = shown_lazily(__name__, __file__)
