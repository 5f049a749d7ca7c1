"""Verification by layers and of the whole model, on random faults anywhere in models of the zoo."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from verify_cases import Doubled

from makespan.slapo import VerificationError, Verify, create_schedule
from makespan.training.zoo import build_family, family_batch, family_spec


def on_tensors(change):
    """Return a hook that changes the first tensor of a result."""

    def hook(module, args, output):
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    return hook


def hooked(change):
    return lambda rng, module, model: module.register_forward_hook(on_tensors(change))


def before(change):
    def hook(module, args):
        return (change(args[0]), *args[1:]) if args and args[0].is_floating_point() else None

    return lambda rng, module, model: module.register_forward_pre_hook(hook)


def parameter_without_gradient(rng, module, model):
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(False)


def parameter_of_another(rng, module, model):
    """Give a layer the weight of another one of its shape, which the gradients of both then share."""
    for name, parameter in module.named_parameters(recurse=False):
        alike = [
            (other, key)
            for other in model.modules()
            for key, weight in other.named_parameters(recurse=False)
            if weight.shape == parameter.shape and weight is not parameter
        ]
        if alike:
            other, key = alike[rng.integers(len(alike))]
            setattr(module, name, getattr(other, key))


def module_of_another(rng, module, model):
    """Swap two modules of one class."""
    owners = [
        (owner, name)
        for owner in model.modules()
        for name, child in owner._modules.items()
        if child is module
    ]
    alike = [
        (owner, name)
        for owner in model.modules()
        for name, child in owner._modules.items()
        if type(child) is type(module)
        and child is not module
        and [one.shape for one in child.parameters()] == [one.shape for one in module.parameters()]
    ]
    if owners and alike:
        (owner, name), (other, key) = owners[0], alike[rng.integers(len(alike))]
        owner._modules[name], other._modules[key] = other._modules[key], owner._modules[name]


def left_out(rng, module, model):
    module.forward = lambda hidden, *args, **kwargs: hidden


def bias_left_out(rng, module, model):
    if getattr(module, "bias", None) is not None:
        module.register_forward_hook(on_tensors(lambda output: output - module.bias))


def other_epsilon(rng, module, model):
    for name in ("eps", "variance_epsilon"):
        if hasattr(module, name):
            setattr(module, name, 0.1)


FAULTS = {
    "nothing": lambda rng, module, model: None,
    "scaled": hooked(lambda output: output * 1.01),
    "gradient": hooked(Doubled.apply),
    "detached": hooked(lambda output: output.detach()),
    "half": hooked(lambda output: torch.cat([output[:1], output[1:].detach()])),
    "input": before(lambda hidden: hidden * 1.01),
    "input gradient": before(Doubled.apply),
    "rounded": hooked(lambda output: output.bfloat16().to(output.dtype)),
    "frozen": parameter_without_gradient,
    "tied": parameter_of_another,
    "swapped": module_of_another,
    "left out": left_out,
    "bias": bias_left_out,
    "epsilon": other_epsilon,
}  # fmt: skip


def verified(family, fault, seed, by_layers):
    rng = np.random.default_rng(seed)
    sch = create_schedule(build_family(family))
    modules = [module for module in sch.mod.modules() if not isinstance(module, nn.ModuleList)]
    check = Verify(sch, family_batch(family_spec(family), 2, 0).inputs, by_layers=by_layers)
    try:
        with check:
            FAULTS[fault](rng, modules[rng.integers(1, len(modules))], sch.mod)
    except VerificationError:
        assert not check.report.is_equal
    return check.report


@pytest.mark.parametrize("family", ["gpt", "t5", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_random_fault_gets_one_verdict(family):
    verdicts = []
    for number, fault in enumerate(FAULTS):
        whole, layered = (verified(family, fault, number, by_layers) for by_layers in (False, True))
        assert whole.is_equal == layered.is_equal, f"{fault}, {number}:\n{whole}\n{layered}"
        verdicts.append(whole.is_equal)
    assert verdicts[0] and verdicts.count(False) >= 5
