"""What building a schedule checks, initialises and refuses, in one process that plays one of two."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from makespan.slapo import (
    ArgumentError,
    BuildError,
    KindError,
    ShardError,
    build,
    create_schedule,
    full_state_dict,
    init_empty_weights,
    load_full_state_dict,
)
from makespan.slapo.building import check_complete


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight


def scheduled(model=None, size=2):
    sch = create_schedule(model or Model())
    for _, node in sch.named_schedules():
        node.world_size = size
    return sch


def warned(sch, ties="error"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_complete(sch, ties)
    return [str(one.message) for one in caught]


def shard_layer(layer):
    for name in ("up", "gate"):
        layer[name].shard(["weight", "bias"], 0)
    layer.sync("bwd_post", "all_reduce")
    layer["down"].shard("weight", 1)
    layer["down"].sync("fwd_post", "all_reduce")


def test_a_complete_schedule_gives_no_warning():
    sch = scheduled()
    for index in range(2):
        shard_layer(sch[f"layers.{index}"])
    sch["words"].shard("weight", 0)
    sch["words"].sync("fwd_post", "all_reduce")
    sch["head"].shard("weight", 0)
    sch["head"].sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)
    assert warned(sch) == []


def test_forgotten_exchanges_are_found():
    sch = scheduled()
    shard_layer(sch["layers.0"])
    sch["layers.1.down"].shard("weight", 1)
    assert warned(sch) == [
        "build: 'layers.1.down' (LateBiasLinear) returns partial sums that are never reduced; add "
        "sync('fwd_post', 'all_reduce') or 'reduce_scatter' there"
    ]
    sch = scheduled()
    sch["layers.0.up"].shard(["weight", "bias"], 0)  # the next sharded layer is that of another owner
    shard_layer(sch["layers.1"])
    (message,) = warned(sch)
    assert (
        "'layers.0.up' (Linear) returns a partition on axis -1 and no layer after it takes parts" in message
    )
    sch = scheduled(nn.ModuleDict({"head": nn.Linear(4, 8)}))
    sch["head"].shard(["weight", "bias"], 0)
    assert len(warned(sch)) == 1
    assert not warned(scheduled(size=1))


def test_half_sharded_layers_are_refused():
    sch = scheduled()
    sch["layers.0.up"].shard("weight", 0)
    with pytest.raises(BuildError, match=r"'bias' of 'layers.0.up' .* is whole, but 'weight' is sharded"):
        check_complete(sch, "error")
    norm = scheduled(nn.ModuleDict({"one": nn.BatchNorm2d(4)}))
    norm["one"].shard(["weight", "bias"], 0)
    with pytest.raises(BuildError, match="'running_mean', 'running_var' of 'one'"):
        check_complete(norm, "error")


def test_half_sharded_ties_are_refused_or_told():
    sch = scheduled()
    sch["words"].shard("weight", 0)
    sch["words"].sync("fwd_post", "all_reduce")
    with pytest.raises(RuntimeError, match=r"'words.weight' and 'head.weight' were one parameter"):
        check_complete(sch, "error")
    assert len(warned(sch, "warn")) == 1


def test_arguments_of_other_kinds_are_refused():
    sch = create_schedule(Model())
    for options, text in (
        ({"init_weights": "normal"}, "init_weights is 'normal'; expected True or False or a function"),
        ({"check": "no"}, "check is 'no'; expected True or False"),
        ({"seed": "1"}, "seed is '1'; expected a whole number or None"),
    ):
        with pytest.raises(KindError, match=text):
            build(sch, **options)
    with pytest.raises(ArgumentError, match="build: device is 'gpu'; expected one of torch, such as 'cpu'"):
        build(sch, device="gpu")
    with pytest.raises(KindError, match="create_schedule: group is 2; expected a process group or None"):
        create_schedule(Model(), group=2)


def test_calls_of_build_are_checked():
    sch = create_schedule(Model())
    for call, text in (
        (
            lambda: build(sch, "deepspeed"),
            "target is 'deepspeed'; expected None or one of eager, compile, ddp, fsdp",
        ),
        (lambda: build(sch["layers.0"]), "build of 'layers.0': expected the schedule of a whole model"),
        (lambda: build(sch, ties="no"), "ties is 'no'; expected 'error' or 'warn'"),
        (
            lambda: build(sch, "ddp", units=[]),
            "unknown option 'units' for ddp; expected one of broadcast_buffers",
        ),
        (lambda: build(sch, "ddp"), "ddp without a process group"),
        (lambda: full_state_dict(sch["layers.0"]), "expected the schedule of a whole model"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert text in str(caught.value)


def empty(make, **options):
    with init_empty_weights(**options):
        return create_schedule(make())


def test_empty_models_take_their_values_from_whoever_knows_them():
    class Own(nn.Module):
        """A layer with a parameter that only the model knows how to fill."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.linear = Own(), nn.Linear(3, 3)

        def _init_weights(self, module):
            for parameter in module.parameters(recurse=False):
                parameter.fill_(7)

    model, _ = build(empty(Owner), seed=1)
    assert all(one.unique().tolist() == [7] for one in model.parameters())
    for fill in (lambda mod: nn.init.ones_(mod.scale), lambda mod, path: nn.init.ones_(mod.scale)):
        assert build(empty(Own), None, fill)[0].scale.tolist() == [1, 1, 1]
    with pytest.raises(
        RuntimeError, match=r"'' \(Own\) is on meta, without _init_weights and reset_parameters"
    ):
        build(empty(Own))
    with pytest.raises(RuntimeError, match=r"initialiser of '' \(Own\) leaves 'scale' without values"):
        build(empty(Own), None, lambda mod: None)
    with pytest.raises(RuntimeError, match=r"'scale' of '' \(Own\) on meta, without values"):
        build(empty(Own), init_weights=False)


