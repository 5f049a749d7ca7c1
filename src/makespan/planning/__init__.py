"""Plan the training of any model on any cluster: time, memory and the best layout, with intervals.

A model comes from its configuration, a cluster from a file, a short text or `makespan.hardware`::

    training = Training(read_model("config.json"), seq=8192, global_batch=256)
    found = plan(Pricer(training, read_machines("64xh100-80"), software("megatron-bridge")))
    found.table()

Times are predictions: `Priced` has their intervals, `judge` says how far they were off on published rows.
"""

from makespan.hardware import (
    ClusterSpec as ClusterSpec,
    Gpu as Gpu,
    gpu as gpu,
    read_machines as read_machines,
    read_pools as read_pools,
)
from makespan.lazy import renamed_names
from makespan.planning.advice import (
    Advice as Advice,
    advise as advise,
    contradicting_rows as contradicting_rows,
    frontier as frontier,
    validate_rows as validate_rows,
)
from makespan.planning.architecture import (
    Architecture as Architecture,
    Attention as Attention,
    Experts as Experts,
    FeedForward as FeedForward,
    Latent as Latent,
    Layers as Layers,
    Recurrent as Recurrent,
)
from makespan.planning.configs import (
    model_names as model_names,
    model_types as model_types,
    read_model as read_model,
)
from makespan.planning.factors import (
    Calibrated as Calibrated,
    Knowledge as Knowledge,
    calibrate_rows as calibrate_rows,
    fit_knowledge as fit_knowledge,
    knowledge as knowledge,
    knowledge_text as knowledge_text,
    uncalibrated as uncalibrated,
)
from makespan.planning.judging import (
    LEAST_ROWS as LEAST_ROWS,
    growth as growth,
    judge as judge,
    judge_memory as judge_memory,
    judged_table as judged_table,
    judged_text as judged_text,
    predictions as predictions,
    recorded_errors as recorded_errors,
    recorded_text as recorded_text,
)
from makespan.planning.layout import Layout as Layout, parse_layout as parse_layout
from makespan.planning.memory import (
    COMPONENTS as COMPONENTS,
    RECURRENT_COMPONENTS as RECURRENT_COMPONENTS,
    components_of as components_of,
    fits as fits,
    memory_table as memory_table,
)
from makespan.planning.pricing import (
    MeasuredStep as MeasuredStep,
    Plans as Plans,
    Priced as Priced,
    Pricer as Pricer,
    calibrated_by as calibrated_by,
    describe as describe,
    feasible_table as feasible_table,
    layouts as layouts,
    plan as plan,
    read_measured as read_measured,
    read_memory as read_memory,
    size_clusters as size_clusters,
)
from makespan.planning.register import (
    PublicTable as PublicTable,
    differences as differences,
    find_tables as find_tables,
    public_tables as public_tables,
)
from makespan.planning.rows import (
    Measured as Measured,
    Refused as Refused,
    read_rows as read_rows,
    takes_part as takes_part,
)
from makespan.planning.scaling import kernel_limit_s as kernel_limit_s, scaling as scaling
from makespan.planning.stacks import (
    PRECISIONS as PRECISIONS,
    Software as Software,
    Training as Training,
    software as software,
    stack_names as stack_names,
)
from makespan.planning.steptime import (
    RECURRENT_TERMS as RECURRENT_TERMS,
    TERMS as TERMS,
    Grid as Grid,
    ideal_terms as ideal_terms,
    names_of as names_of,
)
from makespan.planning.ties import Joint as Joint

__getattr__ = renamed_names(__name__, {"Device": "Gpu", "Machines": "ClusterSpec", "device": "gpu"})
