"""Data flow of a run: which modules with parameters a tensor comes from, and which read it.

A run is watched by hooks on modules and by a function mode. Each tensor carries its sources: the modules with
parameters whose outputs reached it through functions alone. The output of such a module has that module as
its only source. Names and classes of a model's own modules are never looked at.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.graphs import copied_object


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor comes from.

    Parameters
    ----------
    sources
        Paths of the modules with parameters that it comes from through functions alone.
    through
        Repeated modules, see `watched`, that it comes from in any way.
    is_learnt
        True if it depends on a parameter, so that it has a gradient in training.
    is_share
        True for the result of a softmax and what functions of one tensor make of it.
    parameters
        Parameters that it comes from through functions alone: paths of their modules, and names.
    """

    sources: frozenset[str] = frozenset()
    through: frozenset[str] = frozenset()
    is_learnt: bool = False
    is_share: bool = False
    parameters: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class LeafCall:
    """One call of a module with parameters; ``inside`` lists the modules around it."""

    path: str
    origin: Origin
    inside: tuple[str, ...]
    input: Tensor | None
    output: Tensor | None


@dataclass(frozen=True, slots=True)
class Product:
    """A product of attention: sources of queries, keys, values and scores, and the size of a head.

    Scores also come from what is added to the products of queries and keys, such as positions. ``inside``
    lists the modules around it, and ``n_calls`` is the number of calls in the flow before it.
    ``is_kernel`` is true if one function computes the whole attention.
    """

    queries: frozenset[str]
    keys: frozenset[str]
    values: frozenset[str]
    scores: frozenset[str]
    head_size: int
    inside: tuple[str, ...]
    n_calls: int
    is_kernel: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """A call of dropout with its rate, the sources of what it drops from, and the modules around it."""

    rate: float
    sources: frozenset[str]
    inside: tuple[str, ...]


