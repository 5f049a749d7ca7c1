"""Schedule library: options and schedules of the model families of the zoo."""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.arguments import check_kind
from makespan.slapo.errors import (
    ArgumentError,
    KindError,
    ScheduleError,
    ShardError,
    TracingError,
    close_names,
    short_repr,
)
from makespan.slapo.graphs import TracedModule
from makespan.slapo.patterns import call_module
from makespan.slapo.pipelining import default_cuts
from makespan.slapo.recomputing import select_layers
from makespan.slapo.schedule import Schedule, Snapshot, create_schedule

# --- Options, and modules that schedules insert ---

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ATTENTIONS = ("eager", "sdpa")
_POLICIES = ("even", "head")


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options of the schedule of a family.

    Parameters
    ----------
    dtype
        Type of parameters: ``fp32``, ``fp16`` or ``bf16``; None to keep their types.
    ckpt_ratio, ckpt_policy
        Share of the layers that are recomputed, and their choice: spread (``even``) or the first (``head``).
    shard_embedding
        Split vocabulary and logits.
    attn
        ``eager`` for the attention of the model, ``sdpa`` for one kernel.
    fuse, compiler
        Fuse element-wise operations, and the compiler for them, see the primitive ``fuse``.
    pipeline_cuts
        Number of stages with nearly equal numbers of layers, or paths of modules after which a stage ends.
    group
        Processes of tensor parallelism, as for `create_schedule`.
    prefix
        Path of the model in a larger one.
    broadcast_input
        Broadcast the samples of the first process to all processes of the group.
    """

    dtype: str | None = None
    ckpt_ratio: float = 0.0
    ckpt_policy: str = "even"
    shard_embedding: bool = False
    attn: str = "eager"
    fuse: bool = False
    compiler: str | None = "inductor"
    pipeline_cuts: int | Sequence[str] = 1
    group: dist.ProcessGroup | None = None
    prefix: str = ""
    broadcast_input: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ScheduleOptions":
        """Return options after checks of their names and values."""
        names = [option.name for option in fields(cls)]
        for name in options:
            if name not in names:
                raise ArgumentError(f"apply_schedule: no option {name!r}; {close_names(name, names)}")
        chosen = cls(**options)
        for name, accepted in (("dtype", _DTYPES), ("attn", _ATTENTIONS), ("ckpt_policy", _POLICIES)):
            value = getattr(chosen, name)
            if value not in (None, *accepted) or (value is None and name != "dtype"):
                raise ArgumentError(
                    f"apply_schedule: {name} is {value!r}; expected one of {', '.join(accepted)}"
                )
        if chosen.broadcast_input and chosen.pipeline_cuts != 1:
            raise ArgumentError(
                "apply_schedule: broadcast_input and pipeline_cuts exclude each other, since stages do not "
                "run the hooks of the whole model"
            )
        ratio: Any = chosen.ckpt_ratio
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise ArgumentError(f"apply_schedule: ckpt_ratio is {ratio!r}; expected a number from 0 to 1")
        for name, kind in get_type_hints(cls).items():
            check_kind(f"apply_schedule: {name}", getattr(chosen, name), kind, ArgumentError)
        return chosen

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Type of the parameters, None to keep their types."""
        return None if self.dtype is None else _DTYPES[self.dtype]


class EfficientAttention(nn.Module):
    """Attention in one kernel.

    Parameters
    ----------
    dropout
        Probability with which an attention weight is dropped in training.
    scale
        Factor of the scores.
    """

    def __init__(self, dropout: float, scale: float) -> None:
        super().__init__()
        self.p, self.scale = dropout, scale

    def extra_repr(self) -> str:
        """Return the text that a printed schedule shows."""
        return f"dropout={self.p}, scale={self.scale}"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attend for queries of shape ``(n, heads, seq, size)``; ``mask`` is added to the scaled scores."""
        rate = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=rate, scale=self.scale
        )


class BroadcastInputs:
    """A hook that broadcasts the inputs of a module from the first process of a group."""

    with_kwargs = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return copies of the inputs of the first process."""
        group = self.group if self.group is not None else dist.group.WORLD
        source = 0 if group is None else dist.get_global_rank(group, 0)

        def sent(value: Tensor) -> Tensor:
            copied = value.clone()
            with torch.no_grad():  # gradients flow as if the values had been equal
                dist.broadcast(copied, source, group=self.group)
            return copied

        return pytree.tree_map_only(Tensor, sent, (args, kwargs))


