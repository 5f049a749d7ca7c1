"""Oobleck, Varuna and Bamboo over one trace of nodes, as their authors' simulators have it and repaired.

`simulate` runs one system on one `NodeTrace`, which is read (`read_trace`) or generated
(`generate_failures`, `generate_spot`), with the `Costs` that `Systems` takes from printed cells and
configuration::

    costs = systems.costs("oobleck", "GPT-2")
    outcome = simulate("oobleck", generate_failures("10m", 1), costs, repairs("fixed"))
"""

from makespan.oobleck.simulators._analytic import expected_share, young_daly_steps
from makespan.oobleck.simulators._costs import SYSTEMS, Costs, ModelCosts, Systems
from makespan.oobleck.simulators._defects import DEFECTS, MODES, Defect, repairs, switches
from makespan.oobleck.simulators._generated import (
    FAILURE_TRACES,
    SPOT_TRACES,
    generate_failures,
    generate_spot,
    generate_steady,
)
from makespan.oobleck.simulators._records import Category
from makespan.oobleck.simulators._simulate import Outcome, simulate, unused_nodes
from makespan.oobleck.simulators._traces import NodeEvent, NodeTrace, read_trace

__all__ = [
    "DEFECTS",
    "FAILURE_TRACES",
    "MODES",
    "SPOT_TRACES",
    "SYSTEMS",
    "Category",
    "Costs",
    "Defect",
    "ModelCosts",
    "NodeEvent",
    "NodeTrace",
    "Outcome",
    "Systems",
    "expected_share",
    "generate_failures",
    "generate_spot",
    "generate_steady",
    "read_trace",
    "repairs",
    "simulate",
    "switches",
    "unused_nodes",
    "young_daly_steps",
]
