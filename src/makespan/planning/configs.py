"""Read the architecture of a model from the file that describes it.

`read_model` accepts four kinds of files:

- ``config.json`` of the library transformers, or the folder that holds it;
- arguments of Megatron-LM for a GPT or BERT: command-line options in a text file or script, or the same names
  in YAML or JSON;
- a training configuration of torchtitan in TOML (``[model]`` with ``name`` and ``flavor``);
- our own TOML, whose fields are those of `makespan.planning.Architecture`::

    name = "small-mixture"
    family = "mixtral"
    hidden = 2048
    vocab = 32000
    extra_parameters = 2048      # the final norm

    [[layers]]                   # one table per run of equal layers
    n_layers = 24
    [layers.attention]
    heads = 16
    kv_heads = 4
    head_dim = 128
    value_dim = 128
    [layers.ffn]                 # a mixture of experts if it has n_experts, otherwise size and is_gated
    n_experts = 8
    per_token = 2
    size = 5632

A layer may have ``[layers.recurrent]`` (`makespan.planning.Recurrent`) in place of attention or beside it,
and no feed-forward part.

Parameters are counted as transformers counts them for the class with the usual head, and selection biases of
routers, which it keeps as buffers, are counted as well.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, get_args

from makespan.errors import InputError, MissingDataError, UnknownNameError, unknown_name
from makespan.files import parse_json, read_preset, read_text, read_toml, read_yaml
from makespan.planning.architecture import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    HeadKind,
    Latent,
    Layers,
    Recurrent,
    RecurrentKind,
)

_LOG = logging.getLogger(__name__)
_PACKAGE = "makespan.planning"
_EXPECTED = "config.json of a model, arguments of Megatron-LM, or TOML"
_LARGEST_BYTES = 1 << 22  # the longest configurations list the labels of 20,000 classes
_LARGEST_COUNT = 10**9
_MOST_LAYERS = 10_000
_GPT2_VOCAB = 50_257  # Radford et al. 2019, section 2.3
_REQUIRED: Final = object()


def model_names() -> tuple[str, ...]:
    """Return the names of the models that need no file."""
    return tuple(read_preset(_PACKAGE, "models"))


def model_types() -> tuple[str, ...]:
    """Return the values of ``model_type`` of transformers that `read_model` knows, sorted."""
    return tuple(sorted({*_FAMILIES, *_READERS, *_ALIASES}))


def read_model(source: str | Path) -> Architecture:
    """Read the architecture of a model.

    Parameters
    ----------
    source
        Path to a file, or to a folder with ``config.json``; the module describes the accepted formats. Or one
        of `model_names`, if there is no file of that name.

    Raises
    ------
    MissingDataError
        There is no such file.
    InputError
        The file is not of an accepted format, or a field is missing or out of range; the message names file,
        field, the value found and what is expected.
    """
    if not isinstance(source, str | Path):
        raise InputError(f"model: expected the path to a file or folder, got {type(source).__name__}")
    if str(source) in model_names() and not Path(source).exists():
        entry = read_preset(_PACKAGE, "models")[str(source)]
        known = _hugging_face({"architectures": ["ForCausalLM"], **entry}, Path(str(source)))
        return replace(known, name=str(source), source="its published config.json")
    path = _model_file(Path(source))
    try:
        model = _parsed(path)
    except InputError as wrong:
        if str(wrong).startswith(f"{path}:"):
            raise
        raise type(wrong)(f"{path}: {wrong}") from None
    stem = path.resolve().parent.name if path.name == "config.json" else path.stem
    return replace(model, name=model.name or stem or "model", source=model.source or str(path))


def _model_file(path: Path) -> Path:
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        if (path / "adapter_config.json").is_file():
            return path / "adapter_config.json"  # rejected below, with the name of its base model
        raise MissingDataError(f"{path}: the folder has no config.json; expected {_EXPECTED}")
    if not path.exists():
        raise MissingDataError(
            f"{path}: no such file or folder; expected {_EXPECTED} (nothing is downloaded: save the "
            f"config.json of a published model first), or one of {', '.join(model_names())}"
        )
    return path


def _parsed(path: Path) -> Architecture:
    kind, table = path.suffix.lower(), None
    if kind == ".toml":
        table = read_toml(path, "TOML of a model")
        if not table:
            raise InputError(f"the file is empty; expected {_EXPECTED}")
        return _torchtitan(table, path) if "model" in table else _from_table(Architecture, table, "")
    if kind in (".yaml", ".yml"):
        table = read_yaml(path, "YAML of Megatron-LM arguments")
    else:
        text = read_text(path, _EXPECTED, largest=_LARGEST_BYTES)
        if kind == ".json" or text.lstrip().startswith("{"):
            table = _json(text) if text.strip() else None
        elif re.search(r"(^|\s)--\w", text):
            arguments = _options(text)
            return _megatron(arguments, path, _megatron_kind(text, arguments))
        elif text.strip():
            raise InputError(f"has neither JSON nor command-line options; expected {_EXPECTED}")
    if table is None:
        raise InputError(f"the file is empty; expected {_EXPECTED}")
    if not isinstance(table, dict):
        raise InputError(f"holds a {type(table).__name__}; expected a table of named fields")
    if "peft_type" in table:
        base = table.get("base_model_name_or_path")
        raise InputError(
            f"describes a {table['peft_type']} adapter; expected config.json of its base ({base})"
        )
    if "model_type" in table:
        return _hugging_face(table, path)
    arguments = _argument_names(table)
    if "num_layers" in arguments and "hidden_size" in arguments:
        _reject_other_models(arguments, is_script=False)
        return _megatron(arguments, path)
    if "tokenizer_class" in table or "added_tokens" in table:
        raise InputError("describes a tokenizer; expected config.json of the model, beside it")
    raise InputError(
        "field 'model_type' is missing; expected that of a transformers model, or the Megatron-LM arguments "
        "num_layers and hidden_size"
    )


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as wrong:
        raise InputError(f"cannot be read as JSON: {wrong}") from None


_SPELLINGS = {
    "hidden_size": ("n_embd", "n_embed", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "hidden_act": ("activation_function", "hidden_activation"),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_moe_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "moe_topk"),
    "sliding_window": ("window_size",),
    "mamba_d_state": ("ssm_state_size", "state_size"),
    "mamba_n_groups": ("n_groups",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_chunk_size": ("chunk_size",),
    "mamba_conv_bias": ("use_conv_bias",),
    "mamba_expand": ("expand",),
}
"""Other names of a field, by its most common one."""


class _Fields:
    """Checked access to the fields of one table."""

    def __init__(self, table: Mapping[str, Any], path: Path) -> None:
        self.table, self._path = table, path

    def value(self, name: str, default: Any, expected: str) -> tuple[str, Any]:
        """Return the name in the file and the value of a field; null counts as missing."""
        others = _SPELLINGS.get(name, ())
        stated = {key: self.table[key] for key in (name, *others) if self.table.get(key) is not None}
        if stated:
            (spelt, value), *further = stated.items()
            for key, other in further:
                if type(value) is type(other) is int and value != other:
                    raise InputError(
                        f"field {spelt!r}: found {value!r}, but {key!r} is {other!r}; expected one of them, "
                        "or equal values"
                    )
            return spelt, value
        if default is _REQUIRED:
            also = f" (or {', '.join(others)})" if others else ""
            raise InputError(f"field {name!r}{also} is missing; expected {expected}")
        return name, default

    def part(self, name: str) -> "_Fields":
        """Return the fields of a table within the table; of an empty one if it is not stated."""
        _, value = self.value(name, {}, "a table")
        if not isinstance(value, dict):
            raise InputError(f"field {name!r}: found {value!r}; expected a table of fields")
        return self.with_table(value)

    def whole(
        self, name: str, default: Any = _REQUIRED, least: int = 1, largest: int = _LARGEST_COUNT
    ) -> int:
        expected = f"a whole number from {least:,} to {largest:,}"
        spelt, value = self.value(name, default, expected)
        if type(value) is not int or not least <= value <= largest:
            raise InputError(f"field {spelt!r}: found {value!r}; expected {expected}")
        return value

    def with_table(self, table: Mapping[str, Any]) -> "_Fields":
        """Return access to another table of the same file."""
        return _Fields(table, self._path)

    def flag(self, name: str, default: bool = False) -> bool:
        spelt, value = self.value(name, default, "true or false")
        if not isinstance(value, bool):
            raise InputError(f"field {spelt!r}: found {value!r}; expected true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        spelt, value = self.value(name, default, "text")
        if not isinstance(value, str):
            raise InputError(f"field {spelt!r}: found {value!r}; expected text")
        return value

    def listed(self, name: str, kind: type) -> list[Any]:
        """Return a list of whole numbers or texts; an empty one if it is not stated."""
        value = self.table.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(entry) is not kind for entry in value):
            expected = "whole numbers" if kind is int else "texts"
            raise InputError(f"field {name!r}: found {value!r}; expected a list of {expected}")
        return value

    def switch(self, switch: bool | tuple[str, bool]) -> bool:
        """Return a fact of the family, or the field that decides it, given with its default."""
        return switch if isinstance(switch, bool) else self.flag(*switch)

    def warn(self, message: str, *values: object) -> None:
        _LOG.warning(f"%s: {message}", self._path, *values)


def _runs(layers: Iterable[Layers]) -> tuple[Layers, ...]:
    """Join equal neighbours of single layers."""
    return tuple(replace(layer, n_layers=len(list(equal))) for layer, equal in groupby(layers))


def _per_head(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise InputError(f"the hidden size {hidden:,} is not a multiple of {heads} attention heads")
    return hidden // heads


# --- Configurations of transformers -----------------------------------------------------------------


def _dense(fields: _Fields, family: "_Family", _layer: int) -> tuple[FeedForward, int]:
    hidden = fields.whole("hidden_size")
    default = family.ffn_ratio * hidden if family.ffn_ratio else _REQUIRED
    size = fields.whole("intermediate_size", default)
    return FeedForward(size, family.is_gated, fields.switch(family.ffn_bias)), 0


def _mixtral(fields: _Fields, family: "_Family", _layer: int) -> tuple[Experts, int]:
    n_experts, per_token = fields.whole("num_experts"), fields.whole("num_experts_per_tok")
    router = n_experts if fields.switch(family.has_router_bias) else 0
    return Experts(n_experts, per_token, fields.whole("intermediate_size")), router


def _granite_moe(fields: _Fields, family: "_Family", layer: int) -> tuple[Experts, int]:
    experts, _ = _mixtral(fields, family, layer)
    return replace(experts, shared_size=fields.whole("shared_intermediate_size", 0, least=0)), 0


def _gpt_oss(fields: _Fields, family: "_Family", layer: int) -> tuple[Experts, int]:
    experts, _ = _mixtral(fields, family, layer)
    # Beside the biases of experts: one per expert in the router, and a sink per attention head.
    return replace(experts, has_bias=True), experts.n_experts + fields.whole("num_attention_heads")


def _qwen_moe(fields: _Fields, family: "_Family", layer: int) -> tuple[FeedForward | Experts, int]:
    is_sparse = (layer + 1) % fields.whole("decoder_sparse_step", 1) == 0
    if layer in fields.listed("mlp_only_layers", int) or not is_sparse:
        return _dense(fields, family, layer)
    shared = fields.whole("shared_expert_intermediate_size", 0, least=0)
    experts = Experts(
        n_experts=fields.whole("num_experts"),
        per_token=fields.whole("num_experts_per_tok"),
        size=fields.whole("moe_intermediate_size"),
        shared_size=shared,
    )
    return experts, fields.whole("hidden_size") if shared else 0  # a gate weighs the shared expert


def _deepseek_moe(fields: _Fields, family: "_Family", layer: int) -> tuple[FeedForward | Experts, int]:
    is_dense = layer < fields.whole("first_k_dense_replace", 0, least=0)
    if is_dense or layer % fields.whole("moe_layer_freq", 1):
        return _dense(fields, family, layer)
    size = fields.whole("moe_intermediate_size")
    n_groups, groups_per_token = 1, 1
    if fields.text("topk_method", family.topk_method) != "greedy":
        n_groups = fields.whole("n_group", family.groups[0])
        groups_per_token = fields.whole("topk_group", family.groups[1])
    experts = Experts(
        n_experts=fields.whole("num_experts"),
        per_token=fields.whole("num_experts_per_tok"),
        size=size,
        shared_size=size * fields.whole("n_shared_experts", 0, least=0),
        n_groups=n_groups,
        groups_per_token=groups_per_token,
    )
    router = experts.n_experts if fields.switch(family.has_router_bias) else 0
    return experts, router + _biases_of_shared(fields, family, experts)


def _biases_of_shared(fields: _Fields, family: "_Family", experts: Experts) -> int:
    has_biases = experts.shared_size and fields.switch(family.ffn_bias)
    return 2 * experts.shared_size + fields.whole("hidden_size") if has_biases else 0


def _ernie_moe(fields: _Fields, family: "_Family", layer: int) -> tuple[FeedForward | Experts, int]:
    last = fields.whole("moe_layer_end_index", -1, least=-1)
    is_outside = 0 <= last < layer or layer < fields.whole("moe_layer_start_index", 1, least=0)
    if is_outside or (layer + 1) % fields.whole("moe_layer_interval", 1):
        return _dense(fields, family, layer)
    size = fields.whole("moe_intermediate_size")
    n_experts, per_token = fields.whole("num_experts"), fields.whole("num_experts_per_tok")
    experts = Experts(n_experts, per_token, size, size * fields.whole("moe_num_shared_experts", 0, least=0))
    return experts, n_experts + _biases_of_shared(fields, family, experts)  # and a bias of the router


def _hunyuan_moe(fields: _Fields, _family: "_Family", layer: int) -> tuple[Experts, int]:
    size = fields.whole("intermediate_size")  # of each expert, and of what computes every token
    for name, usual in (
        ("num_shared_expert", 1),
        ("moe_intermediate_size", size),
        ("moe_layer_num_skipped", 0),
    ):
        stated = fields.table.get(name)
        if any(
            value != usual
            for value in (stated if isinstance(stated, list) else [stated])
            if value is not None
        ):
            raise InputError(f"field {name!r}: found {stated!r}; expected {usual}, as transformers counts")
    if isinstance(fields.table.get("moe_topk"), list):
        of_layers = fields.listed("moe_topk", int)
        if layer >= len(of_layers):
            raise InputError(f"field 'moe_topk': found {len(of_layers)} numbers; expected one per layer")
        per_token = of_layers[layer]
    else:
        per_token = fields.whole("num_experts_per_tok")
    return Experts(fields.whole("num_experts"), per_token, size, shared_size=size), 0


def _llama4_moe(fields: _Fields, _family: "_Family", layer: int) -> tuple[FeedForward | Experts, int]:
    if "moe_layers" in fields.table:
        is_sparse = layer in fields.listed("moe_layers", int)
    else:
        is_sparse = (layer + 1) % fields.whole("interleave_moe_layer_step", 1) == 0
    if not is_sparse:
        return FeedForward(fields.whole("intermediate_size_mlp"), is_gated=True), 0
    size = fields.whole("intermediate_size")
    n_experts, per_token = fields.whole("num_experts"), fields.whole("num_experts_per_tok")
    return Experts(n_experts, per_token, size, shared_size=size), 0


def _apertus(fields: _Fields, family: "_Family", layer: int) -> tuple[FeedForward, int]:
    return _dense(fields, family, layer)[0], 2  # numbers that the activation function learns


_Part = Callable[[_Fields, "_Family", int], tuple[FeedForward | Experts, int]]


@dataclass(frozen=True, slots=True)
class _Family:
    """Facts of a model type that its configurations do not state.

    A pair ``(field, default)`` names the field that decides. ``norm_vectors`` are those of a layer,
    ``outer_vectors`` those outside: final norms, norms of embeddings, token types. ``position_rows`` is the
    number of rows of a learned table beyond the longest sequence, None without such a table. ``slides`` says
    which layers have a window unless the field ``layer_types`` does, ``has_windows`` whether any has, and
    ``window`` is the default of its size, or reads it from a field of another name; with ``is_chunked`` these
    layers have chunks in place of windows.
    ``topk_method`` and ``groups`` are defaults of how tokens choose: groups of experts, and those of a token.
    ``wide_norms`` are norms of queries and keys over all heads together.
    """

    n_biases: int = 0
    biases: bool | tuple[str, bool] = True
    n_norms: int = 0
    norms: bool | tuple[str, bool] = True
    wide_norms: bool | tuple[str, bool] = False
    is_gated: bool = True
    ffn_ratio: int = 0
    ffn_bias: bool | tuple[str, bool] = False
    ffn: _Part = _dense
    has_router_bias: bool | tuple[str, bool] = False
    topk_method: str = "noaux_tc"
    groups: tuple[int, int] = (1, 1)
    norm_vectors: int = 2
    outer_vectors: int = 1
    outer_weights: int = 0
    is_tied: bool = False
    has_head_bias: bool | tuple[str, bool] = False
    head: HeadKind = "lm"
    is_causal: bool = True
    position_rows: int | None = None
    is_grouped: bool = False
    kv_heads: int = 0
    head_dim: int = 0
    latent: bool = False
    slides: Callable[[_Fields, int], bool] | None = None
    has_windows: bool | tuple[str, bool] = True
    is_chunked: bool = False
    window: int | Callable[[_Fields], int] = 0


def _qwen_slides(fields: _Fields, layer: int) -> bool:
    first = 80 if "_vl" in fields.text("model_type") else 28
    return layer >= fields.whole("max_window_layers", first, least=0)


def _qwen_moe_slides(fields: _Fields, layer: int) -> bool:
    return layer < fields.whole("max_window_layers", 28, least=0) and layer % 2 == 0


def _is_rotary(fields: _Fields, layer: int) -> bool:
    """Return whether a layer has rotary positions: SmolLM3 has windows elsewhere, Llama 4 chunks there."""
    if rotary := fields.listed("no_rope_layers", int):  # 1 where there are such positions
        if layer >= len(rotary):
            raise InputError(f"field 'no_rope_layers': found {len(rotary)} numbers; expected one per layer")
        return bool(rotary[layer])
    return (layer + 1) % fields.whole("no_rope_layer_interval", 4) > 0


def _exaone_slides(fields: _Fields, layer: int) -> bool:
    pattern = fields.table.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # such as LLLG
        return bool(pattern) and pattern[layer % len(pattern)] == "L"
    return (layer + 1) % fields.whole("sliding_window_pattern", 4) > 0


def _gpt_neo(fields: _Fields) -> _Family:
    n_layers = fields.whole("num_hidden_layers", largest=_MOST_LAYERS)
    name, kinds = "attention_layers", fields.listed("attention_layers", str)
    if fields.table.get("attention_types") is not None or not kinds:
        name, kinds = "attention_types", _expanded(fields, n_layers)
    if len(kinds) != n_layers or not {*kinds} <= {"global", "local"}:
        raise InputError(
            f"field {name!r}: found {len(kinds)} of {', '.join(sorted({*kinds}))}; "
            f"expected {n_layers} of global, local"
        )
    return replace(
        _GPT,
        n_biases=0,
        norm_vectors=5,  # two norms with biases, and the bias of the output projection
        is_tied=True,
        position_rows=0,
        slides=lambda _fields, layer: kinds[layer] == "local",
        window=256,
    )


def _expanded(fields: _Fields, n_layers: int) -> list[str]:
    """Return the kind of each layer that ``attention_types`` of GPT-Neo gives by lists and repetitions."""
    _, stated = fields.value("attention_types", [[["global", "local"], 12]], "lists with repetitions")
    kinds: list[str] = []
    for entry in stated if isinstance(stated, list) else [stated]:
        match entry:
            case [list(names), int(times)] if times >= 0 and all(isinstance(name, str) for name in names):
                kinds += names * min(times, n_layers + 1)  # not beyond: a short text may stand for any number
            case _:
                raise InputError(
                    f"field 'attention_types': found {stated!r}; expected lists with repetitions, as in "
                    "[[['global', 'local'], 12]]"
                )
    return kinds


def _opt(fields: _Fields) -> _Family:
    for name, accepted in (("layer_norm_elementwise_affine", True), ("_remove_final_layer_norm", False)):
        if fields.flag(name, accepted) != accepted:
            raise InputError(f"field {name!r}: found {not accepted}; expected {accepted}")
    return _Family(
        n_biases=4,
        biases=("enable_bias", True),
        is_gated=False,
        ffn_bias=("enable_bias", True),
        norm_vectors=4,
        outer_vectors=2 if fields.flag("do_layer_norm_before", True) else 0,
        is_tied=True,
        position_rows=2,
    )


def _mpt(fields: _Fields) -> _Family:
    """Follow LLM Foundry, whose options transformers covers in part."""
    attention = fields.part("attn_config")
    for name, table, unset in (
        ("prefix_lm", attention.table, (None, False)),
        ("sliding_window_size", attention.table, (None, -1)),
        ("ffn_config", fields.table, (None, {}, {"ffn_type": "mptmlp"})),
    ):
        if table.get(name) not in unset:
            raise InputError(f"field {name!r}: found {table[name]!r}; expected it unset")
    n_vectors = 1 if fields.flag("no_bias", True) else 2
    is_single = attention.text("attn_type", "multihead_attention") == "multiquery_attention"
    has_positions = fields.flag("learned_pos_emb", True) and not attention.flag("alibi", True)
    return _Family(
        n_biases=0 if n_vectors == 1 else 4,
        is_gated=False,
        ffn_ratio=fields.whole("expansion_ratio", 4),
        ffn_bias=n_vectors == 2,
        norm_vectors=n_vectors * (4 if attention.flag("qk_ln") else 2),
        outer_vectors=n_vectors,
        is_tied=True,
        position_rows=0 if has_positions else None,
        kv_heads=1 if is_single else attention.whole("kv_n_heads", 0, least=0),
    )


def _falcon(fields: _Fields) -> _Family:
    is_new, heads = fields.flag("new_decoder_architecture"), fields.whole("num_attention_heads")
    n_norms = fields.whole("num_ln_in_parallel_attn", 2 if is_new else 1)
    if not is_new:
        n_norms = 1 if fields.flag("parallel_attn", True) else 2
    is_single = not is_new and fields.flag("multi_query", True)
    return _Family(
        n_biases=4,
        biases=("bias", False),
        is_gated=False,
        ffn_ratio=4,
        ffn_bias=("bias", False),
        norm_vectors=2 * n_norms,
        outer_vectors=2,
        is_tied=True,
        kv_heads=1 if is_single else fields.whole("num_kv_heads", heads) if is_new else heads,
    )


def _bert(fields: _Fields) -> _Family:
    hidden, classes = fields.whole("hidden_size"), fields.listed("architectures", str)
    # Outside layers: token types and the norm of embeddings; in the head, a dense layer with bias and norm.
    pooler = hidden * (hidden + 1) + 2 * (hidden + 1) if "BertForPreTraining" in classes else 0
    second_bias = 0 if fields.flag("tie_word_embeddings", True) else fields.whole("vocab_size")
    positions = fields.text("position_embedding_type", "absolute")
    if positions != "absolute":
        fields.warn("position_embedding_type %s is counted as absolute, as in transformers 5", positions)
    is_decoder = fields.flag("is_decoder")
    return _Family(
        n_biases=4,
        is_gated=False,
        ffn_bias=True,
        norm_vectors=4,
        outer_vectors=fields.whole("type_vocab_size", 2) + 2 + 3,
        outer_weights=hidden * hidden + pooler + second_bias,
        is_tied=True,
        has_head_bias=True,
        head="lm" if is_decoder else "masked-lm",
        is_causal=is_decoder,
        position_rows=0,
    )


def _modernbert(fields: _Fields) -> _Family:
    hidden = fields.whole("hidden_size")
    for name in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
        if fields.flag(name):
            raise InputError(f"field {name!r}: found True; expected False")
    return _Family(
        outer_vectors=2,  # norms of embeddings, output and head, but the first layer lacks that of attention
        outer_weights=hidden * hidden,
        is_tied=True,
        has_head_bias=("decoder_bias", True),
        head="masked-lm",
        is_causal=False,
        slides=lambda fields, layer: layer % fields.whole("global_attn_every_n_layers", 3) > 0,
        # Half of it to each side, and the token itself; ``sliding_window`` is that half.
        window=lambda fields: (
            2 * fields.whole("sliding_window", fields.whole("local_attention", 128) // 2, least=0) + 1
        ),
    )


def _gemma(fields: _Fields) -> _Family:
    return replace(_GEMMA, is_causal=not fields.flag("use_bidirectional_attention"))


def _gemma2(fields: _Fields) -> _Family:
    if fields.flag("use_bidirectional_attention"):  # whose masks are causal in transformers all the same
        raise InputError("field 'use_bidirectional_attention': found True; expected False")
    return replace(_GEMMA, norm_vectors=4, slides=lambda _fields, layer: layer % 2 == 0, window=4096)


def _gemma3(fields: _Fields) -> _Family:
    sees_all = fields.flag("use_bidirectional_attention")
    return replace(
        _GEMMA,
        norm_vectors=4,
        n_norms=2,
        is_causal=not sees_all,
        slides=lambda fields, layer: (layer + 1) % fields.whole("sliding_window_pattern", 6) > 0,
        # Of embedding models: half of it to each side, and the token itself.
        window=(lambda fields: 2 * (_window(fields, 4096) // 2) + 1) if sees_all else 4096,
    )


def _stablelm(fields: _Fields) -> _Family:
    return _Family(
        n_biases=3,
        biases=("use_qkv_bias", False),
        wide_norms=("qk_layernorm", False),
        norm_vectors=2 if fields.flag("use_parallel_residual") else 4,
        outer_vectors=2,
    )


def _seed_oss(fields: _Fields) -> _Family:
    inputs, output = fields.flag("attention_bias", True), fields.flag("attention_out_bias")
    if output and not inputs:
        raise InputError("field 'attention_out_bias': found True without attention_bias; expected False")
    return replace(_LLAMA, n_biases=3 + output, biases=inputs, is_grouped=True, head_dim=128)


def _minimax_m2(fields: _Fields) -> _Family:
    if {*fields.listed("attn_type_list", int)} - {1}:
        raise InputError("field 'attn_type_list': found layers of linear attention; expected 1 for each")
    return replace(
        _MISTRAL,
        ffn=_mixtral,
        has_router_bias=("use_routing_bias", True),
        wide_norms=("use_qk_norm", True),
        slides=None,
    )


def _gpt_bigcode(fields: _Fields) -> _Family:
    return replace(
        _GPT,
        is_tied=True,
        position_rows=0,
        kv_heads=1 if fields.flag("multi_query", True) else fields.whole("num_attention_heads"),
    )


_LLAMA = _Family(n_biases=4, biases=("attention_bias", False), ffn_bias=("mlp_bias", False))
_QWEN3 = _Family(
    n_biases=4,
    biases=("attention_bias", False),
    n_norms=2,
    is_grouped=True,
    slides=_qwen_slides,
    has_windows=("use_sliding_window", False),
    window=4096,
)
_ERNIE = _Family(
    n_biases=4,
    biases=("use_bias", False),
    ffn_bias=("use_bias", False),
    is_tied=True,
    is_grouped=True,
    head_dim=128,
)
_GEMMA = replace(_LLAMA, ffn_bias=False, is_tied=True, is_grouped=True, head_dim=256)
_DEEPSEEK = _Family(ffn=_deepseek_moe, latent=True)
_MISTRAL = _Family(is_grouped=True, slides=lambda _fields, _layer: True, window=4096)
_GPT = _Family(n_biases=4, is_gated=False, ffn_ratio=4, ffn_bias=True, norm_vectors=4, outer_vectors=2)

_FAMILIES: dict[str, _Family | Callable[[_Fields], _Family]] = {
    "llama": _LLAMA,
    "qwen2": _Family(
        n_biases=3,
        is_grouped=True,
        slides=_qwen_slides,
        has_windows=("use_sliding_window", False),
        window=4096,
    ),
    "qwen3": replace(_QWEN3, head_dim=128),
    "mistral": _MISTRAL,
    "mixtral": replace(_MISTRAL, ffn=_mixtral, window=0),
    "qwen2_moe": _Family(
        n_biases=3,
        biases=("qkv_bias", True),
        ffn=_qwen_moe,
        is_grouped=True,
        slides=_qwen_moe_slides,
        has_windows=("use_sliding_window", False),
        window=4096,
    ),
    "qwen3_moe": replace(_QWEN3, ffn=_qwen_moe, slides=lambda _fields, _layer: True),
    "qwen3_vl_text": replace(_QWEN3, head_dim=128, slides=None),
    "qwen3_vl_moe_text": replace(_QWEN3, ffn=_qwen_moe, slides=None),
    "deepseek_v2": replace(_DEEPSEEK, topk_method="greedy", ffn_bias=("mlp_bias", False)),
    "deepseek_v3": replace(_DEEPSEEK, has_router_bias=True, groups=(8, 4)),
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": replace(
        _GPT, ffn_ratio=0, norm_vectors=2, has_head_bias=True, n_norms=4, norms=("qk_layernorm", False)
    ),
    "phi3": _Family(slides=lambda _fields, _layer: True),
    "gpt2": replace(_GPT, is_tied=True, position_rows=0),
    "gpt_neox": replace(_GPT, ffn_ratio=0, biases=("attention_bias", True)),
    "gptj": replace(_GPT, n_biases=0, norm_vectors=2, has_head_bias=True),
    "opt": _opt,
    "bloom": replace(_GPT, outer_vectors=4, is_tied=True),  # embeddings have a norm
    "mpt": _mpt,
    "falcon": _falcon,
    "bert": _bert,
    "roberta": _bert,
    "gpt_oss": _Family(
        n_biases=4,
        biases=("attention_bias", True),
        ffn=_gpt_oss,
        is_grouped=True,
        head_dim=64,
        slides=lambda _fields, layer: layer % 2 == 0,
        window=128,
    ),
    "glm4": _Family(
        n_biases=3, biases=("attention_bias", True), norm_vectors=4, is_grouped=True, head_dim=128
    ),
    "glm4_moe": _Family(
        n_biases=3,
        biases=("attention_bias", False),
        n_norms=2,
        norms=("use_qk_norm", False),
        ffn=_deepseek_moe,
        has_router_bias=True,
        is_grouped=True,
    ),
    "glm": _Family(n_biases=3, biases=("attention_bias", True), is_grouped=True, head_dim=128),
    "olmo": replace(_LLAMA, ffn_bias=False, norm_vectors=0, outer_vectors=0),
    "olmo2": replace(_LLAMA, ffn_bias=False, wide_norms=True),
    "olmo3": replace(
        _LLAMA,
        ffn_bias=False,
        wide_norms=True,
        slides=lambda _fields, layer: (layer + 1) % 4 > 0,
        window=4096,
    ),
    "olmoe": replace(_LLAMA, ffn=_mixtral, wide_norms=True),
    "cohere": replace(
        _LLAMA, ffn_bias=False, norm_vectors=1, is_tied=True, wide_norms=("use_qk_norm", False)
    ),
    "cohere2": replace(
        _LLAMA,
        ffn_bias=False,
        norm_vectors=1,
        is_tied=True,
        slides=lambda fields, layer: (layer + 1) % fields.whole("sliding_window_pattern", 4) > 0,
        window=4096,
    ),
    "granite": _LLAMA,
    "granitemoe": replace(_LLAMA, ffn=_mixtral),
    "helium": replace(_LLAMA, n_biases=3, is_grouped=True, head_dim=128),
    "arcee": replace(_LLAMA, is_gated=False),
    "apertus": replace(_LLAMA, is_gated=False, ffn_bias=False, ffn=_apertus, n_norms=2),
    "nemotron": replace(_LLAMA, is_gated=False, norm_vectors=4, outer_vectors=2),
    "smollm3": replace(
        _LLAMA,
        is_tied=True,
        is_grouped=True,
        slides=lambda fields, layer: not _is_rotary(fields, layer),
        has_windows=("use_sliding_window", False),
    ),
    "seed_oss": _seed_oss,
    "starcoder2": replace(
        _MISTRAL,
        n_biases=4,
        biases=("use_bias", True),
        is_gated=False,
        ffn_bias=("use_bias", True),
        norm_vectors=4,
        outer_vectors=2,
        is_tied=True,
        window=0,
    ),
    "stablelm": _stablelm,
    "persimmon": replace(_GPT, ffn_ratio=0, n_norms=4, norms=("qk_layernorm", True)),
    "exaone4": _Family(n_norms=2, is_grouped=True, slides=_exaone_slides, window=4096),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, ffn=_ernie_moe, head_dim=0, has_head_bias=("use_bias", False)),
    "hunyuan_v1_dense": replace(_LLAMA, ffn_bias=False, n_norms=2),
    "hunyuan_v1_moe": replace(_LLAMA, ffn=_hunyuan_moe, n_norms=2),
    "dots1": replace(
        _LLAMA,
        ffn_bias=False,
        n_norms=2,
        ffn=_deepseek_moe,
        has_router_bias=True,
        slides=lambda fields, layer: layer >= fields.whole("max_window_layers", 62, least=0),
        window=4096,
    ),
    "phimoe": replace(
        _MISTRAL,
        n_biases=4,
        biases=("attention_bias", False),
        ffn=_mixtral,
        norm_vectors=4,
        outer_vectors=2,
        has_head_bias=("lm_head_bias", False),
        window=0,
    ),
    "llama4_text": replace(
        _LLAMA,
        ffn=_llama4_moe,
        is_grouped=True,
        head_dim=128,
        slides=_is_rotary,
        is_chunked=True,
        window=8192,
    ),
    "gpt_neo": _gpt_neo,
    "gpt_bigcode": _gpt_bigcode,
    "modernbert": _modernbert,
    "distilbert": lambda fields: _Family(
        n_biases=4,
        is_gated=False,
        ffn_bias=True,
        norm_vectors=4,
        outer_vectors=2 + 3,  # the norm of embeddings; a dense layer with bias and norm
        outer_weights=fields.whole("hidden_size") ** 2,
        is_tied=True,
        has_head_bias=True,
        head="masked-lm",
        is_causal=False,
        position_rows=0,
    ),
    "ministral3": replace(_MISTRAL, head_dim=128, window=0),
    "minimax_m2": _minimax_m2,
    "granitemoeshared": replace(_LLAMA, ffn=_granite_moe),
    "solar_open": replace(
        _LLAMA,
        n_biases=3,
        ffn_bias=False,
        ffn=_deepseek_moe,
        has_router_bias=True,
        is_grouped=True,
        head_dim=128,
    ),
}
_ALIASES = {
    "ministral": "mistral",
    "codegen": "gptj",
    "camembert": "roberta",
    "xlm-roberta": "roberta",
    "mt5": "t5",
    "umt5": "t5",
    "kimi_k2": "deepseek_v3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
}
_OMITTED: dict[str, dict[str, int]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    },
}
"""Defaults of transformers for fields that published multimodal configurations leave out."""
_USUAL_HEADS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForPreTraining",
    "ForImageClassification",
)


def _hugging_face(table: dict[str, Any], path: Path) -> Architecture:
    fields = _Fields(table, path)
    nested = next((key for key in ("text_config", "llm_config", "language_config") if key in table), None)
    if nested is not None:
        fields.warn("reading %s, the text model of %s; other parts are left out", nested, table["model_type"])
        text = fields.part(nested).table
        defaults = _OMITTED.get(str(text.get("model_type")), {})
        added = {name: value for name, value in defaults.items() if text.get(name) is None}
        if added:
            fields.warn("%s leaves out fields; using the defaults of transformers: %s", nested, added)
        table = {"tie_word_embeddings": table.get("tie_word_embeddings"), **text, **added}
    elif "vision_config" in table or "audio_config" in table:
        fields.warn("reading the text model of %s; other parts are left out", table["model_type"])
    if table.get("quantization_config") is not None:
        fields.warn("'quantization_config' is ignored: weights are counted as trained")
    further = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    if n_further := next(filter(None, map(table.get, further)), None):
        fields.warn("%s layers that predict further tokens are left out", n_further)
    fields = _Fields(table, path)
    if fields.flag("add_cross_attention"):
        raise InputError(
            "field 'add_cross_attention': found True; expected False, or a model with an encoder"
        )
    stated = fields.text("model_type")
    kind = _ALIASES.get(stated, stated)
    if kind not in _FAMILIES and kind not in _READERS:
        raise unknown_name("model_type", stated, model_types())
    if fields.table.get("pruned_heads"):
        raise InputError(
            f"field 'pruned_heads': found {fields.table['pruned_heads']!r}; expected it empty or unset"
        )
    for name, usual in (("is_decoder", False), ("is_encoder_decoder", True)) if kind in _TWO_STACKS else ():
        if fields.flag(name, usual) != usual:
            raise InputError(f"field {name!r}: found {not usual}; expected {usual}: both stacks are counted")
    if kind in _READERS:
        _warn_of_windows(fields)
    heads = [] if nested else fields.listed("architectures", str)
    if heads and not any(head.endswith(_USUAL_HEADS) for head in heads):
        fields.warn("architectures is %s; counting the usual head of %s", heads, stated)
    model = _READERS[kind](fields) if kind in _READERS else _stack(fields, kind)
    _warn_of_parts(fields, model)
    return replace(model, family=stated)


def _warn_of_parts(fields: _Fields, model: Architecture) -> None:
    """Warn of fields about parts that no layer of the model has, mostly because its type has none."""
    kind = fields.text("model_type")
    experts = [run.ffn for run in model.kinds if isinstance(run.ffn, Experts)]
    is_latent = any(run.attention is not None and run.attention.latent for run in model.kinds)
    is_stated_off = fields.table.get("use_mla") is False  # Hunyuan states the sizes all the same
    for part, is_counted in (
        ("has experts", bool(experts)),
        # Where there are no experts, the size of the shared one is that of the dense part.
        ("has shared experts", not experts or any(ffn.shared_size for ffn in experts)),
        ("is dense", len(experts) < len(model.kinds)),
        ("has latent attention", is_latent or is_stated_off),
        # Types that may have such layers state their sizes where all layers have attention, too.
        ("is recurrent", kind in _READERS),
        ("has sparse attention", False),
        ("shares keys and values", False),
        ("has cross attention", False),
    ):
        names = () if is_counted else _PARTS[part]
        if name := next((name for name in names if _is_set(fields.table.get(name), part)), None):
            fields.warn("%s %s is ignored: no layer of %s %s", name, fields.table[name], kind, part)


def _is_set(value: Any, part: str) -> bool:
    """Return whether a field switches a part on; one expert is a dense feed-forward part."""
    return value not in (None, False, 0, [], {}) and not (part == "has experts" and value == 1)


_PARTS = {
    "has experts": ("num_experts", *_SPELLINGS["num_experts"]),
    "has shared experts": (
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
        "shared_intermediate_size",
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "is dense": ("first_k_dense_replace", "mlp_only_layers", "num_dense_layers"),
    "has latent attention": ("kv_lora_rank", "q_lora_rank", "use_mla"),
    "is recurrent": ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_value_heads"),
    "has sparse attention": ("index_topk", "index_n_heads"),
    "shares keys and values": ("use_cla", "num_kv_shared_layers"),
    "has cross attention": ("cross_attention_layers",),
}
"""Fields that switch parts of layers on in some model types; others ignore them."""


def _warn_of_windows(fields: _Fields) -> None:
    """Warn of fields about windows that have no effect, because models of this type have none."""
    kind, window = fields.text("model_type"), fields.table.get("sliding_window")
    if window not in (None, False) and fields.table.get("use_sliding_window") is not False:
        fields.warn("sliding_window %s is ignored: transformers has no windows in %s", window, kind)
    elif "sliding_attention" in fields.listed("layer_types", str):
        fields.warn("sliding_attention in layer_types is ignored: transformers has no windows in %s", kind)


def _stack(fields: _Fields, kind: str) -> Architecture:
    """Build a model of one stack of layers from the facts of its family."""
    entry = _FAMILIES[kind]
    family = entry(fields) if callable(entry) else entry
    hidden, vocab = fields.whole("hidden_size"), fields.whole("vocab_size")
    n_layers = fields.whole("num_hidden_layers", largest=_MOST_LAYERS)
    unstated = fields.whole("seq_length", 0, least=0) if family.position_rows is None else _REQUIRED
    max_seq = fields.whole("max_position_embeddings", unstated, least=0)
    attention = _attention(fields, family, hidden)
    windows = _windows(fields, family, n_layers, attention.is_causal)
    layers = []
    norms = (
        (attention.heads + attention.kv_heads) * attention.head_dim if fields.switch(family.wide_norms) else 0
    )
    for layer in range(n_layers):
        ffn, extra = family.ffn(fields, family, layer)
        if family.is_chunked:
            own = replace(attention, chunk=windows[layer])
        else:
            own = replace(attention, window=windows[layer])
        layers.append(Layers(1, own, ffn, norm_vectors=family.norm_vectors, extra_parameters=extra + norms))
    positions = 0 if family.position_rows is None else max_seq + family.position_rows
    embedding_dim = fields.whole("word_embed_proj_dim", hidden) if kind == "opt" else hidden
    head_bias = vocab if fields.switch(family.has_head_bias) else 0
    return Architecture(
        name="",
        family=kind,
        hidden=hidden,
        layers=_runs(layers),
        vocab=vocab,
        is_tied=fields.flag("tie_word_embeddings", family.is_tied),
        head=family.head,
        positions=positions,
        extra_parameters=family.outer_vectors * hidden + family.outer_weights + head_bias,
        max_seq=max_seq - 2 if kind == "roberta" else max_seq,  # the first rows are those of padding
        embedding_dim=0 if embedding_dim == hidden else embedding_dim,
        activation=fields.text("hidden_act", ""),
    )


def _attention(fields: _Fields, family: _Family, hidden: int) -> Attention:
    heads = fields.whole("num_attention_heads")
    n_biases = family.n_biases if fields.switch(family.biases) else 0
    is_causal = family.is_causal and fields.flag("is_causal", True)
    if family.latent:
        if fields.flag("attention_bias"):
            raise InputError("field 'attention_bias': found True; expected False with latent attention")
        latent = Latent(
            query_rank=fields.whole("q_lora_rank", 0, least=0),
            kv_rank=fields.whole("kv_lora_rank"),
            rope_dim=fields.whole("qk_rope_head_dim"),
        )
        head_dim = fields.whole("qk_nope_head_dim") + latent.rope_dim
        value_dim = fields.whole("v_head_dim")
        return Attention(heads, heads, head_dim, value_dim, is_causal=is_causal, latent=latent)
    is_stated = fields.table.get("head_dim") is not None
    head_dim = fields.whole("head_dim") if is_stated else family.head_dim or _per_head(hidden, heads)
    kv_heads = family.kv_heads or fields.whole(
        "num_key_value_heads", _REQUIRED if family.is_grouped else heads
    )
    return Attention(
        heads,
        kv_heads,
        head_dim,
        head_dim,
        is_causal=is_causal,
        n_biases=n_biases,
        n_norms=family.n_norms if fields.switch(family.norms) else 0,
    )


def _window(fields: _Fields, default: int, name: str = "sliding_window") -> int:
    """Return the stated size of windows or chunks, 0 where it is null."""
    is_null = name in fields.table and fields.table[name] is None
    return 0 if is_null else fields.whole(name, default, least=0)


def _windows(fields: _Fields, family: _Family, n_layers: int, is_causal: bool) -> list[int]:
    """Return the window of each layer, or its chunk, 0 for none."""
    if family.slides is None:
        _warn_of_windows(fields)
        if others := sorted({*fields.listed("layer_types", str)} - {"full_attention", "sliding_attention"}):
            kind = fields.text("model_type")
            fields.warn(
                "layer_types %s are ignored: all layers of %s have attention", ", ".join(others), kind
            )
        return [0] * n_layers
    local, name = "sliding_attention", "sliding_window"
    if family.is_chunked:
        local, name = "chunked_attention", "attention_chunk_size"
    window = family.window(fields) if callable(family.window) else _window(fields, family.window, name)
    if window and family.is_causal and not is_causal:  # as many to each side, and the token itself
        window = 2 * window + 1
    if not fields.switch(family.has_windows):
        window = 0
    types = fields.listed("layer_types", str)
    if not types:
        slides = [family.slides(fields, layer) for layer in range(n_layers)]
    elif len(types) != n_layers or not {*types} <= {"full_attention", local}:
        raise InputError(
            f"field 'layer_types': found {len(types)} of {', '.join(sorted({*types}))}; "
            f"expected {n_layers} of full_attention, {local}"
        )
    else:
        slides = [kind == local for kind in types]
    return [window if is_sliding else 0 for is_sliding in slides]


def _t5(fields: _Fields) -> Architecture:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = fields.whole("d_kv", 64)
    n_encoder = fields.whole("num_hidden_layers", largest=_MOST_LAYERS)
    n_decoder = fields.whole("num_decoder_layers", n_encoder, largest=_MOST_LAYERS)
    kind = fields.text("feed_forward_proj", "relu")
    is_gated = kind.startswith("gated")
    ffn = FeedForward(fields.whole("intermediate_size"), is_gated)
    seeing_all = Attention(heads, heads, head_dim, head_dim, is_causal=False)
    decoder = Layers(
        n_decoder, replace(seeing_all, is_causal=True), ffn, cross_attention=seeing_all, norm_vectors=3
    )
    # Encoder and decoder have a final norm each, and in their first layer, or in all, biases of relative
    # positions.
    biases = fields.whole("relative_attention_num_buckets", 32) * heads
    of_layer, outer = (biases, 0) if fields.text("model_type") == "umt5" else (0, biases)
    encoder = Layers(n_encoder, seeing_all, ffn, extra_parameters=of_layer)
    decoder = replace(decoder, extra_parameters=of_layer)
    return Architecture(
        name="",
        family="t5",
        hidden=hidden,
        layers=(encoder, decoder),
        vocab=fields.whole("vocab_size"),
        is_tied=fields.flag("tie_word_embeddings", True),
        extra_parameters=2 * (hidden + outer),
        max_seq=fields.whole("max_position_embeddings", 0, least=0),
        activation="gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-"),
    )


def _vit(fields: _Fields) -> Architecture:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    image, patch = fields.whole("image_size", 224), fields.whole("patch_size", 16)
    if patch > image:
        raise InputError(f"field 'patch_size': found {patch}; expected at most the image size, {image}")
    patches = (image // patch) ** 2
    n_classes = len(fields.part("id2label").table) or fields.whole("num_labels", 0, least=0)
    if not n_classes:
        n_classes = 2
        fields.warn("no labels are stated; counting a head of 2 classes, the default of transformers")
    has_biases, head_dim = fields.flag("qkv_bias", True), _per_head(hidden, heads)
    attention = Attention(heads, heads, head_dim, head_dim, is_causal=False, n_biases=4 if has_biases else 0)
    layers = Layers(
        n_layers=fields.whole("num_hidden_layers", largest=_MOST_LAYERS),
        attention=attention,
        ffn=FeedForward(fields.whole("intermediate_size"), is_gated=False, has_bias=True),
        norm_vectors=4,
        seq=patches + 1,  # the class token comes first
        extra_parameters=0 if has_biases else hidden,  # the output projection keeps its bias
    )
    # Outside layers: class token, bias of the patch embedding, final norm; weights of the patch embedding.
    outer = 4 * hidden + fields.whole("num_channels", 3) * patch**2 * hidden
    return Architecture(
        name="",
        family="vit",
        hidden=hidden,
        layers=(layers,),
        vocab=n_classes,
        head="classes",
        positions=patches + 1,
        extra_parameters=outer + n_classes,
        max_seq=patches + 1,
    )


def _encoder_and_decoder(fields: _Fields, n_biases: int, frames: int = 0) -> tuple[Layers, Layers]:
    """Return the stacks of a model whose fields are stated for encoder and decoder apart."""
    hidden = fields.whole("hidden_size")

    def attention(side: str, is_causal: bool) -> Attention:
        heads = fields.whole(f"{side}_attention_heads")
        head_dim = _per_head(hidden, heads)
        return Attention(heads, heads, head_dim, head_dim, is_causal=is_causal, n_biases=n_biases)

    def ffn(side: str) -> FeedForward:
        return FeedForward(fields.whole(f"{side}_ffn_dim"), is_gated=False, has_bias=True)

    encoder = Layers(
        n_layers=fields.whole("encoder_layers", largest=_MOST_LAYERS),
        attention=attention("encoder", is_causal=False),
        ffn=ffn("encoder"),
        norm_vectors=4,
        seq=frames,
    )
    decoder = Layers(
        n_layers=fields.whole("decoder_layers", largest=_MOST_LAYERS),
        attention=attention("decoder", is_causal=True),
        ffn=ffn("decoder"),
        cross_attention=attention("decoder", is_causal=False),
        norm_vectors=6,
    )
    return encoder, decoder


def _whisper(fields: _Fields) -> Architecture:
    hidden, frames = fields.whole("hidden_size"), fields.whole("max_source_positions", 1500)
    max_seq, n_mels = fields.whole("max_target_positions", 448), fields.whole("num_mel_bins", 80)
    # Two convolutions over three frames with biases, and a final norm each of encoder and decoder.
    convolutions = 3 * hidden * (n_mels + hidden) + 2 * hidden
    return Architecture(
        name="",
        family="whisper",
        hidden=hidden,
        # Keys have no bias; queries, values and outputs have one of the same size each.
        layers=_encoder_and_decoder(fields, 3, frames),
        vocab=fields.whole("vocab_size"),
        is_tied=fields.flag("tie_word_embeddings", True),
        positions=frames + max_seq,
        extra_parameters=convolutions + 4 * hidden,
        max_seq=max_seq,
    )


_BART = {"bart": (2, 2), "mbart": (2, 4), "pegasus": (0, 2), "marian": (0, 0)}
"""Rows of a position table beyond the longest sequence, and vectors of the outer norms, of each stack."""


def _bart(fields: _Fields) -> Architecture:
    hidden, max_seq = fields.whole("hidden_size"), fields.whole("max_position_embeddings", 1024)
    further_rows, norm_vectors = _BART[fields.text("model_type")]
    for name in ("tie_word_embeddings", "share_encoder_decoder_embeddings"):
        if not fields.flag(name, True):
            raise InputError(f"field {name!r}: found False; expected True")
    return Architecture(
        name="",
        family="bart",
        hidden=hidden,
        layers=_encoder_and_decoder(fields, 4),
        vocab=fields.whole("vocab_size"),
        is_tied=True,
        positions=2 * (max_seq + further_rows),
        extra_parameters=2 * norm_vectors * hidden,
        max_seq=max_seq,
        activation=fields.text("hidden_act", ""),
    )


# --- Models with recurrent layers -------------------------------------------------------------------

_EITHER = ("full_attention", "linear_attention")
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers as older files call them."""
_NEMOTRON_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _of_layers(fields: _Fields, layers: Iterable[Layers], is_tied: bool = False) -> Architecture:
    """Build a decoder with a final norm whose layers differ in their parts."""
    hidden = fields.whole("hidden_size")
    return Architecture(
        name="",
        family="",
        hidden=hidden,
        layers=_runs(layers),
        vocab=fields.whole("vocab_size"),
        is_tied=fields.flag("tie_word_embeddings", is_tied),
        extra_parameters=hidden,
        max_seq=fields.whole("max_position_embeddings", 0, least=0),
        activation=fields.text("hidden_act", ""),
    )


