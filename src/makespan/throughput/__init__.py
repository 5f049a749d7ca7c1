"""Sources of iteration times: emulated, published, measured or predicted, and the register of data sets.

Every source gives the same table (`makespan.tables.THROUGHPUT`), so nothing downstream knows
where the numbers come from::

    source = PublishedSource(directory, default_cpu_threads=12)
    frame = source.load("roberta")
"""

from makespan.throughput.planned import (
    FASTEST as FASTEST,
    PREDICTED as PREDICTED,
    PlannedSource as PlannedSource,
    PlannedWorkload as PlannedWorkload,
    best_plans as best_plans,
    fitted_workload as fitted_workload,
    is_planned as is_planned,
    planned_workload as planned_workload,
    requested_label as requested_label,
    sampled_plans as sampled_plans,
)
from makespan.throughput.pollux import Profile as Profile, ProfiledSource as ProfiledSource
from makespan.throughput.register import (
    Dataset as Dataset,
    fetch as fetch,
    find_dataset as find_dataset,
    locate as locate,
    read_register as read_register,
    shipped_register as shipped_register,
    verify as verify,
)
from makespan.throughput.sources import (
    SOURCE_NAMES as SOURCE_NAMES,
    EmulatedSource as EmulatedSource,
    MeasuredSource as MeasuredSource,
    PublishedSource as PublishedSource,
    ReferenceTimes as ReferenceTimes,
    ThroughputSource as ThroughputSource,
    check_published_gpus as check_published_gpus,
    flag_anomalies as flag_anomalies,
    placement_order as placement_order,
    reference_plan as reference_plan,
)
