"""Elastic training whose result does not depend on the processes: what a process of a job does.

Importing the package loads nothing; what it shows imports torch.

- `RankMapping` says which process hosts which logical workers
- `Buckets` packs the gradients of a model into a `GradientSet` by a bucket map, `provisional_map` or
  `rebuilt_map`, the layouts of DistributedDataParallel; `ReadyOrder` records what the second one needs
- `reduce_sets` sums the sets of all logical workers in an order that depends on their virtual ranks alone,
  `over_group` between processes, `in_memory` between generators
- `folds_like_gloo` says whether a fold gives the bits of gloo's all-reduce on this machine
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.papers.easyscale.runtime._buckets import (
        Buckets,
        GradientSet,
        ReadyOrder,
        provisional_map,
        rebuilt_map,
        trained_parameters,
    )
    from makespan.papers.easyscale.runtime._exchange import Reduction, in_memory, over_group, reduce_sets
    from makespan.papers.easyscale.runtime._folds import FOLDS
    from makespan.papers.easyscale.runtime._gloo import GlooThreads, folds_like_gloo
    from makespan.papers.easyscale.runtime._mapping import RankMapping

__all__ = [
    "FOLDS",
    "Buckets",
    "GlooThreads",
    "GradientSet",
    "RankMapping",
    "ReadyOrder",
    "Reduction",
    "folds_like_gloo",
    "in_memory",
    "over_group",
    "provisional_map",
    "rebuilt_map",
    "reduce_sets",
    "trained_parameters",
]

__getattr__ = shown_lazily(__name__, __file__)