def _layer_kinds(
    fields: _Fields, usual: Callable[[int], str] | None, accepted: tuple[str, ...] = _EITHER
) -> list[str]:
    """Return the kind of each layer: as a list states it, or the usual one of its index."""
    lists = {name: fields.listed(name, str) for name in ("layer_types", "layers_block_type")}
    stated = next((name for name, kinds in lists.items() if kinds), None)
    if stated is None and usual is None:
        raise InputError(f"field 'layer_types' is missing; expected a list of {', '.join(accepted)}")
    kinds = [_OLD_KINDS.get(kind, kind) for kind in lists[stated]] if stated else []
    n_layers = fields.whole("num_hidden_layers", len(kinds) or _REQUIRED, largest=_MOST_LAYERS)
    if stated is None and usual is not None:
        return [usual(layer) for layer in range(n_layers)]
    if len(kinds) != n_layers or not {*kinds} <= {*accepted}:
        raise InputError(
            f"field {stated!r}: found {len(kinds)} of {', '.join(sorted({*kinds}))}; "
            f"expected {n_layers} of {', '.join(accepted)}"
        )
    return kinds


def _either(
    has_attention: bool,
    attention: Attention,
    recurrent: Recurrent,
    ffn: FeedForward | Experts,
    extra: int = 0,
) -> Layers:
    """Return a layer with one of two parts before its feed-forward part."""
    if has_attention:
        return Layers(1, attention, ffn, extra_parameters=extra)
    return Layers(1, None, ffn, extra_parameters=extra, recurrent=recurrent)


