"""Models that are trained for real, described without torch.

Small models, families that schedules are written for, with their sizes, parameters and FLOP, and stand-ins
for well-known models. Only the functions that build models and data import torch.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from makespan.arguments import check_fields, check_range
from makespan.errors import InputError, unknown_name
from makespan.files import preset_entry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from makespan.training.zoo.families import FamilyBatch
    from makespan.training.zoo.tasks import Samples


# --- Small models -----------------------------------------------------------------------------------

MODEL_FAMILIES = ("llama", "gpt", "bert", "t5", "vit")
"""Kinds of small models; each follows the layer structure of the model it is named after."""


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Sizes of a small transformer; an `InputError` names one out of range.

    Parameters
    ----------
    family
        One of `MODEL_FAMILIES`: ``llama`` (causal, RMSNorm, rotary positions, gated MLP), ``gpt``
        (causal, LayerNorm, learned positions), ``bert`` (bidirectional, masked tokens), ``t5``
        (encoder and decoder with cross attention) or ``vit`` (image patches, one class per image).
    n_layers
        Transformer layers; of ``t5``, half of them (rounded up) form the encoder.
    hidden, heads, kv_heads, ffn
        Width, attention heads, key-value heads and width of the MLP.
    seq
        Tokens per sample; image patches for ``vit``.
    vocab
        Tokens of the vocabulary; classes for ``vit``.
    patch_features
        Values per image patch (``vit`` only).
    """

    family: str
    n_layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 128
    seq: int = 32
    vocab: int = 64
    patch_features: int = 48

    def __post_init__(self) -> None:
        """Check family and sizes."""
        if self.family not in MODEL_FAMILIES:
            raise unknown_name("model family", self.family, MODEL_FAMILIES)
        check_fields(self, "", positive=("n_layers", "hidden", "heads", "kv_heads", "ffn", "patch_features"))
        for name in ("seq", "vocab", *(("n_layers",) if self.family == "t5" else ())):
            check_range(name, getattr(self, name), 2)
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise InputError(f"hidden {self.hidden} must be an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")

    @property
    def n_encoder_layers(self) -> int:
        """Layers that belong to the encoder; 0 for models without a separate encoder."""
        return (self.n_layers + 1) // 2 if self.family == "t5" else 0


# --- Families ---------------------------------------------------------------------------------------

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
        One of `FAMILIES`, the key of the size in it, and the name of the model in figures.
    hidden, n_layers, heads, ffn, vocab, seq
        Width, layers (of the encoder if there is a decoder), attention heads, width of the feed-forward
        part, tokens of the vocabulary, tokens per sample.
    source
        Source of the sizes.
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
        Number of tokens to which every second layer looks back; 0 for no limit.
    norm_first
        Whether norms come before attention and feed-forward part, in families that have both forms.
    padding
        Token that pads a sample.
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
        """Fill in derived sizes, and check that the sizes fit each other."""
        for name, default in (
            ("kv_heads", self.heads),
            ("head_size", self.hidden // self.heads),
            ("embedding_width", self.hidden),
        ):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, default)
        if self.heads % self.kv_heads:
            raise InputError(f"{self.title}: {self.heads} heads; expected a multiple of {self.kv_heads}")
        if self.max_positions and self.seq > self.max_positions:
            raise InputError(f"{self.title}: seq {self.seq}; expected at most {self.max_positions}")

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
        One of `FAMILIES`, the key of the size in it, and the name of the model in figures.
    planes, width_per_group
        Channels behind the stem, and channels inside a bottleneck for each 64 of its planes.
    blocks
        Bottlenecks of each of the four parts.
    image_side, n_classes
        Pixels per side, and classes.
    source
        Source of the sizes.
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
        """Return the output channels of the bottlenecks of a part."""
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
        Their function in the model.
    inputs, outputs
        Rows and columns of each; a convolution has as many inputs as its kernel reads, a norm has one.
    has_bias
        Whether each has a bias of ``outputs`` elements.
    tokens
        Positions of a sample that it multiplies; 0 for tables and norms, which are no matrix products.
    copies, uses
        Number of them, and how often each is applied in a forward pass.
    is_tied
        Whether the matrix is shared with an earlier one, so that only the bias is new.
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
        n_inputs = 0 if self.is_tied else self.inputs
        return self.copies * self.outputs * (n_inputs + self.has_bias)

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
    return tuple(WEIGHTS[spec.family](spec))


def parameter_count(spec: FamilySpec) -> int:
    """Return the parameters of a model, tied ones counted once."""
    return sum(weights.parameters for weights in family_weights(spec))