# --- Schedules of the families ---
#
# All follow the same order: split the vocabulary, split attention and feed-forward part by heads, insert
# efficient kernels, broadcast inputs, recompute layers, cut stages. Steps take nodes of a schedule and are
# independent of the family. Each schedule is complete in itself, like a listing of the paper, since its lines
# are counted: schedules of two families may repeat each other.


def schedule_bert(sch: Schedule, options: ScheduleOptions) -> None:
    """Schedule BERT."""
    split_vocabulary(sch["bert.embeddings.word_embeddings"], sch["cls.predictions.decoder"], options)
    layers = elements(sch, "bert.encoder.layer")
    for layer in layers:
        split_attention(layer["attention.self"], ("query", "key", "value"), "dropout", options)
        split_rows(layer["attention.output.dense"])
        split_columns(layer["intermediate.dense"])
        layer["intermediate.dense"].sync("bwd_post", "all_reduce")
        split_rows(layer["output.dense"])
        fuse_all(layer["intermediate"], bias_gelu, options, "dense")
        fuse_all(layer["attention.output"], bias_dropout_norm, options, "dense")
        fuse_all(layer["output"], bias_dropout_norm, options, "dense")
    finish(sch, layers, options)


def schedule_roberta(sch: Schedule, options: ScheduleOptions) -> None:
    """Schedule RoBERTa."""
    split_vocabulary(sch["roberta.embeddings.word_embeddings"], sch["lm_head.decoder"], options)
    layers = elements(sch, "roberta.encoder.layer")
    for layer in layers:
        split_attention(layer["attention.self"], ("query", "key", "value"), "dropout", options)
        split_rows(layer["attention.output.dense"])
        split_columns(layer["intermediate.dense"])
        layer["intermediate.dense"].sync("bwd_post", "all_reduce")
        split_rows(layer["output.dense"])
        fuse_all(layer["intermediate"], bias_gelu, options, "dense")
        fuse_all(layer["attention.output"], bias_dropout_norm, options, "dense")
        fuse_all(layer["output"], bias_dropout_norm, options, "dense")
    finish(sch, layers, options)


def schedule_albert(sch: Schedule, options: ScheduleOptions) -> None:
    """Schedule ALBERT; all its layers are one module."""
    split_vocabulary(sch["albert.embeddings.word_embeddings"], sch["predictions.decoder"], options)
    layers = elements(sch, "albert.encoder.albert_layer_groups.0.albert_layers")
    for layer in layers:
        names = ("query", "key", "value")
        split_attention(layer["attention"], names, "attention_dropout", options, apart=True)
        split_rows(layer["attention.dense"])
        split_columns(layer["ffn"])
        layer["ffn"].sync("bwd_post", "all_reduce")
        split_rows(layer["ffn_output"])
        fuse_all(layer, bias_tanh_gelu, options, "ffn")
    finish(sch, layers, options)


def schedule_gpt(sch: Schedule, options: ScheduleOptions) -> None:
    """Schedule GPT."""
    split_vocabulary(sch["transformer.wte"], sch["lm_head"], options)
    layers = elements(sch, "transformer.h")
    for layer in layers:
        attention = layer["attn.attention"]
        split_attention(attention, ("q_proj", "k_proj", "v_proj"), "attn_dropout", options, scaled=False)
        split_rows(attention["out_proj"])
        split_columns(layer["mlp.c_fc"])
        layer["mlp.c_fc"].sync("bwd_post", "all_reduce")
        split_rows(layer["mlp.c_proj"])
        fuse_all(layer["mlp"], bias_tanh_gelu, options, "c_fc")
    finish(sch, layers, options)


