"""The verifier in one process: what it leaves alone, what it compares, what it finds, what it says."""

import functools
import random
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import fx, nn
from torch.nn import functional as F
from verify_cases import Doubled

from makespan.slapo import (
    ArgumentError,
    KindError,
    VerificationError,
    Verify,
    create_schedule,
    init_empty_weights,
)
from makespan.slapo.weights import copy_module

HIDDEN = 8


class Net(nn.Module):
    """A model with everything that a verification must not touch: dropout, buffers, modes, a dictionary."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(HIDDEN, 16), nn.BatchNorm1d(16), nn.Linear(16, HIDDEN)
        self.drop = nn.Dropout(0.5)
        nn.init.zeros_(self.last.bias)

    def forward(self, hidden, scale=1.0):
        inner = self.norm(F.relu(self.first(hidden)))
        return {"out": self.last(self.drop(inner)) * scale, "kept": (hidden, "a word")}


class Changed(nn.Linear):
    """A linear layer that computes something else."""

    how = "bias"

    def forward(self, hidden):
        product = hidden @ self.weight.T
        return {
            "bias": lambda: product,
            "scale": lambda: 2 * (product + self.bias),
            "detached": lambda: (product + self.bias).detach(),
            "shape": lambda: (product + self.bias)[:-1],
            "type": lambda: (product + self.bias).double(),
            "raises": lambda: product + self.bias[:3],
            "in place": lambda: hidden.mul_(1.5) @ self.weight.T + self.bias,
            "nan": lambda: product + self.bias + torch.tensor(float("nan")),
        }[self.how]()


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def changed(old, how):
    new = Changed(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    new.how = how
    return new


def batch(*shape, seed=1):
    return torch.randn(shape or (4, HIDDEN), generator=torch.Generator().manual_seed(seed))


def refused(sch, change, *patterns, inputs=None, **options):
    check = Verify(sch, batch() if inputs is None else inputs, **options)
    with pytest.raises(VerificationError) as caught, check:
        change(sch)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not in:\n{caught.value}"
    assert str(check.report) == str(caught.value)
    return check.report


def test_what_is_not_the_business_of_a_verification_stays():
    model = net()
    model.norm.eval()
    sch, seen = create_schedule(model), batch()
    model(seen)["out"].sum().backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    state = {name: one.clone() for name, one in model.state_dict().items()}
    parameters, generator = dict(model.named_parameters()), torch.get_rng_state()
    with Verify(sch, seen) as check:
        sch["first"].checkpoint()
        sch["last"].decompose()
    report = check.report
    assert (
        report.is_equal
        and report.world_size == 1
        and [one.op for one in report.steps] == ["checkpoint", "decompose"]
    )
    assert torch.equal(generator, torch.get_rng_state())
    assert [one.training for one in (model, model.norm, model.drop)] == [True, False, True]
    assert all(one is dict(model.named_parameters())[name] for name, one in parameters.items())
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in state.items())
    assert all(torch.equal(one.grad, gradients[name]) for name, one in model.named_parameters())
    assert torch.equal(seen, batch()) and not seen.requires_grad
    assert [vars(one) for one in model.parameters()] == [{}] * 6


def test_modes_of_the_model_are_taken_where_asked_for():
    """In training mode dropout draws the same in both, and what batch norm keeps is compared."""
    sch = create_schedule(net())
    with Verify(sch, batch(), eval_mode=False) as check:
        sch["last"].checkpoint()
    assert check.report.count("buffer") == 3
    sch = create_schedule(net())
    with Verify(sch, batch()):
        sch["drop"].replace(nn.Dropout(0.1))
    sch = create_schedule(net())
    refused(sch, lambda sch: sch["drop"].replace(nn.Dropout(0.1)), "'drop'", eval_mode=False)
    slower = nn.BatchNorm1d(16, momentum=0.5)
    refused(
        create_schedule(net()),
        lambda sch: sch["norm"].replace(slower),
        "buffer norm.running_mean",
        eval_mode=False,
    )


class CountsTwice(nn.BatchNorm1d):
    """Batch norm that is right in everything but in what it keeps."""

    def forward(self, hidden):
        result = super().forward(hidden)
        if self.training:
            super().forward(hidden)
        return result


def test_training_mode_and_what_it_leaves_in_buffers_are_verified_by_default():
    sch = create_schedule(net())
    sch.mod.eval()
    with Verify(sch, batch()) as check:
        sch["norm"].checkpoint()
    report = check.report
    assert report.count("output") == report.count("output in training") == 2
    assert report.count("parameter gradient") == report.count("parameter gradient in training") == 6
    assert report.count("buffer in training") == 3 and not sch.mod.training
    with Verify(sch, batch(), eval_mode=True) as check:
        sch["last"].checkpoint()
    assert check.report.count("buffer in training") == 0

    def change(sch):
        twice = CountsTwice(16)
        twice.load_state_dict(sch["norm"].mod.state_dict())
        sch["norm"].replace(twice)

    report = refused(
        create_schedule(net()),
        change,
        r"buffer in training norm\.num_batches_tracked: 1 of 1 values differ",
        r"first buffer that differs: 'norm' \(CountsTwice\), seen by rank 0; last step there: replace",
    )
    assert all(not one.fault for one in report.comparisons if one.kind == "buffer")


class InHalves(nn.Linear):
    """A linear layer that adds up in another order, and may be off by a factor."""

    factor = 1.0

    def forward(self, hidden):
        one, other = hidden.chunk(2, -1)
        left, right = self.weight.chunk(2, 1)
        return (self.bias + other @ right.T + one @ left.T) * self.factor


def test_what_rounding_makes_of_nearly_equal_samples_is_no_difference():
    """Batch norm divides by what is left of two samples: a sum in another order is seen a thousandfold."""
    alike = batch(1, HIDDEN).expand(2, HIDDEN) + 2e-3 * batch(2, HIDDEN)

    def change(sch, factor=1.0):
        halves = InHalves(HIDDEN, 16)
        halves.load_state_dict(sch["first"].mod.state_dict())
        halves.factor = factor
        sch["first"].replace(halves)

    sch = create_schedule(net())
    with Verify(sch, alike) as check:
        change(sch)
    assert check.report.largest("output in training")[1] > 1e-5
    assert "rounding alone changes results by up to" in str(check.report)
    refused(create_schedule(net()), lambda sch: change(sch, 1.001), "output out", inputs=alike)


class Drops(nn.Module):
    """Dropout in all ways that torch has."""

    def __init__(self):
        super().__init__()
        self.module, self.rows = nn.Dropout(0.5), nn.LSTM(HIDDEN, HIDDEN, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, dropout=0.5, batch_first=True)

    def forward(self, hidden):
        rows = F.dropout(self.module(hidden), 0.5, self.training).unsqueeze(0)
        seen = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5 if self.training else 0.0)
        mixed, _ = self.attention(seen, seen, seen)
        kept = F.alpha_dropout(mixed, 0.5, self.training)
        return self.rows(kept)[0] + torch.dropout(rows, 0.5, self.training)


def test_nothing_is_dropped_while_training_mode_is_verified():
    """A schedule may draw in another order; what is computed beside that is the same."""
    sch = create_schedule(Drops())

    def draw(module, args):
        torch.rand(3)

    with Verify(sch, batch()) as check:
        sch["module"].sync("fwd_pre", draw)
    assert check.report.count("output in training") == 1


class LeavesOut(nn.Module):
    """Layers that Python's generator, NumPy's or one of its own leaves out in training mode."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(12))
        self.source = torch.Generator().manual_seed(4)

    def forward(self, hidden):
        draw = [
            random.random,
            lambda: np.random.uniform(),  # noqa: NPY002 - what layers of users draw from
            lambda: torch.rand((), generator=self.source),
        ]
        for place, layer in enumerate(self.layers):
            if not self.training or draw[place % 3]() < 0.5:
                hidden = hidden + torch.tanh(layer(hidden))
        return hidden


