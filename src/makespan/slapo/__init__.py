"""Schedule language for PyTorch models (Slapo, ASPLOS 2024): how a model runs, apart from its definition.

Importing the package imports nothing else. Most of its names import torch on first use; the tuner,
`makespan.slapo.tuning`, does not.

- `create_schedule` makes the `Schedule` of any module, a tree whose nodes have the primitives as methods;
  `list_primitives` lists them, `select_layers` chooses layers to recompute, and `replay` applies a journal to
  another model
- `apply_plan` schedules any transformer by a plan such as ``tp2 pp2 mb1``; `find_structure` finds by a run,
  not by names, what there is to cut, a `Structure` of `StructurePart` values
- `Verify` compares the scheduled model with the original one, outputs and gradients, on all processes; its
  `VerifyReport` lists each `Divergence`, a module at which they differ
- `Pattern`, `ModulePattern`, `call_module` and `ANY` describe what `find` searches in graphs; it returns each
  `Match`
- `partition` splits a model at its cuts into stages, `default_cuts` chooses cuts
- `build` makes a scheduled model ready to run, also one that was created under `init_empty_weights`;
  `full_state_dict` and `load_full_state_dict` use the keys and shapes of the original model, and so do
  `save_sharded` and `load_sharded`, to whose files each process writes its parts;
  `pad_vocabulary` enlarges a vocabulary until it divides among the processes
- `clip_grad_norm` clips gradients by the norm of the whole model, sharded or not
- `Primitive` and `register_primitive` add a primitive, `register_shard_rule` adds a layer to ``shard``;
  `ScheduleError` is the base of all errors
- `saved_tensors` counts the bytes that a forward pass saves for the backward pass, and can limit them
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.slapo.building import (
        build as build,
        init_empty_weights as init_empty_weights,
    )
    from makespan.slapo.comparison import Divergence as Divergence
    from makespan.slapo.errors import (
        ArgumentError as ArgumentError,
        BuildError as BuildError,
        ConflictError as ConflictError,
        KindError as KindError,
        MemberError as MemberError,
        PathError as PathError,
        ReplayError as ReplayError,
        ScheduleError as ScheduleError,
        ShardError as ShardError,
        StructureError as StructureError,
        TracingError as TracingError,
        VerificationError as VerificationError,
    )
    from makespan.slapo.library import (
        SCHEDULES as SCHEDULES,
        ScheduleOptions as ScheduleOptions,
        apply_schedule as apply_schedule,
    )
    from makespan.slapo.memory import (
        OutOfBudgetError as OutOfBudgetError,
        SavedTensors as SavedTensors,
        saved_tensors as saved_tensors,
    )
    from makespan.slapo.patterns import (
        ANY as ANY,
        Match as Match,
        ModulePattern as ModulePattern,
        Pattern as Pattern,
        call_module as call_module,
    )
    from makespan.slapo.pipelining import (
        Partition as Partition,
        Tie as Tie,
        default_cuts as default_cuts,
        partition as partition,
    )
    from makespan.slapo.planned import apply_plan as apply_plan
    from makespan.slapo.recomputing import select_layers as select_layers
    from makespan.slapo.regions import StructurePart as StructurePart
    from makespan.slapo.saving import (
        load_sharded as load_sharded,
        save_sharded as save_sharded,
        sharded_state_dict as sharded_state_dict,
    )
    from makespan.slapo.schedule import (
        JournalEntry as JournalEntry,
        Metadata as Metadata,
        Primitive as Primitive,
        Schedule as Schedule,
        create_schedule as create_schedule,
        list_primitives as list_primitives,
        register_primitive as register_primitive,
        replay as replay,
    )
    from makespan.slapo.sharding import (
        ShardEffect as ShardEffect,
        ShardRequest as ShardRequest,
        pad_vocabulary as pad_vocabulary,
        register_shard_rule as register_shard_rule,
    )
    from makespan.slapo.state import (
        full_state_dict as full_state_dict,
        load_full_state_dict as load_full_state_dict,
    )
    from makespan.slapo.structure import (
        Structure as Structure,
        find_structure as find_structure,
    )
    from makespan.slapo.syncing import clip_grad_norm as clip_grad_norm
    from makespan.slapo.verification import Verify as Verify, VerifyReport as VerifyReport


__getattr__ = lazy_exports(__name__, __file__, renamed={"Place": "Divergence"})
