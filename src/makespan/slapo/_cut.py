"""The primitive that ends a pipeline stage."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from makespan.slapo._errors import ArgumentError, ConflictError, TracingError
from makespan.slapo._partition import staged_operations
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._trace import graph_of
from makespan.slapo._traced import TracedModule
from makespan.slapo._tracer import has_hooks, is_wrapped

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["CutPipelineStage"]


@register_primitive()
class CutPipelineStage(Primitive):
    """End a pipeline stage after a module."""

    @classmethod
    def name(cls) -> str:
        """Return ``cut_pipeline_stage``."""
        return "cut_pipeline_stage"

    @classmethod
    def init_metadata(cls) -> list[str]:
        """Return the paths of the modules that end a stage."""
        return []

    @classmethod
    def apply(cls, sch: "Schedule") -> None:
        """Let this module be the last of its stage; all modules above it must be traced."""
        where = f"cut_pipeline_stage of {sch.path!r}"
        if sch.parent is None:
            raise ArgumentError(f"{where}: nothing follows the whole model; accepted: a module in it")
        cuts: list[str] = sch.metadata.slots[cls.name()]
        if sch.path in cuts:
            raise ConflictError(f"{where}: a stage ends here already, {sch.conflict(cls.name())}")
        _check_owners(where, sch)
        graph = graph_of(sch.parent, cls.name()).graph
        calls = [one for one in graph.find_nodes(op="call_module") if one.target == sch.name]
        if len(calls) != 1:
            raise ArgumentError(f"{where}: its owner calls it {len(calls)} times; accepted: once")
        try:
            staged_operations(sch, [*cuts, sch.path])
        except ArgumentError as error:
            raise ArgumentError(
                f"{where}: {error}; accepted: a module behind which the model, or another stage, goes on"
            ) from None
        cuts.append(sch.path)


def _check_owners(where: str, sch: "Schedule") -> None:
    for above in _above(sch):
        if is_wrapped(above.mod):
            raise ConflictError(
                f"{where}: the forward of {above.path!r} above it is wrapped, {above.conflict('checkpoint')};"
                " accepted: a module of which none above it is wrapped"
            )
        if not isinstance(above.mod, TracedModule):
            if _is_never_called(above):
                continue
            raise TracingError(
                f"{where}: {above.path!r} above it is not traced; accepted: after"
                f" trace_until({sch.parent.path if sch.parent else ''!r}) on the root"
            )
        if has_hooks(above.mod):
            raise ConflictError(
                f"{where}: {above.path!r} above it has hooks, which no stage would run,"
                f" {above.conflict('sync')}; accepted: a module of which none above it has hooks"
            )


def _is_never_called(sch: "Schedule") -> bool:
    """Whether a module only holds what a traced one above calls by its path, past the holder's forward."""
    owner = sch.parent
    while owner is not None and not isinstance(owner.mod, TracedModule):
        owner = owner.parent
    if owner is None or is_wrapped(owner.mod):
        return False
    own = sch.path.removeprefix(owner.path).lstrip(".")
    targets = {str(node.target) for node in graph_of(owner, "cut_pipeline_stage").graph.nodes}
    return own not in targets and any(one.startswith(f"{own}.") for one in targets)


def _above(sch: "Schedule") -> Iterator["Schedule"]:
    above = sch.parent
    while above is not None:
        yield above
        above = above.parent
