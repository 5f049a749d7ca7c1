"""The tree of a schedule: one node a module, found by its path, with the primitives as methods."""

import copy
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from makespan.slapo._dispatch import applied
from makespan.slapo._errors import ArgumentError, KindError, MemberError, PathError, close_names
from makespan.slapo._journal import JournalEntry
from makespan.slapo._paths import found_at, node_modules
from makespan.slapo._printing import printed
from makespan.slapo._registry import list_primitives, primitive_named

__all__ = ["Metadata", "Schedule", "create_schedule"]


class _Slots(dict[str, Any]):
    """State of the primitives, made when it is first asked for."""

    def __missing__(self, name: str) -> Any:
        primitive = primitive_named(name)
        if primitive is None:
            raise MemberError(f"no primitive {name!r}; {close_names(name, list_primitives())}")
        self[name] = primitive.init_metadata()
        return self[name]


@dataclass(slots=True)
class Metadata:
    """What all nodes of a tree share.

    Parameters
    ----------
    ties
        Groups of parameters that were one object when the schedule was created, by their paths.
    tags
        Names of attributes that a parameter keeps when another object takes its place.
    slots
        State of each primitive, by its name.
    journal
        What was applied, in order; steps are counted from one.
    has_shared
        Whether a module was met at several places.
    depth
        How many primitives are at work: those that another one applies belong to that one's step.
    """

    ties: list[tuple[str, ...]] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)
    slots: dict[str, Any] = field(default_factory=_Slots)
    journal: list[JournalEntry] = field(default_factory=list)
    has_shared: bool = False
    depth: int = 0


