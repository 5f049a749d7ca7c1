"""What the stages of a cut model must do together; every function runs in each process of a group."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from makespan.slapo import (
    ArgumentError,
    BuildError,
    build,
    create_schedule,
    full_state_dict,
    init_empty_weights,
    load_full_state_dict,
)
from makespan.slapo.building import consolidate

HIDDEN, WORDS, N_MICROBATCHES = 8, 16, 4


class Block(nn.Module):
    """A feed-forward block that also reads a mask, which every stage needs."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden, mask):
        return hidden + self.down(F.gelu(self.up(hidden))) * mask


class Stack(nn.Module):
    def __init__(self, n_blocks):
        super().__init__()
        self.block = nn.ModuleList(Block() for _ in range(n_blocks))
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, hidden, mask):
        for block in self.block:
            hidden = block(hidden, mask)
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2), hidden


class EncoderDecoder(nn.Module):
    """Two stacks; one table of words embeds twice and makes the logits."""

    def __init__(self, n_blocks=3):
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.encoder, self.decoder = Stack(n_blocks), Stack(n_blocks)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, source, target):
        mask = source.gt(0).unsqueeze(-1).to(self.words.weight.dtype)
        encoded, _ = self.encoder(self.words(source), mask)
        decoded, before = self.decoder(self.words(target) + encoded, mask)
        return self.head(decoded + before) / source.size(1)


def loss_of(logits, answers):
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten())


def seeded():
    torch.manual_seed(0)
    return EncoderDecoder().double()


def sample(batch=8, seq=5):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (batch, seq), generator=draw) for _ in range(3)]


def cut(model, paths, group=None):
    sch = create_schedule(model, group=group)
    sch.trace_until(["encoder", "decoder"])
    for path in paths:
        sch[path].cut_pipeline_stage()
    return sch


CUTS = {
    1: [],
    2: ["encoder.block.1"],
    4: ["encoder.block.1", "encoder", "decoder.block.1"],
}


def by_hand(model, source, target, answers):
    """Run the whole model on one micro-batch after the other, as the pipeline does."""
    chunks = zip(*(one.chunk(N_MICROBATCHES) for one in (source, target, answers)), strict=True)
    losses = [loss_of(model(*inputs), wanted) for *inputs, wanted in chunks]
    (sum(losses) / N_MICROBATCHES).backward()
    return torch.stack(losses).detach()


def check_stage(stage, whole):
    """Compare gradients and buffers of a stage with those of the whole model, by their names."""
    parameters, buffers = dict(whole.named_parameters(remove_duplicate=False)), dict(whole.named_buffers())
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(
            parameter.grad, parameters[name].grad, msg=lambda text, name=name: f"{name}: {text}"
        )
    for name, buffer in stage.named_buffers():
        torch.testing.assert_close(buffer, buffers[name])


def stages_add_up_to_the_whole():
    """Loss and gradients, of what is tied across stages too, at the second step as well as at the first."""
    size = dist.get_world_size()
    source, target, answers = sample()
    orders = [("gpipe", size), ("1f1b", size), ("zero-bubble", size)]
    if size == 2:
        orders += [(order, 4) for order in ("interleaved", "zero-bubble", "zero-bubble-v", "dual-pipe-v")]
    for schedule, n_stages in orders:
        whole = seeded()
        sch = cut(copy.deepcopy(whole), CUTS[n_stages])
        stage, engine = build(
            sch, "pipeline", n_microbatches=N_MICROBATCHES, loss_fn=loss_of, schedule=schedule
        )
        for _ in range(2):
            expected = by_hand(whole, source, target, answers)
            losses = []
            engine.step(source, target, target=answers, losses=losses)
            if dist.get_rank() == (0 if schedule.endswith("-v") else size - 1):
                torch.testing.assert_close(torch.stack(losses).detach(), expected)
            for one in [stage] if n_stages == size else stage:
                check_stage(one, whole)
        assert bool(engine.ties) == (size > 1)


def outputs_without_a_loss():
    """Forward passes only: the last stage has the outputs, and no gradient appears."""
    size = dist.get_world_size()
    source, target, _ = sample()
    whole = seeded().eval()
    for schedule, n_stages in [("1f1b", size)] + ([("zero-bubble", 4)] if size == 2 else []):
        sch, options = cut(copy.deepcopy(whole), CUTS[n_stages]), {"schedule": schedule}
        stage, engine = build(sch, "pipeline", n_microbatches=N_MICROBATCHES, **options)
        with torch.no_grad():
            found = engine.step(source, target)
        if dist.get_rank() == size - 1:
            torch.testing.assert_close(found, whole(source, target))
        assert all(one.grad is None for one in stage.parameters())


