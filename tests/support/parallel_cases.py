"""What sharded models must do in a group of processes of any size; every function runs in each of them."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from makespan.slapo import (
    ShardError,
    build,
    create_schedule,
    full_state_dict,
    init_empty_weights,
    layouts as exchanges,
    load_full_state_dict,
    replay,
)
from makespan.slapo.building import consolidate
from makespan.slapo.layouts import SCHEMES, sharding_of
from makespan.slapo.sharding import ranks_of

HIDDEN = 16


def labelled(name):
    """Return what puts a name before a message of a comparison."""
    return lambda text: f"{name}: {text}"


def drawn(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(build, seed=0):
    """Return a model of doubles, and a copy of it."""
    torch.manual_seed(seed)
    model = build().double()
    return model, copy.deepcopy(model)


def assert_same(reference, scheduled, *inputs, **named):
    """Compare outputs, and the gradients of inputs and parameters, parts with the parts of the whole."""
    runs = []
    for model in (reference, scheduled):
        model.zero_grad()
        own = [one.clone().requires_grad_(one.is_floating_point()) for one in inputs]
        extra = {name: one.clone().requires_grad_() for name, one in named.items()}
        output = model(*own, **extra)
        output.backward(drawn(*output.shape, seed=5))
        leaves = [one for one in (*own, *extra.values()) if one.requires_grad]
        runs.append((output.detach(), [one.grad for one in leaves]))
    (expected, whole_grads), (found, grads) = runs
    torch.testing.assert_close(found, expected)
    for one, whole in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(one, whole)
    wholes = dict(reference.named_parameters(remove_duplicate=False))
    for path, module in scheduled.named_modules():
        shards = sharding_of(module).tensors
        for name, parameter in module.named_parameters(recurse=False):
            gradient = wholes[f"{path}.{name}".removeprefix(".")].grad
            part = shards[name].part_of(gradient) if name in shards else gradient
            torch.testing.assert_close(parameter.grad, part, msg=labelled(name))


class Mlp(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias), nn.Linear(4 * HIDDEN, HIDDEN, bias)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden):
        return self.norm(hidden + self.down(F.gelu(self.up(hidden))))


def shard_mlp(sch):
    sch["up"].shard(["weight", "bias"], 0)
    sch["up"].sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", 1)
    sch["down"].sync("fwd_post", "all_reduce")


def mlp():
    reference, model = seeded(Mlp)
    sch = create_schedule(model)
    shard_mlp(sch)
    size = dist.get_world_size()
    assert model.up.out_features == 4 * HIDDEN // size == model.down.in_features == len(model.up.weight)
    assert (model.up.in_features, model.down.out_features) == (HIDDEN, HIDDEN)
    assert isinstance(model.down, nn.Linear)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert_same(reference, model, drawn(2, 3, HIDDEN))
    assert_same(reference, copy.deepcopy(model), drawn(2, 3, HIDDEN))  # groups are shared


class Attention(nn.Module):
    """Queries, keys and values in one matrix, all inputs by name, and a mask beside them."""

    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.size = heads, HIDDEN // heads
        self.qkv, self.output = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden, mask=None):
        query, key, value = (
            one.unflatten(-1, (self.heads, self.size)).transpose(1, 2)
            for one in self.qkv(hidden).chunk(3, -1)
        )
        scores = query @ key.transpose(2, 3) / self.size**0.5 + mask
        mixed = scores.softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).flatten(2))


def fused_attention():
    reference, model = seeded(Attention)
    sch = create_schedule(model)
    sch["qkv"].shard(["weight", "bias"], axis=0, groups=3)
    sch.sync("bwd_post", "all_reduce", inputs=["hidden"])
    sch["output"].shard("weight", axis=1)
    sch["output"].sync("fwd_post", "all_reduce")
    sch.set_attr(heads=4 // sch.world_size)
    hidden, mask = drawn(2, 5, HIDDEN), drawn(5, 5, seed=2)
    expected = reference(hidden=hidden, mask=mask)
    torch.testing.assert_close(model(hidden=hidden, mask=mask), expected)
    masked = MaskedAttention(reference, mask), MaskedAttention(model, mask)
    assert_same(*masked, drawn(2, 5, HIDDEN))


class MaskedAttention(nn.Module):
    """Attention with a mask of its own, called with names."""

    def __init__(self, attention, mask):
        super().__init__()
        self.attention, self.mask = attention, mask

    def forward(self, hidden):
        return self.attention(mask=self.mask, hidden=hidden)


class Vocabulary(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(32, HIDDEN, padding_idx=17), nn.Linear(HIDDEN, 32, bias=False)

    def forward(self, ids):
        return self.head(self.words(ids))


class GroupedAttention(nn.Module):
    """Four heads of queries for two of keys and values, all of them in one matrix."""

    def __init__(self, heads=4, kv_heads=2):
        super().__init__()
        self.head_dim = HIDDEN // heads
        self.sizes = [heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.qkv, self.output = nn.Linear(HIDDEN, sum(self.sizes)), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden):
        query, key, value = (
            one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for one in self.qkv(hidden).split(self.sizes, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def grouped_attention():
    """Blocks of different sizes are cut each by itself; heads that do not divide are refused by number."""
    reference, model = seeded(GroupedAttention)
    sch, size, sizes = create_schedule(model), dist.get_world_size(), model.sizes
    if size > 2:
        with pytest.raises(ShardError, match=r"'weight' has 2 heads or units of 4, .* among 4 processes"):
            sch["qkv"].shard(["weight", "bias"], 0, groups=sizes)
        with pytest.raises(ShardError, match="'weight' has 2 heads or units of 8"):
            sch["qkv"].shard(["weight", "bias"], 0, groups=2, unit=8)
        sch["qkv"].shard(["weight", "bias"], 0, groups=sizes, unit=1)
        assert len(sch["qkv"].mod.weight) == sum(sizes) // size
        return
    sch["qkv"].shard(["weight", "bias"], 0, groups=sizes)
    sch["qkv"].sync("bwd_post", "all_reduce")
    sch.set_attr(sizes=[one // size for one in sizes])
    sch["output"].shard("weight", 1)
    sch["output"].sync("fwd_post", "all_reduce")
    rows = drawn(2, 3, HIDDEN)
    assert_same(reference, model, rows)
    for key, one in full_state_dict(sch).items():
        assert torch.equal(one, reference.state_dict()[key]), key
    again = replay(seeded(GroupedAttention)[0], sch.dump())
    assert all(
        torch.equal(one, other) for one, other in zip(again.mod.parameters(), model.parameters(), strict=True)
    )
    whole, gathered = seeded(GroupedAttention)
    layer = create_schedule(nn.ModuleDict({"qkv": gathered.qkv}))["qkv"]
    layer.shard(["weight", "bias"], 0, groups=sizes)
    layer.sync("bwd_post", "all_reduce")
    layer.sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)
    assert_same(whole.qkv, layer.mod, rows)


def vocabulary():
    reference, model = seeded(Vocabulary)
    sch = create_schedule(model)
    sch["words"].shard("weight", 0)
    sch["words"].sync("fwd_post", "all_reduce")
    sch["head"].shard("weight", 0)
    sch["head"].sync("bwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)
    ids = torch.randint(32, (3, 7), generator=torch.Generator().manual_seed(1))
    ids[0] = torch.tensor([0, 31, 17, 16, 15, 8, 7])
    assert_same(reference, model, ids)
    ids_before = ids.clone()
    model.words(ids)
    assert torch.equal(ids, ids_before)


def embedding_columns():
    reference, model = seeded(lambda: nn.Sequential(nn.Embedding(8, HIDDEN), nn.Linear(HIDDEN, 3)))
    sch = create_schedule(model)
    sch["0"].shard("weight", -1)
    sch["0"].sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=False)
    assert model[0].embedding_dim == HIDDEN // sch.world_size
    assert_same(reference, model, torch.tensor([[1, 2, 7]]))


class Bottleneck(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, HIDDEN, 1, bias=bias), nn.BatchNorm2d(HIDDEN)
        self.depth = nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1, groups=8, bias=bias)
        self.conv2, self.conv3 = (
            nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1, padding_mode="circular", bias=bias),
            nn.Conv2d(HIDDEN, 8, 1, bias=bias),
        )

    def forward(self, image):
        inner = self.depth(F.relu(self.bn1(self.conv1(image))))
        return self.conv3(F.relu(self.conv2(inner)))


def bottleneck():
    for bias in (False, True):
        reference, model = seeded(lambda bias=bias: Bottleneck(bias))
        both = ["weight", "bias"][: 1 + bias]
        sch = create_schedule(model)
        sch["conv1"].shard(both, 0)
        sch["conv1"].sync("bwd_post", "all_reduce")
        sch["bn1"].shard(["weight", "bias", "running_mean", "running_var"], 0)
        sch["depth"].shard(both, 0)
        sch["conv2"].shard("weight", 1)
        sch["conv2"].sync("fwd_post", "all_reduce")
        sch["conv3"].shard(both, 0)
        sch["conv3"].sync("fwd_post", "all_gather", axis=1, tensor_parallel_output_grad=False)
        sch["conv3"].sync("bwd_post", "all_reduce")
        assert model.depth.groups == 8 // sch.world_size
        assert_same(reference, model, drawn(2, 8, 6, 6))
        means = sharding_of(model.bn1).tensors["running_mean"].part_of(reference.bn1.running_mean)
        torch.testing.assert_close(model.bn1.running_mean, means)


def transposed_convolutions():
    def build():
        return nn.Sequential(nn.ConvTranspose2d(4, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 3))

    reference, model = seeded(build)
    sch = create_schedule(model)
    sch["0"].shard("weight", 1)
    sch["0"].shard("bias", 0)
    sch["0"].sync("bwd_post", "all_reduce")
    sch["1"].shard("weight", 0)
    sch["1"].sync("fwd_post", "all_reduce")
    assert_same(reference, model, drawn(2, 4, 5, 5))


class TransposedLinear(nn.Module):
    """The linear layer of GPT-2, whose weight is kept as inputs times outputs."""

    __module__, __qualname__ = "transformers.pytorch_utils", "Conv1D"

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(drawn(nx, nf)), nn.Parameter(drawn(nf))

    def forward(self, hidden):
        flat = torch.addmm(self.bias, hidden.flatten(0, -2), self.weight)
        return flat.view(*hidden.shape[:-1], self.nf)


class Gpt2Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = TransposedLinear(32, HIDDEN), TransposedLinear(HIDDEN, 32)

    def forward(self, hidden):
        return self.c_proj(F.gelu(self.c_fc(hidden)))


def transposed_linear_layers():
    reference, model = seeded(Gpt2Mlp)
    sch = create_schedule(model)
    sch["c_fc"].shard("weight", 1)
    sch["c_fc"].shard("bias", 0)
    sch["c_fc"].sync("bwd_post", "all_reduce")
    sch["c_proj"].shard("weight", 0)
    sch["c_proj"].sync("fwd_post", "all_reduce")
    assert model.c_fc.nf == 32 // sch.world_size
    assert_same(reference, model, drawn(2, 3, HIDDEN))


class Block(nn.Module):
    """A norm and an MLP, cut along the sequence between them."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.last = nn.LayerNorm(HIDDEN), Mlp(), nn.LayerNorm(HIDDEN)
        self.mlp.norm = nn.Identity()

    def forward(self, hidden):
        return self.last(self.mlp(self.norm(hidden)))


