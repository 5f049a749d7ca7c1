"""Primitive ``take_experts``: each process computes its experts, for the tokens that chose them.

Either all processes are handed the same tokens, and each computes its summands of their results, or each has
tokens of its own, as in data parallelism: those are sent to the processes of their experts, and results back.
Both are combined where processes of tensor parallelism have the same tokens, and those of data parallelism
others: a process sends the pairs for experts of its place in tensor parallelism, or its part of the tokens.
Processes of context parallelism have other tokens, too, of the same samples.
"""

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from makespan.slapo.errors import ArgumentError, ConflictError, ShardError
from makespan.slapo.layouts import Ranks, send_rows, share_of_gradient
from makespan.slapo.schedule import (
    ForwardWrapper,
    Primitive,
    register_primitive,
    wrap_forward,
    wrapped_forward,
)
from makespan.slapo.sharding import kinds_of, ranks_of
from makespan.slapo.syncing import ExchangeParameterGradients, input_places
from makespan.slapo.tracing import check_is_called

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


_SHARE = "share_of_gradient"  # the exchange that divides gradients, and needs no other process


class OwnExperts(ForwardWrapper):
    """A forward that is handed only the pairs of a token and an expert of this process.

    Parameters
    ----------
    module
        Experts that hold a part of their weights.
    first, count
        The experts of this process, by the numbers of the whole model.
    tokens, chosen, weights
        Names of the arguments, see `TakeExperts`.
    """

    op = "take_experts"

    def __init__(
        self, module: nn.Module, first: int, count: int, tokens: str, chosen: str, weights: str
    ) -> None:
        super().__init__(module)
        self.first, self.count = first, count
        self.tokens, self.chosen, self.weights = tokens, chosen, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum over the experts of this process, for all tokens."""
        bound = inspect.signature(self.inner).bind(*args, **kwargs)
        tokens, chosen, weights = (bound.arguments[name] for name in (self.tokens, self.chosen, self.weights))
        own = (chosen >= self.first) & (chosen < self.first + self.count)
        rows, places = own.nonzero(as_tuple=True)
        if not len(rows) and not isinstance(self.inner, SentExperts):  # which receives those of others
            # Zeros that depend on the inputs, so that all processes exchange the same gradients backward.
            return tokens[:0].sum() + weights[:0].sum() + tokens.new_zeros(tokens.shape)
        # One row per pair, so that no process computes an expert for a token of another one's.
        bound.arguments[self.tokens] = tokens[rows]
        bound.arguments[self.chosen] = chosen[rows, places].unsqueeze(1) - self.first
        bound.arguments[self.weights] = weights[rows, places].unsqueeze(1)
        made = self.inner(*bound.args, **bound.kwargs)
        return made.new_zeros(tokens.shape).index_add(0, rows, made)


class SentExperts(OwnExperts):
    """A forward that sends the tokens of this process to their experts, and computes those that arrive."""

    def __init__(self, module: nn.Module, ranks: Ranks, count: int, *names: str) -> None:
        super().__init__(module, ranks.rank * count, count, *names)
        self.ranks = ranks

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum over the chosen experts, for the tokens of this process."""
        bound = inspect.signature(self.inner).bind(*args, **kwargs)
        tokens, chosen, weights = (bound.arguments[name] for name in (self.tokens, self.chosen, self.weights))
        ranks, every = self.ranks, (self.count,) * self.ranks.size
        # One row per pair of a token and an expert, in the order of the experts and so of their processes.
        order = chosen.flatten().argsort(stable=True)
        rows = order // chosen.shape[1]
        counts = chosen.flatten().bincount(minlength=self.count * ranks.size)
        arriving = send_rows(ranks, every, every).operation(counts)
        sent, received = (of.view(ranks.size, -1).sum(1).tolist() for of in (counts, arriving))
        send = send_rows(ranks, sent, received)
        own, shares = send(tokens[rows]), send(weights.flatten()[order].unsqueeze(1))
        numbers = torch.arange(self.count, device=chosen.device, dtype=chosen.dtype).repeat(ranks.size)
        bound.arguments[self.tokens], bound.arguments[self.weights] = own, shares
        bound.arguments[self.chosen] = numbers.repeat_interleave(arriving).unsqueeze(1)
        # Without a row, what depends on inputs and weights, so that all exchange gradients backward.
        is_last = not isinstance(self.inner, SentExperts)  # else they are sent on
        if len(own) or not is_last:
            made = self.inner(*bound.args, **bound.kwargs)
        else:
            made = own + shares.sum() + self._nothing()
        back = send_rows(ranks, received, sent)(made)
        return back.new_zeros(tokens.shape).index_add(0, rows, back)

    def _nothing(self) -> Any:
        """Return zero, with a gradient of zeros for each of the experts' own weights."""
        forward: Any = self.inner
        while isinstance(forward, ForwardWrapper):
            forward = forward.inner
        module = getattr(forward, "__self__", None)
        weights = module.parameters(recurse=False) if isinstance(module, nn.Module) else ()
        return sum(weight.flatten()[:0].sum() for weight in weights)


