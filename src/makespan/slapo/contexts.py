"""Context parallelism: each process holds a part of every sequence throughout all layers.

Only attention needs other parts. The primitive ``share_context`` gathers keys and values for each call of
`torch.nn.functional.scaled_dot_product_attention`, and leaves queries, and rows of masks, as they are.
`ContextSplitter` finds the modules that need it, and the arguments of a layer that must be cut.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.errors import ConflictError, ShardError
from makespan.slapo.flow import Flow
from makespan.slapo.layouts import Ranks, all_gather, scatter
from makespan.slapo.rehearsals import TOKENS, LayerRehearsal, RefusedError, hidden_of, replaced
from makespan.slapo.schedule import (
    ForwardWrapper,
    Primitive,
    register_primitive,
    wrap_forward,
    wrapped_forward,
)
from makespan.slapo.tracing import check_is_called
from makespan.slapo.trials import Step

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule

REFUSED = ("context parallelism cannot be placed", "a plan without cp")
"""What is refused about sequences, and what is expected instead."""
_ATTENTION = F.scaled_dot_product_attention
_MOST_REHEARSALS = 64
_SUMMED = {"mode": "bwd_post", "sync_op_or_fn": "all_reduce", "over": "context"}


# --- Primitive ---


class _Gathering(TorchFunctionMode):
    """Hand each call of an attention the keys and values of all processes."""

    def __init__(self, ranks: Ranks, where: str) -> None:
        super().__init__()
        self.ranks, self.where = ranks, where

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ATTENTION:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **further: Any,
    ) -> Tensor:
        """Attend from the rows of this process to the keys of all processes."""
        rank, n_rows, n_keys = self.ranks.rank, query.shape[TOKENS], key.shape[TOKENS]
        join = all_gather(self.ranks, TOKENS)
        key, value = join(key), join(value)
        if attn_mask is not None:
            attn_mask = self._own_rows(attn_mask, n_rows, key.shape[TOKENS])
        elif is_causal:
            if n_rows != n_keys:
                raise ShardError(f"{self.where}: causal attention from {n_rows} tokens to {n_keys}")
            # The keys end at the last row of this process, so that a kernel skips those behind it.
            end = (rank + 1) * n_rows
            key, value = key[..., :end, :], value[..., :end, :]
            if rank:
                # Called by its protocol, which compares functions: a verification replaces that of torch.
                bias: Any = causal_lower_right(n_rows, end)
                named = {"attn_mask": bias, "dropout_p": dropout_p, **further}
                attend, kinds = F.scaled_dot_product_attention, (type(bias),)
                result: Tensor = bias.__torch_function__(attend, kinds, (query, key, value), named)
                return result
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **further
        )

    def _own_rows(self, mask: Tensor, n_rows: int, n_keys: int) -> Tensor:
        """Return the rows of a mask for the queries of this process."""
        if mask.shape[-1] not in (1, n_keys):
            raise ShardError(
                f"{self.where}: a mask of shape {tuple(mask.shape)} for {n_keys} keys of all processes; a "
                "mask must be made for whole sequences"
            )
        if mask.dim() > 1 and mask.shape[TOKENS] == self.ranks.size * n_rows:
            own: Tensor = scatter(self.ranks, TOKENS)(mask)
            return own
        return mask


class SharedContext(ForwardWrapper):
    """A forward whose attention sees the tokens of all processes."""

    op = "share_context"

    def __init__(self, module: nn.Module, ranks: Ranks, where: str) -> None:
        super().__init__(module)
        self.ranks, self.where = ranks, where

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with keys and values of all processes, eagerly, as compiled code leaves modes."""
        with _Gathering(self.ranks, self.where):
            return self.inner(*args, **kwargs)


@register_primitive()
class ShareContext(Primitive):
    """Let the attention of a module see whole sequences, of which each process holds a part."""

    @classmethod
    def name(cls) -> str:
        """Return ``share_context``."""
        return "share_context"

    @classmethod
    def apply(cls, sch: "Schedule") -> None:
        """Gather keys and values wherever this module calls ``scaled_dot_product_attention``.

        Queries stay those of this process. A causal mask begins at its tokens; of a mask that is handed to
        the call, made for whole sequences, it takes its rows. Gradients of keys and values are summed over
        the processes and cut. The processes are those of ``context_group``, see `create_schedule`; process
        ``i`` holds the ``i``-th of equal parts. Cut what the layers read, join what they return, and sum
        gradients of weights by ``sync(..., over="context")``.

        Apply it to the innermost module around the calls: recomputation of a module below this one does not
        see it, nor do functions of torch that call it, such as that of ``nn.MultiheadAttention``. A compiled
        layer runs this module eagerly.
        """
        where = f"share_context of {sch.path!r} ({type(sch.mod).__name__})"
        check_is_called(sch, cls.name())
        if wrapped_forward(sch.mod, SharedContext):
            raise ConflictError(f"{where}: it sees whole sequences already, {sch.conflict(cls.name())}")
        ranks = sch.metadata.context
        if ranks.size > 1:
            wrap_forward(sch.mod, SharedContext(sch.mod, ranks, where))


# --- One layer ---


