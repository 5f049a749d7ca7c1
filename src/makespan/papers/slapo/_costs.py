"""What training a model costs a sample, by its sizes: matrix products, kept activations, parameters."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from makespan.training.zoo import ConvolutionSpec, FamilySpec, TransformerSpec, Weights, family_weights

__all__ = ["ModelCosts", "Product", "model_costs"]

_BYTES = 2  # of an activation or weight at 16 bit
_MACS = 2
_COLUMNS = ("query", "key and value", "feed-forward in", "convolution 1", "convolution 3")
_ROWS = ("attention output", "feed-forward out", "convolution 2")
_MASK, _DROPPED, _NORM_INPUTS, _INPUTS = 1, 2, 4, 4


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one shape.

    Parameters
    ----------
    place
        ``layer``, ``head`` or ``scores``, products of attention.
    flop
        Of all of them, a sample and forward pass [FLOP].
    inputs, outputs, tokens
        Rows and columns of the matrix, and positions of a sample that it multiplies.
    split
        ``columns``, ``rows`` or empty: how tensor parallelism divides it.
    """

    place: str
    flop: float
    inputs: int
    outputs: int
    tokens: int
    split: str

    def width(self, samples: float, tp: int) -> float:
        """Return the smallest dimension of the product on one of ``tp`` devices, for so many samples."""
        if self.place == "scores":
            return min(self.inputs, self.outputs)
        inputs = self.inputs / tp if self.split == "rows" else self.inputs
        outputs = self.outputs / tp if self.split == "columns" else self.outputs
        return min(inputs, outputs, self.tokens * samples)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Counts of a model; bytes and scores are those of one sample and all layers.

    Parameters
    ----------
    n_layers
        Layers that can be recomputed, of encoder and decoder, or bottlenecks.
    products
        Matrix products of the forward pass.
    split_parameters, whole_parameters, vocabulary_parameters
        Weights that tensor parallelism divides, that every device keeps, and the table of the vocabulary.
    largest_layer_parameters
        Of one layer.
    kept_split_bytes, kept_whole_bytes
        Activations for the backward pass, divided by tensor parallelism and not [B].
    fusable
        Tokens times channels behind which fused kernels need not keep what they computed.
    scores, kept_score_bytes
        Attention scores, and what is kept of each if attention is not one kernel [B].
    input_bytes
        Inputs of the layers, which is what recomputation keeps [B].
    exchanged_bytes, n_exchanges
        What tensor parallelism reduces or gathers in a forward pass [B], and how often.
    embedded_bytes
        Output of the embedding [B].
    logits
        Numbers that the head puts out.
    """

    n_layers: int
    products: tuple[Product, ...]
    split_parameters: int
    whole_parameters: int
    vocabulary_parameters: int
    largest_layer_parameters: float
    kept_split_bytes: float
    kept_whole_bytes: float
    fusable: float
    scores: float
    kept_score_bytes: float
    input_bytes: float
    exchanged_bytes: float
    n_exchanges: int
    embedded_bytes: float
    logits: float

    @property
    def forward_flop(self) -> float:
        """Matrix products of a sample and forward pass [FLOP]."""
        return sum(one.flop for one in self.products)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.split_parameters + self.whole_parameters + self.vocabulary_parameters


@cache
def model_costs(spec: FamilySpec) -> ModelCosts:
    """Count what a model costs.

    Parameters
    ----------
    spec
        A model of `makespan.training.zoo`.

    Returns
    -------
    ModelCosts
        Kept activations of transformers follow Korthikanti et al. 2022, section 4, for any width of the
        feed-forward part; those of convolutions are the maps in front of each norm and convolution.
    """
    return _convolutions(spec) if isinstance(spec, ConvolutionSpec) else _transformer(spec)


def _products(weights: tuple[Weights, ...]) -> Iterator[Product]:
    """Yield the products of every shape, equal ones together."""
    flop: dict[tuple[str, int, int, int, str], float] = {}
    for one in weights:
        name = one.name.removeprefix("cross ")
        split = "columns" if name in (*_COLUMNS, "logits") else "rows" if name in _ROWS else ""
        if one.tokens:
            place = "layer" if one.place == "layer" else "head"
            key = (place, one.inputs, one.outputs, one.tokens, split)
            flop[key] = flop.get(key, 0.0) + one.flop
    for (place, inputs, outputs, tokens, split), total in flop.items():
        yield Product(place, total, inputs, outputs, tokens, split)


def _parameters(weights: tuple[Weights, ...]) -> tuple[int, int, int]:
    """Return the parameters that are divided, those that are not, and those of the vocabulary."""
    split = whole = vocabulary = 0
    for one in weights:
        if one.name == "logits" or (one.place, one.name) == ("embedding", "tokens"):
            vocabulary += one.parameters
        elif one.name.removeprefix("cross ") in (*_COLUMNS, *_ROWS):
            split += one.parameters
        else:
            whole += one.parameters
    return split, whole, vocabulary


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal layers: how many, their tokens, and the tokens of an encoder that they attend to, or 0."""

    n_layers: int
    seq: int
    memory_seq: int