def forward_flop(spec: FamilySpec) -> int:
    """Return the matrix products of a forward pass, without those that recomputation repeats.

    Training needs three times as many: the backward pass has two products for each of these.

    Parameters
    ----------
    spec
        The model.

    Returns
    -------
    int
        FLOP per sample; one multiplication with its addition counts as two.
    """
    products = sum(weights.flop for weights in family_weights(spec))
    if isinstance(spec, ConvolutionSpec):
        return products
    # Rows and columns of every matrix of attention scores; each is a factor of two products.
    scores = [(spec.seq, spec.seq)] * spec.n_layers
    scores += [(spec.decoder_seq, spec.decoder_seq), (spec.decoder_seq, spec.seq)] * spec.n_decoder_layers
    return products + sum(2 * _MACS * rows * columns * spec.inner for rows, columns in scores)


def build_family(family: str, size: str = "tiny", *, seed: int = 0, meta: bool = False) -> "nn.Module":
    """Build a model on the CPU, in training mode.

    Each weight follows from the seed and its own name. No bias is zero and no norm is one, so that losing
    one of them changes the result. The random state of torch is left unchanged.

    Parameters
    ----------
    family, size
        As for `family_spec`.
    seed
        Seed of the weights.
    meta
        Whether to build without values, for example to count the parameters of models that fit nowhere.

    Returns
    -------
    torch.nn.Module
        Takes the ``inputs`` of a `family_batch` and returns logits, float32.
    """
    from makespan.training.zoo.families import build

    return build(family_spec(family, size), seed, meta=meta)


def family_batch(spec: FamilySpec, n_samples: int, seed: int) -> "FamilyBatch":
    """Draw synthetic samples.

    Parameters
    ----------
    spec
        Model that takes them.
    n_samples
        Their number, from 1; an `InputError` for others.
    seed
        Samples depend on the model, the seed and their number only.

    Returns
    -------
    FamilyBatch
        ``inputs``, in the order in which the model takes them, and ``targets``.

        - ``bert``, ``roberta``, ``albert``: ``(n, seq)`` tokens of which some are masked, ``(n, seq)``
          integers that are 0 for padding; the original tokens where they were masked
        - ``gpt``, ``opt``, ``llama``: ``(n, seq)`` tokens; the tokens that follow
        - ``t5``: tokens and integers as those of ``bert``, ``(n, decoder_seq)`` tokens; those that follow
        - ``wideresnet``: ``(n, 3, side, side)`` float32; ``(n,)`` classes
    """
    check_range("n_samples", n_samples, 1)
    from makespan.training.zoo.families import SAMPLES

    return SAMPLES[spec.family](spec, n_samples, seed)


def family_loss(logits: "Tensor", targets: "Tensor") -> "Tensor":
    """Return the mean cross entropy over the targets that count.

    Parameters
    ----------
    logits
        Output of a model: ``(n, tokens, vocab)`` or ``(n, classes)``.
    targets
        Those of a `family_batch`.

    Returns
    -------
    torch.Tensor
        Scalar.
    """
    return link_loss(logits, targets)


# --- Weights of the families, counted from their sizes: one function per family ---------------------

_COLOURS, _STEM_KERNEL, _KERNEL = 3, 7, 3
_OPT_OFFSET = 2  # rows of the position table before the first position


def _norms(place: str, width: int, copies: int = 1, has_bias: bool = True) -> Weights:
    return Weights(place, "norm", 1, width, has_bias, copies=copies)


def _attention(spec: TransformerSpec, has_bias: bool, output_bias: bool) -> Iterator[Weights]:
    kv_inner, n = spec.kv_heads * spec.head_size, spec.n_layers
    yield Weights("layer", "query", spec.hidden, spec.inner, has_bias, spec.seq, n)
    yield Weights("layer", "key and value", spec.hidden, kv_inner, has_bias, spec.seq, 2 * n)
    yield Weights("layer", "attention output", spec.inner, spec.hidden, output_bias, spec.seq, n)


def _feed_forward(spec: TransformerSpec, has_bias: bool, n_raising: int = 1) -> Iterator[Weights]:
    n = spec.n_layers
    yield Weights("layer", "feed-forward in", spec.hidden, spec.ffn, has_bias, spec.seq, n_raising * n)
    yield Weights("layer", "feed-forward out", spec.ffn, spec.hidden, has_bias, spec.seq, n)


def _logits(spec: TransformerSpec, has_bias: bool = False, is_tied: bool = True) -> Weights:
    seq = spec.decoder_seq or spec.seq
    return Weights("head", "logits", spec.embedding_width, spec.vocab, has_bias, seq, is_tied=is_tied)


