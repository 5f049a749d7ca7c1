"""Measured rows of others: read from tables, checked before anything is fitted to them.

A table has one row per measurement, with the columns of `COLUMNS`; empty cells are unknown. Every row becomes
a `Measured`, or a `Refused` with the reason: none is dropped silently.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from makespan.arguments import typed
from makespan.errors import MakespanError, TraceError
from makespan.files import read_bytes, read_preset
from makespan.hardware import ClusterSpec, cluster_of, equal_parts, gpu_names
from makespan.planning.architecture import Architecture, Attention, FeedForward, Layers
from makespan.planning.configs import model_names, read_model
from makespan.planning.layout import Layout, Recompute
from makespan.planning.stacks import Software, Training, software
from makespan.tables import parse_csv
from makespan.units import GIB

_PACKAGE = "makespan.planning"
COLUMNS = (
    "source", "address", "model", "family", "params", "layers", "hidden", "ffn", "heads", "kv_heads", "gated",
    "vocab", "tied", "seq", "experts", "topk", "gpu", "n_gpus", "gpus_per_node", "dp", "tp", "pp", "cp", "ep",
    "vpp", "sp", "zero_stage", "fsdp", "micro_batch", "global_batch", "recompute", "precision", "attention",
    "overlap", "tokens_per_s_per_gpu", "iteration_time_s", "tflops_per_gpu", "peak_mem_gib", "note",
)  # fmt: skip
"""Columns of a table of measured rows, the form of the public register; a column ``stack`` may be added."""
_MOST_OF_PEAK = 0.8  # a row that claims more of the dense peak is wrong


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured row: a training run, its layout, cluster and stack, and the time of a step.

    ``plan`` names model and layout without the release of the software: rows of one plan go together into
    what is fitted or into what is judged, never into both. ``assumed`` lists in words what the row does not
    state, or states otherwise.
    """

    source: str
    address: str
    training: Training
    layout: Layout
    cluster: ClusterSpec
    stack: Software
    step_s: float
    memory_bytes: float
    plan: str
    mfu: float
    assumed: tuple[str, ...]

    @property
    def recomputes_unsaid(self) -> bool:
        """True if the row does not say what is computed again, so that memory cannot be told."""
        return _NO_RECOMPUTATION in self.assumed

    @property
    def memory_kind(self) -> str:
        """Say which memory the source states: ``allocated`` or ``reserved``, which holds free blocks too."""
        return str(_register()["memory"].get(self.source, "allocated"))

    @property
    def group(self) -> str:
        """Source, device and precision: rows that are judged together."""
        return f"{self.source} {self.cluster.gpu.kind} {self.training.precision}"


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that cannot be used, with the reason."""

    source: str
    address: str
    model: str
    reason: str


def takes_part(source: str) -> bool:
    """Tell whether the factors that ship are fitted to rows of a source."""
    return source in _register()["stacks"] or source in _register()["own"]


class _Unusable(Exception):
    """A row cannot be mapped; the text says why."""


@typed
def read_rows(paths: Iterable[str | Path]) -> tuple[list[Measured], list[Refused]]:
    """Read tables of measured rows.

    Returns
    -------
    tuple
        The rows that can be used, in the order of the files, and the others with their reasons.

    Raises
    ------
    TraceError
        A table lacks columns or cannot be read.
    """
    used: list[Measured] = []
    refused: list[Refused] = []
    for path in sorted(map(Path, paths)):
        frame = parse_csv(
            read_bytes(path, "a table of measured rows (CSV)", TraceError),
            str(path),
            "a table of measured rows",
            dtype="str",
            keep_default_na=False,
        )
        if missing := set(COLUMNS) - set(frame.columns):
            raise TraceError(f"{path}: lacks the columns {', '.join(sorted(missing))}")
        for record in frame.to_dict("records"):
            row = {str(name): str(cell).strip() for name, cell in record.items()}
            try:
                used.append(_measured(row))
            except (_Unusable, MakespanError) as error:
                refused.append(Refused(row["source"], row["address"], row["model"], str(error)))
    return used, refused


def _number(row: Mapping[str, str], name: str, default: float | None = None) -> float:
    text = row[name]
    if text == "":
        if default is None:
            raise _Unusable(f"{name} is not stated")
        return default
    try:
        value = float(text)
    except ValueError:
        raise _Unusable(f"{name} is {text!r}, not a number") from None
    if not math.isfinite(value):
        raise _Unusable(f"{name} is {text!r}, not a finite number")
    return value


def _count(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = _number(row, name, None if default is None else float(default))
    if value != round(value) or value < 1:
        raise _Unusable(f"{name} is {row[name]!r}, not a whole number >= 1")
    return round(value)


_PLAN = (
    "model", "n_gpus", "tp", "pp", "cp", "ep", "vpp", "micro_batch", "global_batch", "seq", "recompute",
    "zero_stage", "fsdp", "precision",
)  # fmt: skip
_NO_RECOMPUTATION = "no recomputation"


def _measured(row: Mapping[str, str]) -> Measured:
    register = _register()
    beside = register["beside"].get(row["source"], {}).get(row["model"], {})
    row = {**row, **{name: str(value) for name, value in beside.items()}}
    kind = register["devices"].get(row["gpu"], row["gpu"])
    if kind not in gpu_names(sustained=True):
        raise _Unusable(f"device {row['gpu']!r} is not in the catalogue")
    precision = register["precisions"].get(row["precision"])
    if precision is None:
        raise _Unusable(f"precision {row['precision']!r} is not one precision")
    stack, model = _stack(row), _model(row)
    n_gpus, per_node = _count(row, "n_gpus"), _count(row, "gpus_per_node", 8)
    cluster = cluster_of(kind, n_gpus, row["gpu"], equal_parts(n_gpus, min(per_node, n_gpus)))
    layout, assumed = _layout(row, model, stack, n_gpus)
    share = next((rule["share"] for rule in register["padded"] if rule["text"] in row["note"]), 1.0)
    tuned = next((rule for rule in register["tuned"] if rule["text"] in row["note"]), None)
    if tuned:
        seen = register["packed"].get(row["source"])
        length = f"of {seen} tokens" if seen else "whose tokens see all earlier ones"
        assumed = (*assumed, f"packed sequences {length}")
        if seen:  # a token sees half of its sequence in the mean
            model = model.with_attention(window=seen // 2, chunk=0)
    training = Training(
        model,
        _count(row, "seq"),
        _count(row, "global_batch"),
        precision,
        share,
        is_adapter=tuned is not None and tuned["is_adapter"],
    )
    step_s = _step_s(row, training, n_gpus)
    mfu = training.flop_per_step / (step_s * n_gpus * cluster.gpu.sustained_peak(precision))
    if mfu > _MOST_OF_PEAK:
        raise _Unusable(f"{mfu:.0%} of the peak, more than {_MOST_OF_PEAK:.0%}")
    return Measured(
        source=row["source"],
        address=row["address"],
        training=training,
        layout=layout,
        cluster=cluster,
        stack=stack,
        step_s=step_s,
        memory_bytes=_number(row, "peak_mem_gib", 0.0) * GIB,
        plan=" ".join(row[name] for name in _PLAN),
        mfu=mfu,
        assumed=assumed,
    )


def _layout(
    row: Mapping[str, str], model: Architecture, stack: Software, n_gpus: int
) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout of a row, and what had to be assumed for it."""
    assumed = []
    tp, pp, cp = _count(row, "tp"), _count(row, "pp"), _count(row, "cp", 1)
    if n_gpus % (tp * pp * cp):
        raise _Unusable(f"{n_gpus} GPUs are not a multiple of tp {tp} x pp {pp} x cp {cp}")
    dp = _count(row, "dp", n_gpus // (tp * pp * cp))
    if dp * tp * pp * cp != n_gpus:
        raise _Unusable(f"dp {dp} x tp {tp} x pp {pp} x cp {cp} is not {n_gpus} GPUs")
    if pp > model.n_layers:
        raise _Unusable(f"{pp} stages for {model.n_layers} layers")
    batch, micro = _count(row, "global_batch"), _count(row, "micro_batch", 1)
    if not row["micro_batch"]:
        assumed.append("a micro-batch of 1")
    if stack.fills_pipelines and pp > 1 and batch // (dp * micro) < pp:
        micro = max(1, batch // (dp * pp))
        assumed.append("as many micro-batches as stages, which the software demands")
    recompute, share = row["recompute"], 1.0
    if match := re.fullmatch(r"(0\.\d+) of blocks", recompute):
        recompute, share = "full", float(match[1])
    stated = _register()["recompute"].get(recompute)
    if stated is None:
        raise _Unusable(
            f"recompute is {recompute!r}; expected {', '.join(filter(None, _register()['recompute']))}"
        )
    if stated == "unknown":
        stated = "none"
        assumed.append(_NO_RECOMPUTATION)
    if not row["zero_stage"]:
        assumed.append("no sharded states")
    if not row["sp"] and tp > 1:
        assumed.append(
            f"{'sequence' if stack.sequence_parallel else 'no sequence'} parallelism, as the stack has"
        )
    interleave = _count(row, "vpp", 1) if pp > 1 else 1
    # Where layers do not divide and two more would, embedding and loss have their own.
    chunks = pp * interleave
    ends = model.n_layers % chunks != 0 and (model.n_layers + 2) % chunks == 0
    if ends:
        assumed.append("embedding and loss as layers")
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_count(row, "ep", 1),
        interleave=interleave,
        micro_batch=micro,
        zero=int(_number(row, "zero_stage", 0.0)),
        shard=_count(row, "gpus_per_node", 8) if row["fsdp"] == "HSDP" else 0,
        recompute=cast("Recompute", stated),
        recompute_share=share,
        sequence_parallel=_number(row, "sp", float(stack.sequence_parallel)) == 1,
        ends_as_layers=ends,
    )
    return layout, tuple(assumed)


@cache
def _register() -> dict[str, Any]:
    return read_preset(_PACKAGE, "register")


def _stack(row: Mapping[str, str]) -> Software:
    """Return the stack of a row: the one it states, or that of its source in the release that it names."""
    if stated := row.get("stack", ""):
        return software(stated)
    if reason := _register()["unreadable"].get(row["source"]):
        raise _Unusable(reason)
    name = _register()["stacks"].get(row["source"])
    if name is None:
        raise _Unusable(
            f"no stack is known for source {row['source']!r}; state one of the catalogue in a column 'stack'"
        )
    release = re.search(r'"(\d\d\.\d\d)', row["address"])
    for rule in _register()["releases"]:
        if rule["stack"] == name and release and release[1] < rule["before"]:
            name = rule["is"]
    facts: dict[str, Any] = {}
    for rule in _register()["settings"]:
        if rule["stack"] == name and re.search(rule["pattern"], row[rule["column"]], re.IGNORECASE):
            name += rule.get("adds", "")
            facts |= rule.get("sets", {})
    return replace(software(name), **facts)


def _step_s(row: Mapping[str, str], training: Training, n_gpus: int) -> float:
    """Return the time of a step, from whichever of the three figures is stated."""
    if row["iteration_time_s"]:
        step_s = _number(row, "iteration_time_s")
    elif row["tokens_per_s_per_gpu"]:
        step_s = training.tokens_per_step / (_number(row, "tokens_per_s_per_gpu") * n_gpus)
    elif row["tflops_per_gpu"]:
        counted = training.model
        if row["source"] in _register()["full_attention"]:
            counted = counted.with_attention(is_causal=False)
        flop = training.global_batch * counted.flop_per_sample(training.seq)
        step_s = flop / (_number(row, "tflops_per_gpu") * 1e12 * n_gpus)
    elif "out of memory" in row["note"]:
        raise _Unusable("ran out of memory")
    else:
        raise _Unusable("no time, throughput or FLOP rate is stated")
    if step_s <= 0:
        raise _Unusable(f"a step of {step_s:g} s")
    return step_s


def _model(row: Mapping[str, str]) -> Architecture:
    name = re.sub(r" \(.*", "", row["model"])
    known = _register()["models"].get(name, name)
    if known in model_names() and not row["hidden"]:
        return read_model(known)
    heads = _count(row, "heads")
    hidden = _count(row, "hidden")
    if hidden % heads:
        raise _Unusable(f"hidden {hidden} is not a multiple of {heads} heads")
    family = row["family"]
    size = hidden // heads
    kv_heads = _count(row, "kv_heads", heads)
    is_bert = family == "bert"
    run = Layers(
        n_layers=_count(row, "layers"),
        # A note corrects the heads of some rows and not those of keys; their family has as many of both.
        attention=Attention(
            heads, min(kv_heads, heads), size, size, is_causal=not is_bert, n_norms=2 * (family == "qwen3")
        ),
        ffn=FeedForward(_count(row, "ffn"), row["gated"] == "1"),
    )
    return Architecture(
        name=row["model"],
        family=family,
        hidden=hidden,
        layers=(run,),
        vocab=_count(row, "vocab"),
        is_tied=row["tied"] == "1",
        head="masked-lm" if is_bert else "lm",
    )
