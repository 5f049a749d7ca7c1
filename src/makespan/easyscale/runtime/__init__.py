"""Elastic training whose result does not depend on the processes: what a process of a job does.

Importing the package loads nothing; what it shows imports torch, except mappings, levels and kernel sets.

- `ElasticJob` is all that decides the bits of a job, `build_parts` makes what it trains
- `RankMapping` says which process hosts which logical workers, `DeterminismLevel` what is pinned
- `HostedWorkers` does the mini-batches of one process: its logical workers in turn, each with a context of
  its own (`Contexts`), and one step of the `TrainedParts` that all share
- `Shards` deals samples to logical workers, and a `LoaderPool` loads them for all that a process hosts; its
  `LoaderState` is independent of both
- `register_state` and `register_generator` name state that the runtime cannot find
- `Buckets` packs the gradients of a model into a `GradientSet` by a bucket map, `provisional_map` or
  `rebuilt_map`, the layouts of DistributedDataParallel; `ReadyOrder` records what the second one needs
- `reduce_sets` sums the sets of all logical workers in an order that depends on their virtual ranks alone,
  `over_group` between processes, `in_memory` between generators
- `folds_like_gloo` says whether a fold gives the bits of gloo's all-reduce on this machine, `fold_of_machine`
  which one to take
- `KERNEL_SETS` play types of devices on a CPU: `process_options` starts a process with one, `use_kernels`
  turns it on, `try_kernel_sets` says which of them differ here
- `train_stock` trains the same jobs with stock DistributedDataParallel, as reference
- `scan_module` says whether a model is cheap under level D2
- `seed_everything` and `seed_stream` are the rule of seeds; `parameter_sha`, `optimizer_sha`, `implicit_sha`
  hash what must be equal
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.easyscale.runtime._buckets import (
        Buckets,
        GradientSet,
        ReadyOrder,
        provisional_map,
        rebuilt_map,
        trained_parameters,
    )
    from makespan.easyscale.runtime._contexts import Contexts, register_generator, register_state
    from makespan.easyscale.runtime._exchange import Reduction, in_memory, over_group, reduce_sets
    from makespan.easyscale.runtime._folds import FOLDS
    from makespan.easyscale.runtime._gloo import GlooThreads, fold_of_machine, folds_like_gloo
    from makespan.easyscale.runtime._hashes import implicit_sha, optimizer_sha, parameter_sha
    from makespan.easyscale.runtime._hosted import HostedWorkers, MiniBatch
    from makespan.easyscale.runtime._job import AUTO, TRAINING_LOCK, ElasticJob, job_from
    from makespan.easyscale.runtime._kernels import (
        CANONICAL,
        KERNEL_SETS,
        KernelSet,
        kernels_of,
        process_options,
    )
    from makespan.easyscale.runtime._levels import LEVELS, DeterminismLevel
    from makespan.easyscale.runtime._loader import LoaderPool
    from makespan.easyscale.runtime._mapping import RankMapping
    from makespan.easyscale.runtime._parts import JobParts, TrainedParts, build_parts
    from makespan.easyscale.runtime._process import scan_module, use_kernels
    from makespan.easyscale.runtime._profiles import KernelTrial, try_kernel_sets
    from makespan.easyscale.runtime._seeding import seed_everything, seed_stream
    from makespan.easyscale.runtime._shards import LoaderState, Shards
    from makespan.easyscale.runtime._stock import StockRun, train_stock

__all__ = [
    "AUTO",
    "CANONICAL",
    "FOLDS",
    "KERNEL_SETS",
    "LEVELS",
    "TRAINING_LOCK",
    "Buckets",
    "Contexts",
    "DeterminismLevel",
    "ElasticJob",
    "GlooThreads",
    "GradientSet",
    "HostedWorkers",
    "JobParts",
    "KernelSet",
    "KernelTrial",
    "LoaderPool",
    "LoaderState",
    "MiniBatch",
    "RankMapping",
    "ReadyOrder",
    "Reduction",
    "Shards",
    "StockRun",
    "TrainedParts",
    "build_parts",
    "fold_of_machine",
    "folds_like_gloo",
    "implicit_sha",
    "in_memory",
    "job_from",
    "kernels_of",
    "optimizer_sha",
    "over_group",
    "parameter_sha",
    "process_options",
    "provisional_map",
    "rebuilt_map",
    "reduce_sets",
    "register_generator",
    "register_state",
    "scan_module",
    "seed_everything",
    "seed_stream",
    "train_stock",
    "trained_parameters",
    "try_kernel_sets",
    "use_kernels",
]

__getattr__ = shown_lazily(__name__, __file__)