@dataclass(slots=True)
class Handed:
    """A call of a repeated module.

    Parameters
    ----------
    path
        Its path.
    args, kwargs
        Copies of its arguments.
    origins, ids
        Origin and identity of each tensor among the arguments.
    through
        Repeated modules that its arguments come from.
    shape_in, shape_out
        Shapes of the first floating-point tensors in and out.
    ids_out, sizes_out
        Identity and shape of each tensor in its result.
    id_in, id_out
        Identities of the first floating-point tensors in and out.
    returns
        Class of its result.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origins: list[Origin]
    ids: list[int]
    through: frozenset[str]
    shape_in: tuple[int, ...] = ()
    shape_out: tuple[int, ...] = ()
    ids_out: list[int] = field(default_factory=list)
    sizes_out: list[tuple[int, ...]] = field(default_factory=list)
    id_in: int = 0
    id_out: int = 0
    returns: type = Tensor


@dataclass(slots=True)
class Flow:
    """What was seen of a run."""

    calls: list[LeafCall] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)
    reads: dict[int, list[tuple[str, tuple[str, ...]]]] = field(default_factory=dict)
    """Readers by the id of a tensor: a module with parameters or a function, and what is around it."""
    given: dict[str, list[int]] = field(default_factory=dict)
    """Ids of the learnt arguments of each module by its path."""
    outside: set[str] = field(default_factory=set)
    """Modules whose parameter a function outside of them has read."""


_CONSTANT = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
_LIKE = ("to", "type_as", "expand_as", "view_as", "reshape_as")  # the other tensor gives its type or shape
_SHARES = ("softmax", "_softmax")
_PRODUCTS = ("matmul", "bmm", "baddbmm", "__matmul__", "__rmatmul__", "einsum")
_DROPS = ("dropout", "dropout_", "native_dropout", "alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"


def _union(origins: Sequence[Origin]) -> Origin:
    return Origin(
        frozenset().union(*(origin.sources for origin in origins)),
        frozenset().union(*(origin.through for origin in origins)),
        any(origin.is_learnt for origin in origins),
        any(origin.is_share for origin in origins),
        frozenset().union(*(origin.parameters for origin in origins)),
    )


class _Watch(TorchFunctionMode):
    """Follow origins through functions."""

    def __init__(self, flow: Flow, names: Mapping[int, tuple[str, str]], sources: Collection[str]) -> None:
        super().__init__()
        self.flow, self.names, self.sources = flow, names, sources
        self.known: dict[int, tuple[Tensor, Origin]] = {}  # tensors too, so that no id is used twice
        self.written: dict[int, Origin] = {}  # what was written into a memory, by its address: views share it
        self.inside: list[str] = []
        self.depth = 0  # above zero inside a module with parameters, whose output has that module as source
        self.scores: list[tuple[frozenset[str], frozenset[str]]] = []

    def of(self, tensor: Tensor) -> Origin:
        known = self.known.get(id(tensor))
        origin = self._unknown(tensor) if known is None else known[1]
        written = self.written.get(tensor.untyped_storage().data_ptr()) if self.written else None
        return origin if written is None else _union([origin, written])

    def _unknown(self, tensor: Tensor) -> Origin:
        """Return the origin of a tensor that nothing in the run has made, such as a parameter."""
        name = self.names.get(id(tensor))
        own = frozenset() if name is None else frozenset({name})
        return Origin(is_learnt=isinstance(tensor, nn.Parameter), parameters=own)

    def set(self, tensor: Tensor, origin: Origin) -> None:
        self.known[id(tensor)] = tensor, origin

    def joined(self, values: Any) -> Origin:
        return _union([self.of(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)])

    def read(self, values: Any, reader: str) -> None:
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, Tensor):
                self.flow.reads.setdefault(id(leaf), []).append((reader, tuple(self.inside)))
                self.known.setdefault(id(leaf), (leaf, self._unknown(leaf)))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.depth:
            return result
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if name == "__setitem__":
            tensors = [args[0]]
        if not tensors:
            return result
        for leaf in pytree.tree_leaves((args, kwargs)):
            path, _ = self.names.get(id(leaf), ("", ""))
            if path in self.sources:
                self.flow.outside.add(path)
        self.read((args, kwargs), f"function {name}")
        origin = self.joined((args, kwargs))
        if name in _CONSTANT or name.startswith("new_"):
            origin = Origin()
        elif name in _LIKE:
            origin = self.joined(args[:1])
        elif name in _SHARES:
            origin = replace(origin, is_share=True)
        elif name in _PRODUCTS or name == _ATTENTION:
            origin = self._product(name, args, kwargs, origin)
        elif name in _DROPS:
            self._drop(args[1] if len(args) > 1 else kwargs.get("p", 0.5), args[0], args, kwargs)
        for tensor in tensors:
            plain = not (tensor.is_floating_point() or tensor.is_complex())
            # What is no number of the reals has no gradient, and says nothing of where activations go.
            self.set(tensor, Origin(through=origin.through) if plain else origin)
            if any(tensor is argument for argument in args[:1]) and origin.sources and not plain:
                address = tensor.untyped_storage().data_ptr()
                self.written[address] = _union([self.written.get(address, Origin()), origin])
        return result

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin) -> Origin:
        operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if name == _ATTENTION:
            named = [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
            query, key, value = [*args, *named][:3]
            of_query, of_key, of_value = (self.of(operand).sources for operand in (query, key, value))
            scores = self.joined([one for one in operands if one is not value]).sources
            self._note(of_query, of_key, of_value, scores, value.shape[-1], is_kernel=True)
            rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            self._drop(rate, query, (), {})
        elif len(operands) >= 2:
            first, second = operands[-2:]
            if name == "__rmatmul__":
                first, second = second, first
            left, right = self.of(first), self.of(second)
            if left.is_share != right.is_share and (left.sources and right.sources):
                share, value = (left, right) if left.is_share else (right, left)
                pairs = [pair for pair in self.scores if pair[0] | pair[1] <= share.sources]
                queries, keys = pairs[-1] if pairs else (share.sources, share.sources)
                size = (second if left.is_share else first).shape[-1]
                self._note(queries, keys, value.sources, share.sources, size)
            elif left.sources and right.sources:
                self.scores.append((left.sources, right.sources))
        return replace(origin, is_share=False)

    def _note(
        self,
        queries: frozenset[str],
        keys: frozenset[str],
        values: frozenset[str],
        scores: frozenset[str],
        head_size: int,
        is_kernel: bool = False,
    ) -> None:
        inside, n_calls = tuple(self.inside), len(self.flow.calls)
        product = Product(queries, keys, values, scores, head_size, inside, n_calls, is_kernel)
        self.flow.products.append(product)

    def _drop(self, rate: Any, dropped: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_training = args[2] if len(args) > 2 else kwargs.get("training", True)
        if rate and is_training:
            self.flow.drops.append(Drop(float(rate), self.of(dropped).sources, tuple(self.inside)))


def is_source(module: nn.Module) -> bool:
    """Return True for a module with parameters of its own that calls no others with parameters."""
    return next(module.parameters(recurse=False), None) is not None and not any(
        True for child in module.children() for _ in child.parameters()
    )


def fresh(values: Any) -> Any:
    """Copy arguments: objects such as caches, and the tensors in tuples, lists and dictionaries."""
    return pytree.tree_map_only(Tensor, Tensor.clone, copied_object(values))


def own_matrices(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters with two axes or more."""
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1]