def _state_space(fields: _Fields, inner: int, heads: int, head_dim: int, has_biases: bool) -> Recurrent:
    """Read the state space of Mamba-2, whose output has a norm."""
    if heads * head_dim != inner:
        raise InputError(
            f"{heads} heads of {head_dim} channels in a state space of {inner:,}; expected as many in all"
        )
    return Recurrent(
        kind="state-space",
        heads=heads,
        head_dim=head_dim,
        state_dim=fields.whole("mamba_d_state"),
        groups=fields.whole("mamba_n_groups"),
        kernel=fields.whole("mamba_d_conv", 4),
        chunk=fields.whole("mamba_chunk_size", 256),
        norm_size=inner,
        has_input_bias=has_biases,
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_output_bias=has_biases,
    )


def _bamba_scan(fields: _Fields, inner: int) -> Recurrent:
    heads, stated = fields.whole("mamba_n_heads"), fields.table.get("mamba_d_head")
    head_dim = inner // heads if stated in (None, "auto") else fields.whole("mamba_d_head")
    return _state_space(fields, inner, heads, head_dim, fields.flag("mamba_proj_bias"))


def _selective(fields: _Fields, inner: int, rank_name: str, bias_name: str, has_norms: bool) -> Recurrent:
    """Read the selective scan of Mamba."""
    state_dim, has_biases = fields.whole("mamba_d_state", 16), fields.flag(bias_name)
    is_auto = fields.table.get(rank_name) in (None, "auto")
    rank = -(-fields.whole("hidden_size") // 16) if is_auto else fields.whole(rank_name)
    return Recurrent(
        kind="selective",
        heads=inner,
        state_dim=state_dim,
        kernel=fields.whole("mamba_d_conv", 4),
        rank=rank,
        norm_size=rank + 2 * state_dim if has_norms else 0,
        has_input_bias=has_biases,
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_output_bias=has_biases,
    )


def _qwen_next(fields: _Fields) -> Architecture:
    family = _Family(n_biases=4, biases=("attention_bias", False), n_norms=2, is_grouped=True, head_dim=256)
    attention = replace(_attention(fields, family, fields.whole("hidden_size")), has_gate=True)
    interval = fields.whole("full_attention_interval", 4)
    kinds = _layer_kinds(fields, lambda layer: _EITHER[(layer + 1) % interval > 0])
    value_dim = fields.whole("linear_value_head_dim")
    recurrent = Recurrent(
        kind="delta",
        heads=fields.whole("linear_num_value_heads"),
        head_dim=value_dim,
        state_dim=fields.whole("linear_key_head_dim"),
        groups=fields.whole("linear_num_key_heads"),
        kernel=fields.whole("linear_conv_kernel_dim", 4),
        chunk=64,  # of flash-linear-attention, and of the operators of transformers
        norm_size=value_dim,
    )
    is_dense = fields.text("model_type") == "qwen3_5_text" or fields.table.get("num_experts") == 0
    layers = []
    for layer, kind in enumerate(kinds):
        ffn, extra = (_dense if is_dense else _qwen_moe)(fields, family, layer)
        layers.append(_either(kind == "full_attention", attention, recurrent, ffn, extra))
    return _of_layers(fields, layers)


def _bamba(fields: _Fields) -> Architecture:
    """Follow Bamba, and Granite 4, whose layers may have experts."""
    hidden = fields.whole("hidden_size")
    attention = _attention(fields, _LLAMA, hidden)
    recurrent = _bamba_scan(fields, fields.whole("mamba_expand", 2) * hidden)
    ffn: FeedForward | Experts
    if fields.text("model_type") == "bamba":
        with_attention = fields.listed("attn_layer_indices", int)
        kinds = _layer_kinds(fields, lambda layer: _EITHER[layer not in with_attention])
        ffn, _ = _dense(fields, _LLAMA, 0)
    else:
        kinds = _layer_kinds(fields, lambda _layer: "linear_attention")
        shared = fields.whole("shared_intermediate_size")
        ffn = FeedForward(shared, is_gated=True)
        if fields.whole("num_experts", least=0):
            ffn, _ = _granite_moe(fields, _LLAMA, 0)
    layers = [_either(kind == "full_attention", attention, recurrent, ffn) for kind in kinds]
    return _of_layers(fields, layers)


def _falcon_h1(fields: _Fields) -> Architecture:
    hidden = fields.whole("hidden_size")
    inner = fields.whole("mamba_expand", 2) * hidden
    if "mamba_d_ssm" not in fields.table or fields.table["mamba_d_ssm"] is not None:
        inner = fields.whole("mamba_d_ssm", 1024)
    recurrent = replace(
        _bamba_scan(fields, inner),
        norm_size=inner if fields.flag("mamba_rms_norm") else 0,
        has_output_bias=fields.flag("projectors_bias"),
    )
    ffn, _ = _dense(fields, _LLAMA, 0)
    n_layers = fields.whole("num_hidden_layers", largest=_MOST_LAYERS)
    attention = _attention(fields, _LLAMA, hidden)
    return _of_layers(fields, [Layers(1, attention, ffn, recurrent=recurrent)] * n_layers)


def _jamba(fields: _Fields) -> Architecture:
    hidden = fields.whole("hidden_size")
    attention = _attention(fields, _Family(), hidden)
    inner = fields.whole("mamba_expand", 2) * hidden
    recurrent = _selective(fields, inner, "mamba_dt_rank", "mamba_proj_bias", has_norms=True)
    every, first = fields.whole("attn_layer_period", 8), fields.whole("attn_layer_offset", 4, least=0)
    sparse_every = fields.whole("expert_layer_period", 2)
    first_sparse = fields.whole("expert_layer_offset", 1, least=0)
    size, n_experts = fields.whole("intermediate_size"), fields.whole("num_experts", 16)
    layers = []
    for layer in range(fields.whole("num_hidden_layers", largest=_MOST_LAYERS)):
        ffn: FeedForward | Experts = FeedForward(size, is_gated=True)
        if n_experts > 1 and layer % sparse_every == first_sparse:
            ffn = Experts(n_experts, fields.whole("num_experts_per_tok", 2), size)
        layers.append(_either(layer % every == first, attention, recurrent, ffn))
    return _of_layers(fields, layers)


def _nemotron_h(fields: _Fields) -> Architecture:
    """Follow Nemotron-H, each of whose layers has one part."""
    for name in ("attention_bias", "moe_latent_size", "sliding_window", "tie_word_embeddings"):
        if fields.table.get(name) not in (None, False):
            raise InputError(f"field {name!r}: found {fields.table[name]!r}; expected it unset")
    hidden = fields.whole("hidden_size")
    if "hybrid_override_pattern" in fields.table and not fields.listed("layers_block_type", str):
        pattern = fields.text("hybrid_override_pattern")
        if not pattern or not {*pattern} <= {*_NEMOTRON_KINDS}:
            raise InputError(
                f"field 'hybrid_override_pattern': found {pattern!r}; "
                f"expected a letter of {' '.join(_NEMOTRON_KINDS)} per layer"
            )
        stated = {**fields.table, "layers_block_type": [_NEMOTRON_KINDS[letter] for letter in pattern]}
        fields = fields.with_table(stated)
    kinds = _layer_kinds(fields, None, tuple(_NEMOTRON_KINDS.values()))
    has_biases, parts = fields.flag("mlp_bias"), dict[str, Layers]()
    if "linear_attention" in kinds:
        heads, head_dim = fields.whole("mamba_num_heads"), fields.whole("mamba_head_dim")
        scan = _state_space(fields, heads * head_dim, heads, head_dim, fields.flag("use_bias"))
        parts["linear_attention"] = Layers(1, norm_vectors=1, recurrent=scan)
    if "full_attention" in kinds:
        parts["full_attention"] = Layers(1, _attention(fields, _Family(), hidden), norm_vectors=1)
    if "mlp" in kinds:
        dense = FeedForward(fields.whole("intermediate_size"), is_gated=False, has_bias=has_biases)
        parts["mlp"] = Layers(1, None, dense, norm_vectors=1)
    if "moe" in kinds:
        experts = Experts(
            n_experts=fields.whole("num_experts"),
            per_token=fields.whole("num_experts_per_tok"),
            size=fields.whole("moe_intermediate_size"),
            shared_size=fields.whole("moe_shared_expert_intermediate_size"),
            is_gated=False,
            n_groups=fields.whole("n_group", 1),
            groups_per_token=fields.whole("topk_group", 1),
        )
        # Selection biases of the router, and biases of what computes every token.
        extra = experts.n_experts + (experts.shared_size + hidden if has_biases else 0)
        parts["moe"] = Layers(1, None, experts, norm_vectors=1, extra_parameters=extra)
    return _of_layers(fields, [parts[kind] for kind in kinds])


def _mamba(fields: _Fields) -> Architecture:
    n_layers = fields.whole("num_hidden_layers", largest=_MOST_LAYERS)
    is_second = fields.text("model_type") == "mamba2"
    inner = fields.whole("mamba_expand", 2) * fields.whole("hidden_size")
    if is_second:
        heads, head_dim = fields.whole("num_heads"), fields.whole("head_dim")
        recurrent = _state_space(fields, inner, heads, head_dim, fields.flag("use_bias"))
    else:
        inner = fields.whole("intermediate_size", inner)
        recurrent = _selective(fields, inner, "time_step_rank", "use_bias", has_norms=False)
    return _of_layers(fields, [Layers(1, norm_vectors=1, recurrent=recurrent)] * n_layers, not is_second)


def _lfm2(fields: _Fields) -> Architecture:
    hidden, is_mixture = fields.whole("hidden_size"), fields.text("model_type") == "lfm2_moe"
    attention = _attention(fields, _Family(n_norms=2, is_grouped=True), hidden)
    has_biases = fields.flag("conv_bias")
    recurrent = Recurrent(
        kind="convolution",
        heads=hidden,
        kernel=fields.whole("conv_L_cache", 3),
        has_input_bias=has_biases,
        has_conv_bias=has_biases,
        has_output_bias=has_biases,
    )
    with_attention = fields.listed("full_attn_idxs", int)
    is_stated = fields.table.get("full_attn_idxs") is not None
    accepted = ("full_attention", "conv")
    kinds = _layer_kinds(
        fields,
        None if is_mixture else lambda layer: accepted[is_stated and layer not in with_attention],
        accepted,
    )
    size = fields.whole("block_ff_dim", fields.whole("intermediate_size", 0, least=0) or _REQUIRED)
    if not is_mixture and fields.flag("block_auto_adjust_ff_dim", True):
        size, multiple = int(2 * size / 3), fields.whole("block_multiple_of", 256)
        _, share = fields.value("block_ffn_dim_multiplier", None, "a number")
        if share is not None:
            if type(share) not in (int, float) or not 0 < share < _MOST_LAYERS:
                raise InputError(
                    f"field 'block_ffn_dim_multiplier': found {share!r}; expected a number above 0"
                )
            size = -(-int(share * size) // multiple) * multiple
    layers = []
    for layer, kind in enumerate(kinds):
        ffn: FeedForward | Experts = FeedForward(size, is_gated=True)
        biases = 0
        if is_mixture and layer >= fields.whole("num_dense_layers", 2, least=0):
            n_experts, per_token = fields.whole("num_experts"), fields.whole("num_experts_per_tok")
            ffn = Experts(n_experts, per_token, fields.whole("moe_intermediate_size"))
            biases = n_experts if fields.flag("use_expert_bias", True) else 0
        layers.append(_either(kind == "full_attention", attention, recurrent, ffn, biases))
    is_tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    return replace(_of_layers(fields, layers), is_tied=is_tied)


_TWO_STACKS = ("t5", "whisper", *_BART)
_READERS: dict[str, Callable[[_Fields], Architecture]] = {
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    **dict.fromkeys(_BART, _bart),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _qwen_next),
    **dict.fromkeys(("bamba", "granitemoehybrid"), _bamba),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _mamba),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
}