@dataclass(slots=True)
class ContextSplitter:
    """Finds what a layer needs if each process holds a part of every sequence.

    Parameters
    ----------
    flow
        A run of the layer in training mode, with the arguments of the sample themselves.
    rehearsal
        Judges a choice.
    steps
        Primitives that share the layer by tensor parallelism.
    """

    flow: Flow
    rehearsal: LayerRehearsal
    steps: Sequence[Step]
    notes: list[str] = field(default_factory=list)

    def find(self) -> list[Step]:
        """Return the fewest steps that pass; a `RefusedError` says why there are none."""
        sample, n = self.rehearsal.sample, self.rehearsal.n_context
        try:
            hidden = hidden_of(sample.args, sample.kwargs)
        except RefusedError as error:
            raise RefusedError(str(error), *REFUSED) from None
        n_parts = n * (self.rehearsal.n_tensor if self.rehearsal.along_sequence else 1)
        length = hidden.shape[TOKENS]
        if length % n_parts:
            self._refuse(f"{length} tokens of the example do not divide among {n_parts} processes")
        if length < 2 * n_parts:
            self._refuse(
                f"{length} tokens of the example for {n_parts} processes; use two or more for each of them"
            )
        self._check_kernels()
        self._check_modules(hidden)
        choices = [*self._shares(), *self._arguments(hidden)]
        fullest = tuple(of[1] for of in choices)
        reason = ""
        for chosen in _fewest_first(choices):
            steps = self._with_sums(chosen)
            failed = self.rehearsal.why_not([*self.steps, *steps])
            if not failed:
                return steps + self._drawn_apart()
            if chosen == fullest or not reason:
                reason = failed
        raise RefusedError(reason, *REFUSED)

    @staticmethod
    def _refuse(why: str) -> None:
        raise RefusedError(why, *REFUSED)

    def _check_kernels(self) -> None:
        """Refuse a layer whose attention is written out, since nothing shows where keys could be gathered."""
        products = self.flow.products
        if products and not any(product.is_kernel for product in products):
            where = products[0].inside[-1] if products[0].inside else ""
            self._refuse(f"attention in {where!r} is written out, not a call of scaled_dot_product_attention")

    def _check_modules(self, hidden: Tensor) -> None:
        """Refuse a layer whose tokens choose modules: a process without one would wait for its gradients."""
        equal = hidden[:1, :1].expand_as(hidden).contiguous()  # tokens that all choose the same
        if differing := sorted(self._called(hidden, hidden) ^ self._called(hidden, equal)):
            self._refuse(f"tokens choose whether {differing[0]!r} is called")

    def _called(self, hidden: Tensor, value: Tensor) -> set[str]:
        """Return the modules with parameters that are called if the layer reads other values."""
        sample, seen = self.rehearsal.sample, set[str]()
        handles = [
            module.register_forward_pre_hook(lambda module, args, path=path: seen.add(path))
            for path, module in sample.layer.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        try:
            sample.call(sample.layer, *replaced((sample.args, sample.kwargs), hidden, value))
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def _shares(self) -> Iterator[list[Step | None]]:
        """Iterate over the modules that call an attention; each may need the keys of other processes."""
        paths = [
            product.inside[-1] if product.inside else ""
            for product in self.flow.products
            if product.is_kernel
        ]
        for path in dict.fromkeys(paths):
            yield [None, Step("share_context", path, {})]

    def _named(self) -> list[tuple[int | str, Any]]:
        sample = self.rehearsal.sample
        return [*enumerate(sample.args), *sample.kwargs.items()]

    def _arguments(self, hidden: Tensor) -> Iterator[list[Step | None]]:
        """Iterate over what may have to be done with arguments: cut their tokens, or sum their gradients."""
        length = hidden.shape[TOKENS]
        for place, value in self._named():
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            read = [leaf for leaf in leaves if id(leaf) in self.flow.reads]
            if value is hidden or not read:
                continue
            found: list[Step | None] = [None]
            if place in self.rehearsal.learnt:  # whole, and each process has a summand of its gradient
                found.append(Step("sync", "", {**_SUMMED, "inputs": [place]}))
            for axis, scheme in ((-2, "RR->SR"), (-1, "RR->RS")):
                if all(leaf.dim() >= -axis and leaf.shape[axis] == length for leaf in leaves):
                    values = {"mode": "fwd_pre", "sync_op_or_fn": scheme, "inputs": [place]}
                    found.append(Step("sync", "", values | {"over": "context"}))
            if len(found) > 1:
                yield found

    def _with_sums(self, chosen: Sequence[Step | None]) -> list[Step]:
        """Return chosen steps, and sums of the gradients of weights, which see the tokens of a process.

        Experts that processes share see those of all that chose them.
        """
        steps = [step for step in chosen if step is not None]
        dealt = {step.path for step in self.steps if step.op == "take_experts" and step.is_over("context")}
        for path, module in self.rehearsal.sample.layer.named_modules():
            if path not in dealt and next(module.parameters(recurse=False), None) is not None:
                steps.append(Step("sync", path, {**_SUMMED, "on": "parameters"}))
        return steps

    def _drawn_apart(self) -> list[Step]:
        """Return a step by which dropout draws apart in each process, whose tokens are others."""
        return [Step("fork_rng", "", {"over": "context"})] if self.flow.drops else []


def _fewest_first(choices: Sequence[Sequence[Step | None]]) -> Iterator[tuple[Step | None, ...]]:
    """Iterate over choices of one option each, those with few steps first."""
    ways = itertools.product(*(range(len(of)) for of in choices))
    ordered = sorted(ways, key=lambda places: (sum(map(bool, places)), sum(places)))
    for places in itertools.islice(ordered, _MOST_REHEARSALS):
        yield tuple(of[place] for of, place in zip(choices, places, strict=True))
