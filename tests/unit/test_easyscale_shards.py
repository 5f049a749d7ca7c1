"""Shards of an optimizer: who holds what, equal steps for every kind of optimizer, and what is refused."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from makespan.easyscale.job import RankMapping
from makespan.easyscale.optimizer_shards import OptimizerShards, holders_of, owners_of
from makespan.easyscale.parts import TrainedParts
from makespan.easyscale.recovery import Assembly, HeldShards, RecoveryPlanner, holdings
from makespan.easyscale.reduction import in_memory
from makespan.errors import InputError
from makespan.runtime.protocol import Abort, ClusterState
from makespan.training.bits import has_equal_bits

KINDS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
)  # fmt: skip


def test_owners_have_neighbours_of_about_equally_many_elements():
    assert owners_of([4, 4, 4, 4], 2) == [0, 0, 1, 1]
    assert owners_of([100, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert owners_of([1, 1, 100], 3) == [0, 0, 1]
    assert owners_of([0, 0], 2) == [0, 0]
    for n_processes in range(1, 9):
        sizes = [(7 * number) % 23 for number in range(40)]
        owners = owners_of(sizes, n_processes)
        assert owners == sorted(owners)
        for owner in range(n_processes):
            held = sum(size for size, each in zip(sizes, owners, strict=True) if each == owner)
            assert held <= sum(sizes) / n_processes + max(sizes)


def test_copies_are_on_other_hosts_first():
    assert holders_of([1, 1, 1, 1], "aabb", 1) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert holders_of([1, 1], "aaa", 5) == [(0, 1, 2), (2, 0, 1)]


class Layers(nn.Module):
    """Matrices only, which Muon needs: large and small ones, one with gaps, one that is not always used."""

    def __init__(self):
        super().__init__()
        self.large, self.small = (nn.Parameter(torch.randn(160, 110)), nn.Parameter(torch.randn(3, 5)))
        self.exact = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.other = nn.Parameter(torch.randn(160, 110))
        self.gaps = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.turned, self.rare = nn.Parameter(torch.randn(9, 5).t()), nn.Parameter(torch.randn(2, 2))
        self.third = nn.Parameter(torch.randn(110, 160))
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)


def made(kind):
    torch.manual_seed(3)
    model = Layers()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.02)
    return TrainedParts(model, optimizer, lambda outputs, targets: outputs)


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (name != "rare" or step > 1):
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = drawn.to(parameter.dtype)


def equal(left, right):
    """Compare states by number and name, with the order of both."""
    pairs = [[(key, name) for key, each in side.items() for name in each] for side in (left, right)]
    return pairs[0] == pairs[1] and all(
        has_equal_bits(torch.as_tensor(left[key][name]), torch.as_tensor(right[key][name]))
        for key, name in pairs[0]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_shards_have_the_bits_of_whole_steps(kind):
    alone, several = made(kind), [made(kind) for _ in range(3)]
    shards = [OptimizerShards(parts, 1) for parts in several]
    for number, each in enumerate(shards):
        each.place(number, 3 * ("",))
    for step in range(4):
        give_gradients(alone.model, step)
        alone.optimizer.step()
        for parts, each in zip(several, shards, strict=True):
            give_gradients(parts.model, step)
            before = [parameter.grad for parameter in parts.model.parameters()]
            with each.stepping():
                parts.optimizer.step()
            assert [id(parameter.grad) for parameter in parts.model.parameters()] == list(map(id, before))
        in_memory([each.share() for each in shards])
        assert not any(each.is_whole for each in shards)
        for parts in several:
            for one, other in zip(parts.model.parameters(), alone.model.parameters(), strict=True):
                assert has_equal_bits(one, other)
        parts_of_all = [each.owned() for each in shards]
        if step == 2:  # the steps after that begin from a whole optimizer
            for each in shards:
                each.complete(parts_of_all)
    for each in shards:
        each.complete(parts_of_all)
    expected = alone.optimizer.state_dict()
    for parts in several:
        found = parts.optimizer.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        # Numbers, too: a checkpoint is that of a run without shards.
        ordered = dict(sorted(expected["state"].items()))
        assert equal(found["state"], ordered)


class Own(torch.optim.SGD):
    pass


class OwnScaler(torch.amp.GradScaler):
    pass


def refused(optimizer=None, scaler=None):
    parts = made("SGD")
    return TrainedParts(parts.model, optimizer or parts.optimizer, parts.loss, None, None, scaler)


def test_steps_that_may_mix_parameters_are_refused_by_name():
    with pytest.raises(
        InputError, match=r"zero_stage is 1 and the optimizer is .*Own; expected one of torch"
    ):
        OptimizerShards(refused(Own(Layers().parameters(), lr=0.1)), 0)
    with pytest.raises(InputError, match=r"the optimizer is torch.optim.lbfgs.LBFGS; expected one of torch"):
        OptimizerShards(refused(torch.optim.LBFGS(Layers().parameters())), 0)
    with pytest.raises(
        InputError, match=r"the scaler is .*OwnScaler; expected torch.amp.GradScaler, or zero"
    ):
        OptimizerShards(refused(scaler=OwnScaler("cpu")), 0)
    OptimizerShards(refused(scaler=torch.amp.GradScaler("cpu")), 0)
    parts = made("Adam")
    parts.optimizer.register_step_post_hook(lambda *arguments: None)
    with pytest.raises(InputError, match="the optimizer, Adam, has hooks, which may see the state of all"):
        OptimizerShards(parts, 0)


# --- who continues from where, with survivors one mini-batch apart ---------------------------------------

STARTED = Assembly("0/1/2/3", (0, 1, 2, 3), 4 * ("",), 0, 0, is_start=True)
ALL = (0, 1, 2, 3)


def decided(held, leaving=()):
    state = ClusterState(STARTED, tuple(sorted(held)), leaving, 0, held)
    return RecoveryPlanner(RankMapping.parse("0/1/2/3"))(state)


def ready(step, *numbers):
    """A process that has all for the next step of its shard, but not the results of all."""
    return holdings(step, {step: ALL, step + 1: ALL}, HeldShards(4, {step: numbers, step + 1: numbers}))


def stepped(step, *numbers, is_partial=True):
    return holdings(step, {step: ALL}, HeldShards(4, {step: numbers}, is_partial))


def test_those_that_are_ready_take_the_step_that_another_one_has_taken():
    plan = decided({0: stepped(6, 0, 3), 1: ready(5, 1, 0), 2: ready(5, 2, 1)}).plan
    assert (plan.step, plan.source, plan.behind, plan.partial) == (6, 0, (1, 2), (0,))
    assert plan.shards == ((0, 1), (1, 2), (2,), (0,))
    assert plan.lacking == {0, 1, 2}


def test_without_one_that_has_taken_the_step_all_stay_before_it():
    plan = decided({1: ready(5, 1, 0), 2: ready(5, 2, 1), 3: ready(5, 3, 2)}).plan
    assert (plan.step, plan.source, plan.behind, plan.partial) == (5, None, (), ())
    assert plan.shards == ((1,), (1, 2), (2, 3), (3,))


def test_parameters_that_all_have_are_not_sent():
    plan = decided({each: stepped(6, each, (each - 1) % 4, is_partial=False) for each in range(4)}).plan
    assert plan.partial == plan.behind == ()
    assert not plan.lacking


def test_a_shard_whose_holders_are_all_lost_ends_the_attempt():
    answer = decided({0: stepped(6, 0, 3), 1: ready(5, 1, 0)})  # 2 and 3 held the third one
    assert isinstance(answer, Abort)
    assert "processes 2, 3 were lost" in str(answer.error) and "optimizer state" in str(answer.error)


def test_a_process_that_failed_amid_its_step_holds_nothing():
    torn = holdings(None, {6: ALL}, HeldShards(4, {}))
    plan = decided({0: stepped(6, 0, 3), 1: torn, 2: ready(5, 2, 1), 3: ready(5, 3, 2)}).plan
    assert (plan.step, plan.behind) == (6, (1, 2, 3))
    assert plan.shards == ((0,), (2,), (2, 3), (0, 3))


def test_one_that_leaves_takes_its_step_if_only_it_can_send_the_shard():
    held = {0: stepped(6, 0, 3), 1: ready(5, 1, 0), 2: ready(5, 2, 1)}
    plan = decided(held, leaving=(2,)).plan
    assert (plan.nodes, plan.behind, plan.shards[2]) == ((0, 1), (1, 2), (2,))
    assert decided(held, leaving=(1,)).plan.behind == (2,)  # the others have what it holds