def schedule_opt(sch: Schedule, options: ScheduleOptions) -> None:
    """Schedule OPT."""
    split_vocabulary(sch["model.decoder.embed_tokens"], sch["lm_head"], options)
    layers = elements(sch, "model.decoder.layers")
    for layer in layers:
        split_attention(layer["self_attn"], ("q_proj", "k_proj", "v_proj"), "attn_dropout", options)
        split_rows(layer["self_attn.out_proj"])
        split_columns(layer["fc1"])
        layer["fc1"].sync("bwd_post", "all_reduce")
        split_rows(layer["fc2"])
        fuse_all(layer, bias_relu, options, "fc1")
    finish(sch, layers, options)


def schedule_llama(sch: Schedule, options: ScheduleOptions) -> None:
    """Schedule LLaMA."""
    split_vocabulary(sch["model.embed_tokens"], sch["lm_head"], options)
    layers = elements(sch, "model.layers")
    for layer in layers:
        names, heads = ("q_proj", "k_proj", "v_proj"), ("num_heads", "num_kv_heads")
        split_attention(layer["self_attn"], names, "attn_dropout", options, heads)
        split_rows(layer["self_attn.o_proj"])
        split_columns(layer["mlp.gate_proj"], layer["mlp.up_proj"])
        layer["mlp"].sync("bwd_post", "all_reduce")
        split_rows(layer["mlp.down_proj"])
        fuse_all(layer["mlp"], gated, options)
    finish(sch, layers, options)


def schedule_t5(sch: Schedule, options: ScheduleOptions) -> None:
    """Schedule T5; the tables of relative positions are split with the heads."""
    split_vocabulary(sch["shared"], sch["lm_head"], options)
    layers = elements(sch, "encoder.block") + elements(sch, "decoder.block")
    for stack in ("encoder", "decoder"):
        sch[f"{stack}.position_bias.relative_attention_bias"].shard("weight", axis=1)
    parts = [part for layer in layers for part in elements(layer, "layer")]
    for node in [node for part in parts for name, node in part.child.items() if name.endswith("Attention")]:
        split_attention(node, ("q", "k", "v"), "attn_dropout", options, scaled=False, apart=True)
        split_rows(node["o"])
    for mlp in [part["DenseReluDense"] for part in parts if "DenseReluDense" in part]:
        split_columns(mlp["wi"])
        mlp["wi"].sync("bwd_post", "all_reduce")
        split_rows(mlp["wo"])
        draw_apart(mlp["dropout"])
    for part in parts:
        fuse_all(part, dropout_sum, options)
    finish(sch, layers, options)


def schedule_wideresnet(sch: Schedule, options: ScheduleOptions) -> None:
    """Schedule WideResNet: the first convolution of a bottleneck by outputs, the second by inputs."""
    layers = [block for part in range(1, 5) for block in elements(sch, f"layer{part}")]
    for block in layers:
        split_columns(block["conv1"])
        block["conv1"].sync("bwd_post", "all_reduce")
        block["bn1"].shard(["weight", "bias", "running_mean", "running_var"], axis=0)
        split_rows(block["conv2"])
        split_columns(block["conv3"])
        block["conv3"].sync("bwd_post", "all_reduce")
        block["conv3"].sync("fwd_post", "all_gather", axis=1, tensor_parallel_output_grad=False)
        fuse_all(block, sum_relu, options)
    finish(sch, layers, options)


SCHEDULES: Mapping[str, Callable[[Schedule, ScheduleOptions], None]] = {
    "bert": schedule_bert,
    "roberta": schedule_roberta,
    "albert": schedule_albert,
    "gpt": schedule_gpt,
    "opt": schedule_opt,
    "t5": schedule_t5,
    "llama": schedule_llama,
    "wideresnet": schedule_wideresnet,
}
"""The schedule of each family."""


