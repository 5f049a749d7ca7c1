"""Reproduce and extend experiments on training large models on shared GPU clusters.

What most users want stands here::

    import makespan

    scenario = makespan.scenario("base", n_jobs=20)
    makespan.compare(scenario, ["fifo", "morphling-work"])

The rest of the package is layered; import the layer you need, for example ``makespan.plans``. Importing this
module loads nothing else before a name is asked for, so that starting a workflow stays quick.
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.api import (
        ComparisonError as ComparisonError,
        compare as compare,
        emulate as emulate,
        fit as fit,
        intervals as intervals,
        next_runs as next_runs,
        rank_plans as rank_plans,
        simulate as simulate,
    )
    from makespan.easyscale import ElasticJob as ElasticJob, ElasticTrainer as ElasticTrainer
    from makespan.oobleck import ChainJob as ChainJob, train_resilient as train_resilient
    from makespan.slapo import (
        Verify as Verify,
        apply_schedule as apply_schedule,
        create_schedule as create_schedule,
    )
    from makespan.studies import (
        Run as Run,
        Scenario as Scenario,
        read_trace as read_trace,
        scenario as scenario,
    )

__version__ = "0.1.0"

__getattr__ = lazy_exports(__name__, __file__)