def first_tensor(values: Any) -> Tensor | None:
    """Return the first floating-point tensor in nested values, else the first tensor, else None."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return next(iter(floating or tensors), None)


def common_owner(paths: Iterable[str]) -> str:
    """Return the path of the innermost module that holds all modules, itself included for one path."""
    tokens = [path.split(".") for path in paths]
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*tokens, strict=False))
    return ".".join(level[0] for level in shared)


def upwards(path: str) -> list[str]:
    """Return the paths of a module and of all that hold it, the innermost first, without the outermost."""
    tokens = path.split(".") if path else []
    return [".".join(tokens[:end]) for end in range(len(tokens), 0, -1)]


def is_within(path: str, owner: str) -> bool:
    """Return True if a path is that of a module or of one in it."""
    return path == owner or path.startswith(f"{owner}.")


def by_called_owner(flow: Flow, parameters: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return parameters by the innermost module around each that is called, with their paths below it."""
    called = {*flow.given, *(call.path for call in flow.calls)}
    found: dict[str, list[str]] = {}
    for path, name in parameters:
        owner = next((one for one in upwards(path) if one in called), "")
        found.setdefault(owner, []).append(f"{path}.{name}".removeprefix(f"{owner}.").lstrip("."))
    return found


@contextmanager
def watched(
    model: nn.Module,
    repeated: Collection[str] = (),
    kept: Collection[str] = (),
    origins: Iterable[tuple[Tensor, Origin]] = (),
) -> Iterator[Flow]:
    """Watch the calls in a block.

    Parameters
    ----------
    model
        The model that the block runs.
    repeated
        Paths of modules whose calls are listed, and which are followed by ``Origin.through``.
    kept
        Those of them whose arguments are kept.
    origins
        Pairs of a tensor and its origin, from a run that led to this one.
    """
    flow = Flow()
    names = {
        id(parameter): (path, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    watch = _Watch(flow, names, {path for path, module in model.named_modules() if is_source(module)})
    for tensor, origin in origins:
        watch.set(tensor, origin)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            enter, leave = _hooks(watch, path, is_source(module), path in repeated, path in kept)
            for handle in (
                module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        stack.enter_context(watch)
        yield flow


def _hooks(watch: _Watch, path: str, is_leaf: bool, is_listed: bool, is_kept: bool) -> tuple[Any, Any]:
    """Return the hooks of one module."""
    flow = watch.flow

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_listed:
            watch.depth += 1
            leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            origins, hidden = [watch.of(leaf) for leaf in leaves], first_tensor((args, kwargs))
            positional, named = fresh((args, kwargs)) if is_kept else ((), {})
            through = frozenset().union(*(origin.through for origin in origins))
            shape = () if hidden is None else tuple(hidden.shape)
            flow.handed.append(
                Handed(
                    path, positional, named, origins, [id(leaf) for leaf in leaves], through, shape,
                    id_in=id(hidden),
                )
            )  # fmt: skip
            for leaf in leaves:
                watch.known.setdefault(id(leaf), (leaf, watch.of(leaf)))
            watch.depth -= 1
        if is_leaf:
            watch.read((args, kwargs), path)
        else:
            learnt = [
                id(leaf)
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and watch.of(leaf).is_learnt
            ]
            flow.given.setdefault(path, []).extend(learnt)
        watch.inside.append(path)
        watch.depth += is_leaf

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch.inside.pop()
        watch.depth -= is_leaf
        if is_leaf and not watch.depth:
            origin, given = watch.joined((args, kwargs)), first_tensor((args, kwargs))
            flow.calls.append(LeafCall(path, origin, tuple(watch.inside), given, first_tensor(output)))
            # What reads nothing hands on its parameters, such as a module with a table of positions.
            own = (
                {(path, name) for name, _ in module.named_parameters(recurse=False)} if given is None else ()
            )
            after = Origin(frozenset({path}), origin.through, is_learnt=True, parameters=frozenset(own))
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor):
                    watch.set(leaf, after)
        if is_listed:
            result = first_tensor(output)
            handed = next(one for one in reversed(flow.handed) if one.path == path)
            handed.shape_out = () if result is None else tuple(result.shape)
            handed.id_out, handed.returns = id(result), Tensor if isinstance(output, Tensor) else type(output)
            made = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            handed.ids_out, handed.sizes_out = (
                [id(leaf) for leaf in made],
                [tuple(leaf.shape) for leaf in made],
            )
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor):
                    origin = watch.of(leaf)
                    watch.set(leaf, replace(origin, through=origin.through | {path}))

    return enter, leave
