"""What becomes of pipelines when nodes are lost, leave or join: regrouping, batches, copies of state."""

from makespan.oobleck.reconfiguration._errors import InsufficientNodes, StateLost
from makespan.oobleck.reconfiguration._reconfigure import Reconfiguration, reconfigure
from makespan.oobleck.reconfiguration._regroup import Regrouping, regroup
from makespan.oobleck.reconfiguration._state import Copy, Gpu, copy_plan, node_layers

__all__ = [
    "Copy",
    "Gpu",
    "InsufficientNodes",
    "Reconfiguration",
    "Regrouping",
    "StateLost",
    "copy_plan",
    "node_layers",
    "reconfigure",
    "regroup",
]
