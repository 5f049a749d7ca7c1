"""Schema of the table of measured iterations beside predicted ones."""

from makespan.tables import table_schema

__all__ = ["EXECUTED", "PREDICTIONS"]

PREDICTIONS = table_schema(
    "oobleck_predictions",
    ("n_layers", "int", "1", "layers of the small model, embedding and head among them"),
    ("n_microbatches", "int", "1", "microbatches of an iteration"),
    ("n_nodes", "int", "1", "nodes, a process with one thread each"),
    ("stages", "text", "", "layers of the stages of each pipeline"),
    ("microbatches", "text", "", "microbatches of each pipeline"),
    ("n_cores", "int", "1", "CPU cores that all nodes share"),
    ("predicted_iter_time_s", "float", "s", "by planning, from the profile: a core for each node"),
    (
        "predicted_cores_iter_time_s",
        "float",
        "s",
        "the same, and not less than all passes take on these cores",
    ),
    ("iter_wall_s", "float", "s", "median of measured iterations"),
)
EXECUTED = {"predictions": PREDICTIONS}