def test_parameters_of_an_owner_itself_are_zero_with_a_warning():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.linear = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

    sch = empty(Owner)
    with pytest.warns(UserWarning, match="no initialiser for the parameters of '' itself; they are zero"):
        model, _ = build(sch)
    assert model.token.tolist() == [0, 0] and model.linear.weight.any()


def test_buffers_without_values_are_refused_where_nobody_knows_them():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

    model, _ = build(empty(Owner, include_buffers=True))
    assert model.norm.running_var.tolist() == [1, 1] and model.norm.num_batches_tracked == 0

    class Places(Owner):
        def __init__(self):
            super().__init__()
            self.register_buffer("places", torch.arange(3))

    assert build(empty(Places))[0].places.tolist() == [0, 1, 2]
    with pytest.raises(
        RuntimeError, match=r"buffers 'places' of '' \(Places\) are on meta, and no initialiser knows"
    ):
        build(empty(Places, include_buffers=True))


def test_values_stay_unless_others_are_asked_for():
    model = Model()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    sch = create_schedule(model)
    build(sch, seed=3)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    build(sch, seed=3, reinitialise=True)
    first = {name: one.clone() for name, one in model.state_dict().items()}
    assert not torch.equal(first["words.weight"], before["words.weight"])
    build(sch, seed=3, reinitialise=True)
    assert all(torch.equal(one, first[name]) for name, one in model.state_dict().items())
    assert model.head.weight is model.words.weight


def test_nothing_is_empty_where_it_is_not_asked_for():
    with init_empty_weights(enable=False):
        assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(ArithmeticError), init_empty_weights(include_buffers=True):
        raise ArithmeticError
    assert not nn.BatchNorm1d(2).running_mean.is_meta


def test_a_state_that_does_not_fit_changes_nothing():
    sch = create_schedule(Model())
    state = full_state_dict(sch)
    assert state.keys() == sch.mod.state_dict().keys()
    before = {key: one.clone() for key, one in state.items()}
    changed = {key: one + 1 for key, one in state.items()}
    for wrong, error, text in (
        ({"words.weight": state["words.weight"]}, ArgumentError, "no 'head.weight' (17 missing)"),
        (
            changed | {"heads": state["head.weight"]},
            ArgumentError,
            "'heads' (1 unknown; close: 'head.weight'",
        ),
        (
            changed | {"head.weight": torch.ones(3)},
            ShardError,
            "'head.weight' has shape (3,); expected (8, 4)",
        ),
    ):
        with pytest.raises(error) as caught:
            load_full_state_dict(sch, wrong)
        assert text in str(caught.value), caught.value
    assert all(torch.equal(one, before[key]) for key, one in sch.mod.state_dict().items())
    load_full_state_dict(sch, changed)
    assert all(torch.equal(one, changed[key]) for key, one in sch.mod.state_dict().items())
    with pytest.raises(ArgumentError, match="has no values"):
        full_state_dict(empty(Model))