def test_both_models_draw_the_same_from_generators_of_python_and_numpy():
    sch = create_schedule(LeavesOut())
    states = random.getstate(), np.random.get_state()[1:3]  # noqa: NPY002
    with Verify(sch, batch()) as check:
        sch.checkpoint()
    assert check.report.count("output in training") == 1
    assert states[0] == random.getstate()
    assert all(map(np.array_equal, states[1], np.random.get_state()[1:3]))  # noqa: NPY002


def test_a_model_without_a_training_mode_is_verified_in_evaluation_mode():
    class OnlyEvaluated(nn.Linear):
        def forward(self, hidden):
            if self.training:
                raise RuntimeError("never trained")
            return super().forward(hidden)

    sch = create_schedule(OnlyEvaluated(HIDDEN, HIDDEN))
    with Verify(sch, batch()) as check:
        sch.checkpoint()
    assert "not compared in training mode, in which the original raises" in str(check.report)
    assert "never trained" in str(check.report)


@pytest.mark.parametrize(
    ("how", "patterns"),
    [
        (
            "bias",
            [r"output out: 32 of 32 values differ", "first output that differs: 'last' \\(Changed\\)"],
        ),
        ("scale", ["first output that differs: 'last'"]),
        ("detached", [r"parameter gradient last\.weight: gets no gradient", "'last'"]),
        ("shape", [r"output out: has shape \(3, 8\); expected \(4, 8\)", "'last'"]),
        ("type", [r"output out: has type torch.float64; expected torch.float32"]),
        (
            "raises",
            ["the scheduled model raises RuntimeError", "the error was raised in: 'last' \\(Changed\\)"],
        ),
        ("nan", ["first output that differs: 'last'"]),
    ],
)
def test_what_a_module_does_wrong_is_found_at_the_module(how, patterns):
    last = "last step there: replace\\(new_mod_or_func=<Changed>\\) at 'last'"
    report = refused(
        create_schedule(net()),
        lambda sch: sch["last"].replace(changed(sch["last"].mod, how)),
        *patterns,
        last,
    )
    assert [one.path for one in report.divergences] == ["last"] * len(report.divergences)


