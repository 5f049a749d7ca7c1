from makespan.front import (
    ComparisonError,
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
    "ComparisonError",
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
