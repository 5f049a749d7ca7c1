"""Models that schedules are written for, described without torch: families, sizes, parameters and FLOP."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from makespan.errors import InputError, unknown_name
from makespan.presets import preset_entry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from makespan.training.zoo._family_samples import FamilyBatch

__all__ = [
    "FAMILIES",
    "ConvolutionSpec",
    "FamilySpec",
    "TransformerSpec",
    "Weights",
    "build_family",
    "family_batch",
    "family_loss",
    "family_sizes",
    "family_spec",
    "family_weights",
    "forward_flop",
    "parameter_count",
]

FAMILIES = ("bert", "roberta", "albert", "gpt", "opt", "t5", "llama", "wideresnet")
"""Architectures, each written as its authors wrote it, in plain torch."""

_PACKAGE = "makespan.training.zoo"
_MACS, _PLANES_BASE, _EXPANSION = 2, 64, 4


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """Sizes of a transformer of one of the families.

    Parameters
    ----------
    family, size, title
        One of `FAMILIES`, the key of the size in it, and what figures call the model.
    hidden, n_layers, heads, ffn, vocab, seq
        Width, layers (of the encoder where there is a decoder), attention heads, width of the feed-forward
        part, tokens of the vocabulary, tokens a sample.
    source
        Where the sizes come from.
    kv_heads, head_size, embedding_width
        Key-value heads, width of a head and of the embedding; 0 stands for ``heads``, ``hidden / heads``
        and ``hidden``.
    n_decoder_layers, decoder_seq
        Layers and tokens of a decoder that attends to an encoder.
    max_positions, n_types
        Rows of the learned position table and of the table of token types.
    n_buckets, max_distance
        Rows of the table of relative positions, and the distance from which all share the last one.
    window
        How far every second layer looks back; 0 for no limit.
    norm_first
        Whether norms stand before attention and feed-forward part, where a family has both forms.
    padding
        Token that fills a sample up.
    dropout, attention_dropout
        Probabilities.
    """

    family: str
    size: str
    title: str
    hidden: int
    n_layers: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    source: str
    kv_heads: int = 0
    head_size: int = 0
    embedding_width: int = 0
    n_decoder_layers: int = 0
    decoder_seq: int = 0
    max_positions: int = 0
    n_types: int = 0
    n_buckets: int = 0
    max_distance: int = 0
    window: int = 0
    norm_first: bool = True
    padding: int = 0
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Fill in what follows from other sizes, and check that they fit each other."""
        for name, default in (
            ("kv_heads", self.heads),
            ("head_size", self.hidden // self.heads),
            ("embedding_width", self.hidden),
        ):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, default)
        if self.heads % self.kv_heads:
            raise InputError(f"{self.title}: {self.heads} heads; accepted: a multiple of {self.kv_heads}")
        if self.max_positions and self.seq > self.max_positions:
            raise InputError(f"{self.title}: seq {self.seq}; accepted: at most {self.max_positions}")

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_size


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """Sizes of a residual network of bottlenecks.

    Parameters
    ----------
    family, size, title
        One of `FAMILIES`, the key of the size in it, and what figures call the model.
    planes, width_per_group
        Channels behind the stem, and channels inside a bottleneck for each 64 of its planes.
    blocks
        Bottlenecks of each of the four parts.
    image_side, n_classes
        Pixels a side, and classes.
    source
        Where the sizes come from.
    """

    family: str
    size: str
    title: str
    planes: int
    width_per_group: int
    blocks: tuple[int, ...]
    image_side: int
    n_classes: int
    source: str

    def __post_init__(self) -> None:
        """Make the numbers of blocks, which a file gives as a list, immutable."""
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def width(self, part: int) -> int:
        """Return the channels inside the bottlenecks of a part, from 0."""
        return (self.planes << part) * self.width_per_group // _PLANES_BASE

    def outputs(self, part: int) -> int:
        """Return the channels that the bottlenecks of a part put out."""
        return (self.planes << part) * _EXPANSION


FamilySpec: TypeAlias = TransformerSpec | ConvolutionSpec


@dataclass(frozen=True, slots=True)
class Weights:
    """Equal matrices, tables or norms of a model.

    Parameters
    ----------
    place
        ``embedding``, ``layer`` or ``head``.
    name
        What they do.
    inputs, outputs
        Rows and columns of one; a convolution has as many inputs as a kernel reads, a norm has one.
    has_bias
        Whether a vector of ``outputs`` belongs to each.
    tokens
        Positions of a sample that it multiplies; 0 for tables and norms, which multiply no matrices.
    copies, uses
        How many there are, and how often each is applied in a forward pass.
    is_tied
        Whether the matrix is one of those before, so that only the bias is its own.
    """

    place: str
    name: str
    inputs: int
    outputs: int
    has_bias: bool = False
    tokens: int = 0
    copies: int = 1
    uses: int = 1
    is_tied: bool = False

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        own_inputs = 0 if self.is_tied else self.inputs
        return self.copies * self.outputs * (own_inputs + self.has_bias)

    @property
    def flop(self) -> int:
        """Matrix products of a sample in the forward pass [FLOP]."""
        return _MACS * self.tokens * self.inputs * self.outputs * self.copies * self.uses