def test_a_bias_of_zero_is_missed():
    """As the bias of the last layer is; the model of the user keeps its zeros."""
    sch = create_schedule(net())
    refused(sch, lambda sch: sch["last"].replace(changed(sch["last"].mod, "bias")))
    assert not sch["last"].mod.bias.any()


def test_a_gradient_alone_can_be_wrong():
    def change(sch):
        sch["first"].checkpoint()
        sch["norm"].mod.register_forward_hook(doubled)

    report = refused(
        create_schedule(net()), change, r"parameter gradient first\.weight", "input gradient",
        r"last input gradient that differs: 'norm' \(BatchNorm1d\), seen by rank 0; last step there: none",
    )  # fmt: skip
    assert report.largest("output") == (0.0, 0.0)
    with Verify(sch := create_schedule(net()), batch(), check_grad=False) as check:
        change(sch)
    assert check.report.count("parameter gradient") == 0


def test_small_gradients_are_held_to_their_own_size():
    """An error that is small only because the gradients are is an error."""

    def loss(outputs):
        return 1e-6 * outputs["out"].square().mean()

    def change(sch):
        sch["last"].mod.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.1,))

    report = refused(create_schedule(net()), change, "parameter gradient first.weight", loss_fn=loss)
    assert report.largest("parameter gradient")[0] < 1e-6
    with Verify(sch := create_schedule(net()), batch(), loss_fn=loss) as check:
        sch["last"].checkpoint()
    assert check.report.count("loss") == 1


def test_tolerances_follow_the_type_and_the_user():
    def change(factor):
        def hook(module, args, output):
            return output * factor

        return lambda sch: sch["last"].mod.register_forward_hook(hook)

    model = net().bfloat16()
    with Verify(sch := create_schedule(model), batch().bfloat16()):
        change(1.008)(sch)
    refused(create_schedule(net()), change(1.001), "tolerated: 1e-05 of the value and 1e-05 of the largest")
    with Verify(sch := create_schedule(net()), batch(), rtol=0.01, atol=0.01):
        change(1.001)(sch)
    with pytest.raises(ArgumentError, match="rtol is -1; expected a number >= 0"):
        Verify(sch, batch(), rtol=-1)


