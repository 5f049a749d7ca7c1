"""What a logical worker has for itself, and what a process refuses to train."""

import io
import random

import numpy as np
import pytest

from makespan.errors import InputError, UnknownNameError

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.checkpoint import checkpoint

from makespan.easyscale.context import Contexts, register_generator, register_state, registered_state
from makespan.easyscale.hosting import HostedESTs
from makespan.easyscale.job import RankMapping
from makespan.easyscale.kernels import DeterminismLevel
from makespan.easyscale.parts import TrainedParts
from makespan.easyscale.randomness import optimizer_sha, parameter_sha
from makespan.easyscale.reduction import Reduction, in_memory
from makespan.easyscale.saved import copied

pytestmark = pytest.mark.xdist_group("training")
CPU, D1 = torch.device("cpu"), DeterminismLevel.named("D1")


@pytest.fixture(autouse=True)
def nothing_registered():
    yield
    registered_state().clear()


class Counting(nn.Module):
    """Buffers: one written in place, one bound anew, one written from the third pass on, and a constant."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("late", torch.full((2,), torch.nan), persistent=False)
        self.register_buffer("fixed", torch.full((3,), torch.nan))

    def forward(self, inputs):
        found = self.linear(inputs)
        self.passes += 1
        self.mean = self.mean + found.detach().mean(0)
        if self.passes >= 3:
            self.late[:] = float(self.passes)
        return found


def drawn():
    states = random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002
    return states


def test_each_logical_worker_draws_as_if_it_were_alone():
    model = nn.Linear(2, 2)
    before = torch.get_rng_state()
    together, alone = Contexts(model, CPU, [0, 1], 3), [Contexts(model, CPU, [rank], 3) for rank in (0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    found = {0: [], 1: []}
    for rank in (0, 1, 1, 0, 1, 0):
        with together.live(rank):
            found[rank].append(drawn())
    for rank, one in enumerate(alone):
        expected = []
        for _ in range(3):
            with one.live(rank):
                expected.append(drawn())
        assert found[rank] == expected
    assert len({*found[0], *found[1]}) == 6
    assert together.sha(0) == alone[0].sha(0) != together.sha(1)


def test_buffers_that_change_are_found_whenever_they_do_and_copied_in_place():
    model = Counting()
    contexts, late = Contexts(model, CPU, [0, 1], 0), model.late
    for n_passes, rank in ((1, 0), (2, 1), (1, 1)):
        with contexts.live(rank):
            for _ in range(n_passes):
                model(torch.ones(1, 4))
    assert contexts.mutable_buffers == ["late", "mean", "passes"]
    contexts.enter(0)
    assert (int(model.passes), bool(model.late.isnan().all())) == (1, True)
    contexts.enter(1)
    assert (int(model.passes), model.late.tolist()) == (3, [3.0, 3.0])
    assert model.late is late


def test_a_context_goes_through_a_file_without_pickled_objects():
    model, stream = Counting(), io.BytesIO()
    generator = np.random.default_rng(1)
    register_generator("generator", generator)
    contexts = Contexts(model, CPU, [0, 1], 0)
    with contexts.live(1):
        model(torch.ones(1, 4))
        drawn(), generator.random()
    torch.save(contexts.values(1), stream)
    sha = contexts.sha(1)
    with contexts.live(1):
        expected = drawn(), generator.random()
    stream.seek(0)
    other = Contexts(Counting(), CPU, [1], 99)
    other.install(1, torch.load(stream, weights_only=True))
    assert other.sha(1) == sha
    with other.live(1):
        assert (drawn(), generator.random()) == expected


def test_registered_state_belongs_to_each_logical_worker():
    state, generator = {"n": 0}, torch.Generator().manual_seed(5)
    register_state("count", lambda: dict(state), state.update)
    register_generator("draws", generator)
    contexts = Contexts(nn.Linear(1, 1), CPU, [0, 1], 0)
    draws = []
    for rank in (0, 1, 0):
        with contexts.live(rank):
            state["n"] += 1
            draws.append(float(torch.rand((), generator=generator)))
    assert draws[0] == draws[1] != draws[2]
    assert [contexts.values(rank)["states"]["registered"]["count"]["n"] for rank in (0, 1)] == [2, 1]
    with pytest.raises(InputError, match="'count' is already registered"):
        register_state("count", dict, print)


def test_a_buffer_that_changed_in_one_process_alone_comes_back_in_another():
    models = [Counting(), Counting()]
    contexts = [Contexts(model, CPU, [rank], 0) for rank, model in enumerate(models)]
    for n_passes, rank in ((3, 0), (1, 1)):
        with contexts[rank].live(rank):
            for _ in range(n_passes):
                models[rank](torch.ones(1, 4))
    saved = [contexts[rank].values(rank) for rank in (0, 1)]
    together = Contexts(models[0], CPU, [0, 1], 0)  # whose buffers are those that the first left behind
    for rank in (0, 1):
        together.install(rank, saved[rank])
    together.enter(0)
    assert models[0].late.tolist() == [3.0, 3.0]
    together.enter(1)
    assert (int(models[0].passes), bool(models[0].late.isnan().all())) == (1, True)


def test_a_context_that_does_not_fit_is_refused():
    contexts = Contexts(nn.Linear(1, 1), CPU, [0], 0)
    values = contexts.values(0)
    with pytest.raises(
        InputError, match="buffers mean are only in the context or only in the model; expected both"
    ):
        contexts.install(0, values | {"buffers": {"mean": torch.zeros(1)}})
    contexts.install(0, values | {"states": values["states"] | {"registered": {"odd": 1}}})
    with pytest.raises(InputError, match="'odd' is in the context and not registered"):
        contexts.enter(0)


# --- a process ----------------------------------------------------------------------------------------


def hosted(model, mapping="0,1", process=0, n=2, after_reduce=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = TrainedParts(model, optimizer, nn.functional.mse_loss, after_reduce=after_reduce)
    return HostedESTs(parts, CPU, RankMapping.parse(mapping), process, Reduction(n), D1, seed=0, **options)


def fetch(rank):
    return torch.full((2, 4), float(rank)), torch.zeros(2, 2)


def test_what_logical_workers_cannot_share_is_refused():
    synchronised = nn.Sequential(nn.Linear(4, 2), nn.SyncBatchNorm(2))
    for mapping in ("0,1", "0/1"):
        with pytest.raises(
            InputError, match=r"module 1 is a SyncBatchNorm.*between GPUs; expected BatchNorm, who"
        ):
            hosted(synchronised, mapping)
    with pytest.raises(
        InputError, match=r"module 1 is a SyncBatchNorm, .* within a forward pass; expected BatchN"
    ):
        hosted(synchronised.to("meta"), "0/1")  # stands for a GPU
    with pytest.raises(InputError, match=r"mapping 0,1 has 2 logical workers; expected 3"):
        hosted(nn.Linear(4, 2), n=3)
    with pytest.raises(InputError, match="buffers 'mine'; expected per_rank, rank0"):
        hosted(nn.Linear(4, 2), buffers="mine")
    with pytest.raises(UnknownNameError, match=r"unknown determinism level 'D2'; expected D0, D0\+D2"):
        DeterminismLevel.named("D2")


def test_one_sample_under_batch_norm_fails_as_it_does_in_torch():
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        in_memory([hosted(model).mini_batch(lambda rank: (torch.ones(1, 4), torch.zeros(1, 2)))])


def test_buffers_of_the_first_reach_every_logical_worker():
    models = [Counting(), Counting()]
    models[1].load_state_dict(models[0].state_dict())
    processes = [hosted(one, "1/0", number, buffers="rank0") for number, one in enumerate(models)]
    for _ in range(3):
        in_memory([one.mini_batch(fetch) for one in processes])
    first, other = processes[1].contexts.values(0), processes[0].contexts.values(1)
    assert first["buffers"]["passes"] == other["buffers"]["passes"] == 3
    # Both started from the mean of the first, and each added that of its own batch.
    assert not torch.equal(first["buffers"]["mean"], other["buffers"]["mean"])


def test_without_swaps_logical_workers_share_what_should_be_their_own():
    model = Counting()
    worker = hosted(model, swaps_contexts=False)
    in_memory([worker.mini_batch(fetch)])
    assert int(model.passes) == 2
    assert worker.contexts.mutable_buffers == []


def test_a_model_without_buffers_has_none_to_send():
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    processes = [hosted(one, "1/0", number, buffers="rank0") for number, one in enumerate(models)]
    assert len(in_memory([one.mini_batch(fetch) for one in processes])) == 2


def test_a_mini_batch_tells_losses_by_rank_and_times_of_its_own():
    model = Counting()
    worker = hosted(model, "1,0")
    assert worker.bucket_map is None
    before = parameter_sha(model)
    (batch,) = in_memory([worker.mini_batch(fetch)])
    assert batch.losses[0] != batch.losses[1]
    assert len(batch.micro_batch_s) == 2
    assert min(*batch.micro_batch_s, batch.sync_s) > 0
    assert sorted(name for names in worker.bucket_map for name in names) == ["linear.bias", "linear.weight"]
    assert parameter_sha(model) != before
    assert all(one.grad is None for one in model.parameters())


def test_hashes_see_the_learning_rate_and_every_state():
    model = nn.Linear(2, 2)
    one, other = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2))
    assert optimizer_sha(one) != optimizer_sha(other)
    other.param_groups[0]["lr"] = 0.1
    assert optimizer_sha(one) == optimizer_sha(other)


class Nested(nn.Module):
    """A layer that gets its gradient in two nested backward passes, and one that gets it in one."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 2)
        self.is_nested = True

    def forward(self, inputs):
        found = inputs.detach().requires_grad_()
        for _ in range(2):
            found = checkpoint(self.twice, found, use_reentrant=True) if self.is_nested else self.twice(found)
        return self.once(found)


