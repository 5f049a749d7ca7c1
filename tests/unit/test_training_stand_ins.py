"""The stand-ins learn, are made of what they stand for, and start from the same bits under all kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from makespan.errors import InputError, UnknownNameError
from makespan.training.zoo import STAND_INS, StandIn, build_stand_in, stand_in_data, stand_in_loss

torch = pytest.importorskip("torch")

from stand_in_bits import digests, flat, seed_all
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, default_collate

from makespan.training.zoo.layers import DropPath
from makespan.training.zoo.tasks import Bottleneck, ShuffleUnit, WindowBlock

pytestmark = pytest.mark.xdist_group("stand-ins")

SUPPORT = Path(__file__).parents[1] / "support"
RATES = {"neumf": 1e-2}
BATCH_NORM = {"shufflenetv2", "resnet50", "yolov3"}
RANDOM = {"vgg19", "bert", "electra", "swintransformer"}
IMAGES = {"shufflenetv2", "resnet50", "vgg19", "yolov3", "swintransformer"}


def small(name, **sizes):
    return StandIn(name, **{"width": 8, **sizes})


def first_batch(spec, size=4, **options):
    data = stand_in_data(spec, size, 0, **options)
    return default_collate([data[index] for index in range(size)])


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- learning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAND_INS)
def test_training_lowers_the_loss_on_samples_that_were_not_trained_on(name, one_thread):
    spec = small(name, width=16, n_rows=32)
    model, data = build_stand_in(spec, 0), stand_in_data(spec, 512, 0)
    inputs, targets = first_batch(spec, 64, held_out=True, augment=False)
    seed_all(0, 0, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATES.get(name, 3e-3))

    def held_out_loss():
        model.eval()
        with torch.no_grad():
            return stand_in_loss(spec, model(inputs), targets).item()

    before, losses = held_out_loss(), []
    model.train()
    for _ in range(5 if name == "neumf" else 1):
        for seen, wanted in DataLoader(data, 16, shuffle=True):
            loss = stand_in_loss(spec, model(seen), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-8:]) < 0.85 * sum(losses[:8])
    assert held_out_loss() < 0.85 * before


# --- what they are made of --------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records the operators that run, and the groups and strides of convolutions."""

    def __init__(self):
        super().__init__()
        self.names, self.convolutions = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names.append(name)
        if name == "convolution":
            self.convolutions.append((tuple(args[1].shape), args[3][0], args[8]))
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def recorded():
    found = {}
    for name in STAND_INS:
        spec = small(name)
        model, (inputs, _) = build_stand_in(spec, 0), first_batch(spec)
        with Recorder() as recorder:
            outputs = model(inputs)
        found[name] = model, recorder, outputs
    return found


