"""Verification by layers in one process: layers that stand for others, and what needs the whole model."""

import functools

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F
from verify_cases import Doubled

from makespan.slapo import VerificationError, Verify, create_schedule
from makespan.slapo.layered import repeated_layers

HIDDEN = 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden, scale=1.0):
        return hidden + self.drop(self.down(F.gelu(self.up(self.norm(hidden))))) * scale


class Model(nn.Module):
    """Layers between an embedding and a head that share their table."""

    layer = Layer

    def __init__(self, n_layers=4):
        super().__init__()
        self.words = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(self.layer() for _ in range(n_layers))
        self.head = nn.Linear(HIDDEN, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        hidden = self.words(ids)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, scale=0.5) if number % 2 else layer(hidden)
        return self.head(hidden)


def model(kind=Model):
    torch.manual_seed(0)
    return kind()


def ids(generator):
    return torch.randint(16, (2, 5), generator=generator)


def both_ways(change, kind=Model, **options):
    """Verify a change of two equal models, whole and by layers: return the second report, of one verdict."""
    reports = []
    for by_layers in (False, True):
        sch = create_schedule(model(kind))
        before = [(tensor, tensor.clone()) for tensor in (*sch.mod.parameters(), *sch.mod.buffers())]
        check = Verify(sch, ids, by_layers=by_layers, **options)
        try:
            with check:
                change(sch)
        except VerificationError:
            assert check.report is not None
        reports.append(check.report)
        assert all(torch.equal(tensor, values) for tensor, values in before)
        assert all(parameter.grad is None for parameter in sch.mod.parameters())
    whole, layered = reports
    assert whole.is_equal == layered.is_equal, f"{whole}\n\n{layered}"
    if not layered.layers:
        (note,) = (note for note in layered.notes if "not by layers" in note)
        assert str(layered).replace(f"\n  note: {note}", "") == str(whole)
    return layered


def whole_because(reason, change, kind=Model, **options):
    report = both_ways(change, kind, **options)
    assert not report.layers
    assert reason in str(report), str(report)
    return report


def unchanged(sch):
    """Change nothing."""


def hooked(path, hook):
    return lambda sch: sch[path].mod.register_forward_hook(hook)


def test_layers_of_one_structure_are_compared_once_per_kind_of_arguments():
    def change(sch):
        for layer in ("layers.0", "layers.1", "layers.2"):
            sch[layer].checkpoint()
            sch[layer]["up"].decompose()

    report = both_ways(change)
    assert report.is_equal
    # With and without a scale, and the last layer as it was.
    assert report.layers == {
        "layers.0": ["layers.0", "layers.1", "layers.2"],
        "layers.1": ["layers.0", "layers.1", "layers.2"],
        "layers.3": ["layers.3"],
    }
    assert "were compared once: layers.0 for 3, layers.1 for 3, layers.3 for 1" in str(report)
    assert report.count("layer output") == report.count("layer output in training") == 3
    assert report.count("parameter gradient") == 1 + 3 * 6


def test_only_one_of_equal_layers_runs():
    runs = []

    class Counted(Layer):
        def forward(self, hidden, scale=1.0):
            runs.append(id(self.norm.weight))
            return super().forward(hidden, scale)

    class Deep(Model):
        layer = Counted

        def __init__(self):
            super().__init__(12)

        def forward(self, ids):
            hidden = self.words(ids)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(hidden)

    with Verify(create_schedule(model(Deep)), ids, by_layers=True, eval_mode=True) as check:
        unchanged(check._sch)
    # For the kind of its results, in the original model, and in the scheduled model.
    assert len(runs) == 3 and check.report.layers == {"layers.0": [f"layers.{n}" for n in range(12)]}


@pytest.mark.parametrize("path", ["layers.0", "layers.1", "layers.2", "layers.3"])
@pytest.mark.parametrize(
    "change",
    [
        lambda node: node["down"].mod.register_forward_hook(lambda module, args, output: output * 1.01),
        lambda node: node["down"].mod.register_forward_hook(
            lambda module, args, output: Doubled.apply(output)
        ),
        lambda node: node["norm"].replace(nn.LayerNorm(HIDDEN, eps=0.1)),
        lambda node: node["up"].replace(nn.Linear(HIDDEN, 16, bias=False)),
        lambda node: node["drop"].replace(AlwaysDropout(0.5)),
        lambda node: setattr(node.mod, "forward", functools.partial(twice, node.mod)),
    ],
    ids=["value", "gradient", "attribute", "bias", "dropout", "argument"],
)
def test_a_mistake_in_any_single_layer_is_found(path, change):
    report = both_ways(lambda sch: change(sch[path]))
    assert not report.is_equal and "compared as a whole" in str(report)


