"""Architectures of models: runs of equal layers with their weights, matrix products and kept activations.

A layer has attention, a recurrent part, both with one input, or neither, and a feed-forward part or none.

An architecture says what a model is, not how long its sequences are: counts that depend on tokens take the
sequence length of the run. All counts are per layer and for whole layers; what parallelism divides is the
business of `makespan.planning.steptime` and `makespan.planning.memory`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from makespan.arguments import check_fields
from makespan.errors import InputError, unknown_name

HeadKind = Literal["lm", "masked-lm", "classes", "none"]
_HEAD_KINDS = get_args(HeadKind)
RecurrentKind = Literal["state-space", "selective", "delta", "convolution"]
_RECURRENT_KINDS = get_args(RecurrentKind)
# Per token, channel and entry of its state: decay, input, sum and output; and an exponential, which takes as
# long as 16 operations (CUDA C++ programming guide, throughput of arithmetic instructions).
_SELECTIVE_FLOP = 9.0 + 16.0
_MASKED_SHARE = 0.15  # of the tokens, in masked-language modelling (Devlin et al. 2019, section 3.1)
_STATED_TOLERANCE = 0.02
"""Accepted difference between stated and counted parameters [1]."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Projections of multi-head latent attention (DeepSeek-AI 2024, section 2.1).

    ``query_rank`` is 0 where queries come straight from the hidden state; ``rope_dim`` channels of every head
    carry the position and share one key.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int

    def __post_init__(self) -> None:
        check_fields(self, positive=("kv_rank", "rope_dim"), not_negative=("query_rank",))


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer.

    Parameters
    ----------
    heads, kv_heads
        Query heads, and heads of keys and values; fewer of them is grouped-query attention.
    head_dim, value_dim
        Channels of a query or key head, and of a value head.
    is_causal
        True if a token sees earlier ones only.
    window
        Tokens that a token sees at most; 0 for all.
    chunk
        Tokens of the pieces into which a sequence is cut; a token sees its own piece only. 0 for one piece.
    latent
        Projections of latent attention, if there are any.
    n_biases, n_norms
        Biases of the four projections, queries first and output last (0 to 4), and vectors of the norms of
        queries and keys per head (0, 2, or 4 with biases).
    has_gate
        True if queries are projected along with a gate of the same size, by which the output is multiplied.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool = True
    window: int = 0
    chunk: int = 0
    latent: Latent | None = None
    n_biases: int = 0
    n_norms: int = 0
    has_gate: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            positive=("heads", "kv_heads", "head_dim", "value_dim"),
            not_negative=("window", "chunk", "n_biases", "n_norms"),
        )
        if self.window and self.chunk:
            raise InputError(
                f"Attention: window is {self.window}, chunk is {self.chunk}; expected one of them"
            )
        if self.n_biases > 4:
            raise InputError(f"Attention: n_biases is {self.n_biases}; expected 0 to 4, one per projection")
        if self.has_gate and self.latent is not None:
            raise InputError("Attention: has a gate and latent projections; expected one of them")
        if self.heads % self.kv_heads:
            raise InputError(
                f"Attention: {self.heads} heads are not a multiple of {self.kv_heads} kv_heads; "
                "every key head serves the same number of query heads"
            )

    @property
    def gate_size(self) -> int:
        """Channels of the gate of the output."""
        return self.heads * self.value_dim if self.has_gate else 0

    def products(self, hidden: int) -> tuple[tuple[int, int, bool], ...]:
        """Return output size, input size of each projection, and whether heads divide it between ranks."""
        queries, values = self.heads * self.head_dim, self.heads * self.value_dim
        if self.latent is None:
            return ((queries + self.gate_size + self.key_size, hidden, True), (hidden, values, True))
        rank, rope = self.latent.kv_rank, self.latent.rope_dim
        down = (rank + rope, hidden, False)
        up = (self.heads * (self.head_dim - rope + self.value_dim), rank, True)
        if not self.latent.query_rank:
            return ((queries, hidden, True), down, up, (hidden, values, True))
        query_rank = self.latent.query_rank
        return (
            (query_rank, hidden, False),
            (queries, query_rank, True),
            down,
            up,
            (hidden, values, True),
        )

    @property
    def key_size(self) -> int:
        """Channels of the keys and values of a token."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    def parameters(self, hidden: int) -> int:
        """Return the weights of the projections with biases and norms."""
        weights = sum(out * size for out, size, _ in self.products(hidden))
        if self.latent is not None:
            weights += self.latent.query_rank + self.latent.kv_rank  # norms of the compressed states
        keys = self.kv_heads * self.head_dim
        queries = self.heads * self.head_dim + self.gate_size
        biases = (queries, keys, self.kv_heads * self.value_dim, hidden)
        return weights + sum(biases[: self.n_biases]) + self.n_norms * self.head_dim

    def seen_tokens(self, seq: int) -> float:
        """Return how many tokens a token attends to in the mean."""
        if self.chunk and self.chunk < seq:
            piece, rest = replace(self, chunk=0), seq % self.chunk
            return ((seq - rest) * piece.seen_tokens(self.chunk) + rest * piece.seen_tokens(rest)) / seq
        if self.window and self.window < seq:
            if not self.is_causal:
                return float(self.window)
            return self.window * (1 - (self.window - 1) / (2 * seq))  # the first tokens see fewer
        return (seq + 1) / 2 if self.is_causal else float(seq)

    def core_flop(self, seq: int, keys: int | None = None) -> float:
        """Return the matrix products of scores and weighted values for one sequence, forward [FLOP].

        ``keys`` is the number of keys of cross attention; masked scores are not counted.
        """
        seen = self.seen_tokens(seq) if keys is None else float(keys)
        return 2.0 * seq * seen * self.heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Recurrent part of one layer: a short convolution, and a scan that carries a state from token to token.

    The kinds are ``state-space``, the chunked scan of Mamba-2 (Dao & Gu 2024, section 6); ``delta``, that of
    gated delta nets (Yang et al. 2024, section 3.3); ``selective``, the scan of Mamba, which has no matrix
    products (Gu & Dao 2023, section 3.3); and ``convolution``, a short convolution between two gates alone.

    Parameters
    ----------
    kind
        Mechanism that carries the state, see above.
    heads, head_dim
        Heads, and channels of each; a ``selective`` scan and a ``convolution`` have heads of one channel.
    state_dim
        Entries of the state per channel, that is, channels of a key; 0 for a ``convolution``.
    groups
        Heads of keys and queries, which are B and C of a state space; they divide ``heads``.
    kernel
        Tokens that the short convolution sees.
    chunk
        Tokens whose pairs a chunked scan computes; the others meet through the state.
    rank
        Inner size of the projection of time steps of a ``selective`` scan.
    norm_size
        Weights of norms within the part.
    has_input_bias, has_conv_bias, has_output_bias
        Biases of the first projection, of the short convolution and of the last projection.
    """

    kind: RecurrentKind
    heads: int
    head_dim: int = 1
    state_dim: int = 0
    groups: int = 1
    kernel: int = 4
    chunk: int = 256
    rank: int = 0
    norm_size: int = 0
    has_input_bias: bool = False
    has_conv_bias: bool = False
    has_output_bias: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            positive=("heads", "head_dim", "groups", "kernel", "chunk"),
            not_negative=("state_dim", "rank", "norm_size"),
        )
        if self.kind not in _RECURRENT_KINDS:
            raise unknown_name("kind of a recurrent part", self.kind, _RECURRENT_KINDS)
        if not self.has_heads and (self.head_dim, self.groups) != (1, 1):
            raise InputError(
                f"Recurrent: head_dim {self.head_dim} and groups {self.groups} of a {self.kind} part; "
                "expected 1, as its heads are its channels"
            )
        if (self.state_dim > 0) != (self.kind != "convolution"):
            expected = "0" if self.kind == "convolution" else "a whole number >= 1"
            raise InputError(
                f"Recurrent: state_dim is {self.state_dim} in a {self.kind} part; expected {expected}"
            )
        if (self.rank > 0) != (self.kind == "selective"):
            expected = "a whole number >= 1" if self.kind == "selective" else "0"
            raise InputError(f"Recurrent: rank is {self.rank} in a {self.kind} part; expected {expected}")
        if self.heads % self.groups:
            raise InputError(f"Recurrent: {self.heads} heads are not a multiple of {self.groups} groups")

    @property
    def has_heads(self) -> bool:
        """True if the scan has heads of several channels, whose chunks are matrix products."""
        return self.kind in ("state-space", "delta")

    @property
    def inner(self) -> int:
        """Channels that the scan computes, and the last projection reads."""
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the short convolution: those of the scan, keys and queries."""
        return self.inner + 2 * self.groups * self.state_dim * self.has_heads

    @property
    def input_size(self) -> int:
        """Channels that the first projection writes: the convolution's, gates, and numbers per head."""
        if self.kind == "convolution":
            return 3 * self.inner
        per_head = {"state-space": 1, "delta": 2, "selective": 0}[self.kind]
        return self.conv_size + self.inner + per_head * self.heads

    def products(self, hidden: int) -> tuple[tuple[int, int, bool], ...]:
        """Return output size, input size of each projection, and whether heads divide it between ranks."""
        first, last = (self.input_size, hidden, True), (hidden, self.inner, True)
        if self.kind != "selective":
            return first, last
        return first, (self.rank + 2 * self.state_dim, self.inner, True), (self.inner, self.rank, True), last

    @property
    def vector_parameters(self) -> int:
        """Weights that are not in matrix products."""
        per_head = {"state-space": 3, "delta": 2, "selective": 2, "convolution": 0}[self.kind]
        decays = self.inner * self.state_dim if self.kind == "selective" else 0
        of_convolution = self.conv_size * (self.kernel + self.has_conv_bias)
        return (
            self.has_input_bias * self.input_size
            + of_convolution
            + per_head * self.heads
            + decays
            + self.norm_size
        )

    def parameters(self, hidden: int) -> int:
        """Return the weights of projections, convolution and scan with biases and norms."""
        weights = sum(out * size for out, size, _ in self.products(hidden))
        return weights + self.vector_parameters + self.has_output_bias * hidden

    def core_flop(self, seq: int) -> float:
        """Return the matrix products of the scan of one sequence, forward [FLOP]; linear in its length.

        A chunk has products of all pairs of its tokens, of which masked ones are not counted, and the state
        two: one that it is updated by and one that it is read by. The delta rule has a third one with the
        state, and inverts the triangular matrix of the pairs.
        """
        seen = (min(self.chunk, seq) + 1) / 2
        if self.kind == "state-space":
            scores = self.groups * seen * self.state_dim  # heads of a group share them
            return 2.0 * seq * (scores + self.inner * (seen + 2 * self.state_dim))
        if self.kind == "delta":
            # Scores of keys with keys and with queries; keys and values times the inverse; the output.
            pairs = seen * (3 * self.state_dim + 2 * self.head_dim) + min(self.chunk, seq) ** 2 / 6
            return 2.0 * seq * self.heads * (pairs + 3 * self.state_dim * self.head_dim)
        return 0.0

    def vector_flop(self, seq: int) -> float:
        """Return the operations of a scan without matrix products for one sequence, forward [FLOP]."""
        return _SELECTIVE_FLOP * seq * self.inner * self.state_dim if self.kind == "selective" else 0.0

    def scan_bytes(self, width: float) -> float:
        """Return what kernels of the scan read and write per token, forward [B].

        ``width`` are the bytes of a channel; states and scores have four. The kernels are those of the
        packages mamba-ssm and flash-linear-attention, which keep states of chunks in memory.
        """
        states = 4.0 * self.inner * self.state_dim / self.chunk
        if self.kind == "state-space":  # states are written, passed on and read
            return (
                width * (3 * self.inner + 4 * self.groups * self.state_dim)
                + 4 * states
                + 8.0 * self.groups * self.chunk
            )
        if self.kind == "delta":  # heads have keys and queries of their own by then
            return (
                width * (6 * self.inner + 8 * self.heads * self.state_dim + 4 * self.heads * self.chunk)
                + 2 * states
            )
        return width * (4 * self.inner + 2 * self.state_dim) if self.kind == "selective" else 0.0

    @property
    def streamed(self) -> int:
        """Channels that convolution, gate and norm read and write per token, forward."""
        return 2 * self.conv_size + 3 * self.inner

    @property
    def kept(self) -> int:
        """Channels per token that the kernels keep for the backward pass, which computes states again."""
        return self.input_size + {
            "state-space": self.inner,  # the output; the convolution is computed again
            "selective": self.inner + self.rank + 2 * self.state_dim,
            "delta": self.conv_size + self.heads * (2 * self.state_dim + self.chunk) + 2 * self.inner,
            "convolution": 3 * self.inner,
        }[self.kind]  # fmt: skip

    @property
    def state_bytes(self) -> float:
        """Bytes per token of the states of chunks, and of their gradients, while one layer runs [B]."""
        return 0.0 if self.kind == "selective" else 8.0 * self.inner * self.state_dim / self.chunk


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Dense feed-forward part: two matrices, or three if it is gated."""

    size: int
    is_gated: bool
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_fields(self, positive=("size",))

    @property
    def n_matrices(self) -> int:
        """Matrices of the part."""
        return 3 if self.is_gated else 2

    def parameters(self, hidden: int) -> int:
        """Return weights and biases."""
        biases = (self.n_matrices - 1) * self.size + hidden
        return self.n_matrices * hidden * self.size + (biases if self.has_bias else 0)


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts.

    Parameters
    ----------
    n_experts, per_token
        Experts, and those that compute one token.
    size
        Feed-forward size of one expert.
    shared_size
        Feed-forward size of what computes every token besides; 0 for none.
    is_gated, has_bias
        As of a dense feed-forward part.
    capacity
        Largest load of an expert over the mean load; 0 where no token is dropped.
    n_groups, groups_per_token
        Equal groups that the experts are divided into, and those from which a token chooses its experts.
    """

    n_experts: int
    per_token: int
    size: int
    shared_size: int = 0
    is_gated: bool = True
    has_bias: bool = False
    capacity: float = 0.0
    n_groups: int = 1
    groups_per_token: int = 1

    def __post_init__(self) -> None:
        check_fields(self, positive=("n_experts", "per_token", "size", "n_groups", "groups_per_token"))
        if self.per_token > self.n_experts:
            raise InputError(f"Experts: {self.per_token} per token, but there are {self.n_experts}")
        check_fields(self, not_negative=("shared_size", "capacity"))
        if self.n_experts % self.n_groups or self.groups_per_token > self.n_groups:
            raise InputError(
                f"Experts: {self.groups_per_token} of {self.n_groups} groups per token; expected no more "
                f"than there are, and a divisor of {self.n_experts} experts"
            )
        if self.per_token > self.n_experts * self.reach:
            raise InputError(
                f"Experts: {self.per_token} per token, but there are {self.n_experts * self.reach:.0f} in "
                f"{self.groups_per_token} of {self.n_groups} groups"
            )

    @property
    def reach(self) -> float:
        """Share of the experts from which a token chooses [1]."""
        return self.groups_per_token / self.n_groups

    @property
    def n_matrices(self) -> int:
        """Matrices of one expert."""
        return 3 if self.is_gated else 2

    def expert_parameters(self, hidden: int) -> int:
        """Return the weights of all experts, without router and shared part."""
        bias = self.size * (self.n_matrices - 1) + hidden if self.has_bias else 0
        return self.n_experts * (self.n_matrices * hidden * self.size + bias)

    def shared_parameters(self, hidden: int) -> int:
        """Return the weights of router and shared part."""
        return self.n_experts * hidden + self.n_matrices * hidden * self.shared_size

    def parameters(self, hidden: int) -> int:
        """Return all weights."""
        return self.expert_parameters(hidden) + self.shared_parameters(hidden)

    def active_parameters(self, hidden: int) -> int:
        """Return the weights that compute one token."""
        held = self.expert_parameters(hidden) * self.per_token // self.n_experts
        return held + self.shared_parameters(hidden)


