"""Schema of what becomes of plans after losses, and of the cases that the artifact works out."""

from makespan.tables import table_schema

__all__ = ["RECONFIGURATION", "RECONFIGURATION_CELLS"]

RECONFIGURATION = table_schema(
    "oobleck_reconfiguration",
    ("case", "text", "", "a worked case, or n0, f and the nodes; beyond where more than f are lost at once"),
    ("step", "int", "1", "number of the plan and of the loss in that case"),
    ("lost_nodes", "text", "", "nodes lost at once; a plan has nodes from 0, the smallest pipeline first"),
    (
        "action",
        "text",
        "",
        "drop, re-instantiate, borrow, merge, split, re-plan, or why training ends: state-lost, "
        "insufficient-nodes",
    ),
    ("counts_before", "text", "", "pipelines of each number of nodes before"),
    ("counts_after", "text", "", "the same afterwards; empty where training ends"),
    ("copies_bytes", "float", "B", "state that is sent", True),
    ("iter_time_s", "float", "s", "iteration afterwards, by a simulated schedule", True),
    ("wall_s", "float", "s", "time in which the answer was found"),
    ("most_sent_bytes", "float", "B", "of that, what the node that sends most sends", True),
    ("copied_layers", "float", "1", "layers of which copies are sent", True),
)
RECONFIGURATION_CELLS = {
    "reconfiguration": (
        ("case", "int", "1", "number of the case"),
        ("n0", "int", "1", "least nodes of a pipeline"),
        ("pipelines", "text", "", "nodes of each pipeline at the start"),
        ("lost_nodes", "text", "", "nodes lost at once"),
        ("published_action", "text", "", "what is done"),
        ("published_pipelines", "text", "", "nodes of each pipeline afterwards"),
    )
}
