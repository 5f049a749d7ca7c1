"""Reproduce and extend experiments on training large models on shared GPU clusters.

What most users want stands here::

    import makespan

    scenario = makespan.scenario("base", n_jobs=20)
    makespan.compare(scenario, ["fifo", "morphling-work"])

The rest of the package is layered; import the layer you need, for example ``makespan.plans``. Importing this
module loads nothing else before a name is asked for, so that starting a workflow stays quick.
"""

from importlib import import_module

__version__ = "0.1.0"

_NAMES = {
    "front": (
        "ComparisonError",
        "Run",
        "Scenario",
        "compare",
        "emulate",
        "fit",
        "rank_plans",
        "read_trace",
        "scenario",
        "simulate",
    ),
    "easyscale": ("ElasticJob", "ElasticTrainer"),
    "oobleck": ("ChainJob", "train_resilient"),
    "slapo": ("Verify", "apply_schedule", "create_schedule"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