@dataclass(frozen=True, slots=True)
class Layers:
    """A run of equal layers.

    Parameters
    ----------
    n_layers
        Layers in the run.
    attention, ffn
        Parts of one layer, at least one of them or ``recurrent``.
    cross_attention
        Attention to the output of the encoder, in the decoder of a sequence-to-sequence model.
    norm_vectors
        Vectors of the hidden size that norms and other scalings have; a layer norm has two.
    seq
        Fixed number of tokens, of image patches or audio frames; 0 for that of the run.
    extra_parameters
        Other weights of a layer: router biases, attention sinks, the gate of a shared expert.
    recurrent
        Recurrent part in place of the attention, or beside it with the same input.
    """

    n_layers: int
    attention: Attention | None = None
    ffn: FeedForward | Experts | None = None
    cross_attention: Attention | None = None
    norm_vectors: int = 2
    seq: int = 0
    extra_parameters: int = 0
    recurrent: Recurrent | None = None

    def __post_init__(self) -> None:
        check_fields(self, positive=("n_layers",), not_negative=("norm_vectors", "seq", "extra_parameters"))
        if self.attention is None and self.recurrent is None and self.ffn is None:
            raise InputError("Layers: have no part; expected attention, recurrent or ffn")
        if self.cross_attention is not None and self.cross_attention.latent is not None:
            raise InputError("Layers: cross_attention has latent projections; expected none")

    @property
    def n_halves(self) -> int:
        """Residual sums of a layer: attention or recurrent part, cross attention, and feed-forward part."""
        is_mixed = self.attention is not None or self.recurrent is not None
        return is_mixed + (self.cross_attention is not None) + (self.ffn is not None)

    @property
    def ffn_size(self) -> float:
        """Channels of the feed-forward part that compute one token."""
        if isinstance(self.ffn, Experts):
            return float(self.ffn.size * self.ffn.per_token + self.ffn.shared_size)
        return float(self.ffn.size) if self.ffn else 0.0

    def parameters(self, hidden: int) -> int:
        """Return the weights of one layer."""
        parts = (self.attention, self.recurrent, self.ffn, self.cross_attention)
        own = sum(part.parameters(hidden) for part in parts if part is not None)
        return own + self.norm_vectors * hidden + self.extra_parameters

    def counts(self, hidden: int) -> tuple[int, int]:
        """Return the weights of one layer, and how many of them are those of experts."""
        experts = self.ffn.expert_parameters(hidden) if isinstance(self.ffn, Experts) else 0
        return self.parameters(hidden), experts

    def active_parameters(self, hidden: int) -> int:
        """Return the weights of one layer that compute one token."""
        if not isinstance(self.ffn, Experts):
            return self.parameters(hidden)
        idle = self.ffn.parameters(hidden) - self.ffn.active_parameters(hidden)
        return self.parameters(hidden) - idle


