"""Primitive ``checkpoint``: what the backward pass computes again, and which results it need not.

A module is computed again as a whole, or without the operators whose results are kept, such as products
(selective recomputation, Korthikanti et al. 2022, section 5).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from makespan.slapo.compiling import Compiled
from makespan.slapo.errors import ArgumentError, ConflictError, KindError, close_names, warn
from makespan.slapo.graphs import StateSnapshot, argument_restorer
from makespan.slapo.memory import count_kept
from makespan.slapo.rewriting import as_matches, extract_module
from makespan.slapo.schedule import (
    ForwardWrapper,
    Primitive,
    register_primitive,
    wrap_forward,
    wrapped_forward,
)
from makespan.slapo.tracing import check_is_called

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Operators whose results are kept ---

PRODUCTS, ATTENTION = "products", "attention"
GROUPS: Mapping[str, tuple[str, ...]] = {
    PRODUCTS: ("mm", "addmm", "linear", "convolution", "_scaled_mm", "_grouped_mm"),
    ATTENTION: (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "higher_order::flex_attention",
    ),
}
"""Operators by group: products with weights, and kernels of attention. Attention that is written out
multiplies activations (``bmm``), which belongs to neither."""


def kept_operators(where: str, keep: str | Sequence[str]) -> frozenset[str]:
    """Return the full names of operators, given by name or by group; reject those that cannot be kept."""
    wanted: object = [keep] if isinstance(keep, str) else keep
    if not isinstance(wanted, list | tuple) or not all(isinstance(name, str) for name in wanted):
        raise KindError(f"{where}: keep is {keep!r}; expected names of operators, or of groups of them")
    names = set[str]()
    for name in wanted:
        if name in GROUPS:
            names.update(map(_full_name, GROUPS[name]))
        else:
            _check_can_be_kept(where, name)
            names.add(_full_name(name))
    return frozenset(names)


def _full_name(name: str) -> str:
    return name if "::" in name else f"aten::{name}"


def _check_can_be_kept(where: str, name: str) -> None:
    space, _, short = _full_name(name).partition("::")
    operator = getattr(getattr(torch.ops, space), short, None)
    if operator is None:
        known = close_names(name, [*GROUPS, *GROUPS[PRODUCTS]])
        raise ArgumentError(f"{where}: torch has no operator {name!r}; {known}")
    if space == "higher_order":
        return
    overloads: list[Any] = [getattr(operator, overload) for overload in operator.overloads()]
    makers = [one for one in overloads if all(_is_only_read(argument) for argument in one._schema.arguments)]
    if not makers:
        raise ArgumentError(
            f"{where}: {name!r} changes its arguments or returns a view of one; name an operator that makes "
            "a new tensor"
        )
    if all(torch.Tag.nondeterministic_seeded in one.tags and _rate_of(one) is None for one in makers):
        raise ArgumentError(
            f"{where}: {name!r} draws random numbers; if it did not draw again, later draws would differ"
        )


def _is_only_read(argument: Any) -> bool:
    return argument.alias_info is None


def _rate_of(operator: Any) -> int | None:
    """Return the position of the rate of dropout among the arguments of an operator, None without one."""
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a call that draws random numbers, after which later calls draw others."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    place = _rate_of(operator)
    if place is None:
        return True
    default = operator._schema.arguments[place].default_value
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", default))


def _addresses(values: Any) -> list[int]:
    """Return the addresses of the memory of tensors; views share theirs."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