class SharedTokens(ForwardWrapper):
    """A forward that is handed the part of this process of tokens that several processes have."""

    op = "take_experts"

    def __init__(self, module: nn.Module, ranks: Ranks, *names: str) -> None:
        super().__init__(module)
        self.rank, self.size, self.names = ranks.rank, ranks.size, names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of the part of this process, and zeros for all other tokens."""
        bound = inspect.signature(self.inner).bind(*args, **kwargs)
        count = len(bound.arguments[self.names[0]])
        first, last = count * self.rank // self.size, count * (self.rank + 1) // self.size
        for name in self.names:
            bound.arguments[name] = bound.arguments[name][first:last]
        made = self.inner(*bound.args, **bound.kwargs)
        return nn.functional.pad(made, (0, 0, first, count - last))


def has_exchanged_experts(module: nn.Module) -> bool:
    """Return True for experts whose gradients processes sum, whether a token chose one of theirs or not."""
    hooks = [
        hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ExchangeParameterGradients)
    ]
    is_dealt = any(wrapped_forward(module, kind) is not None for kind in (OwnExperts, SharedTokens))
    return is_dealt and any(hook.exchange.name != _SHARE for hook in hooks)


@register_primitive()
class TakeExperts(Primitive):
    """Leave each process the tokens that chose one of its experts, whose weights are sharded by experts."""

    @classmethod
    def name(cls) -> str:
        """Return ``take_experts``."""
        return "take_experts"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        n_experts: int,
        tokens: int | str = 0,
        chosen: int | str = 1,
        weights: int | str = 2,
        has_own_tokens: bool = False,
        over: str | Sequence[str] = "tensor",
        shares_tokens: bool = False,
    ) -> None:
        """Call the module with the pairs of a token and an expert of this process, and add its results up.

        The module returns a row per token, the sum over the chosen experts. Each process computes its
        summands, for tokens that all processes are handed: sum them by ``sync``, as after a row. With tokens
        of its own, it sends each pair to the process of the expert, and the result comes back whole; the
        gradients of the experts are then means over the processes, like those of data parallelism.

        Parameters
        ----------
        n_experts
            Experts of the whole model; a process holds an equal part of them, in order.
        tokens
            Argument with a row per token, ``(n_tokens, width)``, by name or position.
        chosen, weights
            Arguments with the numbers of the experts that a token chose, and their weights, both
            ``(n_tokens, n_chosen)``.
        has_own_tokens
            True if each process has samples of its own, False if all have the same tokens.
        over
            Processes among which the experts are dealt out, as for `shard`: those of ``experts`` and of
            ``context`` have tokens of their own, those of ``tensor`` beside them have the same.
        shares_tokens
            True if experts are not dealt out over ``tensor``, and the processes of tensor parallelism are
            handed the same tokens: each computes its part of them, to be summed, and so are the gradients of
            the experts. False if each is handed its part.
        """
        where = f"take_experts of {sch.path!r} ({type(sch.mod).__name__})"
        check_is_called(sch, cls.name())
        kinds = kinds_of(over, where)
        tensor = ranks_of(sch)
        n_processes = math.prod(ranks_of(sch, kind).size for kind in kinds)
        if (has_own_tokens and kinds != ("tensor",)) or (shares_tokens and "tensor" in kinds):
            said = "has_own_tokens" if has_own_tokens else "shares_tokens"
            raise ArgumentError(f"{where}: {said} is not for experts over {' and '.join(kinds)}")
        if any(wrapped_forward(sch.mod, kind) for kind in (OwnExperts, SharedTokens)):
            raise ConflictError(f"{where}: it has its experts already, {sch.conflict(cls.name())}")
        if n_experts < 1 or n_experts % n_processes:
            raise ShardError(f"{where}: {n_experts} experts do not divide among {n_processes} processes")
        names = list(inspect.signature(sch.mod.forward).parameters)
        given = []
        for argument in (tokens, chosen, weights):
            input_places(sch.mod, [argument], where)
            given.append(argument if isinstance(argument, str) else names[argument])
        if len({*given}) < len(given):
            raise ArgumentError(f"{where}: {', '.join(given)} are not three arguments of it")
        # The innermost first: what arrives from processes with other samples is sent on to those of the
        # sequence, each time by the numbers of the experts that the receiving processes hold together.
        senders = kinds if has_own_tokens else [kind for kind in kinds if kind != "tensor"]
        count = n_experts // n_processes
        for kind in reversed(senders):
            ranks = ranks_of(sch, kind)
            if ranks.size == 1:
                continue
            wrap_forward(sch.mod, SentExperts(sch.mod, ranks, count, *given))
            count *= ranks.size
            if kind != "context":  # whose processes have one loss, that of whole sequences
                own = tuple(name for name, _ in sch.mod.named_parameters(recurse=False))
                hook = ExchangeParameterGradients(own, share_of_gradient(ranks), kind)
                sch.mod.register_forward_pre_hook(hook)
        if "tensor" in kinds and not has_own_tokens and tensor.size > 1:
            count = n_experts // tensor.size  # of all processes at this place in tensor parallelism
            wrap_forward(sch.mod, OwnExperts(sch.mod, tensor.rank * count, count, *given))
        if shares_tokens and tensor.size > 1:
            wrap_forward(sch.mod, SharedTokens(sch.mod, tensor, *given))