# --- Arguments of Megatron-LM -----------------------------------------------------------------------


def _options(text: str) -> dict[str, Any]:
    """Return the values of command-line options; those without a value are true, lists keep their values.

    Options may stand in variables of a script; variables with one word as value are expanded.
    """
    text = re.sub(r"(?m)(^|\s)#.*$", "", text).replace("\\\n", " ")
    text = text.replace("=(", "= ").replace('"', " ").replace("'", " ")
    variables = dict(re.findall(r"(?m)^[ \t]*(?:export +)?(\w+)=([\w.]+)[ \t]*$", text))
    text = re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda match: variables.get(match[1] or match[2], match[0]), text)
    options: dict[str, list[Any]] = {}
    for line in text.splitlines():
        values: list[Any] = []  # words before the first option, such as the name of the script
        for word in line.split():
            if word.startswith("--"):
                name, _, value = word.partition("=")
                values = options.setdefault(name, [])
                values[:] = [_plain(value)] if value else []
            elif word := word[:-1] if word.count(")") > word.count("(") else word:  # end of an array
                values.append(_plain(word))
    plain = {name: values if len(values) > 1 else (values or [True])[0] for name, values in options.items()}
    return {"group_query_attention": False} | _argument_names(plain)  # groups are used with the option only


def _plain(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _argument_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by names with underscores; a table MODEL_ARGS within the file takes precedence."""
    nested = next((table[key] for key in ("MODEL_ARGS", "model") if isinstance(table.get(key), dict)), table)
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in nested.items()}


_OTHER_MODELS: dict[str, tuple[Any, ...]] = {
    "is_hybrid_model": (),
    "hybrid_attention_ratio": (),
    "hybrid_mlp_ratio": (),
    "hybrid_override_pattern": (),
    "hybrid_layer_pattern": (),
    "mamba_state_dim": (128,),
    "mamba_head_dim": (64,),
    "mamba_num_groups": (8,),
    "mamba_num_heads": (),
    "mamba_": (),
    "experimental_attention_variant": (),
    "linear_attention_": (),
    "heterogeneous_layers_config_": (),
    "moe_latent_size": (),
    "decoder_num_layers": (),
    "encoder_num_layers": (),
    "decoder_seq_length": (),
    "vision_pretraining": (),
    "vision_model_type": (),
    "language_model_type": (),
    "freeze_LM": (),
    "freeze_ViT": (),
    "img_h": (224,),
    "img_w": (224,),
    "patch_dim": (16,),
    "retro_add_retriever": (),
    "retro_project_dir": (),
    "ict_head_size": (),
    "biencoder_projection_dim": (0,),
}
"""Arguments of other models than GPT and BERT, with values of files that list the defaults of all arguments.

A name that ends in an underscore stands for all that begin with it.
"""
_SCRIPTS = {"pretrain_gpt": "gpt", "pretrain_bert": "bert"}
_OTHER_SCRIPTS = re.compile(
    "^(multimodal|retro)/|/pretrain_.*(mamba|hybrid|t5|ul2|bert|ict|retro|realm|biencoder|vision|vit|vlm)"
)
_OTHERWISE = (
    "expected a GPT or BERT of Megatron-LM; describe another model by its config.json or our own TOML"
)


def _megatron_kind(text: str, arguments: Mapping[str, Any]) -> str:
    """Return the model that a script trains, ``gpt`` or ``bert``; reject others."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)
    kinds: set[str] = set()
    for word in re.split(r"[\s\"'=();|&]+", text):
        folder, _, script = word.removesuffix(".py").rpartition("/")
        if script in _SCRIPTS and word.endswith(".py"):
            kinds.add(_SCRIPTS[script])
        elif word.endswith(".py") and _OTHER_SCRIPTS.search(f"{folder.rpartition('/')[2]}/{script}"):
            raise InputError(f"script {word!r}: {_OTHERWISE}")
    _reject_other_models(arguments, is_script=True)
    if len(kinds) > 1:
        raise InputError("runs pretrain_gpt.py and pretrain_bert.py; expected one of them")
    return kinds.pop() if kinds else "gpt"


def _reject_other_models(arguments: Mapping[str, Any], is_script: bool) -> None:
    """Reject arguments of Megatron-LM for models other than GPT and BERT."""
    for name, value in arguments.items():
        known = next(
            (key for key in (name, *_PREFIXES) if key in _OTHER_MODELS and name.startswith(key)), None
        )
        if known is None or value in (None, False, 0, "", []):
            continue
        is_usual = value in _OTHER_MODELS[known] or (
            known == "encoder_num_layers" and value == arguments.get("num_layers")
        )
        if is_script or not is_usual:
            written = f"option '--{name.replace('_', '-')}'" if is_script else f"field {name!r}"
            raise InputError(f"{written}: found {value!r}; {_OTHERWISE}")
    spec = arguments.get("spec")
    if spec is not None and spec != "local" and "gpt" not in str(spec):
        raise InputError(f"{'option --spec' if is_script else 'field spec'}: found {spec!r}; {_OTHERWISE}")
    target = str(arguments.get("_target_", "")).rpartition(".")[2]
    if re.search("Mamba|NemotronH|T5|Bert|VL", target):
        raise InputError(f"field '_target_': found {target!r}; {_OTHERWISE}")


_PREFIXES = tuple(name for name in _OTHER_MODELS if name.endswith("_"))


def _megatron(arguments: dict[str, Any], path: Path, kind: str = "gpt") -> Architecture:
    """Follow arguments of Megatron-LM, or fields of its TransformerConfig, with its defaults."""
    fields = _Fields(arguments, path)
    hidden = fields.whole("hidden_size")
    n_layers = fields.whole("num_layers", largest=_MOST_LAYERS)
    has_biases = fields.flag("add_bias_linear", True) and not fields.flag("disable_bias_linear")
    is_gated = any(fields.flag(name) for name in ("swiglu", "quick_geglu", "gated_linear_unit"))
    n_vectors = {"LayerNorm": 2, "RMSNorm": 1}.get(name := fields.text("normalization", "LayerNorm"))
    if n_vectors is None:
        raise InputError(f"field 'normalization': found {name!r}; expected LayerNorm or RMSNorm")
    attention = _megatron_attention(fields, hidden, has_biases, n_vectors)
    gated_default = int(4 * hidden * 2 / 3) // 64 * 64
    size = fields.whole("ffn_hidden_size", gated_default if is_gated else 4 * hidden)
    dense = Layers(1, attention, FeedForward(size, is_gated, has_biases), norm_vectors=2 * n_vectors)
    sparse = dense
    if fields.whole("num_experts", 0, least=0):
        gate = hidden if fields.flag("moe_shared_expert_gate") else 0
        sparse = replace(
            dense, ffn=_megatron_experts(fields, size, is_gated, has_biases), extra_parameters=gate
        )
    is_sparse = _pattern(fields, "moe_layer_freq", n_layers, lambda layer, every: layer % every == 0)
    layers = [
        replace(sparse if has_experts else dense, attention=replace(attention, window=window))
        for has_experts, window in zip(is_sparse, _megatron_windows(fields, n_layers), strict=True)
    ]
    if fields.whole("mtp_num_layers", 0, least=0):
        fields.warn("%s layers that predict further tokens are left out", arguments["mtp_num_layers"])
    if chunk := fields.whole("attention_chunk_size", 0, least=0):
        fields.warn("attention in chunks of %d tokens is counted as attention to all tokens", chunk)
    is_rotary = fields.flag("use_rotary_position_embeddings") or fields.flag("no_position_embedding")
    encoding = "rope" if is_rotary else fields.text("position_embedding_type", "learned_absolute")
    is_learned = encoding == "learned_absolute"
    positions = fields.whole("max_position_embeddings", _REQUIRED if is_learned else 0, 0)
    is_untied = fields.flag("untie_embeddings_and_output_weights")
    is_shared = fields.flag("share_embeddings_and_output_weights", default=True)
    model = Architecture(
        name="",
        family="megatron",
        hidden=hidden,
        layers=_runs(layers),
        vocab=_padded_vocab(fields),
        is_tied=is_shared and not is_untied,
        positions=positions if is_learned else 0,
        extra_parameters=n_vectors * hidden,
        max_seq=fields.whole("seq_length", fields.whole("encoder_seq_length", positions, least=0), least=0),
    )
    return _megatron_bert(fields, model, n_vectors) if kind == "bert" else model


def _megatron_bert(fields: _Fields, model: Architecture, n_vectors: int) -> Architecture:
    """Return the same stack as a BERT: without a causal mask, and with its head."""
    hidden = model.hidden
    # In the head a dense layer with bias and norm, and a bias of the logits. With the sentence-order task
    # two token types, a pooler, and two classes.
    extra = hidden * hidden + (1 + n_vectors) * hidden + model.vocab
    if not fields.flag("bert_no_binary_head") and fields.flag("bert_binary_head", True):
        extra += 2 * hidden + hidden * (hidden + 1) + 2 * (hidden + 1)
    extra_parameters = model.extra_parameters + extra
    return replace(model.with_attention(is_causal=False), head="masked-lm", extra_parameters=extra_parameters)


def _padded_vocab(fields: _Fields) -> int:
    """Return the rows of the embedding, which tensor-parallel ranks divide evenly."""
    padded = fields.whole("padded_vocab_size", 0, least=0)
    if padded:
        return padded
    multiple = fields.whole("make_vocab_size_divisible_by", 128)
    multiple *= fields.whole("tensor_model_parallel_size", 1)
    is_gpt2 = "merge_file" in fields.table and "tokenizer_type" not in fields.table
    is_gpt2 = is_gpt2 or fields.text("tokenizer_type", "") == "GPT2BPETokenizer"
    if is_gpt2 and "vocab_size" not in fields.table:
        fields.warn("no vocab_size is stated; using %s, that of the tokenizer of GPT-2", _GPT2_VOCAB)
    size = fields.whole("vocab_size", _GPT2_VOCAB if is_gpt2 else _REQUIRED)
    return -(-size // multiple) * multiple


def _megatron_attention(fields: _Fields, hidden: int, has_biases: bool, n_vectors: int) -> Attention:
    heads = fields.whole("num_attention_heads")
    has_gate = fields.flag("attention_output_gate")
    if fields.flag("multi_latent_attention"):
        if has_gate:
            raise InputError(
                "field 'attention_output_gate': found True; expected False with multi_latent_attention"
            )
        latent = Latent(
            query_rank=fields.whole("q_lora_rank", 0, least=0),
            kv_rank=fields.whole("kv_lora_rank", 32),
            rope_dim=fields.whole("qk_pos_emb_head_dim", 64),
        )
        head_dim = fields.whole("qk_head_dim", 128) + latent.rope_dim
        return Attention(heads, heads, head_dim, fields.whole("v_head_dim", 128), latent=latent)
    is_grouped = fields.flag("group_query_attention", "num_query_groups" in fields.table)
    kv_heads = fields.whole("num_query_groups", 1) if is_grouped else heads
    kv_heads = heads if fields.table.get("num_query_groups", 1) is None else kv_heads
    stated = fields.whole("kv_channels", 0, least=0)
    head_dim = stated or _per_head(hidden, heads)
    n_biases = 4 if has_biases else 3 if fields.flag("add_qkv_bias") else 0
    n_norms = 2 * n_vectors if fields.flag("qk_layernorm") else 0
    return Attention(
        heads, kv_heads, head_dim, head_dim, n_biases=n_biases, n_norms=n_norms, has_gate=has_gate
    )


def _megatron_experts(fields: _Fields, size: int, is_gated: bool, has_biases: bool) -> Experts:
    _, capacity = fields.value("moe_expert_capacity_factor", 0, "a number")
    if type(capacity) not in (int, float) or not math.isfinite(capacity):
        raise InputError(f"field 'moe_expert_capacity_factor': found {capacity!r}; expected a number")
    # Groups limit nothing unless it is stated how many of them a token has.
    groups_per_token = fields.whole("moe_router_group_topk", 0, least=0)
    return Experts(
        n_experts=fields.whole("num_experts"),
        per_token=fields.whole("moe_router_topk", 2),
        size=fields.whole("moe_ffn_hidden_size", size),
        shared_size=fields.whole("moe_shared_expert_intermediate_size", 0, least=0),
        is_gated=is_gated,
        has_bias=has_biases,
        capacity=max(0.0, float(capacity)),  # Megatron-LM takes a negative factor for none
        n_groups=fields.whole("moe_router_num_groups") if groups_per_token else 1,
        groups_per_token=groups_per_token or 1,
    )


_MOST_DIGITS = 16  # of a side of a window, with its sign


def _megatron_windows(fields: _Fields, n_layers: int) -> list[int]:
    _, stated = fields.value("window_size", None, "two whole numbers")
    if stated is None:
        return [0] * n_layers
    words = re.findall(r"-?\d+", str(stated))
    sides = [int(side) for side in words if len(side) <= _MOST_DIGITS]
    if len(sides) != 2 or len(words) != 2:
        raise InputError(f"field 'window_size': found {stated!r}; expected two whole numbers, as in '127,0'")
    window = sides[0] + 1 if sides[0] >= 0 else 0  # the token itself counts
    slides = _pattern(fields, "window_attn_skip_freq", n_layers, lambda layer, every: (layer + 1) % every > 0)
    is_everywhere = fields.table.get("window_attn_skip_freq") is None
    return [window if is_everywhere or is_sliding else 0 for is_sliding in slides]


def _pattern(fields: _Fields, name: str, n_layers: int, rule: Callable[[int, int], bool]) -> list[bool]:
    """Return which layers a field picks: an interval, or a list of 0 and 1, as in ``([0]*3+[1]*58)``."""
    expected = f"a whole number >= 1, or a list of 0 and 1 for {n_layers} layers, as in '([0]*3+[1]*58)'"
    _, value = fields.value(name, 1, expected)
    if type(value) is int and value >= 1:
        return [rule(layer, value) for layer in range(n_layers)]
    text = re.sub(r"[\s()]", "", str(value))
    picks: list[bool] = []
    if re.fullmatch(r"\[[01](,[01])*\](\*\d{1,5})?(\+\[[01](,[01])*\](\*\d{1,5})?)*", text):
        for entries, times in re.findall(r"\[([01,]+)\](?:\*(\d+))?", text):
            if len(picks) <= n_layers:  # not beyond: a short text may stand for any number
                picks += [entry == "1" for entry in entries.split(",")] * min(int(times or 1), n_layers + 1)
    if len(picks) != n_layers:
        raise InputError(f"field {name!r}: found {value!r}; expected {expected}")
    return picks


# --- torchtitan and our own format ------------------------------------------------------------------

_TITAN_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_TITAN_FLAVORS = {
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
"""Flavors of llama3 (torchtitan, ``torchtitan/models/llama3/__init__.py``; Dubey et al. 2024, table 3)."""


def _torchtitan(table: dict[str, Any], path: Path) -> Architecture:
    fields = _Fields(table, path)
    model_fields = fields.part("model")
    name, flavor = model_fields.text("name"), model_fields.text("flavor")
    if name != "llama3":
        raise unknown_name("name of a torchtitan model", name, ["llama3"])
    if flavor not in _TITAN_FLAVORS:
        raise unknown_name("flavor of llama3", flavor, _TITAN_FLAVORS)
    shared = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
    sizes = dict(zip(_TITAN_SIZES, _TITAN_FLAVORS[flavor], strict=True))
    seq = fields.part("training").whole("seq_len", 0, least=0)
    model = _hugging_face(shared | sizes, path)
    return replace(model, name=f"{name}-{flavor}", max_seq=seq)


def _from_table(kind: type, table: Any, where: str) -> Any:
    """Build a value from the table of its fields; ``where`` is the path of the table in the file."""
    label = where or "the file"
    if not isinstance(table, dict):
        raise InputError(f"{label}: found {table!r}; expected a table of fields")
    if kind is FeedForward and "n_experts" in table:
        kind = Experts
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    values: dict[str, Any] = {}
    for name, value in table.items():
        place = f"{where}.{name}" if where else name
        if name not in fields:
            raise UnknownNameError(f"{label}: {unknown_name('field', name, fields)}")
        if name == "layers":
            if not isinstance(value, list):
                raise InputError(f"layers: found {value!r}; expected tables [[layers]]")
            values[name] = tuple(_from_table(Layers, run, f"layers[{n}]") for n, run in enumerate(value, 1))
        elif name in _NESTED:
            values[name] = _from_table(_NESTED[name], value, place)
        else:
            values[name] = _checked_value(fields[name].type, value, place)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise InputError(f"{label}: field {name!r} is missing; expected {', '.join(fields)}")
    try:
        return kind(**values)
    except InputError as wrong:
        raise InputError(f"{label}: {wrong}") from None


_NESTED = {
    "attention": Attention,
    "cross_attention": Attention,
    "latent": Latent,
    "ffn": FeedForward,
    "recurrent": Recurrent,
}


def _checked_value(kind: Any, value: Any, place: str) -> Any:
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (HeadKind, RecurrentKind) and value in get_args(kind):
        return value
    if kind in (bool, int, str) and type(value) is kind:
        if kind is int and abs(value) > _LARGEST_COUNT * 10_000:
            raise InputError(f"{place}: found {value!r}; expected at most {_LARGEST_COUNT * 10_000:,}")
        return value
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    raise InputError(f"{place}: found {value!r}; expected {expected.get(kind) or ', '.join(get_args(kind))}")
