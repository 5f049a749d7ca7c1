"""Schedule language for PyTorch models (Slapo, ASPLOS 2024): how a model runs, apart from its definition.

Importing the package imports nothing else; most of its names import torch. The tuner, which does not, is
`makespan.slapo.tuning`.

- `create_schedule` makes the `Schedule` of any module, a tree whose nodes have the primitives as methods;
  `list_primitives` says which there are, `select_layers` which layers to recompute, and `replay` repeats a
  journal on another model
- `Verify` compares the scheduled model with the original one, outputs and gradients, on all processes, and
  says in a `VerifyReport` at which `Place` they part
- `Pattern`, `ModulePattern`, `call_module` and `ANY` say what `find` looks for in graphs; it returns each
  `Match`
- `partition` splits what was cut into stages, `default_cuts` says where
- `build` makes a scheduled model ready to run, one that was made under `init_empty_weights`, too;
  `full_state_dict` and `load_full_state_dict` know it by the keys and shapes of the original,
  `pad_vocabulary` makes a vocabulary divide
- `clip_grad_norm` limits gradients by the norm of the whole model, whatever is split
- `Primitive` and `register_primitive` add one, `register_shard_rule` a layer to ``shard``; `ScheduleError` is
  the base of what goes wrong
- `saved_tensors` counts what a forward pass keeps for the backward one, and can set an end to it
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.slapo._build import build
    from makespan.slapo._checkpoint import select_layers
    from makespan.slapo._clipping import clip_grad_norm
    from makespan.slapo._consolidate import init_empty_weights
    from makespan.slapo._errors import (
        ArgumentError,
        BuildError,
        ConflictError,
        KindError,
        MemberError,
        PathError,
        ReplayError,
        ScheduleError,
        ShardError,
        TracingError,
        VerificationError,
    )
    from makespan.slapo._journal import JournalEntry
    from makespan.slapo._library import SCHEDULES, apply_schedule
    from makespan.slapo._library_options import ScheduleOptions
    from makespan.slapo._matcher import Match
    from makespan.slapo._partition import Partition, Tie, default_cuts, partition
    from makespan.slapo._patterns import ANY, ModulePattern, Pattern, call_module
    from makespan.slapo._registry import Primitive, list_primitives, register_primitive
    from makespan.slapo._replay import replay
    from makespan.slapo._saved import OutOfBudgetError, SavedTensors, saved_tensors
    from makespan.slapo._schedule import Metadata, Schedule, create_schedule
    from makespan.slapo._shard_rules import ShardEffect, ShardRequest, register_shard_rule
    from makespan.slapo._state import full_state_dict, load_full_state_dict
    from makespan.slapo._verify import Verify
    from makespan.slapo._verify_report import Place, VerifyReport
    from makespan.slapo._vocabulary import pad_vocabulary

__all__ = [
    "ANY",
    "SCHEDULES",
    "ArgumentError",
    "BuildError",
    "ConflictError",
    "JournalEntry",
    "KindError",
    "Match",
    "MemberError",
    "Metadata",
    "ModulePattern",
    "OutOfBudgetError",
    "Partition",
    "PathError",
    "Pattern",
    "Place",
    "Primitive",
    "ReplayError",
    "SavedTensors",
    "Schedule",
    "ScheduleError",
    "ScheduleOptions",
    "ShardEffect",
    "ShardError",
    "ShardRequest",
    "Tie",
    "TracingError",
    "VerificationError",
    "Verify",
    "VerifyReport",
    "apply_schedule",
    "build",
    "call_module",
    "clip_grad_norm",
    "create_schedule",
    "default_cuts",
    "full_state_dict",
    "init_empty_weights",
    "list_primitives",
    "load_full_state_dict",
    "pad_vocabulary",
    "partition",
    "register_primitive",
    "register_shard_rule",
    "replay",
    "saved_tensors",
    "select_layers",
]

__getattr__ = shown_lazily(__name__, __file__)
