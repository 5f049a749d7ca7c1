"""What a failed primitive must leave as it was: structure, attributes, hooks and tags."""

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from makespan.papers.slapo.language._schedule import Schedule

__all__ = ["Snapshot"]


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy attributes, and what of them holds parameters, modules and hooks by name."""
    return {key: one.copy() if isinstance(one, dict | set | list) else one for key, one in attributes.items()}


class Snapshot:
    """The state of a node, of what is below it and of what holds it, without copying a tensor."""

    def __init__(self, sch: "Schedule") -> None:
        root = sch.root
        held, owner = [root.mod], root.mod
        for token in sch.path.split(".") if sch.path else ():
            owner = owner.get_submodule(token)
            held.append(owner)
        top = root if sch.metadata.has_shared else sch  # what is shared is replaced elsewhere, too
        modules = {id(one): one for one in (*held, *top.mod.modules())}
        self._modules = [
            (one, type(one), one.__dict__.copy(), _shallow(one.__dict__)) for one in modules.values()
        ]
        parameters = {id(one): one for one in sch.mod.parameters()}
        self._parameters = [(one, one.__dict__.copy(), one.requires_grad) for one in parameters.values()]
        nodes = [node for _, node in top.named_schedules()] + ([sch.parent] if sch.parent else [])
        self._nodes = [(node, node.mod, node.child, node.child.copy()) for node in nodes]
        self._metadata = sch.metadata
        self._state = (
            [*sch.metadata.ties],
            {*sch.metadata.tags},
            {name: copy.copy(one) for name, one in sch.metadata.slots.items()},
            len(sch.metadata.journal),
            sch.metadata.has_shared,
        )
        self._root = root

    def restore(self) -> None:
        """Put everything back; containers keep their identity, since handles of hooks refer to them."""
        for module, kind, attributes, contents in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, content in contents.items():
                _refill(attributes[key], content)
        for parameter, tags, requires_grad in self._parameters:
            parameter.__dict__.clear()
            parameter.__dict__.update(tags)
            parameter.requires_grad_(requires_grad)
        for node, mod, child, content in self._nodes:
            node.mod, node.child = mod, child
            _refill(child, content)
        self._restore_metadata()

    def _restore_metadata(self) -> None:
        ties, tags, slots, n_steps, had_shared = self._state
        self._metadata.ties[:] = ties
        self._metadata.tags.clear()
        self._metadata.tags.update(tags)
        self._metadata.slots.clear()
        self._metadata.slots.update(slots)
        del self._metadata.journal[n_steps:]
        if self._metadata.has_shared != had_shared:
            self._root.rebuild()
            self._metadata.has_shared = had_shared


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, dict | set):
        container.clear()
        container.update(content)
    elif isinstance(container, list):
        container[:] = content