class Schedule:
    """A module in the tree of a model, see `create_schedule`; its primitives are methods.

    Parameters
    ----------
    mod
        The module; what takes its place is found here, too.
    name, path
        Name in the parent, ``"layers.0"`` for an element of a list, and path from the root.
    parent
        The node above, None for the root.
    group
        Processes of tensor parallelism; None for the default group, or for one process without any.

    Attributes
    ----------
    child
        Nodes below by name, in the order of the module.
    world_size, rank
        Number of processes in the group, and which of them this is.
    metadata
        What all nodes share, see `Metadata`.
    """

    FIELDS: ClassVar = ("mod", "name", "path", "parent", "group", "child", "world_size", "rank", "metadata")

    def __init__(
        self,
        mod: nn.Module,
        *,
        name: str = "",
        path: str = "",
        parent: "Schedule | None" = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.mod, self.name, self.path, self.parent, self.group = mod, name, path, parent, group
        self.child: dict[str, Schedule] = {}
        self.world_size: int
        self.rank: int
        if parent is not None:
            self.metadata: Metadata = parent.metadata
            self.world_size, self.rank = parent.world_size, parent.rank
            return
        self.metadata = Metadata()
        parallel = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(group) if parallel else 1
        self.rank = dist.get_rank(group) if parallel else 0

    @property
    def root(self) -> "Schedule":
        """The node of the whole model."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a primitive, ready to be applied here."""
        primitive = None if name.startswith("_") else primitive_named(name)
        if primitive is None:
            message = f"a schedule has no primitive {name!r}; {close_names(name, list_primitives())}"
            raise MemberError(message)
        return functools.partial(applied, primitive, self)

    def __getitem__(self, path: str) -> "Schedule":
        """Return the node of a path below this one; a `PathError` says where it stops."""
        return found_at(self, path)

    def __contains__(self, path: object) -> bool:
        """Whether there is a node of that path."""
        try:
            return isinstance(path, str) and found_at(self, path) is not None
        except KeyError:
            return False

    def __str__(self) -> str:
        """Print the tree, with what was applied to each module."""
        return printed(self)

    def __repr__(self) -> str:
        """Name path and class of the module."""
        return f"<Schedule {self.path!r}: {type(self.mod).__name__}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Schedule":
        """Copy the whole tree with its model; groups of processes are shared."""
        if self.parent is not None:
            return copy.deepcopy(self.root, memo)[self.path]
        if self.group is not None:
            memo[id(self.group)] = self.group
        mod = copy.deepcopy(self.mod, memo)
        for old, one in zip(self.mod.parameters(), mod.parameters(), strict=True):
            known = self.metadata.tags & vars(old).keys()  # which copies of parameters do not have
            vars(one).update({tag: copy.deepcopy(vars(old)[tag], memo) for tag in known})
        new = Schedule(mod, group=self.group)
        memo[id(self)] = new
        new.metadata = copy.deepcopy(self.metadata, memo)
        new.rebuild()
        return new

    def named_schedules(self) -> Iterator[tuple[str, "Schedule"]]:
        """Go through path and node of this one and all below, owners first."""
        yield self.path, self
        for node in self.child.values():
            yield from node.named_schedules()

    def get_module(self, name: str) -> nn.Module:
        """Return the module of a path below this node."""
        return self[name].mod

    def get_top_schedule(self) -> "Schedule":
        """Return the node of the whole model."""
        return self.root

    def rebuild(self) -> None:
        """Make the tree below this node agree with the modules again; nodes that stay keep their identity.

        Primitives call it after they changed modules below this node, or ``mod`` itself.
        """
        below = {id(node) for _, node in self.named_schedules()}
        others = (node for _, node in self.root.named_schedules() if id(node) not in below)
        self._rebuild({*(id(node.mod) for node in others), id(self.mod)})
        if self.metadata.has_shared and self.parent is not None:  # nodes elsewhere may have to come or go
            self.root._rebuild({id(self.root.mod)})

    def _rebuild(self, seen: set[int]) -> None:
        old, self.child = self.child, {}
        for name, module in node_modules(self.mod):
            if id(module) in seen:
                self.metadata.has_shared = True
                continue
            seen.add(id(module))
            node = old.get(name)
            if node is None:
                path = f"{self.path}.{name}" if self.path else name
                node = Schedule(module, name=name, path=path, parent=self, group=self.group)
            node.mod, node.metadata = module, self.metadata
            self.child[name] = node
            node._rebuild(seen)

    def dump(self) -> str:
        """Return the journal as JSON, which `replay` applies to a fresh model."""
        fields = ("op", "path", "arguments", "seconds")
        steps = [{name: getattr(entry, name) for name in fields} for entry in self.metadata.journal]
        return json.dumps({"steps": steps}, indent=1)

    def conflict(self, op: str) -> str:
        """Quote the step that applied a primitive to this module, or to the nearest one above.

        Returns
        -------
        The end of a message such as ``conflicts with step 7: shard(tensor_name='weight') at 'fc'``.
        """
        steps = list(enumerate(self.metadata.journal, start=1))[::-1]
        same = [one for one in steps if one[1].op == op and one[1].path == self.path]
        above = [one for one in steps if self._is_below(one[1].path)]
        for step, entry in (*same, *(one for one in above if one[1].op == op), *above):
            return f"conflicts with step {step}: {entry}"
        return f"conflicts with {op} of {self.path!r} in this very step"

    def _is_below(self, path: str) -> bool:
        return not path or self.path == path or self.path.startswith(f"{path}.")


def create_schedule(
    root: nn.Module,
    *,
    name: str = "",
    path: str = "",
    parent: Schedule | None = None,
    group: dist.ProcessGroup | None = None,
) -> Schedule:
    """Return the schedule of a model: a tree of its modules; the model is not changed or copied.

    Elements of a ``ModuleList`` or ``ModuleDict`` are children of the owner of the list, named
    ``"<list>.<element>"``; layers of `torch.nn` except ``Sequential`` have no children. A module that the
    model holds at several places has one node, at the first of them, which the other paths lead to.

    Parameters
    ----------
    root
        The model, on any device, ``meta`` too.
    name, path, parent
        Place of the tree in one above it, whose model holds ``root`` there already; leave them out for a
        whole model.
    group
        Processes of tensor parallelism; None for the default group, or for one process without any.

    Raises
    ------
    KindError
        ``root`` is no module; also a `TypeError`.
    PathError
        ``parent`` has no such module of that name; also a `KeyError`.

    References
    ----------
    Slapo, section 3.1, the schedule as a tree beside the model.
    """
    if not isinstance(root, nn.Module):
        raise KindError(f"create_schedule got {type(root).__name__}; accepted: a torch.nn.Module")
    if parent is not None:
        parent.rebuild()
        if (
            name not in parent.child
            or parent.child[name].mod is not root
            or path not in ("", parent.child[name].path)
        ):
            raise PathError(
                f"create_schedule: {parent.path!r} has no {type(root).__name__} {name!r} at {path!r}"
            )
        return parent.child[name]
    if name or path:
        raise ArgumentError(f"create_schedule: name {name!r} and path {path!r} need a parent")
    schedule = Schedule(root, group=group)
    places: dict[int, list[str]] = {}
    for place, parameter in root.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(place)
    schedule.metadata.ties = [tuple(tied) for tied in places.values() if len(tied) > 1]
    schedule.rebuild()
    return schedule
