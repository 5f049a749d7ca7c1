"""Layouts that divide a training step over devices, and a readable notation for them.

``tp2 pp4 cp2 ep8 fsdp mb1`` reads: tensor parallelism over 2, 4 pipeline stages, context parallelism over 2,
experts over 8, parameters sharded over the data-parallel devices, micro-batches of 1 sample. Data parallelism
follows from the number of devices. `Layout.text` writes what `parse_layout` reads, without loss.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from makespan.arguments import check_fields, typed
from makespan.errors import NotationError, PlanError

Recompute = Literal["none", "selective", "operators", "full"]
RECOMPUTE = ("none", "selective", "operators", "full")
"""What the backward pass computes again: nothing, attention cores, half of the products, or everything."""
Pipeline = Literal["1f1b", "zero-bubble"]
_PIPELINES = ("1f1b", "zero-bubble")
_MOST_STAGE = 3
_COUNTS = ("dp", "tp", "pp", "cp", "ep", "interleave", "micro_batch")


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a training step over devices.

    Parameters
    ----------
    dp, tp, pp, cp
        Degrees of data, tensor, pipeline and context parallelism; their product is the number of devices.
    ep
        Devices over which experts are divided; they are taken from those of data and context parallelism
        first, then from those of tensor parallelism. With 1, tensor parallelism cuts every expert.
    interleave
        Chunks of layers per pipeline stage.
    micro_batch
        Samples of a micro-batch.
    zero
        What data parallelism shards: 0 nothing, 1 the optimizer, 2 gradients too, 3 parameters too (FSDP).
    shard
        Devices over which ZeRO shards; 0 for all that hold the same part (less is HSDP).
    recompute, recompute_share
        What is computed again in the backward pass, and in which share of the layers [1].
    sequence_parallel
        True if tensor parallelism also divides norms and dropout.
    pipeline
        Order of the micro-batches: ``1f1b`` (interleaved with more than one chunk), or ``zero-bubble``.
    ends_as_layers
        True if embedding and loss count as one layer each when layers are dealt to stages.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    interleave: int = 1
    micro_batch: int = 1
    zero: int = 1
    shard: int = 0
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    sequence_parallel: bool = True
    pipeline: Pipeline = "1f1b"
    ends_as_layers: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "layout", PlanError, positive=_COUNTS, not_negative=("shard",))
        if self.zero not in range(_MOST_STAGE + 1):
            raise PlanError(f"layout: zero is {self.zero!r}; expected 0, 1, 2 or 3")
        if self.recompute not in RECOMPUTE:
            raise PlanError(f"layout: recompute is {self.recompute!r}; expected {', '.join(RECOMPUTE)}")
        if not 0 < self.recompute_share <= 1:
            raise PlanError(f"layout: recompute_share is {self.recompute_share!r}; expected above 0, up to 1")
        if self.pipeline not in _PIPELINES:
            raise PlanError(f"layout: pipeline is {self.pipeline!r}; expected {', '.join(_PIPELINES)}")
        if self.interleave > 1 and self.pp == 1:
            raise PlanError(f"layout: {self.interleave} chunks per stage, but there is one stage")
        peers = self.dp * self.cp
        if self.shard and (self.shard > peers or peers % self.shard):
            raise PlanError(
                f"layout: shards over {self.shard} of the {peers} devices that hold the same part; expected "
                "a divisor"
            )
        if (peers * self.tp) % self.ep:
            raise PlanError(
                f"layout: experts over {self.ep} devices, but a stage has {peers * self.tp}; expected a "
                "divisor"
            )

    @property
    def n_gpus(self) -> int:
        """Devices of the layout."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def text(self) -> str:
        """The layout in words, without its data parallelism; `parse_layout` reads it."""
        words = [f"{name}{getattr(self, key)}" for name, key in _DEGREES.items() if getattr(self, key) > 1]
        if self.zero == _MOST_STAGE:
            words.append(f"hsdp{self.shard}" if self.shard else "fsdp")
        elif self.shard:
            words.append(f"zero{self.zero}/{self.shard}")
        else:
            words.append(f"zero{self.zero}")
        words.append(f"mb{self.micro_batch}")
        if self.recompute != "none":
            share = "" if self.recompute_share == 1 else f":{self.recompute_share:.6g}"
            words.append(f"recompute={self.recompute}{share}")
        if not self.sequence_parallel and self.tp > 1:
            words.append("nosp")
        if self.pipeline != "1f1b":
            words.append(self.pipeline)
        if self.ends_as_layers:
            words.append("ends")
        return " ".join(words)

    def microbatches(self, global_batch: int) -> int:
        """Return the micro-batches of a step; raises `PlanError` where the batch cannot be divided."""
        per_step = self.dp * self.micro_batch
        if global_batch % per_step:
            raise PlanError(
                f"layout {self.text!r}: a batch of {global_batch} samples is not a multiple of {per_step}, "
                f"that is dp {self.dp} x micro-batch {self.micro_batch}"
            )
        return global_batch // per_step