def kinds(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


def test_convolution_batch_norm_dropout_and_attention_are_where_they_belong(recorded):
    ran = {name: set(recorder.names) for name, (_, recorder, _) in recorded.items()}
    convolving = {name for name in STAND_INS if "convolution" in ran[name]}
    assert convolving == {"shufflenetv2", "resnet50", "vgg19", "yolov3"}
    assert {name for name in STAND_INS if "native_batch_norm" in ran[name]} == BATCH_NORM
    assert {name for name in STAND_INS if "embedding" in ran[name]} == {"neumf", "bert", "electra"}
    attending = {"bert", "electra", "swintransformer"}
    assert {name for name in STAND_INS if "_softmax" in ran[name]} == attending
    assert {name for name in STAND_INS if "native_layer_norm" in ran[name]} == attending
    dropping = {name for name in STAND_INS if {"native_dropout", "bernoulli_"} & ran[name]}
    assert dropping == {"vgg19", "bert", "electra"}
    assert "rand" in ran["swintransformer"]  # stochastic depth


def test_shufflenet_has_grouped_convolutions_and_shuffles_channels(recorded):
    depthwise = [shape for shape, _, groups in recorded["shufflenetv2"][1].convolutions if groups > 1]
    assert len(depthwise) >= 4
    assert all(shape[1] == 1 and shape[2:] == (3, 3) for shape in depthwise)
    unit = ShuffleUnit(8, 8, stride=1)
    unit.main = nn.Identity()
    channels = torch.arange(8.0).view(1, 8, 1, 1)
    assert unit(channels).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_resnet_adds_what_passes_by(recorded):
    model, recorder, _ = recorded["resnet50"]
    assert {shape[2] for shape, _, _ in recorder.convolutions} == {1, 3}
    unit = Bottleneck(8, 4, 8, stride=1)
    nn.init.zeros_(unit.main[-1][1].weight)
    images = torch.rand(2, 8, 4, 4) - 0.5
    torch.testing.assert_close(unit(images), images.relu())
    assert len(kinds(model, Bottleneck)) == 3
    assert len(kinds(build_stand_in(small("resnet50", depth=3), 0), Bottleneck)) == 9


def test_vgg_is_a_plain_stack_with_large_linear_layers(recorded):
    model, recorder, _ = recorded["vgg19"]
    assert {(shape[2], stride, groups) for shape, stride, groups in recorder.convolutions} == {(3, 1, 1)}
    linear = sum(layer.weight.numel() for layer in kinds(model, nn.Linear))
    assert linear > 0.8 * sum(weight.numel() for weight in model.parameters())


def test_yolo_has_heads_at_three_scales_and_coarse_ones_reach_fine_ones(recorded):
    model, _, outputs = recorded["yolov3"]
    assert [tuple(found.shape) for found in outputs] == [(4, 15, side, side) for side in (2, 4, 8)]
    spec = small("yolov3")
    assert [tuple(wanted.shape) for wanted in first_batch(spec)[1]] == [
        (4, 6, side, side) for side in (2, 4, 8)
    ]
    coarsest = model.down[-1][0][0].weight
    (gradient,) = torch.autograd.grad(outputs[-1].sum(), coarsest, retain_graph=True)
    assert gradient.abs().sum() > 0


def test_bert_marks_a_span_and_electra_every_token_behind_a_narrower_table(recorded):
    assert recorded["bert"][2].shape == (4, 2, 16)
    assert recorded["electra"][2].shape == (4, 16)
    widths = {name: recorded[name][0].encoder.tokens.embedding_dim for name in ("bert", "electra")}
    assert widths == {"bert": 8, "electra": 4}


def test_neumf_joins_a_product_of_embeddings_with_an_mlp(recorded):
    model, _, outputs = recorded["neumf"]
    assert (len(kinds(model, nn.Embedding)), outputs.shape) == (4, (4,))
    pairs = torch.tensor([[1, 2]])
    changed = {}
    for table in ("user_factors", "item_factors", "user", "item"):
        (gradient,) = torch.autograd.grad(model(pairs).sum(), getattr(model, table).weight)
        changed[table] = gradient.abs().sum(1).nonzero().flatten().tolist()
    assert changed == {"user_factors": [1], "item_factors": [2], "user": [1], "item": [2]}


@pytest.mark.parametrize("shifted", [False, True])
def test_windows_attend_to_neighbours_only_and_shifted_ones_do_not_wrap_around(shifted):
    block = WindowBlock(8, 8, shifted, 0.0)
    nn.init.uniform_(block.offsets)
    grid = torch.rand(1, 8, 8, 8, requires_grad=True)

    def seen_from(row, column):
        (gradient,) = torch.autograd.grad(block(grid)[0, row, column].square().sum(), grid)
        return {(r, c) for r, c in gradient[0].abs().sum(-1).nonzero().tolist()}

    def square(rows, columns):
        return {(r, c) for r in rows for c in columns}

    if shifted:
        assert seen_from(3, 3) == square(range(2, 6), range(2, 6))
        assert seen_from(0, 0) == square(range(2), range(2))
    else:
        assert seen_from(3, 3) == square(range(4), range(4))


# --- state and randomness ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAND_INS)
def test_training_changes_the_buffers_of_batch_norm_and_no_others(name):
    spec = small(name)
    model, (inputs, _) = build_stand_in(spec, 0), first_batch(spec)
    running = {key for key, _ in model.named_buffers() if "running" in key or "tracked" in key}

    def changed():
        before = {key: value.clone() for key, value in model.named_buffers()}
        model(inputs)
        return {key for key, value in model.named_buffers() if not torch.equal(value, before[key])}

    assert bool(running) == (name in BATCH_NORM)
    assert changed() == running
    model.eval()
    assert changed() == set()


@pytest.mark.parametrize("name", STAND_INS)
def test_only_dropout_and_stochastic_depth_make_training_random(name):
    spec = small(name, dropout=0.5)
    model, (inputs, _) = build_stand_in(spec, 0), first_batch(spec)

    def outputs(seed):
        torch.manual_seed(seed)
        return torch.cat([found.flatten() for found in flat(model(inputs))])

    assert torch.equal(outputs(1), outputs(1))
    assert torch.equal(outputs(1), outputs(2)) == (name not in RANDOM)
    model.eval()
    assert torch.equal(outputs(1), outputs(2))


def test_stochastic_depth_drops_whole_samples_and_scales_the_others():
    layer = DropPath(0.25)
    torch.manual_seed(0)
    kept = layer(torch.ones(4000, 3, 2))
    per_sample = kept.flatten(1)
    assert torch.equal(per_sample.amin(1), per_sample.amax(1))
    assert sorted(set(per_sample[:, 0].tolist())) == [0.0, pytest.approx(4 / 3)]
    assert per_sample.mean().item() == pytest.approx(1.0, abs=0.05)
    rates = [
        block.drop_path.probability
        for block in kinds(build_stand_in(small("swintransformer"), 0), WindowBlock)
    ]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0.0, pytest.approx(0.1))


