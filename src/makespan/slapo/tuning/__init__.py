"""Search for the best point of a space of schedules, whatever says how good a point is.

`tune` asks a strategy of `STRATEGIES` for points of a `Space` and an objective what each is worth: a measured
run, a model, or a table of what was measured before. A point that runs out of memory is a normal answer.
"""

from makespan.slapo.tuning._evaluation import Database, Evaluation, Status, key_of
from makespan.slapo.tuning._space import Point, Polygon, Space, Symbol, UnfixedSymbolError
from makespan.slapo.tuning._strategies import (
    STRATEGIES,
    CoordinateDescent,
    Exhaustive,
    Frontier,
    Random,
    Strategy,
    strategy_named,
)
from makespan.slapo.tuning._tune import Objective, Result, tune

__all__ = [
    "STRATEGIES",
    "CoordinateDescent",
    "Database",
    "Evaluation",
    "Exhaustive",
    "Frontier",
    "Objective",
    "Point",
    "Polygon",
    "Random",
    "Result",
    "Space",
    "Status",
    "Strategy",
    "Symbol",
    "UnfixedSymbolError",
    "key_of",
    "strategy_named",
    "tune",
]
