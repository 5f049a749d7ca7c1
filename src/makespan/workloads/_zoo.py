"""Presets of models, stacks and workloads, read from the packaged TOML files, and workloads of one's own."""

from dataclasses import replace
from functools import cache
from typing import Any

from makespan.errors import InputError, unknown_name
from makespan.presets import preset_entry, read_preset
from makespan.workloads._spec import BlockSpec, ModelSpec, Stack, Workload

__all__ = [
    "is_in_zoo",
    "model",
    "model_keys",
    "resolve_workload_key",
    "small_workload_keys",
    "stack",
    "workload",
    "workload_keys",
    "workload_of",
]


_PACKAGE = "makespan.workloads"
_SMALL_STACK, _SMALL_PRECISION = "torch-fp32", "fp32"
_EVERY_FAMILY = (
    "DP", "GC", "ZeRO-DP+GA", "ZeRO-Offload", "ZeRO-Offload+GC", "TP+GA", "TP+PP", "DP+TP+PP",
)  # fmt: skip

# Proportions of a decoder that stands for a model of which the number of parameters alone is known: about
# those of the GPT-3 family (Brown et al. 2020, table 2.1).
_OWN_STACK, _OWN_PRECISION = "modern", "bf16"
_HEAD_CHANNELS, _HIDDEN_PER_LAYER, _FFN_PER_HIDDEN, _PARAMETERS_PER_CHANNEL = 128, 128, 4, 12
_OWN_SEQ, _LEAST_PARAMETERS = 1024, 1e4


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


def is_in_zoo(name: str) -> bool:
    """Whether `workload` knows a name."""
    return name in small_workload_keys() or _aliases().get(name, name) in workload_keys()


def workload_of(name: str, global_batch_size: int, parameters: float) -> Workload:
    """Return what a table of one's own measurements is about.

    A workload of the zoo comes back with the global batch of the table. For another name a decoder of usual
    proportions stands for the model, because nothing but its size is known; ``parameters`` counts there
    alone.

    Raises
    ------
    InputError
        The batch or the number of parameters is out of range.
    """
    if is_in_zoo(name):
        found = workload(name)
        is_same = found.global_batch_size == global_batch_size
        return found if is_same else replace(found, global_batch_size=global_batch_size)
    if not _LEAST_PARAMETERS <= parameters < float("inf"):
        raise InputError(f"workload {name!r}: {parameters:g} parameters; expected >= {_LEAST_PARAMETERS:g}")
    hidden = (parameters * _HIDDEN_PER_LAYER / _PARAMETERS_PER_CHANNEL) ** (1 / 3)
    # Small models have one layer that takes most of the parameters; the vocabulary is what the layers leave.
    hidden = min(hidden, (parameters / (_PARAMETERS_PER_CHANNEL + 1)) ** 0.5)
    heads = max(int(hidden / _HEAD_CHANNELS), 1)
    channels = heads * _HEAD_CHANNELS if hidden >= _HEAD_CHANNELS else int(hidden)
    in_layer = _PARAMETERS_PER_CHANNEL * channels**2
    n_layers = max(int(parameters / in_layer), 1)
    block = BlockSpec(
        n_layers=n_layers,
        kind="causal",
        seq=_OWN_SEQ,
        hidden=channels,
        heads=heads,
        kv_heads=heads,
        ffn=_FFN_PER_HIDDEN * channels,
        gated=False,
        kv_channels=channels // heads,
    )
    source = "own measurements; shape assumed from the number of parameters"
    return Workload(
        key=name,
        aliases=(),
        model=ModelSpec(
            key=name,
            title=f"{name} ({parameters / 1e6:.4g} M parameters)",
            family="gpt2",
            blocks=(block,),
            vocab=max(round((parameters - n_layers * in_layer) / channels), 1),
            tied_head=True,
            max_positions=0,
            parameters=round(parameters),
            source=source,
        ),
        global_batch_size=global_batch_size,
        precision=_OWN_PRECISION,
        families=_EVERY_FAMILY,
        data_parallel_stack=stack(_OWN_STACK),
        model_parallel_stack=stack(_OWN_STACK),
        max_microbatches=global_batch_size,
        used_for_calibration=False,
        source=source,
    )