def test_changes_in_place_are_faults():
    def scaled(sch):
        with torch.no_grad():
            sch["first"].mod.weight.mul_(1.0)

    def written(sch):
        sch["first"].mod.weight.data[0, 0] += 1

    for change in (scaled, written):
        refused(create_schedule(net()), change, "parameter first.weight was changed in place")
    refused(
        create_schedule(net()), lambda sch: sch["first"].replace(changed(sch["first"].mod, "in place")),
        r"input hidden is changed in place by one model only",
    )  # fmt: skip


def test_parameters_without_counterpart_are_named():
    """What a new module brings along keeps its values; what it takes the place of is not moved off zero."""

    class Merged(nn.Module):
        def __init__(self, old):
            super().__init__()
            self.table = nn.Parameter(torch.cat([old.weight, old.bias[:, None]], 1).detach())

        def forward(self, hidden):
            return hidden @ self.table[:, :-1].T + self.table[:, -1]

    with Verify(sch := create_schedule(net()), batch()) as check:
        sch["last"].replace(Merged(sch["last"].mod))
    assert sorted(check.report.not_compared) == ["last.bias", "last.table", "last.weight"]
    assert "without counterpart: last.weight, last.bias, last.table" in str(check.report)


def test_a_model_without_values_is_verified_with_those_that_a_build_would_give():
    with init_empty_weights():
        model = Net.__new__(Net)
        nn.Module.__init__(model)
        model.first, model.norm, model.last = nn.Linear(HIDDEN, 16), nn.BatchNorm1d(16), nn.Linear(16, HIDDEN)
        model.drop = nn.Dropout(0.5)
    with Verify(sch := create_schedule(model), batch()) as check:
        sch["last"].decompose()
    assert check.report.is_equal and check.report.count("parameter gradient") == 6
    assert all(one.is_meta for one in model.parameters())
    refused(
        sch,
        lambda sch: sch["last"].mod.register_forward_hook(lambda module, args, output: 2 * output),
        "'last'",
    )


def test_a_subtree_is_verified_by_itself():
    model = nn.Sequential(nn.Linear(HIDDEN, 4), net())
    sch = create_schedule(model)
    with Verify(sch["1"], batch()) as check:
        sch["1.first"].checkpoint()
    assert check.report.path == "1"
    refused(
        sch["1"],
        lambda node: node["last"].replace(changed(node["last"].mod, "bias")),
        r"'1\.last' \(Changed\)",
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (3, "example inputs are int; expected a tensor"),
        ({"image": batch()}, r"do not fit Net.forward.*missing a required argument: 'hidden'"),
        ((batch(), 1.0, 2.0), "too many positional arguments"),
    ],
)
def test_inputs_that_cannot_be_passed_are_refused_before_the_block(inputs, message):
    with pytest.raises(KindError, match=message), Verify(create_schedule(net()), inputs):
        raise AssertionError("the block ran")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"eval_mode": "train"}, "Verify of '': eval_mode is 'train'; expected True or False or None"),
        ({"enable": "no"}, "enable is 'no'; expected True or False"),
        ({"rtol": "1e-3"}, "rtol is '1e-3'; expected a number or None"),
        ({"loss_fn": 3}, "loss_fn is 3; expected a function or None"),
        ({"device": "gpu"}, "Verify of '': device is 'gpu'; expected one of torch, such as 'cpu'"),
    ],
)
def test_options_of_other_kinds_are_refused_before_the_block(option, message):
    with pytest.raises((KindError, ArgumentError), match=message):
        Verify(create_schedule(net()), batch(), **option)


def test_gradients_of_inputs_that_are_never_trained_may_be_left_out():
    inputs = (batch(), torch.tensor(2.0))

    def change(sch):
        sch.mod.register_forward_pre_hook(lambda module, args: (args[0], args[1].detach()))

    with Verify(sch := create_schedule(net()), inputs, input_grads=["hidden"]) as check:
        change(sch)
    assert check.report.count("input gradient") == 1
    refused(create_schedule(net()), change, "input gradient scale: 1 of 1 values differ", inputs=inputs)
    with pytest.raises(ArgumentError, match="input_grads is 'hidden'; expected names among hidden, scale"):
        Verify(sch, inputs, input_grads="hidden").__enter__()