def apply_schedule(model: nn.Module | Schedule, family: str, **options: Any) -> Schedule:
    """Schedule a model of the zoo, or one with the same structure and names.

    Parameters
    ----------
    model
        The model, or its schedule, which is extended.
    family
        Name of the schedule, a key of `SCHEDULES`.
    **options
        Options of `ScheduleOptions`.

    Returns
    -------
    Schedule
        The schedule of the whole model.

    Raises
    ------
    ArgumentError
        The family or an option is unknown, or a value is rejected; also a `ValueError`.
    ScheduleError
        The model is not built like the family, or a primitive rejects it; the message names the module. Model
        and schedule have not changed.

    References
    ----------
    Slapo, section 5, the schedules behind the end-to-end results.
    """
    if family not in tuple(SCHEDULES):
        raise ArgumentError(
            f"apply_schedule: unknown family {family!r}; expected one of {', '.join(SCHEDULES)}"
        )
    chosen = ScheduleOptions.of(options)
    if isinstance(model, Schedule) and chosen.group not in (None, model.group):
        raise ArgumentError(
            "apply_schedule: group differs from that of the schedule; pass group only with a module"
        )
    sch = model if isinstance(model, Schedule) else create_schedule(model, group=chosen.group)
    node = sch[chosen.prefix]
    with undone_on_error(sch):
        try:
            SCHEDULES[family](node, chosen)
            node.mod.to(dtype=chosen.torch_dtype)
        except ScheduleError:
            raise
        except Exception as error:
            raise KindError(
                f"apply_schedule: {type(node.mod).__name__} is not built like a {family!r} of the zoo: "
                f"{type(error).__name__}: {short_repr(error)}; expected a model of that family, or one with "
                "the same names; the model has not changed"
            ) from error
    return sch


@contextmanager
def undone_on_error(sch: Schedule) -> Iterator[None]:
    """Restore model and schedule, graphs included, if the steps of a block raise an error."""
    before = Snapshot(sch.root)
    traced = [module for module in sch.root.mod.modules() if isinstance(module, TracedModule)]
    graphs = [(module, copy.deepcopy(module.graph)) for module in traced]
    was_collecting = gc.isenabled()
    gc.disable()  # thousands of nodes of graphs are created and kept: to look for garbage takes half the time
    try:
        yield
    except BaseException:
        before.restore()
        for module, graph in graphs:  # steps may have changed graphs in place
            module.graph = graph
        raise
    finally:
        if was_collecting:
            gc.enable()


# --- Steps that families share ---


def elements(sch: Schedule, path: str) -> list[Schedule]:
    """Return the elements of a list, or of a sequence, in order."""
    owner, _, name = path.rpartition(".")
    nodes = [node for key, node in sch[owner].child.items() if key.rpartition(".")[0] == name]
    return nodes or list(sch[path].child.values())


def split_columns(*nodes: Schedule) -> None:
    """Split layers by their outputs."""
    for node in nodes:
        node.shard([name for name, _ in node.mod.named_parameters(recurse=False)], axis=0)


def split_rows(node: Schedule) -> None:
    """Split a layer by its inputs, and sum its output over the processes."""
    node.shard("weight", axis=1)
    node.sync("fwd_post", "all_reduce")


def split_vocabulary(table: Schedule, head: Schedule, options: ScheduleOptions) -> None:
    """Split an embedding by tokens, and the head with it; logits are gathered."""
    if options.shard_embedding:
        table.shard("weight", axis=0)
        table.sync("fwd_post", "all_reduce")
        split_columns(head)
        head.sync("bwd_post", "all_reduce")
        head.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)


