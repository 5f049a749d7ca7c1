"""Scaling: no layout beats the limit of the kernels, and curves are those of the planner."""

import itertools

import pytest

from makespan.planning import (
    Layout,
    Pricer,
    Training,
    kernel_limit_s,
    plan,
    read_machines,
    read_model,
    scaling,
    software,
)
from makespan.planning.pricing import layouts

STACK = software("megatron-bridge")


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_no_layout_is_faster_than_the_limit(model):
    pricer = Pricer(Training(read_model(model), 4096, 64), read_machines("32xh100-80"), STACK)
    limit_s = kernel_limit_s(pricer)
    assert limit_s > 0
    for layout in itertools.islice(layouts(pricer.training, pricer.cluster), 0, None, 11):
        assert pricer.price(layout).step_s > limit_s


def test_the_limit_is_the_kernels_of_one_device_divided_by_their_number():
    training = Training(read_model("llama3-8b"), 4096, 64)
    one, many = (Pricer(training, read_machines(f"{n}xh100-80"), STACK) for n in (1, 64))
    terms = one.price(Layout(dp=1)).terms_s
    kernels = sum(terms[name] for name in ("products", "experts", "attention", "head"))
    assert kernel_limit_s(one) == pytest.approx(kernels)
    assert kernel_limit_s(many) == pytest.approx(kernels / 64)


def test_a_curve_has_the_fastest_layouts_of_every_size_that_fits():
    model = read_model("llama3-70b")
    table = scaling(lambda n: Training(model, 4096, 2 * n), "h100-80", STACK, (4, 32, 128))
    assert table["n_gpus"].tolist() == [32, 128]
    assert table["batch"].tolist() == [64, 256]
    best = plan(Pricer(Training(model, 4096, 256), read_machines("128xh100-80"), STACK), 1).best[0]
    assert table["step_s"][1] == best.step_s
    assert table["layout"][1] == f"dp{best.layout.dp} {best.layout.text}"
    assert table["of_limit"].between(0.2, 1.0).all()
    assert scaling(lambda _: Training(model, 4096, 8), "l4", STACK, (1, 2)).empty
