"""Measured rows of others: read from tables, checked before anything is fitted to them.

A table has one row per measurement, with the columns of `COLUMNS`; empty cells are unknown. A row becomes a
`Measured` or a `Refused` with the reason, never silence.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from makespan.errors import InputError, MakespanError, TraceError, cell_error, unknown_name
from makespan.files import read_bytes, read_preset
from makespan.planning.architecture import Architecture, Attention, FeedForward, Layers
from makespan.planning.configs import read_model
from makespan.planning.layout import Layout, parse_layout
from makespan.planning.machines import Machines, device
from makespan.planning.stacks import Software, Training, software
from makespan.tables import parse_csv
from makespan.units import GIB

if TYPE_CHECKING:
    from makespan.planning.pricing import Pricer

_PACKAGE = "makespan.planning"
COLUMNS = (
    "source", "address", "model", "family", "params", "layers", "hidden", "ffn", "heads", "kv_heads", "gated",
    "vocab", "tied", "seq", "experts", "topk", "gpu", "n_gpus", "gpus_per_node", "dp", "tp", "pp", "cp", "ep",
    "vpp", "sp", "zero_stage", "fsdp", "micro_batch", "global_batch", "recompute", "precision", "attention",
    "overlap", "tokens_per_s_per_gpu", "iteration_time_s", "tflops_per_gpu", "peak_mem_gib", "note",
)  # fmt: skip
"""Columns of a table of measured rows, the form of the public register."""
_MOST_OF_PEAK = 0.8  # a row that claims more of the dense peak is wrong
_MATERIAL = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured row: what ran, where and how, and how long a step took.

    ``plan`` names model and layout without the release of the software: rows of one plan go together into
    what is fitted or into what is judged, never into both.
    """

    source: str
    address: str
    training: Training
    layout: Layout
    machines: Machines
    stack: Software
    step_s: float
    memory_bytes: float
    plan: str
    mfu: float

    @property
    def group(self) -> str:
        """Source, device and precision: rows that are judged together."""
        return f"{self.source} {self.machines.device.name} {self.training.precision}"


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that cannot be used, with the reason."""

    source: str
    address: str
    model: str
    reason: str


class _Unusable(Exception):
    """A row cannot be mapped; the text says why."""


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
            raise InputError(f"{path}: lacks the columns {', '.join(sorted(missing))}")
        for record in frame.to_dict("records"):
            row = {str(name): str(cell).strip() for name, cell in record.items()}
            try:
                used.append(_measured(row))
            except _Unusable as error:
                refused.append(Refused(row["source"], row["address"], row["model"], str(error)))
            except MakespanError as error:
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


def _measured(row: Mapping[str, str]) -> Measured:
    note = row["note"]
    if "LoRA" in note or "SFT" in note:
        raise _Unusable("fine-tuning, whose sequences and trained weights are not stated")
    kind = _register()["devices"].get(row["gpu"])
    if kind is None:
        raise _Unusable(f"device {row['gpu']!r} is not in the catalogue")
    precision = _register()["precisions"].get(row["precision"])
    if precision is None:
        raise _Unusable(f"precision {row['precision']!r} is not one precision")
    model = _model(row)
    tp, pp, cp = _count(row, "tp"), _count(row, "pp"), _count(row, "cp", 1)
    n_gpus = _count(row, "n_gpus")
    if n_gpus % (tp * pp * cp):
        raise _Unusable(f"{n_gpus} GPUs are not a multiple of tp {tp} x pp {pp} x cp {cp}")
    dp = _count(row, "dp", n_gpus // (tp * pp * cp))
    if dp * tp * pp * cp != n_gpus:
        raise _Unusable(f"dp {dp} x tp {tp} x pp {pp} x cp {cp} is not {n_gpus} GPUs")
    if pp > model.n_layers:
        raise _Unusable(f"{pp} stages for {model.n_layers} layers")
    batch, seq = _count(row, "global_batch"), _count(row, "seq")
    micro = _count(row, "micro_batch", 1)
    if row["source"] == "torchtitan" and pp > 1 and batch // (dp * micro) < pp:
        micro = max(1, batch // (dp * pp))  # its pipelines refuse fewer micro-batches than stages
    stack = _stack(row)
    recompute, share = _recompute(row["recompute"])
    fsdp = row["fsdp"]
    zero = int(_number(row, "zero_stage", 0))
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_count(row, "ep", 1),
        interleave=_count(row, "vpp", 1) if pp > 1 else 1,
        micro_batch=micro,
        zero=zero,
        shard=_count(row, "gpus_per_node", 8) if fsdp == "HSDP" and dp % 8 == 0 else 0,
        recompute=recompute,  # type: ignore[arg-type]
        recompute_share=share,
        sequence_parallel=row["sp"] == "1"
        or row["sp"] == "1.0"
        or "bridge" in stack.name
        or stack.family == "torchtitan",
        ends_as_layers=pp > 1
        and (model.n_layers + 2) % (pp * _count(row, "vpp", 1)) == 0
        and model.n_layers % (pp * _count(row, "vpp", 1)) != 0,
    )
    training = Training(model, seq, batch, precision, 0.6 if "binned" in note else 1.0)
    machines = Machines(
        row["gpu"], device(kind), n_gpus, min(_count(row, "gpus_per_node", 8), max(n_gpus, 1))
    )
    step_s = _step_s(row, training, n_gpus)
    mfu = (
        batch
        * model.flop_per_sample(seq)
        * training.computed_share
        / (step_s * n_gpus * machines.device.peak_flop_per_s(precision))
    )
    if mfu > _MOST_OF_PEAK:
        raise _Unusable(f"{mfu:.0%} of the peak, more than {_MOST_OF_PEAK:.0%}")
    memory = _number(row, "peak_mem_gib", 0.0) * GIB
    names = (
        "model",
        "n_gpus",
        "tp",
        "pp",
        "cp",
        "ep",
        "vpp",
        "micro_batch",
        "global_batch",
        "seq",
        "recompute",
        "zero_stage",
        "fsdp",
        "precision",
    )
    return Measured(
        source=row["source"].removeprefix("nemo/"),
        address=row["address"],
        training=training,
        layout=layout,
        machines=machines,
        stack=stack,
        step_s=step_s,
        memory_bytes=memory,
        plan=" ".join(row[name] for name in names),
        mfu=mfu,
    )


@cache
def _register() -> dict[str, Any]:
    return read_preset(_PACKAGE, "register")


def _stack(row: Mapping[str, str]) -> Software:
    source = row["source"]
    name = _register()["stacks"].get(source)
    if name is None:
        raise _Unusable(f"no stack is known for source {source!r}")
    if name == "torchtitan":
        note = row["note"].lower()
        name += "-rowwise" * (row["precision"] == "fp8-rowwise") + "-async" * ("async" in note)
        name += "-eager" * (note == "eager")
    if name == "megatron-bridge":
        release = re.search(r'"(\d\d\.\d\d)', row["address"])
        if release and release[1] < "26.02":
            name = "megatron-bridge-25"
        elif release and release[1] < "26.06":
            name = "megatron-bridge-26.02"
    return software(name)


def _recompute(text: str) -> tuple[str, float]:
    if match := re.fullmatch(r"(0\.\d+) of blocks", text):
        return "full", float(match[1])
    names = {
        "none": "none",
        "full": "full",
        "selective": "selective",
        "selective-op": "operators",
        "recipe": "none",
        "": "none",
        "?": "none",
    }
    if text not in names:
        raise _Unusable(f"recompute is {text!r}; expected {', '.join(filter(None, names))}")
    return names[text], 1.0


def _step_s(row: Mapping[str, str], training: Training, n_gpus: int) -> float:
    """Return the time of a step, from whichever of the three figures is stated."""
    if row["iteration_time_s"]:
        step_s = _number(row, "iteration_time_s")
    elif row["tokens_per_s_per_gpu"]:
        step_s = training.tokens_per_step / (_number(row, "tokens_per_s_per_gpu") * n_gpus)
    elif row["tflops_per_gpu"]:
        flop = training.global_batch * training.model.flop_per_sample(training.seq)
        step_s = flop / (_number(row, "tflops_per_gpu") * 1e12 * n_gpus)
    else:
        raise _Unusable("no time, throughput or FLOP rate is stated")
    if step_s <= 0:
        raise _Unusable(f"a step of {step_s:g} s")
    return step_s


def _model(row: Mapping[str, str]) -> Architecture:
    name = re.sub(r" \(.*", "", row["model"])
    known = _register()["models"].get(name)
    if known is not None and not row["hidden"]:
        return read_model(known)
    heads = _count(row, "heads")
    hidden = _count(row, "hidden")
    if hidden % heads:
        raise _Unusable(f"hidden {hidden} is not a multiple of {heads} heads")
    family = row["family"]
    size = hidden // heads
    kv_heads = min(_count(row, "kv_heads", heads), heads)
    is_bert = family == "bert"
    run = Layers(
        n_layers=_count(row, "layers"),
        attention=Attention(
            heads, kv_heads if heads % kv_heads == 0 else heads, size, size, is_causal=not is_bert
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


_OWN = ("n_gpus", "layout", "step_s")
_OPTIONAL = ("seq", "batch", "precision")


def read_measured(path: str | Path, pricer: "Pricer") -> list[tuple[Training, Layout, Machines, float]]:
    """Read measured steps of one model on one kind of device from a CSV.

    Columns: ``n_gpus``, ``layout`` (such as ``tp4 pp4 mb1``) and ``step_s`` [s]; ``seq``, ``batch`` and
    ``precision`` where they differ from those of the plan.

    Raises
    ------
    TraceError
        A cell is not accepted; the message names file, row and column.
    """
    where = str(path)
    frame = parse_csv(
        read_bytes(path, "measured steps (CSV)", TraceError),
        where,
        "measured steps",
        dtype="str",
        keep_default_na=False,
    )
    if missing := [name for name in _OWN if name not in frame.columns]:
        raise TraceError(f"{where}: column {missing[0]!r} is missing; expected {', '.join(_OWN)}")
    if unknown := [name for name in frame.columns if name not in (*_OWN, *_OPTIONAL)]:
        raise TraceError(f"{where}: {unknown_name('column', unknown[0], (*_OWN, *_OPTIONAL))}")
    found = []
    for number, record in enumerate(frame.to_dict("records"), start=1):
        row = {str(name): str(cell).strip() for name, cell in record.items()}

        def value(name: str, kind: type, accepted: str, default: Any = None) -> Any:
            text = row.get(name, "")  # noqa: B023 (called in this turn of the loop)
            if not text and default is not None:
                return default
            try:
                number_ = kind(text)
            except ValueError:
                number_ = math.nan
            if not (math.isfinite(number_) and number_ > 0):
                raise cell_error(where, number, name, text, accepted)  # noqa: B023
            return number_

        n_gpus = value("n_gpus", int, "a whole number >= 1")
        try:
            layout = parse_layout(row["layout"], n_gpus)
            training = replace(
                pricer.training,
                seq=value("seq", int, "a whole number >= 1", pricer.training.seq),
                global_batch=value("batch", int, "a whole number >= 1", pricer.training.global_batch),
                precision=row.get("precision") or pricer.training.precision,
            )
            layout.microbatches(training.global_batch)
        except TraceError:
            raise
        except InputError as error:
            raise TraceError(f"{where}: row {number}: {error}") from None
        step_s = value("step_s", float, "a time above 0 [s]")
        found.append((training, layout, pricer.machines.with_gpus(n_gpus), step_s))
    return found
