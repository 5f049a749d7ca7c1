"""What a model consists of, counted from its sizes: one function a family."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from makespan.training.zoo._families import ConvolutionSpec, TransformerSpec, Weights

__all__ = ["WEIGHTS"]

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
"""How the weights of each family are counted."""
