from makespan.easyscale import ElasticJob, ElasticTrainer
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
from makespan.oobleck import ChainJob, train_resilient
from makespan.slapo import Verify, apply_schedule, create_schedule

__all__ = [
    "ChainJob",
    "ComparisonError",
    "ElasticJob",
    "ElasticTrainer",
    "Run",
    "Scenario",
    "Verify",
    "__version__",
    "apply_schedule",
    "compare",
    "create_schedule",
    "emulate",
    "fit",
    "rank_plans",
    "read_trace",
    "scenario",
    "simulate",
    "train_resilient",
]

__version__: str