def options_are_checked():
    size = dist.get_world_size()
    sch = cut(seeded(), CUTS[size])
    for options, words in (
        ({"n_microbatches": 0}, "n_microbatches is 0; expected"),
        (
            {"n_microbatches": 2, "schedule": "zb"},
            "schedule is 'zb'; expected one of gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v, dual-pi",
        ),
        ({"n_microbatches": size - 1}, f"n_microbatches is {size - 1}; expected"),
    ):
        try:
            build(sch, "pipeline", **options)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{options} were accepted")
    orders = [(4 if size < 4 else 2, "1f1b", N_MICROBATCHES, "expected one process per stage, or")]
    if size == 2:
        orders += [
            (2, "interleaved", 4, "2 stages for 2 processes and schedule interleaved; expected several"),
            (4, "interleaved", 5, "n_microbatches is 5; expected a number that rounds of 2 or more share"),
            (2, "zero-bubble", 5, "a number that rounds of 2 or more share .* for schedule zero-bubble"),
            (2, "zero-bubble-v", 4, "2 stages for 2 processes .*-v; expected two stages per process"),
            (4, "zero-bubble-v", 4, "zero-bubble-v without loss_fn; forward passes alone need"),
            (4, "dual-pipe-v", 3, "n_microbatches is 3; expected at least 4 for 4 stages of dual-pipe-v"),
        ]
    for n_stages, schedule, count, words in orders:
        with pytest.raises((BuildError, ArgumentError), match=words):
            build(cut(seeded(), CUTS[n_stages]), "pipeline", n_microbatches=count, schedule=schedule)


def failures_reach_all_stages():
    """What one stage cannot compute is an error in every process, and none waits for another."""
    size = dist.get_world_size()
    _, engine = build(cut(seeded(), CUTS[size]), "pipeline", n_microbatches=N_MICROBATCHES, loss_fn=loss_of)
    source, target, answers = sample()
    try:
        engine.step(source, target + WORDS, target=answers)
    except BuildError as error:
        assert "stage" in str(error) and "index out of range" in str(error)
    else:
        raise AssertionError("a word that is not in the table was found")


def own_group():
    """Return a group of this process alone; all processes make all of them."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def replicas_average():
    """Two pipelines of two stages: each takes half of the samples."""
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    whole = seeded()
    sch = cut(copy.deepcopy(whole), CUTS[2], group=own_group())
    stage, engine = build(sch, "pipeline", mesh=mesh, n_microbatches=2, loss_fn=loss_of)
    inputs = sample()
    own = [one.chunk(2)[mesh.get_local_rank("dp")] for one in inputs]
    engine.step(*own[:2], target=own[2])
    chunks = zip(*(one.chunk(4) for one in inputs), strict=True)
    sum(loss_of(whole(*part), wanted) / 4 for *part, wanted in chunks).backward()
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)


def shards_in_stages():
    """Two stages of two processes each, which share the linear layers."""
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    whole = seeded()
    sch = create_schedule(copy.deepcopy(whole), group=mesh.get_group("tp"))
    for path in [f"{part}.block.{index}" for part in ("encoder", "decoder") for index in range(3)]:
        sch[f"{path}.up"].shard(["weight", "bias"], 0)
        sch[f"{path}.up"].sync("bwd_post", "all_reduce")
        sch[f"{path}.down"].shard("weight", 1)
        sch[f"{path}.down"].sync("fwd_post", "all_reduce")
    sch.trace_until(["encoder", "decoder"])
    sch["encoder.block.1"].cut_pipeline_stage()
    stage, engine = build(sch, "pipeline", mesh=mesh, n_microbatches=N_MICROBATCHES, loss_fn=loss_of)
    source, target, answers = sample()
    by_hand(whole, source, target, answers)
    engine.step(source, target, target=answers)
    rank = mesh.get_local_rank("tp")
    for name, parameter in stage.named_parameters():
        gradient = whole.get_parameter(name).grad
        for axis in range(gradient.dim()):
            if gradient.shape[axis] != parameter.shape[axis]:
                gradient = gradient.chunk(2, axis)[rank]
        torch.testing.assert_close(parameter.grad, gradient)
    expected = whole.state_dict()
    for key, one in full_state_dict(sch).items():
        torch.testing.assert_close(one, expected[key])


def empty(paths):
    with init_empty_weights():
        model = EncoderDecoder()
    return cut(model, paths, group=own_group())


def stages_are_filled_alone():
    """A process has the values of its stages, those of one seed for every cut; the state is that of all."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    of_several = [("interleaved", 4), ("zero-bubble-v", 4)] if size == 2 else []
    for schedule, n_stages in [("1f1b", size), *of_several]:
        whole, sch = empty([]), empty(CUTS[n_stages])
        consolidate(whole, seed=5)
        stage, engine = build(
            sch, "pipeline", mesh=mesh, seed=5, n_microbatches=N_MICROBATCHES, loss_fn=loss_of,
            schedule=schedule,
        )  # fmt: skip
        own = {id(one) for one in stage.parameters()}
        assert all((id(one) in own) != one.is_meta for one in sch.mod.parameters())
        begun, expected = full_state_dict(sch), whole.mod.state_dict()
        assert begun.keys() == expected.keys()
        assert all(torch.equal(one, expected[key]) for key, one in begun.items())
        source, target, answers = sample()
        by_hand(whole.mod, source, target, answers)
        engine.step(source, target, target=answers)
        for one in (whole.mod, stage):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        for key, one in full_state_dict(sch).items():
            torch.testing.assert_close(one, expected[key], msg=lambda text, key=key: f"{key}: {text}")
        load_full_state_dict(sch, begun)
        assert all(torch.equal(one, begun[key]) for key, one in full_state_dict(sch).items())