def _typed_embedding(spec: TransformerSpec) -> Iterator[Weights]:
    for name, rows in (("tokens", spec.vocab), ("positions", spec.max_positions), ("types", spec.n_types)):
        yield Weights("embedding", name, rows, spec.embedding_width)
    yield _norms("embedding", spec.embedding_width)


def _encoder_layers(spec: TransformerSpec) -> Iterator[Weights]:
    yield from _attention(spec, has_bias=True, output_bias=True)
    yield from _feed_forward(spec, has_bias=True)
    yield _norms("layer", spec.hidden, 2 * spec.n_layers)


def _masked_head(spec: TransformerSpec) -> Iterator[Weights]:
    yield Weights("head", "transform", spec.hidden, spec.embedding_width, True, spec.seq)
    yield _norms("head", spec.embedding_width)
    yield _logits(spec, has_bias=True)


def _encoder(spec: TransformerSpec) -> Iterator[Weights]:
    yield from _typed_embedding(spec)
    yield from _encoder_layers(spec)
    yield from _masked_head(spec)


def _albert(spec: TransformerSpec) -> Iterator[Weights]:
    yield from _typed_embedding(spec)
    yield Weights("embedding", "widening", spec.embedding_width, spec.hidden, True, spec.seq)
    for weights in _encoder_layers(spec):
        yield replace(weights, copies=weights.copies // spec.n_layers, uses=spec.n_layers)
    yield from _masked_head(spec)


def _gpt(spec: TransformerSpec) -> Iterator[Weights]:
    yield Weights("embedding", "tokens", spec.vocab, spec.hidden)
    yield Weights("embedding", "positions", spec.max_positions, spec.hidden)
    yield from _attention(spec, has_bias=False, output_bias=True)
    yield from _feed_forward(spec, has_bias=True)
    yield _norms("layer", spec.hidden, 2 * spec.n_layers)
    yield _norms("head", spec.hidden)
    yield _logits(spec)


def _opt(spec: TransformerSpec) -> Iterator[Weights]:
    yield Weights("embedding", "tokens", spec.vocab, spec.embedding_width)
    yield Weights("embedding", "positions", spec.max_positions + _OPT_OFFSET, spec.hidden)
    is_narrow = spec.embedding_width != spec.hidden
    if is_narrow:
        yield Weights("embedding", "widening", spec.embedding_width, spec.hidden, False, spec.seq)
    yield from _encoder_layers(spec)
    if spec.norm_first:
        yield _norms("head", spec.hidden)
    if is_narrow:
        yield Weights("head", "narrowing", spec.hidden, spec.embedding_width, False, spec.seq)
    yield _logits(spec)


def _llama(spec: TransformerSpec) -> Iterator[Weights]:
    yield Weights("embedding", "tokens", spec.vocab, spec.hidden)
    yield from _attention(spec, has_bias=False, output_bias=False)
    yield from _feed_forward(spec, has_bias=False, n_raising=2)
    yield _norms("layer", spec.hidden, 2 * spec.n_layers, has_bias=False)
    yield _norms("head", spec.hidden, has_bias=False)
    yield _logits(spec, is_tied=False)


def _t5(spec: TransformerSpec) -> Iterator[Weights]:
    decoder = replace(spec, n_layers=spec.n_decoder_layers, seq=spec.decoder_seq)
    yield Weights("embedding", "tokens", spec.vocab, spec.hidden)
    for part, n_norms in ((spec, 2), (decoder, 3)):
        yield Weights("layer", "relative positions", spec.n_buckets, spec.heads)
        yield from _attention(part, has_bias=False, output_bias=False)
        yield from _feed_forward(part, has_bias=False)
        yield _norms("layer", spec.hidden, n_norms * part.n_layers, has_bias=False)
    for weights in _attention(decoder, has_bias=False, output_bias=False):
        is_memory = weights.name == "key and value"
        yield replace(weights, name=f"cross {weights.name}", tokens=spec.seq if is_memory else decoder.seq)
    yield _norms("head", spec.hidden, 2, has_bias=False)
    yield _logits(spec)


def _wide_resnet(spec: ConvolutionSpec) -> Iterator[Weights]:
    side = spec.image_side // 2
    yield Weights("embedding", "stem", _COLOURS * _STEM_KERNEL**2, spec.planes, tokens=side**2)
    yield _norms("embedding", spec.planes)
    side, inputs = side // 2, spec.planes
    for part, n_blocks in enumerate(spec.blocks):
        width, outputs = spec.width(part), spec.outputs(part)
        for block in range(n_blocks):
            stride = 2 if block == 0 and part > 0 else 1
            before, side = side, side // stride
            yield Weights("layer", "convolution 1", inputs, width, tokens=before**2)
            yield Weights("layer", "convolution 2", width * _KERNEL**2, width, tokens=side**2)
            yield Weights("layer", "convolution 3", width, outputs, tokens=side**2)
            yield _norms("layer", width, 2)
            yield _norms("layer", outputs)
            if block == 0:
                yield Weights("layer", "way past", inputs, outputs, tokens=side**2)
                yield _norms("layer", outputs)
            inputs = outputs
    yield Weights("head", "classes", inputs, spec.n_classes, True, tokens=1)


WEIGHTS: Mapping[str, Callable[[Any], Iterator[Weights]]] = {
    "bert": _encoder,
    "roberta": _encoder,
    "albert": _albert,
    "gpt": _gpt,
    "opt": _opt,
    "t5": _t5,
    "llama": _llama,
    "wideresnet": _wide_resnet,
}
"""Function that counts the weights of each family."""


# --- Random numbers ---------------------------------------------------------------------------------


def generator_for(*words: object) -> np.random.Generator:
    """Return the generator for some words, such as a seed and the name of a weight.

    It depends on the words alone, and not on earlier draws.
    """
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


# --- Stand-ins: small models that keep operators, state and kind of task of well-known ones ---------

STAND_IN_TITLES: Mapping[str, str] = {
    "shufflenetv2": "ShuffleNetv2",
    "resnet50": "ResNet50",
    "vgg19": "VGG19",
    "yolov3": "YOLOv3",
    "neumf": "NeuMF",
    "bert": "Bert",
    "electra": "Electra",
    "swintransformer": "Swin",
}
"""Names of the stand-ins in figures."""
STAND_INS = tuple(STAND_IN_TITLES)
"""Keys of the stand-ins, after the models for which they stand."""
_IMAGES = ("shufflenetv2", "resnet50", "vgg19", "yolov3", "swintransformer")
_SIDE, _HEADS = 16, 4


@dataclass(frozen=True, slots=True)
class StandIn:
    """Sizes of a stand-in; an `InputError` names one out of range.

    Parameters
    ----------
    name
        One of `STAND_INS`.

        - ``shufflenetv2``: grouped convolutions, channel split and shuffle, BatchNorm
        - ``resnet50``: bottlenecks of convolution and BatchNorm with residuals
        - ``vgg19``: a plain stack of convolutions, then large linear layers with dropout
        - ``yolov3``: convolution, BatchNorm, heads at three scales that are joined from coarse to fine
        - ``neumf``: embeddings of users and items, their product beside an MLP
        - ``bert``: encoder with LayerNorm and dropout, which marks the span of an answer
        - ``electra``: encoder behind a narrower embedding, which detects replaced tokens
        - ``swintransformer``: attention in plain and shifted windows, LayerNorm, stochastic depth
    width
        Channels of the first layers, or features of an embedding; a multiple of 8.
    depth
        Blocks at each resolution, or layers of an encoder or MLP.
    extent
        Pixels per side, a multiple of 16; tokens per sequence, at least 16.
    n_classes
        Classes of images and boxes.
    n_rows
        Rows of an embedding: users, items or tokens; at least 16.
    dropout
        Probability of dropout and of the deepest block of stochastic depth.
    """

    name: str
    width: int = 32
    depth: int = 1
    extent: int = 16
    n_classes: int = 10
    n_rows: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        """Check name and sizes."""
        if self.name not in STAND_INS:
            raise unknown_name("stand-in", self.name, STAND_INS)
        check_fields(self, "")
        checks: dict[str, tuple[bool, str]] = {
            "width": (_is_multiple(self.width, 2 * _HEADS), f"a multiple of {2 * _HEADS}"),
            "depth": (_is_multiple(self.depth, 1), "a whole number >= 1"),
            "extent": (
                _is_multiple(self.extent, _SIDE) if self.name in _IMAGES else self.extent >= _SIDE,
                f"a multiple of {_SIDE}" if self.name in _IMAGES else f"a whole number >= {_SIDE}",
            ),
            "n_classes": (self.n_classes >= 2, "a whole number >= 2"),
            "n_rows": (self.n_rows >= 16, "a whole number >= 16"),
            "dropout": (0.0 <= self.dropout < 1.0, "a number >= 0 and < 1"),
        }
        for field, (is_valid, expected) in checks.items():
            if not is_valid:
                raise InputError(f"{field} of {self.name} is {getattr(self, field)}; expected {expected}")


def _is_multiple(value: int, unit: int) -> bool:
    return value >= unit and value % unit == 0


def build_stand_in(spec: StandIn, seed: int) -> "nn.Module":
    """Build a stand-in on the CPU, in training mode.

    Each weight follows from the seed and its own name and is drawn uniformly with NumPy, so that it is
    bitwise the same whatever kernels torch uses. The random state of torch is left unchanged.

    Parameters
    ----------
    spec
        Model to build.
    seed
        Seed of the weights.

    Returns
    -------
    torch.nn.Module
        Takes the ``inputs`` of a batch of `stand_in_data`; its output is what `stand_in_loss` takes.
    """
    from makespan.training.zoo.layers import draw_weights
    from makespan.training.zoo.tasks import ATTENTIONS, CONVOLUTIONS

    return draw_weights({**CONVOLUTIONS, **ATTENTIONS}[spec.name], spec, seed)


def stand_in_data(
    spec: StandIn,
    n_samples: int,
    seed: int,
    *,
    held_out: bool = False,
    augment: bool = True,
    noise: float = 1.0,
) -> "Samples":
    """Return generated samples that a stand-in can learn.

    Parameters
    ----------
    spec
        Model that learns them.
    n_samples
        Number of samples, from 1.
    seed
        Seed of the task: patterns of the classes, tastes of users, successors of tokens.
    held_out
        Whether to return samples of the same task that are in no training set of any size.
    augment
        Whether each read of a sample applies a fresh random augmentation, by draws from the global random
        states of Python, NumPy and torch, none of them normal.
    noise
        Strength of the noise: in images the amplitude relative to the signal, elsewhere the share of wrong
        targets in twentieths.

    Returns
    -------
    Samples
        A map-style data set of pairs ``inputs, targets``.

        - images ``(3, extent, extent)`` float32, class
        - ``yolov3``: the same images, for each scale ``(6, cells, cells)`` float32: whether an object has its
          centre here, the centre in the cell, width and height in cells, class
        - ``neumf``: ``(2,)`` user and item, whether it is liked as float32
        - ``bert``: ``(extent,)`` tokens, ``(2,)`` first and last token of the answer
        - ``electra``: ``(extent,)`` tokens, ``(extent,)`` float32 whether a token was replaced

    Raises
    ------
    InputError
        If ``n_samples`` or ``noise`` are out of range.
    """
    check_range("n_samples", n_samples, 1)
    if not 0.0 <= noise <= 10.0:
        raise InputError(f"noise is {noise}; expected a number from 0 to 10")
    from makespan.training.zoo.tasks import TASKS

    return TASKS[spec.name](spec, n_samples, seed, held_out=held_out, augment=augment, noise=noise)


def stand_in_loss(spec: StandIn, outputs: "Tensor | tuple[Tensor, ...]", targets: object) -> "Tensor":
    """Return the mean loss of a batch.

    Parameters
    ----------
    spec
        The model.
    outputs
        Its output for the inputs of the batch.
    targets
        The targets of the batch, as a data loader joins those of `stand_in_data`.

    Returns
    -------
    torch.Tensor
        Scalar, float32.
    """
    from makespan.training.zoo.tasks import LOSSES

    return LOSSES[spec.name](outputs, targets)


# --- Links: a small model as a chain of embedding, numbered layers and head, each built alone -------


def n_links(spec: SmallModel) -> int:
    """Return the number of links of a model: its layers, the embedding and the head."""
    return spec.n_layers + 2


def build_link(spec: SmallModel, seed: int, index: int) -> "nn.Module":
    """Build one link of a model, on the CPU.

    Parameters
    ----------
    spec, seed
        The model, and the seed of its weights: those of a link do not depend on other links.
    index
        0 for the embedding, then the layers, last the head; an `InputError` for others.

    Returns
    -------
    torch.nn.Module
        It takes the output of the previous link, samples or hidden states ``(batch, seq, hidden)``; a tuple
        of two for ``t5``.
    """
    if not 0 <= index < n_links(spec):
        raise InputError(f"link {index} of a model with {n_links(spec)}; expected 0 to {n_links(spec) - 1}")
    from makespan.training.zoo.small import link_of

    return link_of(spec, seed, index)


def link_loss(logits: "Tensor", targets: "Tensor") -> "Tensor":
    """Return the mean cross entropy of the output of the last link, over the targets that count."""
    from torch.nn import functional as F

    from makespan.training.zoo.small import IGNORED

    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
