"""Presets of models, stacks and workloads, read from the packaged TOML files."""

from functools import cache
from typing import Any

from makespan.errors import unknown_name
from makespan.presets import preset_entry, read_preset
from makespan.workloads._spec import BlockSpec, ModelSpec, Stack, Workload

__all__ = [
    "model",
    "model_keys",
    "resolve_workload_key",
    "small_workload_keys",
    "stack",
    "workload",
    "workload_keys",
]


_PACKAGE = "makespan.workloads"
_SMALL_STACK, _SMALL_PRECISION = "torch-fp32", "fp32"


def model_keys() -> tuple[str, ...]:
    """Return the keys of all models in the zoo."""
    return tuple(read_preset(_PACKAGE, "models"))


def workload_keys() -> tuple[str, ...]:
    """Return the keys of all workloads."""
    return tuple(read_preset(_PACKAGE, "workloads"))


@cache
def stack(name: str) -> Stack:
    """Return a software stack; raises `UnknownNameError` for another name."""
    entry = preset_entry(_PACKAGE, "stacks", "software stack", name)
    return Stack(name=name, **entry)


@cache
def model(key: str) -> ModelSpec:
    """Return a model of the zoo; raises `UnknownNameError` for another key."""
    entry = preset_entry(_PACKAGE, "models", "model", key)
    blocks = tuple(_block(block) for block in entry.pop("blocks"))
    return ModelSpec(key=key, blocks=blocks, **entry)


def _block(entry: dict[str, Any]) -> BlockSpec:
    heads = entry["heads"]
    defaults = {"kv_heads": heads, "gated": False, "kv_channels": entry["hidden"] // heads}
    return BlockSpec(**{**defaults, **entry})


@cache
def _aliases() -> dict[str, str]:
    return {
        alias: key for key, entry in read_preset(_PACKAGE, "workloads").items() for alias in entry["aliases"]
    }


def resolve_workload_key(name: str) -> str:
    """Return the key of a workload from its key or an alias; raises `UnknownNameError` otherwise."""
    key = _aliases().get(name, name)
    if key not in read_preset(_PACKAGE, "workloads"):
        raise unknown_name("model or workload", name, [*workload_keys(), *_aliases()])
    return key


def small_workload_keys() -> tuple[str, ...]:
    """Return the keys of the workloads that are small enough to train for real on a few CPU cores."""
    return tuple(read_preset(_PACKAGE, "small"))


@cache
def workload(name: str) -> Workload:
    """Return a workload from its key or an alias, small ones too; raises `UnknownNameError` otherwise."""
    if name in small_workload_keys():
        return _small_workload(name)
    key = resolve_workload_key(name)
    read = read_preset(_PACKAGE, "workloads")[key]
    entry: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in read.items()}
    for role in ("data_parallel_stack", "model_parallel_stack"):
        entry[role] = stack(entry[role])
    return Workload(key=key, model=model(entry.pop("model")), **entry)


def _small_workload(key: str) -> Workload:
    entry = preset_entry(_PACKAGE, "small", "small workload", key)
    batch, microbatches = entry.pop("global_batch_size"), entry.pop("max_microbatches")
    blocks = tuple(_block(block) for block in entry.pop("blocks"))
    return Workload(
        key=key,
        aliases=(),
        model=ModelSpec(key=key, blocks=blocks, **entry),
        global_batch_size=batch,
        precision=_SMALL_PRECISION,
        families=("DP", "GC", "ZeRO-DP+GA", "ZeRO-Offload", "ZeRO-Offload+GC", "TP+PP", "DP+TP+PP"),
        data_parallel_stack=stack(_SMALL_STACK),
        model_parallel_stack=stack(_SMALL_STACK),
        max_microbatches=microbatches,
        used_for_calibration=False,
        source=entry["source"],
    )
