from makespan.front import (
    Run,
    Scenario,
    compare,
    emulate,
    fit,
    rank_plans,
    read_trace,
    scenario,
    simulate,
)

__all__ = [
    "Run",
    "Scenario",
    "__version__",
    "compare",
    "emulate",
    "fit",
    "rank_plans",
    "read_trace",
    "scenario",
    "simulate",
]

__version__: str