def split_attention(
    node: Schedule,
    projections: Sequence[str],
    dropout: str,
    options: ScheduleOptions,
    heads: Sequence[str] = ("num_heads",),
    scaled: bool = True,
    apart: bool = False,
) -> None:
    """Split projections by heads, set the number of heads per process, and insert an efficient kernel.

    Gradients are summed before the attention, or with ``apart`` before each projection, if other layers read
    its inputs.
    """
    for name in heads:
        if (number := getattr(node.mod, name)) % node.world_size:
            raise ShardError(
                f"schedule of {node.path!r}: {name} is {number}; expected a multiple of the "
                f"{node.world_size} processes"
            )
    split_columns(*(node[name] for name in projections))
    for entry in projections if apart else ("",):
        node[entry].sync("bwd_post", "all_reduce")
    for name in heads:
        node.set_attr(**{name: getattr(node.mod, name) // node.world_size})
    draw_apart(attend_efficiently(node, dropout, scaled) if options.attn == "sdpa" else node[dropout])


def attend_efficiently(node: Schedule, dropout: str, scaled: bool) -> Schedule:
    """Replace attention of several operations by one kernel; return its node."""
    attending: Any = node.mod
    dropping: Any = node[dropout].mod
    scale: float = attending.head_size**-0.5 if scaled else 1.0

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2))
        shares = F.softmax((scores * scale if scaled else scores) + mask, dim=-1)
        return torch.matmul(F.dropout(shares), value)

    kernel = EfficientAttention(dropping.p, scale)
    node.replace(kernel, only_match(node, attention))
    return next(child for child in node.child.values() if child.mod is kernel)


def draw_apart(dropout: Schedule) -> None:
    """Make dropout of split activations draw different numbers in each process."""
    if dropout.world_size > 1:
        dropout.fork_rng()


def only_match(node: Schedule, pattern: Callable[..., Any]) -> Any:
    """Return the only match of a pattern; raise a `TracingError` if there are several or none."""
    matches = node.find(pattern)
    if len(matches) != 1:
        raise TracingError(
            f"schedule of {node.path!r}: {pattern.__name__} matches {len(matches)} times; expected one match"
        )
    return matches[0]


def fuse_all(node: Schedule, pattern: Callable[..., Any], options: ScheduleOptions, *decomposed: str) -> None:
    """Decompose layers so that a pattern can include their biases, and fuse the match of the pattern."""
    if options.fuse:
        for name in decomposed:
            node[name].decompose()
        node.fuse(only_match(node, pattern), compiler=options.compiler)


def finish(sch: Schedule, layers: Sequence[Schedule], options: ScheduleOptions) -> None:
    """Broadcast inputs, recompute some of the layers, and cut stages between layers."""
    if options.broadcast_input and sch.world_size > 1:
        sch.sync("fwd_pre", BroadcastInputs(sch.group))
    for index in select_layers(len(layers), options.ckpt_ratio, options.ckpt_policy):
        layers[index].checkpoint()
    cuts = options.pipeline_cuts
    if isinstance(cuts, int):
        cuts = [layers[index].path for index in default_cuts(len(layers), cuts)]
    owners = [sch.root[path].parent for path in cuts]
    if owners:
        sch.root.trace_until(list(dict.fromkeys(owner.path for owner in owners if owner is not None)))
    for path in cuts:
        sch.root[path].cut_pipeline_stage()


# --- Patterns to fuse ---


def bias_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """Match GELU of a product and its bias."""
    return F.gelu(product + bias)


def bias_tanh_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """Match GELU of a product and its bias, approximated by tanh."""
    return F.gelu(product + bias, approximate="tanh")


def bias_relu(product: Tensor, bias: Tensor) -> Tensor:
    """Match ReLU of a product and its bias."""
    return F.relu(product + bias)


def bias_dropout_norm(product: Tensor, bias: Tensor, residual: Tensor) -> Any:
    """Match bias, dropout, residual and norm after a product."""
    return call_module("LayerNorm", F.dropout(product + bias) + residual)


def gated(gate: Tensor, raised: Tensor) -> Tensor:
    """Match the product of a SiLU gate and its input."""
    return F.silu(gate) * raised


def dropout_sum(residual: Tensor, output: Tensor) -> Tensor:
    """Match the end of a part without biases."""
    return residual + F.dropout(output)


def sum_relu(found: Tensor, past: Tensor) -> Tensor:
    """Match the end of a bottleneck."""
    return F.relu(found + past)