def test_inputs_come_in_any_form():
    sch = create_schedule(net())
    drawn = []

    def draw(generator):
        drawn.append(torch.randn(2, HIDDEN, generator=generator))
        return {"hidden": drawn[-1], "scale": torch.tensor(2.0)}

    for inputs in (batch(), (batch(), 2.0), {"scale": torch.tensor(3.0), "hidden": batch()}, draw):
        with Verify(sch, inputs, seed=3):
            pass
    assert torch.equal(drawn[0], batch(2, HIDDEN, seed=3))


def test_nothing_is_verified_after_an_error_or_where_it_is_turned_off():
    sch = create_schedule(net())
    with pytest.raises(ZeroDivisionError), Verify(sch, batch()) as check:
        sch["last"].replace(changed(sch["last"].mod, "bias"))
        raise ZeroDivisionError
    assert check.report is None and not sch.metadata.tags
    with Verify(sch, None, enable=False) as check:
        sch["last"].replace(changed(sch["last"].mod, "scale"))
    assert check.report is None


def test_primitives_that_may_change_results_are_noted():
    with Verify(sch := create_schedule(net()), batch()) as check:
        sch["drop"].fork_rng()
    assert "note: 1 x fork_rng, which may change results" in str(check.report)


def doubled(module, args, output):
    return Doubled.apply(output)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(3)))


def test_stages_are_verified_and_a_wrong_gradient_is_found_in_its_stage():
    def cut(sch):
        sch.trace_until(["0", "1", "2"])
        sch["0"].cut_pipeline_stage()
        sch["1"].cut_pipeline_stage()

    with Verify(sch := create_schedule(chain()), batch()) as check:
        cut(sch)
    assert check.report.is_equal and check.report.count("parameter gradient") == 6

    def change(sch):
        cut(sch)
        sch["1.0"].mod.register_forward_hook(doubled)

    report = refused(
        create_schedule(chain()), change, r"parameter gradient 0\.0\.weight",
        r"last input gradient that differs: '1\.0' \(Linear\) in stage 1, seen by rank 0",
    )  # fmt: skip
    assert report.largest("output") == (0.0, 0.0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, hidden):
        return attend(self.query(hidden), self.key(hidden), self.value(hidden))


def attend(query, key, value):
    return torch.matmul((torch.matmul(query, key.transpose(-2, -1)) * 0.5).softmax(-1), value)


class Kernel(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, scale=0.5)


class Swapped(Kernel):
    def forward(self, key, query, value):
        return super().forward(query, key, value)


def test_swapped_arguments_of_a_kernel_are_found_in_its_module():
    def change(sch, kernel):
        sch["1"].replace(kernel, sch["1"].find(attend)[0])

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Attention(), nn.Linear(HIDDEN, HIDDEN))

    with Verify(sch := create_schedule(model()), batch(2, 3, HIDDEN)):
        change(sch, Kernel())
    refused(
        create_schedule(model()), lambda sch: change(sch, Swapped()),
        r"first output that differs: '1' \(Attention\)", r"last step there: replace\(.*Swapped.*at '1'",
        inputs=batch(2, 3, HIDDEN),
    )  # fmt: skip


