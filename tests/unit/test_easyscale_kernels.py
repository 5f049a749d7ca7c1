"""Kernel sets: processes start with them, they differ, and the explicit sums do so by construction."""

import pytest

from makespan.easyscale.kernels import (
    CANONICAL,
    KERNEL_SETS,
    LEVELS,
    DeterminismLevel,
    KernelTrial,
    kernels_of,
    process_options,
    try_kernel_sets,
)
from makespan.errors import UnknownNameError, WorkerError

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn

from makespan.easyscale.parts import ExplicitSums, ordered_sum, scan_module, use_kernels
from makespan.training.zoo import STAND_INS, StandIn, build_stand_in

pytestmark = pytest.mark.xdist_group("training")
D0, D1_D2 = DeterminismLevel.named("D0"), DeterminismLevel.named("D1+D2")


@pytest.fixture(scope="module")
def trial():
    """Return what each kernel set gave, each in a process that started with it."""
    return try_kernel_sets()


def test_parameters_before_a_step_do_not_depend_on_the_kernels(trial):
    assert list(trial.results) == list(KERNEL_SETS)
    assert len({one["parameters"] for one in trial.results.values()}) == 1


def test_a_process_has_the_kernels_that_it_was_started_for(trial):
    capability = {name: one["capability"] for name, one in trial.results.items()}
    assert capability["C"] == capability["canonical"]
    assert capability["C"] in ("DEFAULT", "NO AVX")
    assert capability["B"] != "AVX512"
    assert (
        capability["A"] == capability["seq"] == capability["tree"] == torch.backends.cpu.get_cpu_capability()
    )


def test_the_pair_in_use_differs_and_what_coincides_is_named(trial):
    pair = trial.different_pair()
    assert pair not in trial.coinciding
    assert ("seq", "tree") not in trial.coinciding
    assert all(trial.results[a]["gradients"] == trial.results[b]["gradients"] for a, b in trial.coinciding)


def test_the_same_kernels_give_the_same_bits_again(trial):
    again = try_kernel_sets(("B",))
    assert again.results["B"] == trial.results["B"]


def test_kernel_sets_that_coincide_are_replaced(caplog):
    one = KernelTrial({name: {"gradients": "same"} for name in ("A", "B")})
    assert (one.coinciding, one.different_pair()) == ([("A", "B")], ("seq", "tree"))
    assert "kernel sets A and B coincide on this machine; using seq and tree instead" in caplog.text


def test_under_d2_every_device_runs_the_kernels_of_all():
    assert {kernels_of(device, D1_D2).name for device in KERNEL_SETS} == {"canonical"}
    assert {kernels_of(device, D0).name for device in KERNEL_SETS} == set(KERNEL_SETS)
    with pytest.raises(UnknownNameError, match="unknown device 'V100'; expected A, B, C"):
        kernels_of("V100", D0)
    with pytest.raises(UnknownNameError, match="unknown kernel set 'D'"):
        try_kernel_sets(("D",))


def test_each_level_pins_what_it_says():
    pinned = {
        name: (one.pins_algorithms, one.pins_communication, one.pins_kernels) for name, one in LEVELS.items()
    }
    assert pinned == {
        "none": (False, False, False), "D0": (True, False, False), "D1": (True, True, False),
        "D0+D2": (True, False, True), "D1+D2": (True, True, True),
    }  # fmt: skip
    assert "CUBLAS_WORKSPACE_CONFIG" in process_options("A", D0).environment
    assert process_options("A", DeterminismLevel.named("none")).environment == {}


def test_kernels_that_came_too_late_are_refused(monkeypatch):
    capability = torch.backends.cpu.get_cpu_capability()
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    with pytest.raises(WorkerError, match=r"canonical needs ATEN_CPU_CAPABILITY=default before.*found None"):
        use_kernels(CANONICAL, D0)
    if capability == "DEFAULT":
        pytest.skip("this processor has the plain kernels alone")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    with pytest.raises(WorkerError, match=f"found 'default' and kernels for {capability}"):
        use_kernels(CANONICAL, D0)


# --- explicit sums -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 2, 63, 64, 65, 1000])
def test_both_orders_sum_the_same_numbers(n_rows):
    rows = torch.rand(n_rows, 3, dtype=torch.float64)
    for order in ("seq", "tree"):
        torch.testing.assert_close(ordered_sum(rows, order), rows.sum(0))
    whole = torch.randint(-1000, 1000, (n_rows, 3)).float()
    assert torch.equal(ordered_sum(whole, "seq"), ordered_sum(whole, "tree"))


@pytest.mark.parametrize("order", ["seq", "tree"])
def test_gradients_under_explicit_sums_are_those_without(order):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(64, 3),
    ).double()
    inputs, targets = torch.rand(5, 2, 8, 8, dtype=torch.float64), torch.randint(0, 3, (5,))
    gradients = []
    for mode in (None, ExplicitSums(order)):
        model.zero_grad()
        if mode is None:
            loss = F.cross_entropy(model(inputs), targets)
        else:
            with mode:
                loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        gradients.append([loss.detach(), *(one.grad.clone() for one in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_the_two_orders_differ_in_bits_and_leave_weighted_losses_alone():
    values = torch.rand(777, 5) * torch.logspace(-3, 3, 777).unsqueeze(1)
    assert not torch.equal(ordered_sum(values, "seq"), ordered_sum(values, "tree"))
    outputs, targets, weight = torch.rand(9, 3), torch.randint(0, 3, (9,)), torch.tensor([0.1, 0.5, 0.9])
    for options in ({"weight": weight}, {"reduction": "sum"}, {"ignore_index": int(targets[0])}):
        plain = F.cross_entropy(outputs, targets, **options)
        with ExplicitSums("tree"):
            assert torch.equal(F.cross_entropy(outputs, targets, **options), plain)


# --- operators ----------------------------------------------------------------------------------------


def test_convolutions_make_d2_expensive():
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1), nn.ConvTranspose1d(1, 1, 1)), nn.GRU(1, 1)
    )
    assert scan_module(model) == {
        "d2_cheap": False, "operators": ["1.0: Conv2d", "1.1: ConvTranspose1d", "2: GRU"],
    }  # fmt: skip
    cheap = nn.Sequential(nn.Embedding(4, 4), nn.TransformerEncoderLayer(4, 2), nn.BatchNorm1d(4))
    assert scan_module(cheap) == {"d2_cheap": True, "operators": []}


@pytest.mark.parametrize("name", STAND_INS)
def test_the_models_of_the_paper_fall_into_two_kinds(name):
    """Patches of the windowed transformer go through a linear layer, so it has no convolution."""
    expensive = {"shufflenetv2", "resnet50", "vgg19", "yolov3"}
    assert scan_module(build_stand_in(StandIn(name), 0))["d2_cheap"] == (name not in expensive)


def test_kernels_are_turned_on_for_the_process():
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    try:
        with use_kernels(KERNEL_SETS["seq"], D0):
            assert torch.are_deterministic_algorithms_enabled()
            assert F.linear(torch.ones(2, 3), torch.ones(1, 3), torch.ones(1)).tolist() == [[4.0], [4.0]]
        assert torch.get_num_threads() == 1
        use_kernels(KERNEL_SETS["A"], DeterminismLevel.named("none"))
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.set_flags(_enabled=onednn)
        torch.set_deterministic_debug_mode("default")
        torch.backends.cudnn.benchmark = False
