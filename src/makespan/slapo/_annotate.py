"""Primitives that note something: tags of parameters, attributes of modules, values of symbols."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from makespan.slapo._errors import ArgumentError, ConflictError, MemberError, close_names
from makespan.slapo._registry import Primitive, register_primitive

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Annotate", "Bind", "SetAttr", "carry_tags"]


def carry_tags(old: nn.Parameter, new: nn.Parameter, tags: Iterable[str]) -> None:
    """Give a parameter the tags of the one whose place it takes; tags that it has, it keeps."""
    for tag in tags:
        if tag in old.__dict__ and tag not in new.__dict__:
            setattr(new, tag, old.__dict__[tag])


@register_primitive()
class Annotate(Primitive):
    """Tag a parameter."""

    @classmethod
    def name(cls) -> str:
        """Return ``annotate``."""
        return "annotate"

    @classmethod
    def apply(cls, sch: "Schedule", param: str, key: str, value: Any) -> None:
        """Set an attribute of a parameter, which it keeps when it is sharded, replaced or consolidated.

        Parameters
        ----------
        param
            Name of a parameter of this module itself.
        key, value
            Name of the attribute, an identifier that no tensor has, and what it becomes.
        """
        found = sch.mod._parameters.get(param)
        if found is None:
            known = close_names(param, (name for name, one in sch.mod._parameters.items() if one is not None))
            raise MemberError(f"annotate of {sch.path!r}: no parameter {param!r}; {known}")
        if not key.isidentifier() or hasattr(nn.Parameter, key):
            raise ArgumentError(
                f"annotate of {sch.path!r}: cannot tag {param!r} with {key!r}; accepted: an identifier "
                "that tensors do not use themselves"
            )
        setattr(found, key, value)
        sch.metadata.tags.add(key)


def _plain_attributes(module: nn.Module) -> Iterator[str]:
    """Go through what a module and its classes define themselves: values, no methods."""
    classes = [one for one in type(module).__mro__ if not issubclass(nn.Module, one)]
    of_classes = [pair for one in classes for pair in vars(one).items() if not _is_method(pair[1])]
    for name, _ in chain(vars(module).items(), of_classes):
        if not (name.startswith("_") or hasattr(nn.Module, name) or name == "training"):
            yield name


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


@register_primitive()
class SetAttr(Primitive):
    """Change attributes of a module, such as the number of heads that are left to a process."""

    @classmethod
    def name(cls) -> str:
        """Return ``set_attr``."""
        return "set_attr"

    @classmethod
    def apply(cls, sch: "Schedule", **values: Any) -> None:
        """Set attributes that the module has; not its parameters, buffers or modules."""
        plain = set(_plain_attributes(sch.mod))
        for name in values:
            if isinstance(getattr(sch.mod, name, None), Tensor | nn.Module):
                raise ArgumentError(
                    f"set_attr of {sch.path!r}: {name!r} is a tensor or a module; accepted: plain attributes"
                )
            if name not in plain:
                known = close_names(name, sorted(plain))
                raise MemberError(f"set_attr of {sch.path!r}: no attribute {name!r}; {known}")
        if isinstance(sch.mod, fx.GraphModule):
            raise ConflictError(
                f"set_attr of {sch.path!r}: its graph holds attributes as they were when it was captured, "
                f"{sch.conflict('trace')}; accepted: set_attr before trace"
            )
        for name, value in values.items():
            setattr(sch.mod, name, value)


@register_primitive()
class Bind(Primitive):
    """Note in the journal which values the symbols of a schedule had."""

    @classmethod
    def name(cls) -> str:
        """Return ``bind``."""
        return "bind"

    @classmethod
    def apply(cls, sch: "Schedule", **symbols: Any) -> None:
        """Remember the values; a symbol that has one keeps it."""
        bound: dict[str, Any] = sch.metadata.slots[cls.name()]
        for name, value in symbols.items():
            if name in bound and bound[name] != value:
                raise ArgumentError(
                    f"bind of {sch.path!r}: {name} = {value!r}, but it is {bound[name]!r} already; "
                    "accepted: one value a symbol"
                )
        bound.update(symbols)