def test_copies_have_their_own_hooks_functions_and_generators():
    model = net()
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    traced.register_forward_hook(lambda module, args, output: output + 1)
    last, seen = model.last, []

    def through(hidden):
        seen.append(last)
        return F.linear(hidden, last.weight)

    model.last.forward = through
    model.first.forward = functools.partial(F.linear, weight=model.first.weight)
    model.draws = torch.Generator().manual_seed(3)
    for one in (model, traced):
        copied = copy_module(one, lambda tensor: type(tensor)(torch.full_like(tensor, 0.5)))
        names = [[type(other).__name__ for other in both.modules()] for both in (copied, one)]
        assert names[0] == names[1]
        assert not {id(other) for other in copied.modules()} & {id(other) for other in one.modules()}
    copied = copy_module(traced, lambda tensor: tensor)
    expected = traced(batch(2, 4))
    traced.graph.output_node().replace_input_with(
        next(iter(traced.graph.output_node().args)), next(iter(traced.graph.nodes))
    )
    traced.recompile()
    torch.testing.assert_close(copied(batch(2, 4)), expected)
    assert not torch.equal(traced(batch(2, 4)), expected)
    copied = copy_module(model, lambda tensor: tensor)
    copied.last.forward(batch(2, 16))
    assert seen[-1] is copied.last and copied.first.forward.keywords["weight"] is model.first.weight
    assert copied.draws.initial_seed() == 3 and copied.draws is not model.draws
    torch.rand(1, generator=copied.draws)
    assert torch.equal(
        torch.rand(1, generator=model.draws), torch.rand(1, generator=torch.Generator().manual_seed(3))
    )


def test_ties_and_compiled_parts_are_copied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    tied = copy_module(model, lambda tensor: nn.Parameter(tensor.detach().clone()))
    assert tied[1].weight is tied[0].weight is not model[0].weight
    compiled = nn.Sequential(torch.compile(model, backend="eager"))
    copied = copy_module(compiled, lambda tensor: nn.Parameter(torch.zeros_like(tensor)))
    assert copied(torch.ones(1, 4)).abs().max() == 0
    assert compiled(torch.ones(1, 4)).abs().max() > 0


class Normalised(nn.Module):
    """An embedding whose rows are normalised where they are looked up."""

    def __init__(self, **options):
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 4, **options), nn.Linear(4, 4)

    def forward(self, ids):
        return self.linear(self.table(ids))


def test_a_forward_that_normalises_rows_changes_copies_only():
    torch.manual_seed(0)
    model, ids = Normalised(max_norm=0.5, sparse=True), torch.arange(8)
    before = model.table.weight.detach().clone()
    sch = create_schedule(model)
    with Verify(sch, (ids,)) as check:
        sch["table"].checkpoint()
    assert check.report.is_equal and torch.equal(model.table.weight, before)
    sch, plain = create_schedule(Normalised(max_norm=0.5)), nn.Embedding(8, 4)
    plain.weight = sch.mod.table.weight
    with pytest.raises(VerificationError, match=r"output itself: .* values differ"), Verify(sch, (ids,)):
        sch["table"].replace(plain)


def test_other_values_of_a_new_module_are_noted():
    torch.manual_seed(0)
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with Verify(sch, torch.randn(2, 4)) as check:
        sch["0"].replace(nn.Linear(4, 4))
    note = "taken from the original, since the schedule brings other values: 0.bias, 0.weight"
    assert check.report.notes == [note]
    with Verify(sch, torch.randn(2, 4)) as check:
        sch["0"].checkpoint()
    assert not check.report.notes


class Decaying(nn.Module):
    """Its forward changes tensors that are no buffers."""

    def __init__(self):
        super().__init__()
        self.linear, self.share, self.others = nn.Linear(4, 4), torch.ones(4), [torch.ones(4)]

    def forward(self, data):
        self.share.mul_(0.5)
        self.others[0].add_(1)
        return self.linear(data) * self.share * self.others[0]


class Still(Decaying):
    def forward(self, data):
        return self.linear(data) * self.share * 0.5 * (self.others[0] + 1)


def test_tensors_that_are_no_buffers_change_in_each_copy_and_once_where_it_is_recomputed():
    torch.manual_seed(0)
    sch, data = create_schedule(nn.Sequential(Decaying())), torch.randn(2, 4)
    with Verify(sch, data) as check:
        sch["0"].checkpoint()
    assert check.report.is_equal
    sch.mod(data).sum().backward()
    assert torch.equal(sch.mod[0].share, torch.full((4,), 0.5)) and sch.mod[0].others[0][0] == 2
    sch, still = create_schedule(nn.Sequential(Decaying())), Still()
    still.linear = sch.mod[0].linear
    with pytest.raises(VerificationError, match="output in training itself"), Verify(sch, data):
        sch["0"].replace(still)