def test_gradients_that_come_in_parts_are_summed_whole():
    torch.manual_seed(1)
    models = [Nested(), Nested()]
    models[1].load_state_dict(models[0].state_dict())
    workers = [hosted(model, "0,1,2", n=3) for model in models]
    models[1].is_nested = False
    for step in range(4):
        models[0].is_nested = step != 2
        for worker in workers:
            in_memory([worker.mini_batch(fetch)])
        assert parameter_sha(models[0]) == parameter_sha(models[1])


def doubled(parameter):
    parameter.grad.mul_(2.0)


def test_hooks_of_user_code_that_come_later_still_change_the_gradient():
    torch.manual_seed(1)
    models, step = [nn.Linear(4, 2), nn.Linear(4, 2)], 0
    models[1].load_state_dict(models[0].state_dict())
    workers = [
        hosted(models[0]),
        hosted(models[1], after_reduce=lambda model: step < 3 or doubled(model.weight)),
    ]
    for step in range(5):
        if step == 3:
            models[0].weight.register_post_accumulate_grad_hook(doubled)
        for worker in workers:
            in_memory([worker.mini_batch(fetch)])
        assert parameter_sha(models[0]) == parameter_sha(models[1])


def run_keeping(keeps):
    """Run a mini-batch of two logical workers; a hook changes what it has kept in the turn before."""
    torch.manual_seed(1)
    model, kept = nn.Linear(4, 2), []

    def keep(parameter):
        for gradient in kept:
            gradient.zero_()
        kept[:] = [keeps(parameter.grad)]

    model.weight.register_post_accumulate_grad_hook(keep)
    in_memory([hosted(model, "0,1").mini_batch(fetch)])
    return parameter_sha(model)