def family_sizes(family: str) -> tuple[str, ...]:
    """Return the keys of the sizes of a family, smallest first.

    Parameters
    ----------
    family
        One of `FAMILIES`; `UnknownNameError` for others.

    Returns
    -------
    tuple of str
        ``tiny`` first.
    """
    return tuple(preset_entry(_PACKAGE, "families", "model family", family))


@cache
def family_spec(family: str, size: str = "tiny") -> FamilySpec:
    """Return the sizes of a model.

    Parameters
    ----------
    family
        One of `FAMILIES`; `UnknownNameError` for others.
    size
        One of its `family_sizes`; `UnknownNameError` for others.

    Returns
    -------
    TransformerSpec or ConvolutionSpec
        The latter for ``wideresnet``.
    """
    sizes: dict[str, dict[str, Any]] = preset_entry(_PACKAGE, "families", "model family", family)
    if size not in sizes:
        raise unknown_name(f"size of {family}", size, sizes)
    kind = ConvolutionSpec if family == "wideresnet" else TransformerSpec
    return kind(family=family, size=size, **sizes[size])


def family_weights(spec: FamilySpec) -> tuple[Weights, ...]:
    """Return all weights of a model, tied ones once.

    Parameters
    ----------
    spec
        The model.

    Returns
    -------
    tuple of Weights
        From input to output.
    """
    from makespan.training.zoo._family_weights import WEIGHTS

    return tuple(WEIGHTS[spec.family](spec))


def parameter_count(spec: FamilySpec) -> int:
    """Return the parameters of a model, tied ones counted once."""
    return sum(weights.parameters for weights in family_weights(spec))


def forward_flop(spec: FamilySpec) -> int:
    """Return the matrix products of a forward pass, without what recomputation repeats.

    Training is three times as much: the backward pass has two products for each of these.

    Parameters
    ----------
    spec
        The model.

    Returns
    -------
    int
        FLOP a sample; one multiplication with its addition is two.
    """
    products = sum(weights.flop for weights in family_weights(spec))
    if isinstance(spec, ConvolutionSpec):
        return products
    return products + sum(2 * _MACS * rows * columns * spec.inner for rows, columns in _scores(spec))


def _scores(spec: TransformerSpec) -> Iterator[tuple[int, int]]:
    """Rows and columns of every matrix of attention scores."""
    yield from [(spec.seq, spec.seq)] * spec.n_layers
    yield from [(spec.decoder_seq, spec.decoder_seq), (spec.decoder_seq, spec.seq)] * spec.n_decoder_layers


def build_family(family: str, size: str = "tiny", *, seed: int = 0, meta: bool = False) -> "nn.Module":
    """Build a model on the CPU, in training mode.

    Each weight follows from the seed and its own name. No bias is zero and no norm is one, so that whoever
    forgets one of them gets another result. The random state of torch is left as it was.

    Parameters
    ----------
    family, size
        As for `family_spec`.
    seed
        Seed of the weights.
    meta
        Whether to leave out all values, as it takes to count parameters of models that fit nowhere.

    Returns
    -------
    torch.nn.Module
        Takes the ``inputs`` of a `family_batch` and returns logits, float32.
    """
    from makespan.training.zoo._family_models import build

    return build(family_spec(family, size), seed, meta=meta)


def family_batch(spec: FamilySpec, n_samples: int, seed: int) -> "FamilyBatch":
    """Draw synthetic samples.

    Parameters
    ----------
    spec
        The model that they are for.
    n_samples
        How many, from 1; an `InputError` for others.
    seed
        They depend on the model, the seed and their number only.

    Returns
    -------
    FamilyBatch
        ``inputs``, in the order in which the model takes them, and ``targets``.

        - ``bert``, ``roberta``, ``albert``: ``(n, seq)`` tokens of which some are masked, ``(n, seq)``
          integers that are 0 for what fills samples up; the original tokens where they were masked
        - ``gpt``, ``opt``, ``llama``: ``(n, seq)`` tokens; the tokens that follow
        - ``t5``: tokens and integers as those of ``bert``, ``(n, decoder_seq)`` tokens; those that follow
        - ``wideresnet``: ``(n, 3, side, side)`` float32; ``(n,)`` classes
    """
    if n_samples < 1:
        raise InputError(f"n_samples is {n_samples}; accepted: a whole number >= 1")
    from makespan.training.zoo._family_samples import SAMPLES

    return SAMPLES[spec.family](spec, n_samples, seed)


def family_loss(logits: "Tensor", targets: "Tensor") -> "Tensor":
    """Return the mean cross entropy over the targets that count.

    Parameters
    ----------
    logits
        What a model returns: ``(n, tokens, vocab)`` or ``(n, classes)``.
    targets
        Those of a `family_batch`.

    Returns
    -------
    torch.Tensor
        Scalar.
    """
    from makespan.training.zoo._links import link_loss

    return link_loss(logits, targets)