# --- equal bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAND_INS)
def test_a_seed_decides_weights_and_batches(name):
    weights, batches, _ = digests(name)
    assert digests(name)[:2] == (weights, batches)
    others = digests(name, seed=1)
    assert others[0] != weights
    assert others[1] != batches


@pytest.mark.parametrize(
    ("capability", "settings"),
    [
        ("AVX2", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
        ("DEFAULT", {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "ONEDNN": "off"}),
    ],
)
def test_weights_and_first_batches_have_the_same_bits_under_other_kernels(capability, settings, one_thread):
    native = torch.backends.cpu.get_cpu_capability()
    if native in ("DEFAULT", capability):
        pytest.skip(f"the kernels of this processor are those of {native} anyway")
    done = subprocess.run(
        [sys.executable, "stand_in_bits.py"],
        cwd=SUPPORT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    active, *lines = done.stdout.splitlines()
    assert active == capability
    found = {name: digest for name, *digest in map(str.split, lines)}
    here = {name: digests(name) for name in STAND_INS}
    assert {name: digest[:2] for name, digest in found.items()} == {
        name: list(digest[:2]) for name, digest in here.items()
    }
    # were the kernels the same after all, the comparison would say nothing
    assert [name for name in STAND_INS if found[name][2] != here[name][2]]


def test_nothing_draws_normal_variates_from_torch(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("torch was asked for normal variates")

    for owner, name in (
        (torch, "randn"),
        (torch, "normal"),
        (torch, "randn_like"),
        (torch.Tensor, "normal_"),
    ):
        monkeypatch.setattr(owner, name, refused)
    for name in STAND_INS:
        spec = small(name)
        build_stand_in(spec, 0)(first_batch(spec)[0])


def test_building_leaves_the_random_state_of_torch_alone():
    before = torch.get_rng_state()
    for name in STAND_INS:
        build_stand_in(small(name), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", STAND_INS)
def test_there_are_deterministic_kernels_for_all_of_it(name):
    torch.use_deterministic_algorithms(True)
    try:
        assert digests(name) == digests(name)
    finally:
        torch.use_deterministic_algorithms(False)


# --- samples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAND_INS)
def test_a_sample_follows_from_seed_and_index_and_augmentation_from_all_three_random_states(name):
    spec = small(name)

    def batch(seeds=(0, 0, 0), seed=0, n_samples=16, **options):
        seed_all(*seeds)
        data = stand_in_data(spec, n_samples, seed, **options)
        return [value.tolist() for index in range(16) for value in flat(data[index])]

    plain = batch(augment=False)
    assert batch((1, 2, 3), augment=False, n_samples=99) == plain
    assert batch(augment=False, held_out=True) != plain
    assert batch(augment=False, seed=1) != plain
    altered = batch()
    assert batch() == altered != plain
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert batch(other) != altered, other


def test_noise_hides_the_task():
    def spread(noise):
        data = stand_in_data(small("resnet50"), 60, 0, augment=False, noise=noise)
        seen = {}
        for image, kind in (data[index] for index in range(60)):
            seen.setdefault(kind.item(), []).append(image.mean((1, 2)))
        return max(torch.stack(colours).std(0).max() for colours in seen.values() if len(colours) > 2)

    assert spread(4.0) > 3 * spread(1.0) > 3 * spread(0.0)

    def disliked(noise):
        clear, noisy = (stand_in_data(small("neumf"), 400, 0, augment=False, noise=one) for one in (0, noise))
        return sum(clear[index][1] != noisy[index][1] for index in range(400)) / 400

    assert disliked(1.0) == pytest.approx(0.05, abs=0.03)
    assert disliked(4.0) == pytest.approx(0.2, abs=0.06)


def test_boxes_are_where_the_targets_say_also_in_flipped_images():
    data = stand_in_data(small("yolov3"), 64, 0, noise=0.0)
    seed_all(0, 0, 0)
    n_boxes = [0, 0, 0]
    for image, targets in (data[index] for index in range(64)):
        for scale, (cell, target) in enumerate(zip((8, 4, 2), targets, strict=True)):
            for row, column in target[0].nonzero().tolist():
                _, x, y, width, height, kind = target[:, row, column].tolist()
                place = image[:, int(cell * (row + y)), min(int(cell * (column + x)), 15)]
                assert place.abs().max() > 0.1  # what is no box is below: the noise of augmentation
                assert 0.75 <= min(width, height) <= max(width, height) <= 1.75
                assert kind in range(10)
                n_boxes[scale] += 1
    assert min(n_boxes) > 10


def test_the_answer_to_a_question_stands_where_the_targets_say():
    data = stand_in_data(small("bert"), 32, 0, noise=0.0)
    for tokens, (first, last) in (data[index] for index in range(32)):
        question = int(tokens[0])
        assert (int(tokens[first]), int(tokens[last])) == (2 + question, 4 + question)
        assert 0 < first < last


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("vgg19", {"width": 12}, "width of vgg19 is 12; expected a multiple of 8"),
        ("yolov3", {"extent": 24}, "extent of yolov3 is 24; expected a multiple of 16"),
        ("bert", {"extent": 8}, "extent of bert is 8; expected a whole number >= 16"),
        ("bert", {"depth": 0}, "depth of bert is 0; expected a whole number >= 1"),
        ("neumf", {"n_rows": 4}, "n_rows of neumf is 4; expected a whole number >= 16"),
        ("resnet50", {"n_classes": 1}, "n_classes of resnet50 is 1; expected a whole number >= 2"),
        ("vgg19", {"dropout": 1.0}, "dropout of vgg19 is 1.0; expected a number >= 0 and < 1"),
    ],
)
def test_sizes_out_of_range_are_refused(name, sizes, message):
    with pytest.raises(InputError) as refused:
        StandIn(name, **sizes)
    assert str(refused.value) == message


def test_unknown_stand_ins_and_odd_data_are_refused():
    with pytest.raises(UnknownNameError, match=r"unknown stand-in 'resnet'.*Did you mean 'resnet50'"):
        StandIn("resnet")
    with pytest.raises(InputError, match="n_samples is 0; expected a whole number >= 1"):
        stand_in_data(StandIn("bert"), 0, 0)
    with pytest.raises(InputError, match=r"noise is -1\.0; expected a number from 0 to 10"):
        stand_in_data(StandIn("bert"), 1, 0, noise=-1.0)
    with pytest.raises(IndexError, match="sample 4 of 4"):
        stand_in_data(StandIn("bert"), 4, 0)[4]


def test_the_zoo_is_described_without_torch():
    command = "import sys, makespan.training.zoo as zoo; zoo.StandIn('bert'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
