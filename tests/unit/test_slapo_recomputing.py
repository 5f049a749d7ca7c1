"""What the backward pass computes again, and which results are kept."""

import copy

import pytest

torch = pytest.importorskip("torch")

import odd_transformers
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from makespan.slapo import (
    ArgumentError,
    ConflictError,
    KindError,
    PathError,
    Verify,
    apply_plan,
    create_schedule,
    replay,
    saved_tensors,
)

PATHS = ("boats.0", "boats.1")
INPUTS = odd_transformers.INPUTS["Harbour"]


class Counting(TorchDispatchMode):
    """Count calls of operators."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **kwargs or {})


def harbour(**options):
    """Return a model in training mode whose layers are recomputed; with ``options=None`` none is."""
    sch = create_schedule(odd_transformers.seeded("Harbour"))
    for path in PATHS if options else ():
        sch[path].checkpoint(**options)
    return sch


def trained(model, *inputs):
    """Return kept bytes, gradients, and the operators of the backward pass."""
    torch.manual_seed(3)
    with saved_tensors(model) as kept:
        loss = model(*inputs).square().sum()
    counting = Counting()
    with counting:
        loss.backward()
    return kept.n_bytes, [one.grad.clone() for one in model.parameters()], counting.counts


def same(gradients, others):
    return all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


def test_kept_products_run_once_and_the_rest_twice_with_the_same_random_numbers():
    whole, full = trained(harbour().mod, *INPUTS), trained(harbour(preserve_rng=True).mod, *INPUTS)
    kept = trained(harbour(keep="products").mod, *INPUTS)
    half = trained(harbour(keep=["products"], every=2).mod, *INPUTS)
    assert all(same(whole[1], other[1]) for other in (full, kept, half))
    assert full[0] < half[0] < kept[0] < whole[0]
    products = [run[2].get("addmm", 0) for run in (whole, kept, half, full)]
    assert products == [0, 0, 2 * 3, 2 * 7]  # of seven products in each of two layers
    assert kept[2]["bernoulli_" if "bernoulli_" in full[2] else "native_dropout"] == 2 * 2


def test_bytes_of_kept_results_are_counted():
    few = trained(harbour(keep="products", within=["braid", "net"]).mod, *INPUTS)
    full = trained(harbour(preserve_rng=True).mod, *INPUTS)
    (batch, words), (_, places, _) = INPUTS[0].shape, INPUTS[1].shape
    width = odd_transformers.WIDTH
    assert few[0] - full[0] == 4 * len(PATHS) * batch * (words * 3 * width + places * 2 * width)
    assert same(few[1], full[1])


def test_scores_are_kept_by_name():
    written = trained(harbour(keep=["bmm"]).mod, *INPUTS)
    assert written[2]["addmm"] == 2 * 7
    # Two attentions of a layer, each with gradients of two factors for both products.
    assert written[2]["bmm"] == 2 * 2 * 4


class Kernel(nn.Module):
    """Attention by a kernel that may drop values, and dropout after it."""

    def __init__(self, rate):
        super().__init__()
        self.three, self.back, self.rate = nn.Linear(16, 48), nn.Linear(16, 16), rate

    def forward(self, x):
        heads = self.three(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, dropout_p=self.rate)
        return F.dropout(self.back(seen.transpose(1, 2).flatten(2)), 0.2)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_kernels_of_attention_are_kept_unless_they_drop_values(rate):
    torch.manual_seed(0)
    plain, x = nn.Sequential(Kernel(rate), Kernel(rate)), torch.randn(2, 6, 16)
    sch = create_schedule(copy.deepcopy(plain))
    for name in "01":
        sch[name].checkpoint(keep=["products", "attention"])
    found, expected = trained(sch.mod, x), trained(plain, x)
    assert same(found[1], expected[1])
    kernels = [name for name in found[2] if "scaled_dot_product" in name and "backward" not in name]
    assert not kernels


def test_a_fused_part_keeps_its_products():
    sch = create_schedule(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Tanh()))
    plain, x = copy.deepcopy(sch.mod), torch.randn(3, 4)
    sch.trace()
    nodes = sch.find("[0-3]")
    sch.checkpoint([nodes], keep="products")
    found, expected = trained(sch.mod, x), trained(plain, x)
    assert same(found[1], expected[1]) and "addmm" not in found[2] and found[2]["gelu"] == 1


def test_a_journal_repeats_what_is_kept():
    sch = harbour(keep=["products", "bmm"], every=2, within=["braid"])
    again = replay(odd_transformers.seeded("Harbour"), sch.dump())
    assert str(again) == str(sch)
    assert same(trained(again.mod, *INPUTS)[1], trained(sch.mod, *INPUTS)[1])


def test_a_second_backward_pass_says_that_results_are_gone():
    model = harbour(keep="products").mod
    loss = model(*INPUTS).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only allowed to backward once"):
        loss.backward()


def test_a_kept_result_that_is_changed_in_place_is_named_before_the_backward_pass():
    def built():
        return create_schedule(
            nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)))
        )

    sch = built()
    sch.checkpoint(keep="products")
    with pytest.raises(
        ConflictError, match=r"result of aten.mm.* is kept, but aten.relu_.* changes it in place"
    ):
        sch.mod(torch.ones(2, 4))
    sch = built()
    sch.checkpoint(keep="products", within=["1"])
    sch.mod(torch.ones(2, 4)).sum().backward()


def test_compiled_code_keeps_them_too():
    plain, sch = odd_transformers.seeded("Harbour").eval(), harbour(keep="products", every=2)
    compiled = torch.compile(sch.mod.eval(), backend="aot_eager")
    for model in (plain, compiled):
        model(*INPUTS).square().sum().backward()
    for one, other in zip(sch.mod.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": "product"}, ArgumentError, "torch has no operator 'product'; close: 'products'"),
        ({"keep": ["foo::bar"]}, ArgumentError, "torch has no operator 'foo::bar'"),
        ({"keep": "relu_"}, ArgumentError, "'relu_' changes its arguments or returns a view"),
        ({"keep": "transpose"}, ArgumentError, "'transpose' changes its arguments or returns a view"),
        ({"keep": "native_dropout"}, ArgumentError, "'native_dropout' draws random numbers"),
        ({"keep": 3}, KindError, "keep is 3; expected names of operators"),
        ({"keep": "mm", "every": 0}, ArgumentError, "every is 0; expected a whole number >= 1"),
        ({"every": 2}, ArgumentError, "every and within need keep"),
        ({"keep": "mm", "within": ["braids"]}, PathError, "has no 'braids'"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_once(options, error, message):
    sch = create_schedule(odd_transformers.seeded("Harbour"))
    with pytest.raises(error, match=message):
        sch["boats.0"].checkpoint(**options)
    assert not sch.metadata.journal
    sch["boats.0"].checkpoint(keep="mm")
    with pytest.raises(ConflictError, match="already recomputed"):
        sch["boats.0"].checkpoint(keep="mm")


# --- Plans ---


def steps_of(plan, kind="Harbour"):
    sch = apply_plan(odd_transformers.seeded(kind), plan, odd_transformers.INPUTS[kind])
    steps = [entry for entry in sch.metadata.journal if entry.op == "checkpoint"]
    return {entry.path: entry.arguments for entry in steps}, sch.metadata.structure.notes


class Apart(nn.Module):
    """A layer with a module for its attention, a norm of heads, and one for what follows."""

    def __init__(self):
        super().__init__()
        self.look, self.norm, self.up, self.down = (
            Looking(),
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        x = x + self.look(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Looking(nn.Module):
    """Attention whose queries are normalised."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        q, (k, v) = self.norm(self.q(x).unflatten(-1, (4, 4))), self.kv(x).unflatten(-1, (2, 4, 4)).unbind(2)
        shares = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return self.o(torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(32, 16), nn.ModuleList(Apart() for _ in range(3))

    def forward(self, words):
        x = self.table(words)
        for layer in self.layers:
            x = layer(x)
        return x


def test_selective_recomputation_is_that_of_the_cores_of_attention():
    torch.manual_seed(0)
    sch, words = create_schedule(Tower()), torch.arange(16).view(2, 8)
    with Verify(sch, words) as check:
        apply_plan(sch, "mb1 recompute=selective:0.67", words)
    assert check.report.is_equal
    steps = [entry for entry in sch.metadata.journal if entry.op == "checkpoint"]
    assert [step.path for step in steps] == ["layers.1.look", "layers.2.look"]
    assert steps[0].arguments == {"keep": "products", "within": ["q", "kv"]}
    assert "2 of 3 layers recompute their cores of attention" in sch.metadata.structure.notes
    plain = trained(Tower(), words)
    scores = 4 * 2 * 4 * 8 * 8  # bytes of one tensor of scores
    assert plain[0] - trained(sch.mod, words)[0] > 2 * scores


def test_attention_that_is_no_module_keeps_the_products_of_its_layer_and_a_note_says_so():
    steps, notes = steps_of("mb1 recompute=selective")
    assert steps == {path: {"keep": "products"} for path in PATHS}
    assert "2 of 2 layers keep their products alone, as attention is no module of its own there" in notes


def test_recomputation_by_operator_keeps_attention_and_every_other_product():
    steps, notes = steps_of("mb1 recompute=operators:0.5")
    assert steps == {"boats.1": {"keep": ["products", "attention"], "every": 2}}
    assert "1 of 2 layers keep attention and every other product" in notes


def test_selective_recomputation_without_attention_is_refused():
    model = odd_transformers.seeded("Market")
    with pytest.raises(ArgumentError, match="no attention is found in the layers of Market; expected"):
        apply_plan(model, "mb1 recompute=selective", odd_transformers.INPUTS["Market"])
    assert "forward" not in vars(model.streets[0])


class Named(nn.Module):
    """A module whose arguments have names that recomputation in torch takes for its own options."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, **chosen):
        return self.linear(x) * sum(range(1, 1 + len(chosen)))


class Naming(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Named()

    def forward(self, x):
        return self.inner(
            x, debug=True, early_stop=False, use_reentrant=True, function=2, determinism_check="none",
            preserve_rng_state=False, context_fn=None,
        )  # fmt: skip


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("keep", [(), ("products",)])
def test_arguments_of_any_name_reach_a_recomputed_module(backend, keep):
    torch.manual_seed(0)
    sch = create_schedule(Naming())
    with Verify(sch, torch.randn(3, 4)) as check:
        sch["inner"].checkpoint(keep=keep)
        if backend is not None:
            sch["inner"].compile(backend)
    assert check.report.is_equal
    assert torch.equal(sch.mod(torch.ones(1, 4)), 28 * sch.mod.inner.linear(torch.ones(1, 4)))


def test_weights_that_change_before_the_backward_pass_are_an_error_as_without_recomputation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    sch = create_schedule(model)
    sch.checkpoint()
    loss = model(torch.ones(2, 4)).sum()
    with torch.no_grad():
        model[2].bias.add_(1)
    with pytest.raises(ConflictError, match=r"parameter '2\.bias' of Sequential has changed between"):
        loss.backward()
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(2, 4)).sum() + model(torch.zeros(2, 4)).sum()).backward()
        optimizer.step()


def test_tensors_that_stand_in_for_parameters_during_a_call_are_refused():
    sch, data = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), torch.ones(2, 4)
    sch["0"].checkpoint()
    others = {name: 2 * one for name, one in sch.mod.named_parameters()}
    with pytest.raises(ConflictError, match=r"'weight' of Linear is another tensor .*functional_call"):
        torch.func.functional_call(sch.mod, others, (data,))
    with torch.no_grad():
        torch.func.functional_call(sch.mod, others, (data,))
