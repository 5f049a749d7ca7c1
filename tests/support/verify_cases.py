"""Schedules that are right, and schedules that are wrong in one place; each process calls every function."""

import re

import parallel_cases
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from makespan.slapo import ConflictError, VerificationError, Verify, create_schedule

HIDDEN, HEADS, WORDS = 16, 4, 32


class Doubled(torch.autograd.Function):
    """The same value, and twice its gradient."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Attention(nn.Module):
    """Attention whose queries, keys and values are one matrix."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.qkv, self.output = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden):
        size = HIDDEN // HEADS
        query, key, value = (
            one.unflatten(-1, (self.heads, size)).transpose(1, 2) for one in self.qkv(hidden).chunk(3, -1)
        )
        mixed = (query @ key.transpose(2, 3) / size**0.5).softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden):
        return self.down(F.gelu(self.up(hidden)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, hidden):
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class Model(nn.Module):
    """Two layers between an embedding and a head that share their table; biases are zero."""

    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, HIDDEN), nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)
        self.head.weight = self.words.weight
        for one in self.modules():
            if isinstance(one, nn.Linear) and one.bias is not None:
                nn.init.zeros_(one.bias)

    def forward(self, ids):
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def shard(sch, *left_out, groups=3):
    """Shard all layers, but for the calls that are left out."""
    steps = {
        "qkv": lambda layer: layer["attention.qkv"].shard(["weight", "bias"], 0, groups=groups),
        "heads": lambda layer: layer["attention"].set_attr(heads=HEADS // sch.world_size),
        "attention backward": lambda layer: layer["attention"].sync("bwd_post", "all_reduce"),
        "output": lambda layer: layer["attention.output"].shard("weight", 1),
        "output forward": lambda layer: layer["attention.output"].sync("fwd_post", "all_reduce"),
        "up": lambda layer: layer["mlp.up"].shard(["weight", "bias"], 0),
        "up backward": lambda layer: layer["mlp.up"].sync("bwd_post", "all_reduce"),
        "down": lambda layer: layer["mlp.down"].shard("weight", 1),
        "down forward": lambda layer: layer["mlp.down"].sync("fwd_post", "all_reduce"),
    }
    for number in range(2):
        for name, step in steps.items():
            if f"{number} {name}" not in left_out:
                step(sch[f"layers.{number}"])


def shard_vocabulary(sch):
    sch["words"].shard("weight", 0)
    sch["words"].sync("fwd_post", "all_reduce")
    sch["head"].shard("weight", 0)
    sch["head"].sync("bwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)


def ids(generator):
    return torch.randint(WORDS, (2, 5), generator=generator)


def model(seed=0):
    torch.manual_seed(seed)
    return Model()


def refused(sch, *patterns, inputs=ids, change, **options):
    """Verify a change that is wrong; every process gets the same report, in which all patterns are found."""
    with pytest.raises(VerificationError) as caught, Verify(sch, inputs, **options) as check:
        change(sch)
    text = str(caught.value)
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"
    if dist.is_initialized():
        texts = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        assert len(set(texts)) == 1
    return check.report


def sound():
    """What is right agrees, from weights that every process has drawn for itself."""
    rank = dist.get_rank()
    sch = create_schedule(model(seed=rank))
    before = {name: one.clone() for name, one in sch.mod.named_parameters()}
    state = torch.get_rng_state()
    with Verify(sch, ids) as check:
        shard(sch)
        shard_vocabulary(sch)
    report = check.report
    assert report.is_equal and not report.divergences and not report.not_compared, str(report)
    assert report.count("parameter gradient") == len(before)
    assert torch.equal(state, torch.get_rng_state())
    assert sch.mod.training and all(one.grad is None for one in sch.mod.parameters())
    if dist.get_world_size() > 1:
        assert "differ between processes" in str(report)
    for name, one in sch.mod.named_parameters():  # the model keeps what it had drawn
        kept = one.shard.part_of(before[name]) if hasattr(one, "shard") else before[name]
        assert torch.equal(one, kept)
        assert not any(tag.startswith("makespan") for tag in vars(one))


def part_by_part():
    """A second block starts from a model that is sharded already."""
    sch = create_schedule(model())
    with Verify(sch, ids):
        shard(sch)
    with Verify(sch, ids) as check:
        shard_vocabulary(sch)
    assert check.report.is_equal
    refused(sch, "'head'", change=lambda sch: sch["head"].replace(nn.Linear(HIDDEN, WORDS // sch.world_size)))


def missing_backward_sync():
    sch = create_schedule(model())
    report = refused(
        sch,
        r"last input gradient that differs: 'layers\.1\.mlp\.up' \(Linear\)",
        r"last step there: shard\(tensor_name=\['weight', 'bias'\], axis=0\) at 'layers\.1\.mlp\.up';"
        r" the processes have summands of .*: sync\('bwd_post', 'all_reduce'\) is missing there or above",
        change=lambda sch: shard(sch, "1 up backward"),
    )
    assert report.largest("output")[1] < 1e-5  # nobody would see it in the outputs
    assert {one.kind for one in report.divergences} == {"input gradient"}
    refused(
        create_schedule(model()),
        r"'layers\.0\.attention",
        change=lambda sch: shard(sch, "0 attention backward"),
    )


def missing_forward_sync():
    refused(
        create_schedule(model()),
        r"first output that differs: 'layers\.0\.mlp\.down'.*'fwd_post', 'all_reduce'\) is missing there\n",
        change=lambda sch: shard(sch, "0 down forward"),
    )


def missing_sync_of_parameters():
    """A norm that sees a part of the sequence has a part of the gradient."""

    def change(sch):
        sch.sync("fwd_pre", "RR->SR")
        for layer in ("layers.0", "layers.1"):
            sch[f"{layer}.up"].shard(["weight", "bias"], 0)
            sch[f"{layer}.up"].sync("fwd_pre", "all_gather", axis=1)
            sch[f"{layer}.down"].shard("weight", 1)
            sch[f"{layer}.down"].sync("fwd_post", "reduce_scatter", axis=1)
        sch["layers.0.norm"].sync("bwd_post", "all_reduce", on="parameters")
        sch["last"].sync("fwd_pre", "SR->RR")

    torch.manual_seed(0)
    refused(
        create_schedule(parallel_cases.Stack()),
        r"parameter gradient layers\.1\.norm\.weight",
        r"first parameter gradient that differs: 'layers\.1\.norm'.*on='parameters'\) is missing",
        inputs=(torch.randn(2, 4, parallel_cases.HIDDEN),),
        change=change,
    )


def wrong_axis():
    """An output matrix that is cut along the other axis does not fit what it gets."""

    def change(sch):
        shard(sch, "1 output", "1 output forward")
        sch["layers.1.attention.output"].shard(["weight", "bias"], 0)
        sch["layers.1.attention.output"].sync("fwd_post", "all_gather")

    refused(
        create_schedule(model()),
        "the scheduled model raises RuntimeError",
        r"the error was raised in: 'layers\.1\.attention\.output'",
        r"sync\(mode='fwd_post', sync_op_or_fn='all_gather'\) at 'layers\.1\.attention\.output'",
        change=change,
    )


def wrong_axis_of_a_hook():
    """A user's own exchange that joins the parts in another order has the right shape."""

    def gather(module, args, output):
        parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, output.contiguous())
        return torch.stack(parts, -1).flatten(-2)

    def change(sch):
        sch["head"].shard("weight", 0)
        sch["head"].sync("fwd_post", gather)

    refused(create_schedule(model()), "first output that differs: 'head'", change=change)


def wrong_partition_of_qkv():
    refused(
        create_schedule(model()),
        r"first output that differs: 'layers\.0\.attention\.",
        r"at 'layers\.0\.attention",
        change=lambda sch: shard(sch, groups=1),
    )


def double_scaling():
    """A bias that every process adds before the sum comes in more than once."""

    def change(sch):
        shard(sch, "0 down forward")
        down = sch["layers.0.mlp.down"]

        def everywhere(module, args, output):
            total = output + 0
            dist.all_reduce(total)
            return total

        down.sync("fwd_post", everywhere)

    refused(create_schedule(model()), r"first output that differs: 'layers\.0\.mlp\.down'", change=change)


def other_steps():
    """Processes with other schedules are told so, and none of them waits for the others."""

    def change(sch):
        sch["layers.0.mlp"].checkpoint()
        sch["layers.1.mlp" if dist.get_rank() else "layers.1.attention"].checkpoint()

    report = refused(
        create_schedule(model()),
        r"differ from step 2 on: rank 0: checkpoint\(\) at 'layers\.1\.attention'; rank 1",
        change=change,
    )
    assert not report.comparisons


def one_process_alone():
    """A fault of one process is raised on all."""

    def scale(module, args, output):
        return output * (1 + dist.get_rank())

    refused(
        create_schedule(model()),
        r"first output that differs: 'norm' \(LayerNorm\), seen by rank 1",
        change=lambda sch: sch["norm"].mod.register_forward_hook(scale),
    )


def own_inputs():
    """Processes that draw other inputs are given those of the first."""
    sch = create_schedule(model())
    own = torch.full((1, 3), dist.get_rank())
    with Verify(sch, (own,)) as check:
        shard(sch)
    assert check.report.is_equal


def errors_pass():
    """What the block raises comes out, and nothing is verified."""
    sch = create_schedule(model())
    with pytest.raises(ConflictError, match="head"), Verify(sch, ids) as check:
        sch["head"].shard("weight", 0)
        sch["head"].shard("weight", 0)
    assert check.report is None
    assert not any(tag.startswith("makespan") for tag in (*sch.metadata.tags, *vars(sch["words"].mod.weight)))
