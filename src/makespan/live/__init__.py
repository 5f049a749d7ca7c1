"""Live scheduling: policies decide, and processes really train.

- `live_experiment` does everything that follows
- `live_workload`, `live_jobs` and `LiveSetting` say what is run
- `run_live` runs them under any policy of the simulator with a `Trainer`; `process_trainer` is the
  one that starts processes, on `local_slots` or on steps of Slurm
- `compare_live` simulates the same and compares
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.live._prepare import process_trainer, slot_cluster
    from makespan.live._run import LiveResult, compare_live, live_experiment, run_live
    from makespan.live._segments import Segment, SegmentResult, Trainer, local_slots
    from makespan.live._workload import (
        LiveSetting,
        LiveWorkload,
        live_jobs,
        live_settings,
        live_workload,
        live_workloads,
    )

__all__ = [
    "LiveResult",
    "LiveSetting",
    "LiveWorkload",
    "Segment",
    "SegmentResult",
    "Trainer",
    "compare_live",
    "live_experiment",
    "live_jobs",
    "live_settings",
    "live_workload",
    "live_workloads",
    "local_slots",
    "process_trainer",
    "run_live",
    "slot_cluster",
]

__getattr__ = shown_lazily(__name__, __file__)
