"""The primitive that says where the processes of a group exchange what a module takes or returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from makespan.slapo._collectives import (
    SCHEMES,
    Exchange,
    all_gather,
    all_reduce,
    reduce_scatter,
    reshard,
    scatter,
    sum_gradient,
)
from makespan.slapo._errors import ArgumentError, KindError
from makespan.slapo._hooks import ExchangeInputs, ExchangeOutput, SumParameterGradients, input_places
from makespan.slapo._layouts import PARTIAL, REPLICATED, Sharding, keep_sharding, partition, sharding_of
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._shard import ranks_of
from makespan.slapo._split_layers import LateBias
from makespan.slapo._trace import check_is_called

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Sync"]

_OPS = {
    "fwd_post": ("all_reduce", "all_gather", "reduce_scatter", "scatter", *SCHEMES),
    "fwd_pre": ("all_gather", *SCHEMES),
    "bwd_post": ("all_reduce",),
}
_TAKES_AXIS = ("all_gather", "reduce_scatter", "scatter")


@dataclass(frozen=True, slots=True)
class _Call:
    """What was asked for, with the place for messages."""

    mode: str
    op: str
    axis: int | None
    tensor_parallel_output_grad: bool
    on: str
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
    ) -> None:
        """Exchange at this module from now on.

        Parameters
        ----------
        mode
            ``fwd_pre`` for what it takes, ``fwd_post`` for what it returns, ``bwd_post`` for gradients.
        sync_op_or_fn
            An operation by name, or a hook of the user's with the signature that torch asks for; with an
            attribute ``with_kwargs`` that is true it gets keyword arguments, too.
        axis
            Axis of the activation; an ``all_gather`` takes the one that is cut, or the last.
        tensor_parallel_output_grad
            Whether what reads a gathered tensor is sharded, so that the processes' gradients are summands.
        inputs
            Arguments that are exchanged, by name or place; None for all tensors of floating-point numbers,
            and for ``bwd_post`` all that have a gradient.
        output
            Which element of a tuple, or which key, is exchanged; None where a tensor is returned.
        on
            ``inputs``, or ``parameters`` to sum the gradients of the module's own parameters, which each
            process has for its part of the sequence.
        """
        where = f"sync of {sch.path!r} ({type(sch.mod).__name__})"
        check_is_called(sch, cls.name())
        if mode not in _OPS:
            raise ArgumentError(f"{where}: mode {mode!r}; accepted: {', '.join(_OPS)}")
        if callable(sync_op_or_fn):
            _install_users(sch.mod, mode, sync_op_or_fn)
            return
        if not isinstance(sync_op_or_fn, str):
            raise KindError(f"{where}: found {sync_op_or_fn!r}; accepted: an operation by name, or a hook")
        call = _Call(mode, sync_op_or_fn, axis, tensor_parallel_output_grad, on, where)
        _check(call, inputs, output)
        before = sharding_of(sch.mod)
        after = _after(sch, call, before) if mode == "fwd_post" and output is None else before
        places = None if inputs is None else input_places(sch.mod, inputs, where)
        if sch.world_size > 1:
            _install(sch, call, before, places, output)
        keep_sharding(sch.mod, after)


def _check(call: _Call, inputs: Sequence[int | str] | None, output: int | str | None) -> None:
    """Refuse operations and options that do not belong together."""
    if call.op not in _OPS[call.mode]:
        raise ArgumentError(
            f"{call.where}: operation {call.op!r} in mode {call.mode!r}; accepted: "
            f"{', '.join(_OPS[call.mode])}, or a hook"
        )
    if call.op in ("reduce_scatter", "scatter") and call.axis is None:
        raise ArgumentError(f"{call.where}: {call.op} without axis; accepted: the axis of the activation")
    superfluous = {
        "axis": call.axis is not None and call.op not in _TAKES_AXIS,
        "tensor_parallel_output_grad": not call.tensor_parallel_output_grad and call.op != "all_gather",
        "inputs": inputs is not None and (call.mode == "fwd_post" or call.on == "parameters"),
        "output": output is not None and call.mode != "fwd_post",
        "on": call.on != "inputs" and not (call.on == "parameters" and call.mode == "bwd_post"),
    }
    for name, found in superfluous.items():
        if found:
            raise ArgumentError(f"{call.where}: {call.op} in mode {call.mode!r} takes no such {name}")


def _after(sch: "Schedule", call: _Call, before: Sharding) -> Sharding:
    """Return what the module returns once it is synchronised; a contradiction is an error."""
    found = before.returns

    def refuse(accepted: str) -> ArgumentError:
        done = f"; {sch.conflict('sync')}" if found != before.computes else ""
        return ArgumentError(
            f"{call.where}: {call.op}{'' if call.axis is None else f' on axis {call.axis}'}, but it returns "
            f"{found or 'what follows from its sharded tensors'}; accepted: {accepted}{done}"
        )

    match call.op:
        case "all_reduce" | "reduce_scatter":
            if found is not None and found.kind != "partial":
                raise refuse(_ACCEPTED[found.kind].format(axis=found.axis))
            after = REPLICATED if call.op == "all_reduce" else partition(_axis(call, before))
        case "all_gather":
            if found is not None and (found.kind != "partition" or not _may_agree(call.axis, found.axis)):
                raise refuse(_ACCEPTED[found.kind].format(axis=found.axis))
            after = REPLICATED
        case "scatter":
            if before.tensors or found not in (None, REPLICATED):
                raise refuse("scatter of what all processes have; reduce_scatter for summands")
            after = partition(_axis(call, before))
        case scheme:
            layouts = {"RR": REPLICATED, "RS": partition(-1), "SR": partition(-2)}
            if found not in (None, layouts[scheme[:2]]):
                raise refuse("a scheme that begins with how the last two axes of the output lie")
            after = layouts[scheme[-2:]]
    return replace(before, returns=after)


_ACCEPTED = {
    "partition": "all_gather on axis {axis}",
    "partial": "all_reduce or reduce_scatter",
    "replicated": "no second synchronisation but a scheme that begins with RR",
}


def _axis(call: _Call, before: Sharding) -> int:
    """Axis of the activation."""
    if call.axis is not None:
        return call.axis
    known = before.returns if call.mode == "fwd_post" else None
    return known.axis if known is not None and known.axis is not None else -1


def _may_agree(axis: int | None, known: int | None) -> bool:
    """Whether two axes can be the same one; counted from different ends only a tensor can tell."""
    if axis is None or known is None or axis == known:
        return True
    return axis != 0 and (axis < 0) != (known < 0)


def _exchange(sch: "Schedule", call: _Call, before: Sharding) -> Exchange:
    ranks = ranks_of(sch)
    match call.mode, call.op:
        case "bwd_post", _:
            return sum_gradient(ranks)
        case _, "all_reduce":
            return all_reduce(ranks)
        case _, "all_gather":
            groups = 1 if call.mode == "fwd_pre" or before.returns is None else before.returns.groups
            return all_gather(ranks, _axis(call, before), call.tensor_parallel_output_grad, groups)
        case _, "reduce_scatter":
            return reduce_scatter(ranks, _axis(call, before))
        case _, "scatter":
            return scatter(ranks, _axis(call, before))
    return reshard(ranks, call.op)


def _install(
    sch: "Schedule",
    call: _Call,
    before: Sharding,
    places: tuple[frozenset[int], frozenset[str]] | None,
    output: int | str | None,
) -> None:
    module, exchange = sch.mod, _exchange(sch, call, before)
    if call.on == "parameters":
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        module.register_forward_pre_hook(SumParameterGradients(names, exchange))
    elif call.mode != "fwd_post":
        hook = ExchangeInputs(exchange, places, call.where, of_gradients=call.mode == "bwd_post")
        module.register_forward_pre_hook(hook, with_kwargs=True)
    elif isinstance(module, LateBias) and before.returns == PARTIAL:
        module.reduce = exchange
        if call.op == "reduce_scatter":  # each process adds the bias to its part only
            module.register_forward_pre_hook(SumParameterGradients(("bias",), sum_gradient(ranks_of(sch))))
    else:
        expected = before.returns.axis if call.op == "all_gather" and before.returns is not None else None
        module.register_forward_hook(ExchangeOutput(exchange, output, call.axis, expected, call.where))


def _install_users(module: nn.Module, mode: str, hook: Callable[..., Any]) -> None:
    with_kwargs = bool(getattr(hook, "with_kwargs", False))
    if mode == "fwd_pre":
        module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    elif mode == "fwd_post":
        module.register_forward_hook(hook, with_kwargs=with_kwargs)
        # What a user's hook makes of the output nobody knows; what the module computes remains known.
        keep_sharding(module, replace(sharding_of(module), returns=None))
    else:
        module.register_full_backward_hook(hook)
