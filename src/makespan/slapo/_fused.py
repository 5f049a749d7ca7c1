"""Parts of a graph as modules of their own, compiled or not, that call modules which stay where they are."""

import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import torch

from makespan.slapo._errors import ArgumentError, ConflictError
from makespan.slapo._find import as_matches
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._rewrite import Call, check_hooks, check_is_closed, insert_call, part_of
from makespan.slapo._trace import graph_of
from makespan.slapo._traced import FusedModule, TracedModule

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Fuse", "check_not_fused", "take_out"]

_BACKENDS = {"inductor": "inductor", "dynamo": "eager", "torchscript": "inductor", None: None}


def _backend(where: str, compiler: str | None) -> str | None:
    if compiler not in _BACKENDS:
        accepted = ", ".join(map(repr, _BACKENDS))
        raise ArgumentError(f"{where}: compiler {compiler!r}; accepted: {accepted}")
    if compiler == "torchscript":
        warnings.warn(f"{where}: torch.jit.script is deprecated; inductor takes its place", stacklevel=4)
    backend = _BACKENDS[compiler]
    if backend == "inductor" and not (torch.cuda.is_available() or _has_compiler()):
        warnings.warn(f"{where}: there is no C++ compiler, so the part runs eagerly", stacklevel=4)
        return None
    return backend


def _has_compiler() -> bool:
    return any(shutil.which(one) for one in (os.environ.get("CXX", "g++"), "clang++", "cl"))


@register_primitive()
class Fuse(Primitive):
    """Make one module of a part of a graph, and compile it."""

    @classmethod
    def name(cls) -> str:
        """Return ``fuse``."""
        return "fuse"

    @classmethod
    def apply(
        cls, sch: "Schedule", subgraph: object, compiler: str | None = "inductor", name: str = "FusedModule"
    ) -> None:
        """Fuse one match of at least two nodes.

        Parameters
        ----------
        subgraph
            A match of `find`, or the list that `find` returned if it has one.
        compiler
            ``inductor`` compiles when the part first runs, and runs it eagerly with a warning where no
            compiler is; ``dynamo`` captures without compiling; ``torchscript`` means inductor; None groups
            the nodes only.
        name
            Class of the module, and with a number its name in the owner of the graph.
        """
        where = f"fuse of {sch.path!r}"
        backend = _backend(where, compiler)
        if not name.isidentifier():
            raise ArgumentError(f"{where}: name {name!r}; accepted: an identifier")
        matches = as_matches(sch, cls.name(), subgraph)
        if len(matches) != 1 or len(matches[0]) < 2:
            found = f"{len(matches)} matches" if len(matches) != 1 else "a match of one node"
            raise ArgumentError(f"{where}: found {found}; accepted: one match of at least two nodes")
        take_out(sch, cls.name(), matches[0], name).compile_by(backend)


def check_not_fused(sch: "Schedule", primitive: str) -> None:
    """Refuse to change tensors that a part of a graph computes with."""
    if sch.parent is None:
        return
    for node in sch.parent.child.values():
        part, owner = node.mod, sch.parent.mod
        if not isinstance(part, FusedModule) or not isinstance(owner, TracedModule):
            continue
        calls = [one for one in owner.graph.find_nodes(op="call_module") if one.target == node.name]
        reads = [str(one.target) for call in calls for one in call.all_input_nodes if one.op == "get_attr"]
        borrows = any(vars(part)[name] is sch.mod for name in part.borrowed)
        if borrows or any(one.startswith(f"{sch.name}.") for one in reads):
            raise ConflictError(
                f"{primitive} of {sch.path!r}: {node.path!r} computes with its tensors,"
                f" {sch.conflict('fuse')}; accepted: {primitive} first, then fuse"
            )


def take_out(
    sch: "Schedule", primitive: str, match: Any, name: str, order_args_fn: Any = None
) -> FusedModule:
    """Put a module of its own in the place of a match, and return it."""
    owner, where = graph_of(sch[match.owner], primitive), f"{primitive} of {sch.path!r}"
    check_is_closed(where, match)
    check_hooks(where, owner, [match])
    part = part_of(owner, match)
    inputs = part.inputs
    if order_args_fn is not None:
        inputs = tuple(order_args_fn(list(inputs)))
        if sorted(one.name for one in inputs) != sorted(one.name for one in part.inputs):
            raise ArgumentError(
                f"{where}: order_args_fn returned {inputs!r}; accepted: {part.inputs!r} in another order"
            )
        part = part_of(owner, match, lambda _: inputs)
    module = FusedModule.of(part.graph, part.modules, name, owner.training)
    insert_call(owner, [match], Call(module, inputs), name, keeps_modules=True)
    sch[match.owner].rebuild()
    return module
