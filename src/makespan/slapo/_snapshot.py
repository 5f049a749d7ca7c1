"""What a failed primitive must leave as it was: structure, attributes, hooks and tags."""

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Snapshot"]


def _contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what the containers among attributes hold, such as parameters and hooks by name."""
    return {key: _inside(one) for key, one in attributes.items() if isinstance(one, dict | set | list)}


def _inside(container: Any) -> tuple[Any, ...]:
    return tuple(dict.items(container)) if isinstance(container, dict) else tuple(container)


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
            (one, type(one), one.__dict__.copy(), _contents(one.__dict__)) for one in modules.values()
        ]
        parameters = {id(one): one for one in sch.mod.parameters()}
        self._parameters = [(one, one.__dict__.copy(), one.requires_grad) for one in parameters.values()]
        nodes = [node for _, node in top.named_schedules()] + ([sch.parent] if sch.parent else [])
        self._nodes = [(node, node.mod, node.child, _inside(node.child)) for node in nodes]
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
            if parameter.requires_grad != requires_grad:
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


def _refill(container: Any, content: tuple[Any, ...]) -> None:
    """Put back what a container held, if that is not what it holds: some of users cannot be changed."""
    now, held = _inside(container), content
    if isinstance(container, dict):
        now, held = (tuple(part for pair in one for part in pair) for one in (now, held))
    if len(now) == len(held) and all(one is other for one, other in zip(now, held, strict=True)):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
