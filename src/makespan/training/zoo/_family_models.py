"""Build the models of the families and draw their weights."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from makespan.training.zoo._decoders import Gpt, Llama, Opt
from makespan.training.zoo._encoder_decoder import T5
from makespan.training.zoo._encoders import Albert, Bert, Roberta
from makespan.training.zoo._families import FamilySpec
from makespan.training.zoo._seeding import generator_for
from makespan.training.zoo._wide_resnet import WideResNet

__all__ = ["build"]

_MODELS: Mapping[str, Callable[[Any], nn.Module]] = {
    "bert": Bert,
    "roberta": Roberta,
    "albert": Albert,
    "gpt": Gpt,
    "opt": Opt,
    "t5": T5,
    "llama": Llama,
    "wideresnet": WideResNet,
}
_SPREAD, _GAIN = 0.02, 2.0


def build(spec: FamilySpec, seed: int, *, meta: bool) -> nn.Module:
    """Build a model; see `makespan.training.zoo.build_family`."""
    with torch.random.fork_rng(devices=[]), torch.device("meta") if meta else nullcontext():
        model = _MODELS[spec.family](spec)
    if not meta:
        _draw(model, seed)
    return model


@torch.no_grad()
def _draw(model: nn.Module, seed: int) -> None:
    """Draw all weights; biases and norms too, because what is zero or one is not missed."""
    for name, weight in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        values = generator_for(seed, name).standard_normal(tuple(weight.shape), dtype=np.float32)
        is_norm = weight.dim() == 1 and name.endswith("weight")
        spread = (_GAIN / weight[0].numel()) ** 0.5 if isinstance(owner, nn.Conv2d) else _SPREAD
        weight.copy_(torch.from_numpy(values * np.float32(spread) + np.float32(is_norm)))
        if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
            weight[owner.padding_idx] = 0.0
