"""Live scheduling: policies decide, and processes really train.

- `live_experiment` profiles, predicts, runs and compares; `LiveSetting` is what a run is given
- `predict_live` writes what is expected of a run, `run_live` runs jobs under any policy of the simulator with
  whatever trains, `compare_live` compares
- `live_workload` and `live_jobs` say what is run
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.live._compare import LiveResult, Prediction, compare_live, predict_live
    from makespan.live._prepare import process_trainer, slot_cluster
    from makespan.live._run import live_experiment, run_live
    from makespan.live._segments import Segment, SegmentResult
    from makespan.live._workload import LiveSetting, live_jobs, live_settings, live_workload, live_workloads

__all__ = [
    "LiveResult",
    "LiveSetting",
    "Prediction",
    "Segment",
    "SegmentResult",
    "compare_live",
    "live_experiment",
    "live_jobs",
    "live_settings",
    "live_workload",
    "live_workloads",
    "predict_live",
    "process_trainer",
    "run_live",
    "slot_cluster",
]

__getattr__ = shown_lazily(__name__, __file__)
