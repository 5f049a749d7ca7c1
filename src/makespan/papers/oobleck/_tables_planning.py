"""Schemas of the tables of planning, and of the cells that belong to them."""

from makespan.tables import table_schema

__all__ = ["INSTANTIATION", "LAYER_THROUGHPUT", "PLANNED", "PLANNING_CELLS", "STUDIES", "TEMPLATES"]

_PROFILE = ("profile", "text", "", "layers: uniform, random (with its seed) or skewed, and how many")
_MODE = ("mode", "text", "", "exact, or dc, the published divide and conquer")
_ESTIMATOR = ("estimator", "text", "", "1f1b, of the schedule, or compat, as the artifact compares plans")
_F = ("f", "int", "1", "nodes that may be lost at once")
_N0 = ("n0", "int", "1", "least nodes that hold the model")

TEMPLATES = table_schema(
    "oobleck_templates",
    *(_PROFILE, _F, _N0),
    ("n_nodes", "int", "1", "nodes of the template"),
    ("gpus_per_node", "int", "1", "GPUs of each node"),
    _MODE,
    ("n_stages", "int", "1", "stages"),
    ("layers_per_stage", "text", "", "layers of each stage"),
    ("stage_latency_s", "text", "s", "forward and backward pass of a microbatch through each stage"),
    ("iter_time_s", "float", "s", "cost of the template"),
    ("imbalance", "float", "1", "slowest stage over the mean"),
    ("wall_s", "float", "s", "time of the search, with what smaller templates left of theirs"),
    ("is_needed", "bool", "", "whether a job of 13 nodes may use it, with f pipelines of n0 nodes beside it"),
)
INSTANTIATION = table_schema(
    "oobleck_instantiation",
    _PROFILE,
    ("n_nodes", "int", "1", "nodes to use"),
    *(_F, _N0),
    ("n_templates", "int", "1", "templates, of n0 nodes and more"),
    ("global_microbatches", "int", "1", "microbatches of an iteration"),
    ("batch_mode", "text", "", "per_template, equal for pipelines of one template, or per_pipeline"),
    _ESTIMATOR,
    ("counts", "text", "", "pipelines of each number of nodes"),
    ("microbatches", "text", "", "microbatches of each pipeline"),
    ("iter_time_s", "float", "s", "iteration by the simulated schedule; shown times of printed templates"),
    ("optimal_iter_time_s", "float", "s", "the same of per_pipeline"),
    ("gap_pct", "float", "%", "by how much the first is longer"),
    ("wall_s", "float", "s", "time of the choice"),
    ("pipeline_time_s", "text", "s", "time of each pipeline"),
    ("spread", "float", "1", "longest minus shortest pipeline, over the longest"),
    ("estimated_time_s", "float", "s", "what the choice takes the iteration for"),
    ("n_plans", "int", "1", "plans that use all nodes"),
    ("n_infeasible", "int", "1", "those in which the microbatches cannot be distributed"),
    (
        "program_time_s",
        "float",
        "s",
        "what an integer program finds for the plan, of per_pipeline by 1f1b",
        True,
    ),
)
LAYER_THROUGHPUT = table_schema(
    "oobleck_layer_throughput",
    ("model", "text", "", "model that is trained"),
    ("n_nodes", "int", "1", "nodes with a GPU each"),
    *(_F, _N0),
    ("counts", "text", "", "pipelines of each number of nodes"),
    ("iter_time_s", "float", "s", "iteration, from emulated times of layers"),
    ("throughput_samples_per_s", "float", "samples/s", "global batch over that"),
    (
        "published_samples_per_s",
        "float",
        "samples/s",
        "throughput that the artifact has for so many nodes",
        True,
    ),
    ("ratio", "float", "1", "emulated over published", True),
    ("n_templates", "int", "1", "templates of all sizes that a pipeline may have"),
    ("least_templates", "int", "1", "as few templates as use every number of nodes"),
    ("lost_pct", "float", "%", "throughput lost with these few"),
)
STUDIES = table_schema(
    "oobleck_studies",
    ("study", "text", "", "what is studied"),
    ("case", "text", "", "what is varied, with its value"),
    ("quantity", "text", "", "what is found"),
    ("value", "float", "1", "its value, in the unit that the quantity ends in"),
)
PLANNED = {
    "templates": TEMPLATES,
    "instantiation": INSTANTIATION,
    "layer_throughput": LAYER_THROUGHPUT,
    "studies": STUDIES,
}

PLANNING_CELLS = {
    "instantiation": (
        ("n_nodes", "int", "1", "nodes of the template"),
        ("n_pipelines", "int", "1", "pipelines made from it"),
        ("microbatches", "int", "1", "microbatches of each"),
        ("published_time_s", "float", "s", "their time"),
    ),
}