def _kinds(layers: tuple[Layers, ...]) -> tuple[tuple[Layers, ...], tuple[int, ...]]:
    """Return runs with equal ones together, and which of them each run belongs to."""
    if len(layers) == 1:
        return layers, (0,)
    number_of: dict[Layers, int] = {}  # kinds, as runs of one layer, in the order of their first run
    counts: list[int] = []
    kind_of = []
    for run in layers:
        # Hashing and comparing layers take most of the time of a model: each is looked up once.
        at = number_of.setdefault(run if run.n_layers == 1 else replace(run, n_layers=1), len(counts))
        if at == len(counts):
            counts.append(0)
        counts[at] += run.n_layers
        kind_of.append(at)
    kinds = [
        layer if count == 1 else replace(layer, n_layers=count)
        for layer, count in zip(number_of, counts, strict=True)
    ]
    return tuple(kinds), tuple(kind_of)


_GELU_OF_OPERATORS = ("gelu_new", "gelu_fast", "gelu_accurate")
_WITH_GELU_NEW = ("gpt2", "gptj", "phi")  # model types of transformers that have it unless they say otherwise


@dataclass(frozen=True, slots=True)
class Architecture:
    """Architecture of a model: its layers, embedding and head.

    Parameters
    ----------
    name, family
        Name in tables, and model type, such as ``llama``.
    hidden
        Channels of the residual stream.
    layers
        Runs of equal layers, from input to output.
    vocab
        Rows of embedding and output head, or classes of an image model.
    is_tied
        True if embedding and output head share their weights.
    head
        ``lm``: logits for every token; ``masked-lm``: for the masked ones; ``classes``: one row a sample.
    positions
        Rows of learned position tables.
    extra_parameters
        Weights outside layers, embedding, head and positions: patch or audio embedding, final norms.
    max_seq
        Longest sequence that the configuration states; 0 if it states none.
    stated_parameters
        Number of parameters that the configuration or its name states; 0 if it states none.
    source
        Origin of the description.
    embedding_dim
        Channels of embedding and head if projections lead to and from ``hidden``; 0 for ``hidden``.
    activation
        Activation function as transformers calls it; empty for that of the family.

    Raises
    ------
    InputError
        A count is out of range, or the stated parameters differ from the counted ones by more than 2 %.
    """

    name: str
    family: str
    hidden: int
    layers: tuple[Layers, ...]
    vocab: int
    is_tied: bool = False
    head: HeadKind = "lm"
    positions: int = 0
    extra_parameters: int = 0
    max_seq: int = 0
    stated_parameters: int = 0
    source: str = ""
    embedding_dim: int = 0
    activation: str = ""
    kinds: tuple[Layers, ...] = field(init=False, repr=False, compare=False)
    """The runs of layers with equal ones together, found in ``layers``: alternating layers are two kinds."""
    kind_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Which of the kinds each run belongs to, in the order of ``layers``."""
    kind_parameters: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    """Weights of one layer of each kind, and how many of them are those of experts."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            positive=("hidden", "vocab"),
            not_negative=("positions", "extra_parameters", "max_seq", "stated_parameters", "embedding_dim"),
        )
        if self.head not in _HEAD_KINDS:
            raise unknown_name("head", self.head, _HEAD_KINDS)
        if not self.layers:
            raise InputError(f"architecture {self.name!r}: has no layers")
        kinds, kind_of = _kinds(self.layers)  # which each prediction asks for several times
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "kind_of", kind_of)
        object.__setattr__(self, "kind_parameters", tuple(run.counts(self.hidden) for run in kinds))
        stated = self.stated_parameters
        if stated and abs((counted := self.parameters) - stated) > _STATED_TOLERANCE * stated:
            raise InputError(
                f"architecture {self.name!r}: {stated:,} parameters are stated, but its layers, embeddings "
                f"and head have {counted:,}; expected a difference of at most {_STATED_TOLERANCE:.0%}"
            )

    @property
    def writes_gelu_out(self) -> bool:
        """True if transformers computes its GELU by eight operators, not by one kernel."""
        usual = "gelu_new" if self.family in _WITH_GELU_NEW else ""
        return (self.activation or usual) in _GELU_OF_OPERATORS

    @property
    def n_layers(self) -> int:
        """Layers of all runs."""
        return sum(run.n_layers for run in self.kinds)

    @property
    def embedding_parameters(self) -> int:
        """Weights before the first layer."""
        table = self.vocab * (self.embedding_dim or self.hidden) if self.head != "classes" else 0
        projections = 2 * self.embedding_dim * self.hidden
        return table + projections + self.positions * self.hidden

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, which are those of the embedding if they are tied."""
        return 0 if self.head == "none" else self.vocab * (self.embedding_dim or self.hidden)

    @property
    def parameters(self) -> int:
        """All weights, each counted once."""
        ends = self.embedding_parameters + (0 if self.is_tied else self.head_parameters)
        return self.extra_parameters + ends + self.layer_parameters

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers."""
        return sum(
            run.n_layers * of_one for run, (of_one, _) in zip(self.kinds, self.kind_parameters, strict=True)
        )

    @property
    def active_parameters(self) -> int:
        """Weights that compute one token: of a mixture of experts, those of the chosen ones."""
        idle = sum(
            run.n_layers * (run.parameters(self.hidden) - run.active_parameters(self.hidden))
            for run in self.kinds
        )
        return self.parameters - idle

    @property
    def is_mixture(self) -> bool:
        """True if any layer has experts."""
        return any(isinstance(run.ffn, Experts) for run in self.kinds)

    @property
    def has_attention(self) -> bool:
        """True if any layer has attention."""
        return any(run.attention is not None for run in self.kinds)

    @property
    def is_recurrent(self) -> bool:
        """True if any layer has a recurrent part."""
        return any(run.recurrent is not None for run in self.kinds)

    def with_attention(self, **changes: Any) -> "Architecture":
        """Return the model with other fields of the attention of all layers that have one."""
        layers = [
            replace(run, attention=run.attention and replace(run.attention, **changes)) for run in self.layers
        ]
        return replace(self, layers=tuple(layers))

    def tokens(self, run: Layers, seq: int) -> int:
        """Return the tokens of a sample in a run of layers, when those of the run are ``seq``."""
        return run.seq or seq

    def head_tokens(self, seq: float) -> float:
        """Return the tokens of a sample that get logits: all, the masked ones, or none that count."""
        share = {"lm": 1.0, "masked-lm": _MASKED_SHARE}.get(self.head, 0.0)
        return share * (self.layers[-1].seq or seq)

    def flop_per_sample(self, seq: int) -> float:
        """Return the matrix products of one sample, forward and backward, nothing recomputed [FLOP].

        This is the numerator of the model FLOP utilisation (MFU); masked scores of causal attention are not
        counted (Chowdhery et al. 2022, appendix B, count them).
        """
        keys = self.tokens(self.layers[0], seq)
        of_kinds = []  # own part and cross attention of a layer, forward
        for run in self.kinds:
            tokens = self.tokens(run, seq)
            vectors = run.norm_vectors * self.hidden + run.extra_parameters
            weights = run.active_parameters(self.hidden) - vectors
            cross = 0.0
            if run.cross_attention is not None:  # its keys and values are those of the encoder's tokens
                moved = 2.0 * (keys - tokens) * run.cross_attention.key_size * self.hidden
                cross = run.cross_attention.core_flop(tokens, keys) + moved
            core = run.attention.core_flop(tokens) if run.attention else 0.0
            if run.recurrent is not None:
                weights -= run.recurrent.vector_parameters
                core += run.recurrent.core_flop(tokens)
            of_kinds.append((2.0 * tokens * weights + core, cross))
        forward = 0.0
        for run, at in zip(self.layers, self.kind_of, strict=True):  # rounded in the order of the runs
            own, cross = of_kinds[at]
            forward += run.n_layers * own
            if cross:
                forward += run.n_layers * cross
        forward += 2.0 * self.head_tokens(seq) * self.head_parameters
        return 3.0 * forward