class Angles(nn.Module):
    """What all blocks read: a pair of tensors."""

    def forward(self, hidden):
        return hidden.cos(), hidden.sin()


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden, angles, mask=None):
        return self.linear(hidden) * angles[0] + hidden * angles[1] + (0 if mask is None else mask)


def no_mask(hidden):
    """Find that nothing is hidden."""


class Turned(nn.Module):
    """Stages hand on a pair and what is no tensor; the model returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.angles, self.blocks = Angles(), nn.ModuleList(Turn() for _ in range(3))

    def forward(self, data):
        angles, mask, hidden = self.angles(data), no_mask(data), data
        for block in self.blocks:
            hidden = block(hidden, angles, mask)
        return {"logits": hidden, "count": 3}


def structures_are_handed_on():
    """Values that are no tensors reach the next stage, and the loss sees what the model returns."""
    torch.manual_seed(0)
    whole = Turned().double()
    data, wanted = torch.randn(2, 4, HIDDEN, dtype=torch.double)

    def loss(output, target):
        assert output["count"] == 3
        return F.mse_loss(output["logits"], target)

    sch = create_schedule(copy.deepcopy(whole))
    sch.trace_until("", leaf_functions=[no_mask])
    sch["blocks.0"].cut_pipeline_stage()
    stage, engine = build(sch, "pipeline", n_microbatches=2, loss_fn=loss)
    losses = []
    output = engine.step(data, target=wanted, losses=losses)
    expected = whole(data)
    loss(expected, wanted).backward()
    if dist.get_rank():
        torch.testing.assert_close(output["logits"], expected["logits"])
        torch.testing.assert_close(torch.stack(losses).mean(), loss(expected, wanted))
    check_stage(stage, whole)


class Kept:
    """A cache: what blocks have made so far."""

    def __init__(self):
        self.rows = []


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden, kept):
        kept.rows.append(hidden)
        return self.linear(hidden) + sum(kept.rows)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(2))

    def forward(self, data):
        kept, hidden = Kept(), data
        for block in self.blocks:
            hidden = block(hidden, kept)
        return hidden


def caches_are_not_sent():
    """A stage that would get a cache without its tensors is refused on all processes, before a step."""
    sch = create_schedule(Cached())
    sch.trace_until("", leaf_modules=["Caching"])
    sch["blocks.0"].cut_pipeline_stage()
    _, engine = build(sch, "pipeline", n_microbatches=2, loss_fn=F.mse_loss)
    data = torch.randn(2, HIDDEN)
    with pytest.raises(BuildError, match="stage 0 of 2 passes on a Kept, whose tensors are not sent"):
        engine.step(data, target=data)
