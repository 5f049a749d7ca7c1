"""Schemas of the tables that an elastic run writes."""

from makespan.tables import table_schema

__all__ = ["ELASTIC_STEPS", "RECONFIGURATIONS"]

ELASTIC_STEPS = table_schema(
    "steps",
    ("stage", "int", "1", "number of the set of processes, from 0"),
    ("step", "int", "1", "number of the mini-batch, from 1"),
    ("rank", "int", "1", "virtual rank of the logical worker"),
    ("process", "int", "1", "process that hosts it"),
    ("device", "text", "", "device of that process"),
    ("loss", "float", "1", "its loss", True),
    ("loss_hex", "text", "", "the same in hexadecimal, with every bit"),
    (
        "parameter_sha",
        "text",
        "",
        "SHA-256 of the parameters after the mini-batch; empty where it was not asked for",
    ),
    ("optimizer_sha", "text", "", "the same of state and options of the optimizer"),
    ("context_sha", "text", "", "the same of buffers and random states of the logical worker"),
    ("micro_batch_s", "float", "s", "time of its forward and backward pass, with the switch of contexts"),
    ("sync_s", "float", "s", "time of sum and optimizer step in that process"),
)
RECONFIGURATIONS = table_schema(
    "reconfigurations",
    ("step", "int", "1", "mini-batches done before"),
    ("cause", "text", "", "start, run (it was called again), request, or failure of a process"),
    ("old_mapping", "text", "", "mapping before; empty at the start"),
    ("new_mapping", "text", "", "mapping from then on"),
    ("old_devices", "text", "", "device of each process before"),
    ("new_devices", "text", "", "device of each process from then on"),
    (
        "restart_s",
        "float",
        "s",
        "writing the checkpoint, start of the processes, and building from the checkpoint",
    ),
)