class Keeping:
    """Which results one call of a module keeps; the second pass repeats the decisions of the first.

    Parameters
    ----------
    operators
        Full names of operators whose results are kept.
    every
        Of the products, keep the first of each so many.
    is_compiled
        True in code that is being compiled, which replaces changes in place.
    """

    def __init__(self, operators: frozenset[str], every: int, is_compiled: bool = False) -> None:
        self.operators, self.every, self.is_compiled = operators, every, is_compiled
        self.products = frozenset(map(_full_name, GROUPS[PRODUCTS]))
        self.is_on = True
        self.n_products = 0
        self.decisions: list[bool] = []
        self.n_repeated = 0
        self.kept: dict[int, str] = {}  # operators by the addresses of their results

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Decide on the result of one operator."""
        if context.is_recompute:  # older versions of torch ask in both passes
            is_kept = self.decisions[self.n_repeated]
            self.n_repeated += 1
        else:
            is_kept = self.is_on and self._is_kept(operator, args, kwargs)
            self.decisions.append(is_kept)
            result = getattr(context, "op_output", None)
            if not self.is_compiled:
                self._check_unchanged(operator, args)
            if is_kept:
                count_kept(result)
                self.kept |= {} if self.is_compiled else dict.fromkeys(_addresses(result), str(operator))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def _check_unchanged(self, operator: Any, args: tuple[Any, ...]) -> None:
        """Reject an operator that changes a kept result in place; the second pass would change it again."""
        schema = getattr(operator, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for argument, value in zip(schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            changed = next(
                (self.kept[at] for at in _addresses(value) if is_written and at in self.kept), None
            )
            if changed is not None:
                raise ConflictError(
                    f"checkpoint: the result of {changed} is kept, but {operator} changes it in place; keep"
                    " other operators, or compute the module again as a whole"
                )

    def _is_kept(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        schema = getattr(operator, "_schema", None)
        name = schema.name if schema is not None else f"higher_order::{operator.name()}"
        if name not in self.operators or _draws(operator, args, kwargs):
            return False
        if name not in self.products:
            return True
        self.n_products += 1
        return (self.n_products - 1) % self.every == 0

    @contextmanager
    def only_within(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Keep results only while one of some modules runs; of all, if none is given."""
        if not modules:
            yield
            return
        depth = 0

        def enter(*_: Any) -> None:
            nonlocal depth
            depth, self.is_on = depth + 1, True

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            self.is_on = depth > 0

        self.is_on = False
        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield


_Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_contexts_of: Callable[[Keeping], _Contexts] = create_selective_checkpoint_contexts


def _contexts_when_compiled(operators: tuple[str, ...], every: int) -> _Contexts:
    return _contexts_of(Keeping(frozenset(operators), every, is_compiled=True))


# --- Recompute activations ---


