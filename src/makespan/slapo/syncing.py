"""Primitive ``sync``, its hooks, and gradient clipping by the norm of the whole model."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils import _pytree as pytree  # there is no public name for it
from torch.utils.weak import WeakIdKeyDictionary

from makespan.slapo.building import is_parallel
from makespan.slapo.errors import ArgumentError, KindError, ShardError, TracingError
from makespan.slapo.layers import LateBias
from makespan.slapo.layouts import (
    PARTIAL,
    REPLICATED,
    SCHEMES,
    Exchange,
    Ranks,
    Sharding,
    all_gather,
    all_reduce,
    cut,
    mean_gradient,
    partition,
    reduce_scatter,
    reshard,
    scatter,
    set_sharding,
    sharding_of,
    sum_gradient,
)
from makespan.slapo.schedule import Primitive, register_primitive
from makespan.slapo.sharding import OVER, groups_of, ranks_of
from makespan.slapo.state import owners_of
from makespan.slapo.tracing import check_is_called
from makespan.training import clip_grad_norm as clip_everywhere

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Hooks ---
#
# Hooks refer to no module, since a copy of a module gets copies of its hooks.


def input_places(
    module: nn.Module, inputs: Sequence[int | str], where: str
) -> tuple[frozenset[int], frozenset[str]]:
    """Return the positions and the names of arguments."""
    names = list(inspect.signature(module.forward).parameters)
    wanted = [inputs] if isinstance(inputs, int | str) else list(inputs)
    for argument in wanted:
        if argument not in names if isinstance(argument, str) else not 0 <= argument < len(names):
            raise ArgumentError(
                f"{where}: no input {argument!r}; expected one of {', '.join(names)}, or a position"
            )
    chosen = [names.index(argument) if isinstance(argument, str) else argument for argument in wanted]
    return frozenset(chosen), frozenset(names[index] for index in chosen)


@dataclass(frozen=True, slots=True)
class ExchangeInputs:
    """Hook that exchanges arguments before a module is called."""

    exchange: Exchange
    places: tuple[frozenset[int], frozenset[str]] | None
    where: str
    of_gradients: bool

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the module gets."""
        # tree_map exchanges the tensors in a value of any structure, such as a named tuple or a model output.
        exchanged = {
            place: pytree.tree_map(self._exchanged, value)
            for place, value in enumerate(args)
            if self._is_selected(place)
        }
        named = {
            name: pytree.tree_map(self._exchanged, value)
            for name, value in kwargs.items()
            if self._is_selected(name)
        }
        return tuple(exchanged.get(place, value) for place, value in enumerate(args)), kwargs | named

    def _is_selected(self, which: int | str) -> bool:
        return self.places is None or which in self.places[isinstance(which, str)]

    def _exchanged(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            return self.exchange(value)
        if not isinstance(value, Tensor):
            return value
        if self.of_gradients:
            is_meant = value.requires_grad
        else:
            is_meant = self.places is not None or value.is_floating_point()
        return _exchange_at(self.exchange, value, self.where) if is_meant else value


@dataclass(frozen=True, slots=True)
class ExchangeOutput:
    """Hook that exchanges the output of a module, or one element of it."""

    exchange: Exchange
    element: Any
    axis: int | None
    expected: int | None
    where: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output that the caller gets."""
        if isinstance(output, Proxy):
            if self.element is not None:
                raise TracingError(
                    f"{self.where}: a graph cannot index the output of the module; declare the module a leaf"
                )
            return self.exchange(output)
        if self.element is None:
            if not isinstance(output, Tensor):
                raise ShardError(
                    f"{self.where}: it returned a {type(output).__name__}; expected a tensor; name the "
                    "element to exchange by output="
                )
            return self._exchanged_value(output)
        exchanged = self._exchanged_value(output[self.element])
        if isinstance(output, tuple):
            place = range(len(output))[self.element]
            parts = [exchanged if index == place else kept for index, kept in enumerate(output)]
            return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)
        output[self.element] = exchanged  # a list or a mapping of any class
        return output

    def _exchanged_value(self, value: Tensor) -> Tensor:
        axis, expected, n = self.axis, self.expected, value.dim()
        if axis is not None and expected is not None and axis % n != expected % n:
            raise ArgumentError(
                f"{self.where}: {self.exchange.name} on axis {axis} of an output of shape "
                f"{tuple(value.shape)}, which is cut along axis {expected}; use that axis"
            )
        return _exchange_at(self.exchange, value, self.where)


@dataclass(frozen=True, slots=True)
class ExchangeParameterGradients:
    """Hook that exchanges gradients of parameters, such as those to which each process contributes a summand.

    It registers the hook of a parameter in the first forward pass, since copies have other parameters.
    """

    EXCHANGED: ClassVar[dict[str, WeakIdKeyDictionary]] = {one: WeakIdKeyDictionary() for one in OVER}

    names: tuple[str, ...]
    exchange: Exchange
    over: str = "tensor"

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Register the hooks of the parameters, once per parameter and kind of parallelism."""
        exchanged = self.EXCHANGED[self.over]
        for name in self.names:
            parameter: Any = module.get_parameter(name)
            if parameter.requires_grad and parameter not in exchanged:
                parameter.register_hook(self.exchange.gradient_operation)
                exchanged[parameter] = True


def _exchange_at(exchange: Callable[[Tensor], Tensor], value: Tensor, where: str) -> Tensor:
    try:
        return exchange(value)
    except ShardError as error:
        raise ShardError(f"{where}: {error}") from None


# --- Primitive ---

_OPS = {
    "fwd_post": ("all_reduce", "all_gather", "reduce_scatter", "scatter", *SCHEMES),
    "fwd_pre": ("all_gather", *SCHEMES),
    "bwd_post": ("all_reduce", "average"),
}
_TAKES_AXIS = ("all_gather", "reduce_scatter", "scatter")


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of a call, with its location for messages."""

    mode: str
    op: str
    axis: int | None
    tensor_parallel_output_grad: bool
    on: str
    over: str
    where: str


@register_primitive()
class Sync(Primitive):
    """Exchange the inputs, the output or the gradients of a module with the other processes."""

    @classmethod
    def name(cls) -> str:
        """Return ``sync``."""
        return "sync"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        mode: str,
        sync_op_or_fn: str | Callable[..., Any],
        *,
        axis: int | None = None,
        tensor_parallel_output_grad: bool = True,
        inputs: Sequence[int | str] | None = None,
        output: int | str | None = None,
        on: str = "inputs",
        over: str = "tensor",
    ) -> None:
        """Exchange tensors at this module from now on.

        Parameters
        ----------
        mode
            ``fwd_pre`` for inputs, ``fwd_post`` for the output, ``bwd_post`` for gradients.
        sync_op_or_fn
            An operation by name, or a hook with the signature that torch requires; a hook with a true
            attribute ``with_kwargs`` also gets keyword arguments.
        axis
            Axis of the activation; the default of ``all_gather`` is the axis that is cut, or the last.
        tensor_parallel_output_grad
            True if readers of a gathered tensor are sharded, so that gradients of the processes are summands.
        inputs
            Arguments that are exchanged, by name or position; None for all floating-point tensors, and with
            ``bwd_post`` for all that have a gradient. With ``on="parameters"``, names of parameters of the
            module or of modules in it; None for all of its own.
        output
            Index of a tuple, or key, of the element that is exchanged; None if the output is a tensor.
        on
            ``inputs``, or ``parameters`` for the gradients of parameters: ``all_reduce`` sums those to which
            each process contributes for its part of the sequence or of the heads, ``average`` takes the mean
            over processes with samples of their own.
        over
            ``tensor`` for the processes that share layers, ``context`` for those of context parallelism,
            ``experts`` for those of data parallelism that share experts.
        """
        where = f"sync of {sch.path!r} ({type(sch.mod).__name__})"
        check_is_called(sch, cls.name())
        if mode not in _OPS:
            raise ArgumentError(f"{where}: mode is {mode!r}; expected one of {', '.join(_OPS)}")
        if callable(sync_op_or_fn):
            with_kwargs = bool(getattr(sync_op_or_fn, "with_kwargs", False))
            if mode == "fwd_pre":
                sch.mod.register_forward_pre_hook(sync_op_or_fn, with_kwargs=with_kwargs)
            elif mode == "fwd_post":
                sch.mod.register_forward_hook(sync_op_or_fn, with_kwargs=with_kwargs)
                # The layout after a user's hook is unknown; that of the module itself remains known.
                set_sharding(sch.mod, replace(sharding_of(sch.mod), returns=None))
            else:
                sch.mod.register_full_backward_hook(sync_op_or_fn)
            return
        if not isinstance(sync_op_or_fn, str):
            raise KindError(f"{where}: got {sync_op_or_fn!r}; expected the name of an operation, or a hook")
        call = _Call(mode, sync_op_or_fn, axis, tensor_parallel_output_grad, on, over, where)
        _check_call(call, inputs, output)
        before = after = sharding_of(sch.mod)
        if mode == "fwd_post" and output is None and over == "tensor":
            after = _sharding_after(sch, call, before)
        if on == "parameters":
            _exchange_gradients(sch, call, inputs)
            return
        places = None if inputs is None else input_places(sch.mod, inputs, where)
        if ranks_of(sch, over).size > 1:
            _install_exchange(sch, call, before, places, output)
        set_sharding(sch.mod, after)


def _check_call(call: _Call, inputs: Sequence[int | str] | None, output: int | str | None) -> None:
    """Reject an unknown operation, and options that it does not take."""
    if call.op not in _OPS[call.mode]:
        raise ArgumentError(
            f"{call.where}: operation is {call.op!r} in mode {call.mode!r}; expected one of "
            f"{', '.join(_OPS[call.mode])}, or a hook"
        )
    if call.over not in OVER:
        raise ArgumentError(f"{call.where}: over is {call.over!r}; expected {' or '.join(OVER)}")
    if call.op in ("reduce_scatter", "scatter") and call.axis is None:
        raise ArgumentError(f"{call.where}: {call.op} needs axis, the axis of the activation")
    if call.op == "average" and call.on != "parameters":
        raise ArgumentError(f"{call.where}: average is for gradients of parameters; expected on='parameters'")
    superfluous = {
        "axis": call.axis is not None and call.op not in _TAKES_AXIS,
        "tensor_parallel_output_grad": not call.tensor_parallel_output_grad and call.op != "all_gather",
        "inputs": inputs is not None and call.mode == "fwd_post",
        "output": output is not None and call.mode != "fwd_post",
        "on": call.on != "inputs" and not (call.on == "parameters" and call.mode == "bwd_post"),
    }
    for name, is_superfluous in superfluous.items():
        if is_superfluous:
            raise ArgumentError(f"{call.where}: {call.op} in mode {call.mode!r} does not take this {name}")


def _sharding_after(sch: "Schedule", call: _Call, before: Sharding) -> Sharding:
    """Return the sharding after a synchronisation; reject one that contradicts the layout of the output."""
    layout = before.returns

    def rejection(remedy: str) -> ArgumentError:
        earlier = f"; {sch.conflict('sync')}" if layout != before.computes else ""
        return ArgumentError(
            f"{call.where}: {call.op}{'' if call.axis is None else f' on axis {call.axis}'}, but it returns "
            f"{layout or 'the layout that its sharded tensors imply'}; {remedy}{earlier}"
        )

    # None is an unknown layout, as of a module without sharded tensors: any operation may follow.
    match call.op:
        case "all_reduce" | "reduce_scatter":
            if layout is not None and layout.kind != "partial":
                raise rejection(_REMEDIES[layout.kind].format(axis=layout.axis))
            after = REPLICATED if call.op == "all_reduce" else partition(_axis(call, before))
        case "all_gather":
            # Axes counted from different ends may be equal, which only the rank of a tensor decides: the hook
            # checks that when it runs.
            axis, known = call.axis, None if layout is None else layout.axis
            may_agree = (
                axis is None or known is None or axis == known or (axis != 0 and (axis < 0) != (known < 0))
            )
            if layout is not None and (layout.kind != "partition" or not may_agree):
                raise rejection(_REMEDIES[layout.kind].format(axis=layout.axis))
            after = REPLICATED
        case "scatter":
            if before.tensors or layout not in (None, REPLICATED):
                raise rejection("use scatter for a replicated tensor, reduce_scatter for summands")
            after = partition(_axis(call, before))
        case scheme:
            layouts = {"RR": REPLICATED, "RS": partition(-1), "SR": partition(-2)}
            if layout not in (None, layouts[scheme[:2]]):
                raise rejection("use a scheme that begins with the layout of the last two axes of the output")
            after = layouts[scheme[-2:]]
    return replace(before, returns=after)


_REMEDIES = {
    "partition": "use all_gather on axis {axis}",
    "partial": "use all_reduce or reduce_scatter",
    "replicated": "only a scheme that begins with RR may follow",
}


def _axis(call: _Call, before: Sharding) -> int:
    """Return the axis of the activation: the argument, else the axis that is cut, else the last."""
    if call.axis is not None:
        return call.axis
    known = before.returns if call.mode == "fwd_post" else None
    return known.axis if known is not None and known.axis is not None else -1


def _exchange_gradients(sch: "Schedule", call: _Call, names: Sequence[int | str] | None) -> None:
    """Sum or average gradients of parameters of a module, by name, or of all of its own."""
    known = dict(sch.mod.named_parameters(recurse=names is not None))
    chosen = list(known) if names is None else [str(name) for name in names]
    for name in chosen:
        if name not in known:
            raise ArgumentError(f"{call.where}: no parameter {name!r}; expected one of {', '.join(known)}")
    ranks = ranks_of(sch, call.over)
    if ranks.size > 1:
        exchange = mean_gradient(ranks) if call.op == "average" else sum_gradient(ranks)
        hook = ExchangeParameterGradients(tuple(chosen), exchange, call.over)
        sch.mod.register_forward_pre_hook(hook)


def _install_exchange(
    sch: "Schedule",
    call: _Call,
    before: Sharding,
    places: tuple[frozenset[int], frozenset[str]] | None,
    output: int | str | None,
) -> None:
    """Register the exchange of an operation as a hook of the module."""
    module, ranks = sch.mod, ranks_of(sch, call.over)
    match call.mode, call.op:
        case "bwd_post", _:
            exchange = sum_gradient(ranks)
        case _, "all_reduce":
            exchange = all_reduce(ranks)
        case _, "all_gather":
            groups = 1 if call.mode == "fwd_pre" or before.returns is None else before.returns.groups
            exchange = all_gather(ranks, _axis(call, before), call.tensor_parallel_output_grad, groups)
        case _, "reduce_scatter":
            exchange = reduce_scatter(ranks, _axis(call, before))
        case _, "scatter":
            exchange = scatter(ranks, _axis(call, before))
        case _:
            exchange = reshard(ranks, call.op)
    if call.mode != "fwd_post":
        hook = ExchangeInputs(exchange, places, call.where, of_gradients=call.mode == "bwd_post")
        module.register_forward_pre_hook(hook, with_kwargs=True)
    elif isinstance(module, LateBias) and before.returns == PARTIAL and call.over == "tensor":
        # The layer reduces its product before it adds the bias; a hook would also sum the bias.
        module.reduce = exchange
        if call.op == "reduce_scatter":
            # Each process adds the bias to its part only, so its gradient is a summand.
            module.register_forward_pre_hook(ExchangeParameterGradients(("bias",), sum_gradient(ranks)))
    else:
        expected = before.returns.axis if call.op == "all_gather" and before.returns is not None else None
        module.register_forward_hook(ExchangeOutput(exchange, output, call.axis, expected, call.where))


# --- Arguments by heads ---

Place = tuple[int | str, int, int]
"""An argument by position or name, its axis for heads, and the number of heads of the whole model."""


@dataclass(frozen=True, slots=True)
class HeadsPart:
    """Hook that leaves a process its part of arguments with an axis for heads."""

    places: Sequence[Place]
    ranks: Ranks

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the module gets."""
        positional, named = list(args), dict(kwargs)
        for place, axis, heads in self.places:
            if isinstance(place, str) and place in named:
                named[place] = self._part(named[place], axis, heads)
            elif isinstance(place, int) and place < len(positional):
                positional[place] = self._part(positional[place], axis, heads)
        return tuple(positional), named

    def _part(self, value: Any, axis: int, heads: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad:  # each process has the gradient of its heads only
            value = sum_gradient(self.ranks)(value)
        # An axis of several samples has the heads of one sample after those of the other.
        return cut(value, axis, self.ranks.size, value.shape[axis] // heads)[self.ranks.rank]


@register_primitive()
class TakeHeads(Primitive):
    """Leave each process its heads of arguments that a module gets for all, such as a bias of scores."""

    @classmethod
    def name(cls) -> str:
        """Return ``take_heads``."""
        return "take_heads"

    @classmethod
    def apply(cls, sch: "Schedule", places: Sequence[Place]) -> None:
        """Cut arguments before the module is called, and sum their gradients over the processes.

        Parameters
        ----------
        places
            For each argument its name or position, the axis with the heads of one sample after the other, and
            the number of heads of the whole model.
        """
        where = f"take_heads of {sch.path!r} ({type(sch.mod).__name__})"
        check_is_called(sch, cls.name())
        given: Sequence[Any] = places
        for one in given:
            if not isinstance(one, list | tuple) or len(one) != 3:
                raise KindError(
                    f"{where}: got {one!r}; expected an argument, its axis, and a number of heads"
                )
        wanted: list[Place] = [(argument, axis, heads) for argument, axis, heads in places]
        input_places(sch.mod, [argument for argument, _, _ in wanted], where)
        for argument, _, heads in wanted:
            if heads < 1 or heads % sch.world_size:
                raise ShardError(
                    f"{where}: {heads} heads of {argument!r} do not divide among {sch.world_size} processes"
                )
        if sch.world_size > 1:
            hook = HeadsPart(wanted, ranks_of(sch))
            sch.mod.register_forward_pre_hook(hook, with_kwargs=True)


# --- Gradient clipping ---


def clip_grad_norm(
    sch: "Schedule", max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of a scheduled model so that their norm is at most ``max_norm``.

    The norm is that of the whole model: it includes all parts of sharded parameters, and counts a parameter
    once that several processes or pipeline stages hold. All processes must call it after the backward passes,
    or after the step of a pipeline.

    Parameters
    ----------
    sch
        Schedule of a whole model, built for any target.
    max_norm, norm_type, error_if_nonfinite
        As of `torch.nn.utils.clip_grad_norm_`; the result is bitwise the same if nothing is split.

    Returns
    -------
    The norm before, a scalar, the same on all processes.

    Raises
    ------
    ArgumentError
        The schedule is not that of a whole model; also a `ValueError`.
    """
    if sch.parent is not None:
        raise ArgumentError(f"clip_grad_norm of {sch.path!r}: expected the schedule of a whole model")
    shards = [shard for module in sch.mod.modules() for shard in sharding_of(module).tensors.values()]
    owners, shared = owners_of(sch), groups_of(sch) if is_parallel(sch) else {}
    if not any("context" in shard.over for shard in shards):
        shared.pop("context", None)  # its processes hold the same
    held, counted = {}, set()
    for path, module in sch.mod.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in held:
                continue  # a tie counts at its first path, in the stage that owns it
            held[id(parameter)] = parameter
            shard = sharding_of(module).tensors.get(name)
            cut_over = () if shard is None else shard.over
            # Of processes that hold it whole, the first one counts.
            first = all(ranks.rank == 0 or over in cut_over for over, ranks in shared.items())
            if first and not owners.is_elsewhere(f"{path}.{name}".removeprefix(".")):
                counted.add(id(parameter))
    groups: list[dist.ProcessGroup | None] = [ranks.group for ranks in shared.values() if ranks.size > 1]
    if owners.ranks.size > 1:
        groups.append(owners.ranks.group)
    return clip_everywhere(
        held.values(), max_norm, norm_type, counted=counted, groups=groups,
        error_if_nonfinite=error_if_nonfinite,
    )  # fmt: skip