def test_a_gradient_that_user_code_keeps_and_changes_later_is_refused_by_name():
    message = (
        r"a gradient of weight was changed after the turn of its logical worker.*expected .* keep a copy"
    )
    with pytest.raises(InputError, match=message):
        run_keeping(lambda gradient: gradient)
    assert run_keeping(torch.clone) == run_keeping(lambda gradient: torch.zeros(1))


class Joined(nn.Module):
    """Layers whose weights are joined in a pass: their gradients are parts of one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, inputs):
        weight = torch.cat([self.first.weight, self.second.weight])
        bias = torch.cat([self.first.bias, self.second.bias])
        return nn.functional.linear(inputs, weight, bias)[:, 1:3]


def test_gradients_that_are_parts_of_one_tensor_are_summed_each():
    model = Joined()
    whole = nn.Linear(4, 5)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([model.first.weight, model.second.weight]))
        whole.bias.copy_(torch.cat([model.first.bias, model.second.bias]))
    cut = nn.Sequential(whole, Columns())
    for each in (model, cut):
        worker = hosted(each, "0,1")
        for _ in range(3):
            in_memory([worker.mini_batch(fetch)])
    assert torch.equal(torch.cat([model.first.weight, model.second.weight]), whole.weight)
    assert torch.equal(torch.cat([model.first.bias, model.second.bias]), whole.bias)


class Columns(nn.Module):
    """Two of the outputs."""

    def forward(self, inputs):
        return inputs[:, 1:3]


def test_a_gradient_that_user_code_keeps_stays_as_it_was():
    model, kept, copies = nn.Linear(4, 2), [], []

    def keep(model):
        kept.append(model.weight.grad)
        copies.append(model.weight.grad.clone())

    worker = hosted(model, after_reduce=keep)
    for _ in range(4):
        in_memory([worker.mini_batch(fetch)])
    assert all(torch.equal(one, copy) for one, copy in zip(kept, copies, strict=True))
    assert not torch.equal(kept[-1], kept[-2])


def test_so_does_a_part_of_it_and_otherwise_its_memory_is_used_again():
    model, places, rows, copies = nn.Linear(4, 2), [], [], []

    def look(model):
        places.append(model.weight.grad.data_ptr())
        if len(places) == 4:
            rows.append(model.weight.grad.detach().flatten()[1:3])
            copies.append(rows[0].clone())

    worker = hosted(model, after_reduce=look)
    for _ in range(6):
        in_memory([worker.mini_batch(fetch)])
    assert places[2] == places[3] != places[4] == places[5]  # the first buckets are only for one mini-batch
    assert torch.equal(rows[0], copies[0])


# --- copies of state --------------------------------------------------------------------------------------


def test_copies_are_renewed_in_their_memory_and_share_none():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    lists = {
        "scores": [1.0, torch.ones(2)],
        "pair": (1, {"deep": [2]}),
        "weight": nn.Parameter(torch.ones(3)),
    }
    state = {"model": model.state_dict(), "state": lists, "absent": None}
    first = copied(state)
    assert first["model"]._metadata == state["model"]._metadata
    assert type(first["state"]["weight"]) is nn.Parameter
    places = [value.data_ptr() for value in first["model"].values()]
    with torch.no_grad():
        model[0].weight += 1.0
        lists["weight"] += 1.0
    lists["scores"].append(torch.zeros(3))
    lists["pair"][1]["deep"].append(3)
    assert not torch.equal(first["model"]["0.weight"], model[0].weight)
    assert (len(first["state"]["scores"]), first["state"]["pair"][1]) == (2, {"deep": [2]})
    again = copied(state, first)
    assert [value.data_ptr() for value in again["model"].values()] == places
    assert all(map(torch.equal, again["model"].values(), model.state_dict().values()))
    assert torch.equal(again["state"]["weight"], lists["weight"])
    assert again["state"]["pair"] == (1, {"deep": [2, 3]}) and len(again["state"]["scores"]) == 3
