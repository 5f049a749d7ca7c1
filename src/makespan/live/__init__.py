"""Live scheduling: policies decide, and processes really train.

- `live_experiment` profiles, predicts, runs and compares; a `LiveSetting` has the inputs of a run
- `predict_live` writes the prediction of a run, `run_live` runs jobs under any policy of the simulator and
  with any `Trainer`, `compare_live` compares both
- `live_workload` and `live_jobs` generate the jobs, `live_failures` the failures of nodes
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.live.engine import (
        Segment as Segment,
        SegmentResult as SegmentResult,
    )
    from makespan.live.run import (
        LiveResult as LiveResult,
        Prediction as Prediction,
        compare_live as compare_live,
        live_experiment as live_experiment,
        predict_live as predict_live,
        process_trainer as process_trainer,
        run_live as run_live,
        slot_cluster as slot_cluster,
    )
    from makespan.live.workload import (
        REPAIR_WALL_S as REPAIR_WALL_S,
        LiveSetting as LiveSetting,
        live_failures as live_failures,
        live_jobs as live_jobs,
        live_settings as live_settings,
        live_workload as live_workload,
        live_workloads as live_workloads,
    )


__getattr__ = lazy_exports(__name__, __file__)