def twice(layer, hidden, scale=1.0):
    return type(layer).forward(layer, hidden, 2 * scale)


class AlwaysDropout(nn.Dropout):
    """Dropout that drops in evaluation mode, too."""

    def forward(self, hidden):
        return torch.dropout(hidden, self.p, True)


def test_a_mistake_in_the_rest_is_found():
    def in_order(sch):
        layers = sch.mod.layers._modules
        layers["0"], layers["1"] = layers["1"], layers["0"]
        sch.rebuild()

    for change in (
        hooked("head", lambda module, args, output: output * 1.01),
        hooked("head", lambda module, args, output: Doubled.apply(output)),
        hooked("words", lambda module, args, output: output.detach()),
        in_order,
    ):
        report = both_ways(change)
        assert not report.is_equal and "compared as a whole" in str(report)


def test_what_a_layer_is_handed_must_agree():
    """A hook of the whole model on the result of a layer lies between two layers."""

    class Between(Model):
        def __init__(self):
            super().__init__()
            self.between = nn.Identity()

        def forward(self, ids):
            hidden = self.layers[0](self.words(ids))
            return self.head(self.layers[1](self.between(hidden)))

    for hook in (lambda m, a, output: output * 1.001, lambda m, a, output: Doubled.apply(output)):
        report = both_ways(hooked("between", hook), Between)
        assert not report.is_equal and "the rest of the model differs" in str(report)


def test_mistakes_that_cancel_within_a_layer_are_none():
    def change(sch):
        sch["layers.1.up"].mod.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        sch["layers.1.norm"].mod.register_forward_hook(lambda module, args, output: output / 2)

    report = both_ways(change)
    assert report.is_equal and report.layers


def test_mistakes_that_cancel_between_layers_are_left_to_the_whole_model():
    def change(sch):
        sch["layers.1"].mod.register_forward_hook(lambda module, args, output: 2 * output)
        sch["layers.2"].mod.register_forward_pre_hook(lambda module, args: (args[0] / 2,))

    report = whole_because("'layers.1' differs by itself", change)
    assert report.is_equal


def test_errors_that_add_up_over_layers_are_left_to_the_whole_model():
    """Eight layers with half the tolerated error each: too much for one of eight."""

    def change(sch):
        for layer in sch.mod.layers:
            layer.register_forward_hook(lambda module, args, output: output * (1 + 5e-6))

    assert not whole_because("differs by itself", change, lambda: Model(8)).is_equal


def test_batch_norm_is_compared_with_its_buffers():
    class Normed(Layer):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

    class WithBuffers(Model):
        layer = Normed

    report = both_ways(unchanged, WithBuffers)
    assert report.is_equal and report.count("buffer in training") == 4 * 3
    slower = both_ways(lambda sch: sch["layers.2.norm"].replace(nn.BatchNorm1d(5, momentum=0.5)), WithBuffers)
    assert not slower.is_equal and "buffer in training layers.2.norm.running_mean" in str(slower)


class Masked(Model):
    """Layers that are handed a trained table with infinite scores, or divide zero by zero."""

    def __init__(self, numbers=True):
        super().__init__()
        self.table = nn.Parameter(torch.rand(5, 5))
        for layer in self.layers:
            vars(layer)["numbers"] = numbers
            vars(layer)["forward"] = functools.partial(masked, layer)

    def forward(self, ids):
        hidden = self.words(ids)
        scores = self.table + torch.full((5, 5), float("-inf")).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, scores)
        return self.head(hidden)


def masked(layer, hidden, scores):
    mixed = scores.softmax(-1) @ layer.up(layer.norm(hidden))
    zeros = hidden[:, :, :1] * 0
    return hidden + layer.down(mixed) + (0 if layer.numbers else zeros / zeros)


def test_infinite_scores_hide_no_fault():
    for number in range(4):
        report = both_ways(hooked(f"layers.{number}.down", lambda m, a, output: output * 1.001), Masked)
        assert not report.is_equal
    assert both_ways(unchanged, Masked).layers == {"layers.0": [f"layers.{number}" for number in range(4)]}


def test_results_that_are_no_numbers_are_compared_as_a_whole():
    whole_because("returns NaN by itself", unchanged, functools.partial(Masked, numbers=False))


def drawing(hidden):
    return hidden + 0 * torch.rand(())