def sequence_layout():
    """Whole sequences go in and out; the norms see parts of them."""
    reference, model = seeded(Block)
    reference.mlp.forward = model.mlp.forward = None
    for one in (reference, model):
        one.mlp.forward = lambda hidden, mlp=one.mlp: mlp.down(F.gelu(mlp.up(hidden)))
    sch = create_schedule(model)
    for name in ("norm", "last"):
        sch[name].sync("bwd_post", "all_reduce", on="parameters")
    sch["norm"].sync("fwd_pre", "RR->SR")
    sch["mlp.up"].shard(["weight", "bias"], 0)
    sch["mlp.up"].sync("fwd_pre", "all_gather", axis=1)
    sch["mlp.down"].shard("weight", 1)
    sch["mlp.down"].sync("fwd_post", "reduce_scatter", axis=1)
    sch["last"].sync("fwd_post", "SR->RR")
    assert_same(reference, model, drawn(2, 8, HIDDEN))


def tied_vocabulary():
    """The head has the words' table: sharding both keeps the tie."""

    def build():
        model = Vocabulary()
        model.head.weight = model.words.weight
        return model

    reference, model = seeded(build)
    sch = create_schedule(model)
    sch["words"].shard("weight", 0)
    sch["words"].sync("fwd_post", "all_reduce")
    sch["head"].shard("weight", 0)
    sch["head"].sync("bwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)
    assert model.head.weight is model.words.weight
    ids = torch.tensor([[1, 2, 17, 31], [0, 0, 5, 16]])
    assert_same(reference, model, ids)
    again = copy.deepcopy(sch)
    assert again.mod.head.weight is again.mod.words.weight is not model.head.weight
    assert again.mod.head.weight.shard == model.head.weight.shard
    assert_same(reference, again.mod, ids)
    wanted = reference.state_dict()
    assert all(torch.equal(one, wanted[key]) for key, one in full_state_dict(again).items())


def reshard_schemes():
    """Every scheme and its gradient against DTensor."""
    size, ranks = dist.get_world_size(), ranks_of(create_schedule(nn.Identity()))
    mesh = init_device_mesh("cpu", (size,))
    places = {"RR": Replicate(), "RS": Shard(2), "SR": Shard(1)}
    whole, cotangent = drawn(3, 8, 12), drawn(3, 8, 12, seed=2)
    for scheme in SCHEMES:
        before, after = (places[one] for one in scheme.split("->"))
        start = DTensor.from_local(whole, mesh, [Replicate()]).redistribute(mesh, [before]).detach()
        theirs = start.clone().requires_grad_()
        moved = theirs.redistribute(mesh, [after])
        onto = DTensor.from_local(cotangent, mesh, [Replicate()]).redistribute(mesh, [after])
        moved.backward(onto)
        ours = start.to_local().clone().requires_grad_()
        found = exchanges.reshard(ranks, scheme)(ours)
        assert torch.equal(found, moved.to_local()), scheme
        found.backward(onto.to_local())
        assert torch.equal(ours.grad, theirs.grad.redistribute(mesh, [before]).to_local()), scheme
        back = "->".join(reversed(scheme.split("->")))
        assert torch.equal(exchanges.reshard(ranks, back)(found), ours), scheme


def exchanges_and_gradients():
    """Each exchange and its gradient against sums over all processes, which each of them can write down."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = ranks_of(create_schedule(nn.Identity()))
    tensors = [drawn(4, 8, seed=10 + one) for one in range(size)]
    total, cotangents = sum(tensors), [drawn(4, 8, seed=30 + one) for one in range(size)]
    summed = sum(cotangents)
    cut = lambda one: one.chunk(size, 1)[rank]  # noqa: E731
    part, parts = drawn(4, 8, seed=50), [one.chunk(size, 1)[0] for one in tensors]
    expected = {
        "all_reduce": (exchanges.all_reduce(ranks), tensors[rank], total, cotangents, cotangents[rank]),
        "sum_gradient": (exchanges.sum_gradient(ranks), tensors[rank], tensors[rank], cotangents, summed),
        "reduce_scatter": (
            exchanges.reduce_scatter(ranks, 1), tensors[rank], cut(total),
            [one.chunk(size, 1)[0] for one in cotangents],
            torch.cat([one.chunk(size, 1)[0] for one in cotangents], 1),
        ),
        "scatter": (
            exchanges.scatter(ranks, -1), part, cut(part), [one.chunk(size, 1)[0] for one in cotangents],
            torch.cat([one.chunk(size, 1)[0] for one in cotangents], 1),
        ),
        "all_gather": (
            exchanges.all_gather(ranks, 1), parts[rank], torch.cat(parts, 1), cotangents, cut(summed),
        ),
        "all_gather, whole": (
            exchanges.all_gather(ranks, 1, False), parts[rank], torch.cat(parts, 1), cotangents,
            cut(cotangents[rank]),
        ),
    }  # fmt: skip
    for name, (exchange, tensor, result, cotangent, gradient) in expected.items():
        own = tensor.clone().requires_grad_()
        found = exchange(own)
        torch.testing.assert_close(found, result, msg=labelled(name))
        found.backward(cotangent[rank])
        torch.testing.assert_close(own.grad, gradient, msg=labelled(name))
        assert torch.equal(own, tensor), f"{name} wrote into its input"


# --- building ----------------------------------------------------------------------------------------


class Empty(nn.Module):
    """Layers of several kinds, a tie, a parameter of its own and a buffer that is known from the start."""

    def __init__(self):
        super().__init__()
        self.words, self.mlp = nn.Embedding(32, HIDDEN, padding_idx=17), Mlp()
        self.image = Bottleneck(True)
        self.fused, self.head = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, 32, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids):
        mixed = self.mlp(self.words(ids)) * self.scale
        return self.head(sum(self.fused(mixed).chunk(3, -1)))


def empty_schedule(group=None):
    with init_empty_weights():
        model = Empty()
    assert model.head.weight is model.words.weight and model.words.weight.is_meta
    assert not model.scale.is_meta
    sch = create_schedule(model, group=group)
    sch["words"].shard("weight", 0)
    sch["words"].sync("fwd_post", "all_reduce")
    sch["head"].shard("weight", 0)
    sch["head"].sync("bwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)
    shard_mlp(sch["mlp"])
    sch["mlp.down"].annotate("weight", "kept", 3)
    sch["fused"].shard(["weight", "bias"], 0, groups=3)
    sch["fused"].sync("bwd_post", "all_reduce")
    sch["fused"].sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)
    sch["image.bn1"].shard(["weight", "bias", "running_mean", "running_var"], 0)
    return sch


def expected_state():
    """What one process without any schedule gets for the seed."""
    with init_empty_weights():
        model = Empty()
    alone = create_schedule(model)
    for _, node in alone.named_schedules():
        node.world_size, node.rank = 1, 0
    consolidate(alone, seed=11)
    return model.state_dict()


def values_do_not_depend_on_the_group():
    """The same full parameters of one seed, whatever the processes drew before."""
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    sch = empty_schedule()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, engine = build(sch, seed=11)
    assert torch.equal(torch.get_rng_state(), before) and engine is None and model is sch.mod
    assert model.head.weight is model.words.weight and model.mlp.down.weight.kept == 3
    assert model.mlp.down.weight.shard.orig_shape == (HIDDEN, 4 * HIDDEN)
    wanted, found = expected_state(), full_state_dict(sch)
    assert list(found) == list(wanted)
    for key, one in wanted.items():
        assert torch.equal(found[key], one), key
    assert not found["words.weight"][17].any() and found["words.weight"][16].any()
    assert model.fused.out_features == 3 * HIDDEN // sch.world_size


def states_move():
    """Save in this group, load in another one (kept beside the run), and in one process."""
    sch, state = empty_schedule(), expected_state()
    load_full_state_dict(sch, state)
    model, _ = build(sch, init_weights=False, check=False)
    assert model.head.weight is model.words.weight
    for key, one in full_state_dict(sch).items():
        assert torch.equal(one, state[key]), key
    changed = {key: one * 2 for key, one in state.items()}
    load_full_state_dict(sch, changed)
    for key, one in full_state_dict(sch).items():
        assert torch.equal(one, changed[key]), key
    ids = torch.tensor([[1, 17, 31]])
    whole = Empty()
    whole.load_state_dict(changed)
    torch.testing.assert_close(model(ids), whole(ids))


def programs_differ():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sch = create_schedule(model)
    sch["0"].bind(symbol=1)
    sch[str(int(dist.get_rank() == 1))].bind(other=2)
    if dist.get_world_size() == 1:
        build(sch)
        return
    try:
        build(sch)
    except RuntimeError as error:
        assert "step 2 is bind(other=2) at" in str(error), error
    else:
        raise AssertionError("two programs were built together")


def failing_initialiser():
    """All hear of what only the first process runs."""

    def refuse(module, path):
        raise ArithmeticError(f"cannot initialise {path}")

    with init_empty_weights():
        sch = create_schedule(nn.Sequential(nn.Linear(4, 4)))
    try:
        build(sch, init_weights=refuse)
    except ArithmeticError:
        assert dist.get_rank() == 0
    except RuntimeError as error:
        assert dist.get_rank() > 0 and "could not initialise '0'" in str(error), error
    else:
        raise AssertionError("no error")


# --- targets ------------------------------------------------------------------------------------------


def stepped(model, engine, batches, place):
    """Train a few steps and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = engine(batch[place]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.last = nn.Linear(HIDDEN, 4)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden)


def shard_along_sequence(sch):
    """Cut a stack so that its norms see parts of the sequence."""
    sch.sync("fwd_pre", "RR->SR")
    for layer in ("layers.0", "layers.1"):
        sch[f"{layer}.up"].shard(["weight", "bias"], 0)
        sch[f"{layer}.up"].sync("fwd_pre", "all_gather", axis=1)
        sch[f"{layer}.down"].shard("weight", 1)
        sch[f"{layer}.down"].sync("fwd_post", "reduce_scatter", axis=1)
        sch[f"{layer}.norm"].sync("bwd_post", "all_reduce", on="parameters")
    sch["last"].sync("fwd_pre", "SR->RR")


def shard_layers(sch):
    for layer in ("layers.0", "layers.1"):
        shard_mlp(sch[layer])


def replicas():
    """DDP and FSDP over all processes, then with two of tensor parallelism in each, against one process."""
    size = dist.get_world_size()
    batches = [drawn(4, 2, HIDDEN, seed=20 + step) for step in range(3)]
    reference, _ = seeded(Stack)
    stepped(reference, reference, batches, slice(None))
    wanted = reference.state_dict()
    for target in ("ddp", "fsdp"):
        for tp, cut in [
            (1, shard_layers),
            *((2, one) for one in (shard_layers, shard_along_sequence) if size == 4),
        ]:
            mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
            _, model = seeded(Stack)
            sch = create_schedule(model, group=mesh.get_group("tp"))
            cut(sch)
            _, engine = build(sch, target, mesh=mesh)
            dp, n = mesh.get_local_rank("dp"), 4 * tp // size
            stepped(model, engine, batches, slice(dp * n, dp * n + n))
            for key, one in full_state_dict(sch).items():
                torch.testing.assert_close(
                    one, wanted[key], msg=labelled(f"{target}, {cut.__name__}, {tp}: {key}")
                )
            load_full_state_dict(sch, reference.state_dict())


def compiled():
    if dist.get_world_size() != 2:  # the compiler takes long to load
        return
    reference, model = seeded(Mlp)
    sch = create_schedule(model)
    shard_mlp(sch)
    _, engine = build(sch, "compile", backend="eager")
    whole, part = drawn(2, 3, HIDDEN).requires_grad_(), drawn(2, 3, HIDDEN).requires_grad_()
    expected, found = reference(whole), engine(part)
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(part.grad, whole.grad)


def groups_and_meshes():
    """A group smaller than the world needs a mesh, and the mesh must have that group."""
    size = dist.get_world_size()
    if size != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sch = create_schedule(Mlp(), group=mesh.get_group("tp"))
    shard_mlp(sch)
    other = create_schedule(Mlp())
    shard_mlp(other)
    for call, part in (
        (lambda: build(sch), "shared by 2 of 4 processes"),
        (lambda: build(other, mesh=mesh), "created for the group of processes [0, 1, 2, 3]"),
        (lambda: build(other, "ddp"), "pass a mesh with dp and tp"),
    ):
        try:
            call()
        except ValueError as error:
            assert part in str(error), error
        else:
            raise AssertionError(f"not refused: {part}")
    build(sch, mesh=mesh)


def saved(path):
    """Write the state of this group for another one."""
    sch = empty_schedule()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(sch, seed=3)
    state = full_state_dict(sch)
    if dist.get_rank() == 0:
        torch.save(state, path)


def loaded(path):
    """Continue with the state of another group."""
    sch, state = empty_schedule(), torch.load(path, weights_only=True)
    load_full_state_dict(sch, state)
    for key, one in full_state_dict(sch).items():
        assert torch.equal(one, state[key]), key
    shard = sch.mod.words.weight.shard
    assert torch.equal(sch.mod.words.weight, shard.part_of(state["words.weight"]))
