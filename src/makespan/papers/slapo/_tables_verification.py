"""Schema of what is verified."""

from makespan.tables import table_schema

__all__ = ["VERIFIED", "VERIFY"]

VERIFY = table_schema(
    "slapo_verify",
    ("oracle", "text", "", "measured: the models ran"),
    ("n_processes", "int", "1", "processes that share the model"),
    ("family", "text", "", "architecture of the zoo"),
    ("schedule", "text", "", "name of the schedule"),
    ("options", "text", "", "options of `apply_schedule`"),
    ("steps", "int", "1", "primitives that were applied"),
    ("outputs", "int", "1", "output tensors that were compared"),
    ("gradients", "int", "1", "parameters whose gradients were compared"),
    ("not_compared", "int", "1", "parameters without a counterpart"),
    ("output_error", "float", "1", "largest error of an output, over the largest value of its tensor"),
    ("input_gradient_error", "float", "1", "the same of gradients of inputs"),
    ("gradient_error", "float", "1", "the same of gradients of parameters"),
    ("is_equal", "bool", "", "whether all agree within the tolerances of the type"),
    ("fault", "text", "", "what differs and where; empty where nothing does"),
)
VERIFIED = {"verify": VERIFY}