class Refusing(Model):
    """A model whose layers do what a verification by layers cannot follow."""

    def __init__(self, how=""):
        super().__init__()
        self.how, self.shared = how, nn.Linear(HIDDEN, HIDDEN)
        if how == "module":
            for layer in self.layers:
                layer.up = self.layers[0].up
        if how == "weight":
            self.layers[1].norm.weight = self.layers[0].norm.weight
        if how == "reference":
            vars(self.layers[0])["owner"] = self
        if how == "closure":
            vars(self.layers[0])["borrowed"] = [self.layers[1].norm.weight]
        self.borrowed = [self.layers[0].norm.weight]
        for layer in self.layers:
            vars(layer)["inner"], vars(layer)["how"] = type(layer).forward, how
            vars(layer)["forward"] = functools.partial(acting, layer)

    def forward(self, ids):
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden, Cache() if self.how == "object" else 1.0)
            if self.how == "inside":
                hidden = layer.norm(hidden)
        if self.how == "borrowed":
            hidden = hidden * self.borrowed[0]
        return self.head(hidden)


class Cache:
    """An object that layers are handed."""


def acting(layer, hidden, scale):
    if layer.how == "random":
        hidden = drawing(hidden)
    if layer.how == "attributes":
        layer.last = hidden.detach()
    result = layer.inner(layer, hidden, 1.0 if layer.how == "object" else scale)
    if layer.how == "in place":
        hidden.data.add_(1.0)
    return result


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("module", "shares a module or weight with the rest"),
        ("weight", "shares a module or weight with the rest"),
        ("reference", "refers to a Refusing outside of it"),
        ("closure", "'layers.0' refers to a weight outside of it"),
        ("borrowed", "the rest of the model uses 'layers.0.norm.weight', which belongs elsewhere"),
        ("random", "'layers.0' draws random numbers"),
        ("attributes", "'layers.0' keeps state in attributes"),
        ("in place", "'layers.0' changes its arguments in place"),
        ("object", "'layers.0' is handed an object, Cache"),
        ("inside", "the model uses 'norm' of 'layers.0' without calling the layer"),
    ],
)
def test_what_cannot_be_taken_apart_is_compared_as_a_whole(how, reason):
    whole_because(reason, unchanged, functools.partial(Refusing, how))
    wrong = hooked("layers.1.down", lambda module, args, output: output * 1.01)
    assert not whole_because("compared as a whole", wrong, functools.partial(Refusing, how)).is_equal


def test_a_tie_across_layers_that_a_schedule_breaks_is_found():
    def change(sch):
        sch["layers.1.norm"].mod.weight = nn.Parameter(sch["layers.1.norm"].mod.weight.detach().clone())

    report = whole_because(
        "shares a module or weight", change, functools.partial(Refusing, "weight"), eval_mode=True
    )
    assert not report.is_equal


def test_models_without_lists_and_stages_are_compared_as_a_whole():
    whole_because("no list has two layers", unchanged, lambda: Model(1))

    class Chain(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Embedding(16, HIDDEN), nn.Sequential(*(Layer() for _ in range(3))))

    def cut(sch):
        sch.trace_until(["1.0"])
        sch["1.0"].cut_pipeline_stage()

    assert both_ways(unchanged, Chain).layers == {"1.0": ["1.0", "1.1", "1.2"]}
    whole_because("the schedule cuts stages", cut, Chain)


def test_repeated_layers_are_the_outermost():
    class Expert(Layer):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    net = nn.ModuleDict(
        {
            "stages": nn.ModuleList([nn.Sequential(Expert(), Expert()), nn.Sequential(Expert(), Expert())]),
            "mixed": nn.Sequential(nn.Linear(2, 2), nn.GELU()),
            "one": nn.ModuleList([Layer()]),
        }
    )
    assert repeated_layers(net) == ["stages.0", "stages.1"]
    assert repeated_layers(nn.Sequential(Expert(), nn.GELU())) == [
        "0.experts.0",
        "0.experts.1",
        "0.experts.2",
    ]


def test_modes_gradients_and_losses_are_those_asked_for():
    def loss(logits):
        return logits.square().mean()

    report = both_ways(unchanged, loss_fn=loss)
    assert report.count("loss") == 1 and report.layers
    assert both_ways(unchanged, check_grad=False).count("parameter gradient") == 0
    assert both_ways(unchanged, eval_mode=True).count("output in training") == 0
    # In its own mode the model draws: its layers cannot be taken apart.
    whole_because("draws random numbers", unchanged, eval_mode=False)
