"""A module that runs the graph of another's forward: same parameters, same names, same arguments."""

import copy
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, fx, nn

from makespan.slapo._errors import TracingError, shown

__all__ = ["PLAIN", "FusedModule", "TracedModule", "exchange_borrowed", "is_same"]

PLAIN = (bool, int, float, str, type(None))
# What belongs to the graph and not to the module that was traced.
_OF_THE_GRAPH = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(vars(nn.Module()))


class TracedModule(fx.GraphModule):
    """The graph of a forward, with all that the traced module had, whether the graph uses it or not."""

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "TracedModule") -> None:
        super().__init__(root, graph, class_name)
        self.origin = f"{type(root).__module__}.{type(root).__qualname__}"
        self.fixed: dict[str, Any] = {}
        self.required: frozenset[str] = frozenset()
        self.flattened = False
        self.argument_names = tuple(str(node.target) for node in graph.find_nodes(op="placeholder"))

    @classmethod
    def around(
        cls, module: nn.Module, graph: fx.Graph, fixed: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> Self:
        """Build it around a traced module; constants are what its graph reads beside what the module has."""
        vars(module).update(constants)
        try:
            traced = cls(module, graph, type(module).__name__)
        finally:
            for name in constants:
                del vars(module)[name]
        traced.take_over(module)
        for name, value in constants.items():
            vars(traced).pop(name, None)
            traced.keep(name, value)
        traced.fixed, traced.required = dict(fixed), frozenset(traced.argument_names) - frozenset(fixed)
        return traced

    def take_over(self, module: nn.Module) -> None:
        """Hold the parameters, buffers, children, hooks and plain attributes of another module."""
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                vars(self)[name] = dict(value)
            elif name == "_non_persistent_buffers_set":
                vars(self)[name] = set(value)
            elif name not in _OF_THE_GRAPH:
                vars(self)[name] = value

    def keep(self, name: str, value: object) -> None:
        """Hold a constant that is no part of the state; a tensor moves with the module."""
        if isinstance(value, Tensor):
            self.register_buffer(name, value, persistent=False)
        else:
            setattr(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph if the arguments are those that it was traced for."""
        given = dict(zip(self.argument_names, args, strict=False)) | kwargs
        for name, value in self.fixed.items():
            if name in given and not is_same(given[name], value):
                raise TracingError(
                    f"{self.origin}: the argument {name!r} was fixed to {shown(value)} when it was traced;"
                    f" found {shown(given[name])}; accepted: that value, or trace again with {name!r} in"
                    " inputs"
                )
        if missing := self.required - set(given):
            wanted = ", ".join(name for name in self.argument_names if name in self.required)
            raise TracingError(
                f"{self.origin}: called without {', '.join(map(repr, sorted(missing)))}; accepted: every"
                f" input that it was traced with: {wanted}"
            )
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TracedModule":
        """Copy with hooks and constants, which a plain graph module would lose."""
        kind = type(self).__mro__[1]  # the class of one graph module is its own and cannot be called
        result: TracedModule = kind(self, copy.deepcopy(self.graph, memo), type(self).__name__)
        memo[id(self)] = result
        for name, value in vars(self).items():
            if name not in _OF_THE_GRAPH and name != "_compiled_call_impl":
                vars(result)[name] = copy.deepcopy(value, memo)
        result.after_copy()
        return result

    def after_copy(self) -> None:
        """Do what is left to do for a copy."""


class FusedModule(TracedModule):
    """A part of a graph; the modules that it calls are still registered with the owner of the graph.

    So their parameters keep their names, and their modes follow those of the model.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "FusedModule") -> None:
        super().__init__(root, graph, class_name)
        self.backend: str | None = None
        self.borrowed: tuple[str, ...] = ()
        self.required = frozenset(self.argument_names)

    @classmethod
    def of(cls, graph: fx.Graph, modules: Mapping[str, nn.Module], class_name: str, training: bool) -> Self:
        """Build it of a graph and the modules that it calls."""
        holder = nn.Module()
        vars(holder).update(modules)
        module = cls(holder, graph, class_name)
        for name in modules:
            vars(module)[name] = module._modules.pop(name)
        module.borrowed = tuple(modules)
        module.training = training
        return module

    def exchange(self, new: Mapping[int, nn.Module]) -> None:
        """Call new modules, given by the identity of those that they replace."""
        for name in self.borrowed:
            vars(self)[name] = new.get(id(vars(self)[name]), vars(self)[name])

    def compile_by(self, backend: str | None) -> None:
        """Let a backend of torch.compile run the graph, from the first call on."""
        self.backend = backend
        if backend is not None:
            self.compile(backend=backend)

    def after_copy(self) -> None:
        """Hand borrowed modules back to their owner, and compile again."""
        for name in self.borrowed:
            self._modules.pop(name, None)
        self.compile_by(self.backend)


def exchange_borrowed(root: nn.Module, new: Mapping[int, nn.Module]) -> None:
    """Let parts of graphs call new modules, given by the identity of the old ones, as their owners do."""
    for part in root.modules():
        if isinstance(part, FusedModule):
            part.exchange(new)


def is_same(found: object, fixed: object) -> bool:
    """Tell whether an argument carries the value that it was fixed to."""
    if found is fixed:
        return True
    return type(found) is type(fixed) and isinstance(found, PLAIN) and found == fixed
