"""What nodes of a graph are for one example, so that a forward that branches on shapes and types has a graph.

A branch is taken as the example takes it, and the graph checks at every call that it would be taken so again.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace as tracing  # a tracer patches modules, and nothing public undoes it

from makespan.slapo._errors import ArgumentError, TracingError, shown
from makespan.slapo._kept_state import KeptState

__all__ = ["Example", "as_example", "check_branch"]


@fx.node.has_side_effect  # or it would be dropped, as nothing reads what it returns
def check_branch(found: Any, expected: Any, where: str) -> None:
    """Check while a graph runs that a forward would branch as it did for the example it was traced with."""
    if found != expected:
        raise TracingError(
            f"{where}: it was traced with an example for which this is {shown(expected)}, and is "
            f"{shown(found)} now; accepted: calls of the same kind, or trace again with such an example"
        )


class Example:
    """Values of the nodes of one graph.

    Parameters
    ----------
    root
        The module whose forward is traced.
    given
        Values of its arguments by name.
    """

    def __init__(self, root: nn.Module, given: Mapping[str, Any]) -> None:
        self._root, self.given = root, given
        self._values: dict[fx.Node, Any] = {}
        self._modes = {path: one.training for path, one in root.named_modules()}

    def value(self, node: fx.Node) -> Any:
        """Return what a node is for the example; buffers and random generators stay as they are."""
        if node not in self._values:
            with _untraced(), torch.no_grad(), torch.random.fork_rng(), KeptState(self._root).put_back():
                self._run_to(node)
        return self._values[node]

    def _run_to(self, last: fx.Node) -> None:
        waiting, needed = [last], set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node not in self._values and node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in last.graph.nodes:
            if node in needed:
                self._values[node] = self._run(node)

    def _run(self, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self._values.__getitem__)
        target: Any = node.target
        match node.op:
            case "placeholder":
                return self.given.get(target)
            case "get_attr":
                owner, _, name = target.rpartition(".")
                if name == "training":
                    return self._modes[owner]
                return getattr(self._root.get_submodule(owner), name)
            case "call_function":
                return target(*args, **kwargs)
            case "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
        return self._root.get_submodule(target)(*args, **kwargs)

    def of_call(self, child: nn.Module, signature: inspect.Signature, node: fx.Node) -> "Example":
        """Return the example of a module that the graph calls, by the arguments of a call."""
        args = fx.node.map_arg(node.args, self.value)
        kwargs = fx.node.map_arg(node.kwargs, self.value)
        return Example(child, _by_name(signature, args, kwargs))


@contextmanager
def _untraced() -> Iterator[None]:
    """Let modules run as they are while a tracer is at work."""
    with (
        mock.patch.object(nn.Module, "__call__", tracing._orig_module_call),
        mock.patch.object(nn.Module, "__getattr__", tracing._orig_module_getattr),
    ):
        yield


def _by_name(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs).arguments
    for one in signature.parameters.values():
        if one.kind is one.VAR_KEYWORD:
            bound |= bound.pop(one.name, {})
    return dict(bound)


def as_example(module: nn.Module, signature: inspect.Signature, inputs: Any, where: str) -> Example:
    """Return the example that a user gave: a tensor, positional arguments, or arguments by name."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        return Example(module, _by_name(signature, (args,) if isinstance(args, Tensor) else args, kwargs))
    except TypeError as error:
        raise ArgumentError(f"{where}: example_inputs do not fit {signature}: {error}") from None