def _transformer(spec: TransformerSpec) -> ModelCosts:
    weights = family_weights(spec)
    runs = [_Run(spec.n_layers, spec.seq, 0)]
    if spec.n_decoder_layers:
        runs.append(_Run(spec.n_decoder_layers, spec.decoder_seq, spec.seq))
    scores = [run.n_layers * run.seq * (run.seq + run.memory_seq) for run in runs]
    attention = [
        Product("scores", 2.0 * _MACS * rows * spec.inner, spec.head_size, run.seq, run.seq, "columns")
        for rows, run in zip(scores, runs, strict=True)
    ]
    split, whole, vocabulary = _parameters(weights)
    n_layers = sum(run.n_layers for run in runs)
    token_layers = sum(run.n_layers * run.seq for run in runs)
    crossed = sum(run.n_layers * run.seq for run in runs if run.memory_seq)
    remembered = sum(run.n_layers * run.memory_seq for run in runs)
    per_token = _INPUTS + _NORM_INPUTS + 2 * _MASK * (spec.dropout > 0)
    inner, kv_inner = spec.inner, spec.kv_heads * spec.head_size
    n_ffn = 3 if spec.family == "llama" else 2
    kept_split = _BYTES * (
        token_layers * (2 * inner + 2 * kv_inner + n_ffn * spec.ffn)
        + crossed * 2 * inner
        + remembered * 2 * kv_inner
    )
    return ModelCosts(
        n_layers=n_layers,
        products=(*_products(weights), *attention),
        split_parameters=split,
        whole_parameters=whole,
        vocabulary_parameters=vocabulary,
        largest_layer_parameters=split / n_layers,
        kept_split_bytes=float(kept_split),
        kept_whole_bytes=float(spec.hidden * (token_layers * per_token + crossed * (per_token // 2))),
        fusable=float(spec.hidden * token_layers),
        scores=float(spec.heads * sum(scores)),
        kept_score_bytes=float(_BYTES + (_MASK + _DROPPED) * (spec.attention_dropout > 0)),
        input_bytes=float(_BYTES * spec.hidden * (token_layers + remembered)),
        exchanged_bytes=float(_BYTES * spec.hidden * (2 * token_layers + crossed)),
        n_exchanges=2 * n_layers + spec.n_decoder_layers,
        embedded_bytes=float(_BYTES * spec.hidden * sum(run.seq for run in runs)),
        logits=float((spec.decoder_seq or spec.seq) * spec.vocab),
    )


def _convolutions(spec: ConvolutionSpec) -> ModelCosts:
    weights = family_weights(spec)
    maps = dict.fromkeys(("convolution 1", "convolution 2", "convolution 3", "way past", "stem"), 0.0)
    blocks: list[int] = []
    for one in weights:
        if one.tokens and one.name in maps:
            maps[one.name] += one.tokens * one.outputs
        if one.name == "convolution 1":
            blocks.append(0)
        if one.place == "layer":
            blocks[-1] += one.parameters
    split, whole, vocabulary = _parameters(weights)
    inside = 2 * _BYTES * maps["convolution 1"]  # in front of the norm, and in front of the next convolution
    outside = 2 * _BYTES * (sum(maps.values()) - maps["convolution 1"])
    return ModelCosts(
        n_layers=sum(spec.blocks),
        products=tuple(_products(weights)),
        split_parameters=split,
        whole_parameters=whole,
        vocabulary_parameters=vocabulary,
        largest_layer_parameters=float(max(blocks)),
        kept_split_bytes=inside,
        kept_whole_bytes=outside,
        fusable=0.0,
        scores=0.0,
        kept_score_bytes=0.0,
        input_bytes=_BYTES * maps["convolution 3"],
        exchanged_bytes=_BYTES * (maps["convolution 2"] + maps["convolution 3"]),
        n_exchanges=2 * sum(spec.blocks),
        embedded_bytes=0.0,
        logits=float(spec.n_classes),
    )
