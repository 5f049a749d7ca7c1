"""What becomes of a layer when one of its tensors is cut along an axis; users add rules for their layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from makespan.slapo._collectives import Blocks, Ranks
from makespan.slapo._errors import ArgumentError, ShardError
from makespan.slapo._layouts import PARTIAL, Layout, partition, sharding_of
from makespan.slapo._split_layers import (
    LateBiasConvolution,
    LateBiasLinear,
    LateBiasTransposedConvolution,
    LateBiasTransposedLinear,
)
from makespan.slapo._vocabulary import VocabularyPart

__all__ = ["ShardEffect", "ShardRequest", "ShardRule", "register_shard_rule", "shard_effect"]


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """A tensor that shall be cut; name, axis and size are known to be right.

    Parameters
    ----------
    module, path
        The layer, and where it stands in the model.
    name, axis, groups
        Parameter or buffer, its axis from zero on, and the blocks of the axis that are cut each by itself:
        how many equal ones, or the size of each.
    local
        Size of the axis that is left to each process.
    ranks
        The processes that share the layer.
    """

    module: Any
    path: str
    name: str
    axis: int
    groups: Blocks
    local: int
    ranks: Ranks

    def whole(self, attribute: str) -> Any:
        """Return the value that an attribute of the layer had before any of its tensors was cut."""
        return sharding_of(self.module).attributes.get(attribute, getattr(self.module, attribute))

    def __str__(self) -> str:
        """Return the request as messages name it."""
        return f"shard({self.name!r}, {self.axis}) at {self.path!r} ({type(self.module).__name__})"


@dataclass(frozen=True, slots=True)
class ShardEffect:
    """What a rule answers.

    Parameters
    ----------
    returns
        What the layer returns then, None if that is not known.
    attributes
        Attributes of the layer that get another value.
    together
        Tensors that have to be cut if one of them is.
    behaviour
        What the layer becomes where several processes share it, a class that comes before its own.
    """

    returns: Layout | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    together: frozenset[str] = frozenset()
    behaviour: type[nn.Module] | None = None


ShardRule = Callable[[ShardRequest], ShardEffect]
_RULES: dict[type[nn.Module] | str, ShardRule] = {}
_BOTH = frozenset({"weight", "bias"})


def register_shard_rule(*layers: type[nn.Module] | str) -> Callable[[ShardRule], ShardRule]:
    """Return a decorator that makes a function the rule of layers and of their subclasses.

    Parameters
    ----------
    *layers
        Classes, or their qualified names with the module, for libraries that need not be there. A rule
        that was registered before is replaced.

    Returns
    -------
    A decorator that returns its function. The function gets a `ShardRequest` and returns a `ShardEffect`, or
    raises `ArgumentError` or `ShardError` before anything has changed.

    Raises
    ------
    ArgumentError
        No layer is named.
    """
    if not layers:
        raise ArgumentError("register_shard_rule names no layer; accepted: classes or their qualified names")

    def register(rule: ShardRule) -> ShardRule:
        _RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


def shard_effect(request: ShardRequest) -> ShardEffect:
    """Ask the rule of a layer, or of the nearest class above its own; without any nothing is known.

    A layer of torch without a rule is rejected: its forward reads the sizes that it was built with, and
    kernels that rely on them, such as those of an LSTM, read memory beyond a part of a weight.
    """
    for kind in type(request.module).__mro__:
        rule = _RULES.get(kind) or _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
        if rule is None:
            continue
        effect = rule(request)
        between = type(request.module).__mro__[: type(request.module).__mro__.index(kind)]
        new = effect.behaviour is not None and not isinstance(request.module, effect.behaviour)
        if new and any("forward" in vars(one) for one in between):
            raise ShardError(
                f"{request}: the class has a forward of its own, which would have to change; accepted: "
                f"{kind.__name__} itself, or replace the layer by one"
            )
        return effect
    computes = next(one for one in type(request.module).__mro__ if "forward" in vars(one))
    if computes is not nn.Module and computes.__module__.startswith("torch.nn."):
        raise ShardError(
            f"{request}: {computes.__name__} of torch.nn has no rule for its parts; expected one with a rule "
            f"(register_shard_rule({computes.__name__}) adds it), or a module of your own"
        )
    return ShardEffect()


def _columns(request: ShardRequest, axis: int, *attributes: str) -> ShardEffect:
    return ShardEffect(partition(axis), dict.fromkeys(attributes, request.local), _BOTH)


def _rows(request: ShardRequest, attribute: str, behaviour: type[nn.Module]) -> ShardEffect:
    """Cut along the inputs, where each process has a summand; a bias waits until they are summed."""
    has_bias = request.module.bias is not None
    return ShardEffect(PARTIAL, {attribute: request.local}, behaviour=behaviour if has_bias else None)


@register_shard_rule(nn.Linear)
def _linear(request: ShardRequest) -> ShardEffect:
    if request.name not in _BOTH:
        return ShardEffect()
    if request.axis == 0:
        return _columns(request, -1, "out_features")
    return _rows(request, "in_features", LateBiasLinear)


@register_shard_rule("transformers.pytorch_utils.Conv1D")
def _transposed_linear(request: ShardRequest) -> ShardEffect:
    if request.name == "bias" or (request.name == "weight" and request.axis == 1):
        return _columns(request, -1, "nf")
    return _rows(request, "nx", LateBiasTransposedLinear) if request.name == "weight" else ShardEffect()


@register_shard_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _convolution(request: ShardRequest) -> ShardEffect:
    return _convolved(request, ("out_channels", "in_channels"), LateBiasConvolution)


@register_shard_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _transposed_convolution(request: ShardRequest) -> ShardEffect:
    return _convolved(request, ("in_channels", "out_channels"), LateBiasTransposedConvolution)


def _convolved(request: ShardRequest, channels: tuple[str, str], behaviour: type[nn.Module]) -> ShardEffect:
    """Cut a kernel; ``channels`` are what its first two axes stand for."""
    axis, size = request.axis, request.ranks.size
    if request.name not in _BOTH:
        return ShardEffect()
    if request.name == "weight" and axis > 1:
        raise ArgumentError(f"{request}: axis {axis} is that of the kernel; accepted: axis 0 or 1")
    if (groups := request.whole("groups")) > 1:
        if request.name == "weight" and axis == 1:
            raise ArgumentError(f"{request}: each of its {groups} groups is whole; accepted: axis 0")
        if groups % size:
            raise ShardError(f"{request}: {groups} groups do not divide among {size} processes")
        names = ("in_channels", "out_channels", "groups")
        return ShardEffect(partition(1), {name: request.whole(name) // size for name in names}, _BOTH)
    name = "out_channels" if request.name == "bias" else channels[axis]
    if name == "out_channels":
        return _columns(request, 1, "out_channels")
    return _rows(request, "in_channels", behaviour)


@register_shard_rule(nn.Bilinear)
def _bilinear(request: ShardRequest) -> ShardEffect:
    if request.axis:
        raise ShardError(f"{request}: only outputs can be cut; expected axis 0")
    return _columns(request, -1, "out_features")


@register_shard_rule(nn.PReLU)
def _prelu(request: ShardRequest) -> ShardEffect:
    return ShardEffect(partition(1), {"num_parameters": request.local})


@register_shard_rule(
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
def _batch_norm(request: ShardRequest) -> ShardEffect:
    together = frozenset({"weight", "bias", "running_mean", "running_var"})
    return ShardEffect(partition(1), {"num_features": request.local}, together)


@register_shard_rule(nn.Embedding)
def _embedding(request: ShardRequest) -> ShardEffect:
    module, local = request.module, request.local
    if request.name != "weight":
        return ShardEffect()
    if request.axis == 1:
        return ShardEffect(partition(-1), {"embedding_dim": local})
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ShardError(
            f"{request}: ids of other processes would count for the first row; accepted: an embedding "
            "without max_norm and scale_grad_by_freq"
        )
    if request.groups not in (1, (request.whole("num_embeddings"),)):
        raise ArgumentError(f"{request}: a process has rows that follow each other; accepted: groups=1")
    first, padding = request.ranks.rank * local, request.whole("padding_idx")
    is_own = padding is not None and first <= padding < first + local
    attributes = {
        "num_embeddings": local,
        "first_row": first,
        "padding_idx": padding - first if is_own else None,
    }
    return ShardEffect(PARTIAL, attributes, behaviour=VocabularyPart)