class _Save(torch.autograd.Function):
    """Save tensors for a backward pass that never comes, so that the hooks of a second pass see them."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("what a second pass returns is not used")


_save: Callable[..., Tensor] = _Save.apply


def _saving_in(saved: list[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which autograd saves tensors in a list, in order."""

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach() if tensor.requires_grad else tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class Checkpointed(ForwardWrapper):
    """A forward whose activations are recomputed without changing its state again.

    The second pass starts from the same state as the first one: buffers, attributes, random generators, and
    objects, lists and dictionaries among the arguments, such as a cache. Its changes to them are dropped when
    it ends. So batch norm counts a batch once, spectral norm uses the same vectors in both passes, a cache
    grows once, and a layer that was dropped at random is dropped again.

    Parameters
    ----------
    module
        The module.
    preserve_rng
        Draw the same random numbers in both passes.
    operators, every, within
        Full names of operators whose results are kept, the share of the products among them, and paths of
        the modules in which they are kept, see `Checkpoint`.
    """

    op = "checkpoint"

    def __init__(
        self,
        module: nn.Module,
        preserve_rng: bool,
        operators: frozenset[str] = frozenset(),
        every: int = 1,
        within: Sequence[str] = (),
    ) -> None:
        super().__init__(module)
        self.module, self.preserve_rng = module, preserve_rng
        self.operators, self.every, self.within = operators, every, tuple(within)
        self.keeps_second_pass = False  # for backward passes in parts, each of which would run it again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward now, and again when its gradients are needed."""
        inner = self.inner
        # Without gradients nothing runs twice, and compiled code recomputes without changing state.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            options: dict[str, Any] = {}
            if self.operators:
                options["context_fn"] = partial(
                    _contexts_when_compiled, tuple(sorted(self.operators)), self.every
                )
            return checkpoint(
                # Torch would take arguments of the forward that are named as its own, such as debug.
                partial(inner, **kwargs),
                *args,
                use_reentrant=False,
                preserve_rng_state=self.preserve_rng,
                **options,
            )
        before = StateSnapshot(self.module, (args, kwargs), with_global_generators=self.preserve_rng)
        kept = argument_restorer(args, kwargs)
        # A forward may change parameters that no optimizer updates; a second pass would change them again.
        # Not checked are embeddings and recurrent layers: they normalise or flatten weights, which is
        # idempotent.
        parameters = [
            (name, parameter)
            for path, module in self.module.named_modules()
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.RNNBase)
            for name, parameter in module.named_parameters(path, recurse=False)
            if not parameter.is_inference()
        ]
        if swapped := [name for name, parameter in parameters if not isinstance(parameter, nn.Parameter)]:
            raise ConflictError(
                f"checkpoint: {swapped[0]!r} of {type(self.module).__name__} is another tensor for this call,"
                " as under torch.func.functional_call, and would not be when it is recomputed; call the"
                " module with its own parameters, or without checkpoint"
            )
        versions = [parameter._version for _, parameter in parameters]
        first, second = self._keeping()
        passes, saved = 0, list[Tensor]()

        def run(*positional: Any, **named: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes > 2 and self.keeps_second_pass:
                return _save(torch.zeros((), requires_grad=True), *saved)
            if passes > 1:
                self._check_parameters(parameters, versions)
            if kept is not None and passes > 1:
                positional, named = kept(positional, named)
            is_kept = passes > 1 and self.keeps_second_pass
            # Around the forward alone: operators that restore its state would count as operators of it.
            with first if passes == 1 else second, _saving_in(saved) if is_kept else nullcontext():
                result = inner(*positional, **named)
            if is_kept:  # hand torch what it wants to know of a second pass
                _save(torch.zeros((), requires_grad=True), *saved)
            return result

        try:
            output = checkpoint(
                partial(run, **kwargs),  # as above
                *args,
                use_reentrant=False,
                preserve_rng_state=self.preserve_rng,
                context_fn=lambda: (nullcontext(), before.restored()),
            )
        finally:  # copies live until the backward pass: keep only those of state that this forward changed
            before.drop_unchanged()
        for place, (name, parameter) in enumerate(parameters):
            before_it, versions[place] = versions[place], parameter._version
            if not parameter.requires_grad and before_it != parameter._version:
                raise ConflictError(
                    f"checkpoint: the forward of {type(self.module).__name__} changes its parameter {name!r},"
                    " and would change it again when it is recomputed; make it a buffer, or"
                    " checkpoint a module that does not change it"
                )
        return output

    def _check_parameters(
        self, parameters: Sequence[tuple[str, nn.Parameter]], versions: Sequence[int]
    ) -> None:
        """Reject parameters that have changed since the forward pass, as autograd does for those it keeps."""
        for (name, parameter), version in zip(parameters, versions, strict=True):
            if parameter._version != version:
                raise ConflictError(
                    f"checkpoint: parameter {name!r} of {type(self.module).__name__} has changed between the "
                    "forward pass and its recomputation, whose results would be others; step the optimizer "
                    "after the backward pass"
                )

    def _keeping(self) -> _Contexts:
        """Return the contexts of the forward in both passes."""
        if not self.operators:
            return nullcontext(), nullcontext()
        keeping = Keeping(self.operators, self.every)
        first, second = _contexts_of(keeping)
        modules = [self.module.get_submodule(path) for path in self.within]
        return _both(keeping.only_within(modules), first), second


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@register_primitive()
class Checkpoint(Primitive):
    """Recompute the activations of a module, or of nodes of its graph, in the backward pass."""

    @classmethod
    def name(cls) -> str:
        """Return ``checkpoint``."""
        return "checkpoint"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        subgraph: object = None,
        order_args_fn: Callable[..., Any] | None = None,
        preserve_rng: bool = True,
        keep: str | Sequence[str] = (),
        every: int = 1,
        within: Sequence[str] = (),
    ) -> None:
        """Recompute the whole module, or one match of `find`, except operators whose results are kept.

        A kept result is not changed in place by the module, and there is one backward pass per forward pass.

        Parameters
        ----------
        subgraph
            A match of `find`; None for the whole module.
        order_args_fn
            Function that returns the inputs of the match in the order in which they are passed.
        preserve_rng
            Draw the same random numbers in the second pass as in the first, also from the generators of
            Python and NumPy. Generators that the module holds always repeat their numbers.
        keep
            Operators whose results are kept: names of `torch.ops.aten` such as ``bmm``, others with their
            namespace as in ``library::operator``, or the groups ``products`` (those with weights) and
            ``attention`` (its kernels, unless they drop values). Empty to recompute everything.
        every
            Of the products, keep the first of each so many.
        within
            Paths below this module of those in which results are kept; empty for all. Compiled code keeps
            them everywhere.
        """
        where = f"checkpoint of {sch.path!r}"
        operators = kept_operators(where, keep)
        if every < 1:
            raise ArgumentError(f"{where}: every is {every!r}; expected a whole number >= 1")
        if not operators and (every > 1 or within):
            raise ArgumentError(f"{where}: every and within need keep, the operators whose results are kept")
        for path in within:
            sch[path]  # a path that does not exist is an error now, not when the model runs
        if subgraph is not None and within:
            raise ArgumentError(f"{where}: within needs a whole module; a subgraph has no paths")
        if subgraph is not None:
            matches = as_matches(sch, cls.name(), subgraph)
            if len(matches) != 1:
                raise ArgumentError(f"{where}: got {len(matches)} matches; expected one")
            part = extract_module(sch, cls.name(), matches[0], "Recomputed", order_args_fn)
            wrap_forward(part, Checkpointed(part, preserve_rng, operators, every))
            return
        if order_args_fn is not None:
            raise ArgumentError(f"{where}: order_args_fn needs a subgraph")
        check_is_called(sch, cls.name())
        if wrapped_forward(sch.mod, Checkpointed):
            raise ConflictError(f"{where}: it is already recomputed, {sch.conflict('checkpoint')}")
        compiled = [path for path, module in sch.mod.named_modules() if wrapped_forward(module, Compiled)]
        if operators and compiled:
            raise ConflictError(
                f"{where}: {compiled[0] or 'the module'!r} is compiled already, which hides its operators; "
                "checkpoint first, then compile"
            )
        above = sch.parent
        while above is not None:
            if wrapped_forward(above.mod, Checkpointed):
                warn(
                    f"{where}: {above.path!r} above it is already recomputed, "
                    "so that this module runs three times"
                )
                break
            above = above.parent
        wrap_forward(sch.mod, Checkpointed(sch.mod, preserve_rng, operators, every, within))


def select_layers(n: int, ratio: float, policy: str = "even") -> list[int]:
    """Return the indices of the layers to recompute: exactly ``floor(n * ratio)`` of them.

    Parameters
    ----------
    n
        Number of layers.
    ratio
        Share of them, in [0, 1].
    policy
        ``even`` spreads them over the model, ``head`` takes the first.

    Raises
    ------
    ArgumentError
        A value is out of range; also a `ValueError`.
    """
    if n < 0 or not 0 <= ratio <= 1:
        raise ArgumentError(f"select_layers got n = {n}, ratio = {ratio}; expected n >= 0, ratio in [0, 1]")
    if policy not in ("even", "head"):
        raise ArgumentError(f"select_layers got policy {policy!r}; expected 'even' or 'head'")
    count = math.floor(n * ratio + 1e-9)  # 100 * 0.29 is 28.999... in floating point
    if policy == "head":
        return list(range(count))
    return [index for index in range(n) if (index + 1) * count // n > index * count // n]