_DEGREES = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "vp": "interleave"}
_WORDS = re.compile(
    r"(?P<degree>tp|pp|cp|ep|vp|dp|mb)(?P<number>\d{1,15})|zero(?P<zero>[0-3])(?:/(?P<over>\d{1,15}))?|(?P<fsdp>fsdp)"
    r"|hsdp(?P<hsdp>\d{1,15})|recompute=(?P<recompute>[a-z]+)(?::(?P<share>[\d.e-]+))?|(?P<nosp>nosp)"
    r"|(?P<pipeline>zero-bubble)|(?P<ends>ends)"
)


@typed
def parse_layout(text: str, n_gpus: int) -> Layout:
    """Read a layout such as ``tp2 pp4 fsdp mb1`` for a number of devices.

    Raises
    ------
    NotationError
        There is no word, or one is not known or occurs twice.
    PlanError
        The degrees do not divide the devices, or options contradict each other.
    """
    values: dict[str, Any] = {}
    seen: set[str] = set()
    if not text.strip():
        raise NotationError("the layout is empty; expected words such as 'tp4 pp4 mb1'")
    for word in text.split():
        match = _WORDS.fullmatch(word)
        if match is None:
            raise NotationError(
                f"layout {text!r}: {word!r} is not understood; expected words such as tp2, pp4, cp2, ep8, "
                "vp2, dp16, mb1, zero1, fsdp, hsdp8, recompute=full, nosp, zero-bubble, ends"
            )
        kind, found = _read_word(match)
        if kind in seen:
            raise NotationError(f"layout {text!r}: {word!r} says again what another word says")
        seen.add(kind)
        values |= found
    split = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
    if split == 0:
        raise PlanError(f"layout {text!r}: a degree is 0; expected whole numbers >= 1")
    if n_gpus % split:
        raise PlanError(f"layout {text!r}: {n_gpus} GPUs are not a multiple of tp x pp x cp = {split}")
    dp = values.pop("dp", n_gpus // split)
    if dp * split != n_gpus:
        raise PlanError(f"layout {text!r}: dp {dp} x tp x pp x cp {split} = {dp * split}, not {n_gpus} GPUs")
    return Layout(dp=dp, **values)


def _read_word(match: re.Match[str]) -> tuple[str, dict[str, Any]]:
    """Return what a word is about, and the fields that it sets."""
    found = match.groupdict()
    if found["degree"]:
        name = {"vp": "interleave", "mb": "micro_batch"}.get(found["degree"], found["degree"])
        return name, {name: int(found["number"])}
    if found["zero"]:
        return "zero", {"zero": int(found["zero"]), "shard": int(found["over"] or 0)}
    if found["fsdp"]:
        return "zero", {"zero": _MOST_STAGE}
    if found["hsdp"]:
        return "zero", {"zero": _MOST_STAGE, "shard": int(found["hsdp"])}
    if found["recompute"]:
        share = found["share"]
        try:
            return "recompute", {
                "recompute": found["recompute"],
                "recompute_share": float(share) if share else 1.0,
            }
        except ValueError:
            raise NotationError(f"recompute share {share!r} is not a number") from None
    if found["nosp"]:
        return "sequence_parallel", {"sequence_parallel": False}
    return ("pipeline", {"pipeline": match[0]}) if found["pipeline"] else ("ends", {"ends_as_layers": True})
