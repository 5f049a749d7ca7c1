"""Presets of models, stacks and workloads, read from the packaged TOML files."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from makespan.errors import unknown_name
from makespan.workloads._spec import BlockSpec, ModelSpec, Stack, Workload

__all__ = [
    "model",
    "model_keys",
    "preset_sources",
    "resolve_workload_key",
    "stack",
    "stack_names",
    "workload",
    "workload_keys",
]


@cache
def _preset(kind: str) -> dict[str, dict[str, Any]]:
    text = resources.files("makespan.workloads").joinpath(f"presets/{kind}.toml").read_text("utf-8")
    return tomllib.loads(text)


def model_keys() -> tuple[str, ...]:
    """Return the keys of all models in the zoo."""
    return tuple(_preset("models"))


def stack_names() -> tuple[str, ...]:
    """Return the names of all software stacks."""
    return tuple(_preset("stacks"))


def workload_keys() -> tuple[str, ...]:
    """Return the keys of all workloads."""
    return tuple(_preset("workloads"))


def preset_sources() -> dict[str, str]:
    """Return the source of every preset, keyed ``kind/name``; empty text where it is missing."""
    return {
        f"{kind}/{name}": str(entry.get("source", ""))
        for kind in ("models", "stacks", "workloads")
        for name, entry in _preset(kind).items()
    }


@cache
def stack(name: str) -> Stack:
    """Return a software stack.

    Raises
    ------
    UnknownNameError
        No stack has that name.
    """
    try:
        entry = _preset("stacks")[name]
    except KeyError:
        raise unknown_name("software stack", name, stack_names()) from None
    return Stack(name=name, **entry)


@cache
def model(key: str) -> ModelSpec:
    """Return a model of the zoo.

    Raises
    ------
    UnknownNameError
        No model has that key.
    """
    try:
        entry = dict(_preset("models")[key])
    except KeyError:
        raise unknown_name("model", key, model_keys()) from None
    blocks = tuple(_block(block) for block in entry.pop("blocks"))
    return ModelSpec(key=key, blocks=blocks, **entry)


def _block(entry: dict[str, Any]) -> BlockSpec:
    heads = entry["heads"]
    defaults = {"kv_heads": heads, "gated": False, "kv_channels": entry["hidden"] // heads}
    return BlockSpec(**{**defaults, **entry})


@cache
def _aliases() -> dict[str, str]:
    return {alias: key for key, entry in _preset("workloads").items() for alias in entry["aliases"]}


def resolve_workload_key(name: str) -> str:
    """Return the key of a workload from its key or one of its aliases.

    Raises
    ------
    UnknownNameError
        Neither a key nor an alias.
    """
    key = _aliases().get(name, name)
    if key not in _preset("workloads"):
        raise unknown_name("model or workload", name, [*workload_keys(), *_aliases()])
    return key


@cache
def workload(name: str) -> Workload:
    """Return a workload from its key or one of its aliases.

    Raises
    ------
    UnknownNameError
        Neither a key nor an alias.
    """
    key = resolve_workload_key(name)
    entry = dict(_preset("workloads")[key])
    return Workload(
        key=key,
        aliases=tuple(entry["aliases"]),
        model=model(entry["model"]),
        global_batch_size=entry["global_batch_size"],
        precision=entry["precision"],
        families=tuple(entry["families"]),
        data_parallel_stack=stack(entry["data_parallel_stack"]),
        model_parallel_stack=stack(entry["model_parallel_stack"]),
        model_parallel_seq=tuple(entry.get("model_parallel_seq", ())),
        max_microbatches=entry["max_microbatches"],
        trace_cpu_threads=tuple(entry.get("trace_cpu_threads", ())),
        used_for_calibration=entry.get("used_for_calibration", True),
        source=entry["source"],
    )
