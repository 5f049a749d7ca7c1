"""Live scheduling: policies decide, and processes really train.

- `live_experiment` profiles, runs, simulates and compares; `LiveSetting` is what a run is given
- `run_live` runs jobs under any policy of the simulator with whatever trains, `compare_live` simulates
  the same and compares
- `live_workload` and `live_jobs` say what is run
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.live._prepare import process_trainer, slot_cluster
    from makespan.live._run import LiveResult, compare_live, live_experiment, run_live
    from makespan.live._segments import Segment, SegmentResult
    from makespan.live._workload import LiveSetting, live_jobs, live_settings, live_workload, live_workloads

__all__ = [
    "LiveResult",
    "LiveSetting",
    "Segment",
    "SegmentResult",
    "compare_live",
    "live_experiment",
    "live_jobs",
    "live_settings",
    "live_workload",
    "live_workloads",
    "process_trainer",
    "run_live",
    "slot_cluster",
]

__getattr__ = shown_lazily(__name__, __file__)
