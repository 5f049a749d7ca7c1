"""Primitives by name; anybody can add one."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from makespan.slapo._errors import ArgumentError

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Primitive", "list_primitives", "primitive_named", "register_primitive"]


class Primitive:
    """One transformation of a model; subclass it, implement `name` and `apply`, and register the class.

    A schedule offers a registered primitive as a method: ``sch.<name>(...)`` calls ``apply(sch, ...)``. The
    call is timed and written to the journal. If it raises, structure, attributes, hooks and tags of the
    subtree, the tree and the metadata are put back as they were. What cannot be put back are values that are
    changed in place, those of tensors or of traced graphs: check all arguments first, change such
    things last.

    After the module tree below ``sch`` changed, `apply` calls ``sch.rebuild()``.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name under which schedules offer the primitive, an identifier."""
        raise NotImplementedError(f"{cls.__name__} does not say what its name is")

    @classmethod
    def apply(cls, sch: "Schedule", *args: Any, **kwargs: Any) -> Any:
        """Transform the module of ``sch`` and what is below it; what is returned, the caller gets."""
        raise NotImplementedError(f"{cls.__name__} does not say what it does")

    @classmethod
    def init_metadata(cls) -> Any:
        """Return what ``sch.metadata.slots[name]`` is at first: state of the primitive, one for a tree."""
        return {}

    @classmethod
    def is_verifiable(cls) -> bool:
        """Say whether a model must compute the same after this primitive as before."""
        return True

    @classmethod
    def is_query(cls) -> bool:
        """Say whether the primitive only looks: then it is not journalled, but others that it applies are."""
        return False


_PRIMITIVES: dict[str, type[Primitive]] = {}
_Any = TypeVar("_Any", bound=type[Primitive])


def register_primitive() -> Callable[[_Any], _Any]:
    """Return a decorator that makes a `Primitive` a method of every schedule.

    Returns
    -------
    A decorator that returns its class.

    Raises
    ------
    ArgumentError
        What is decorated is no subclass of `Primitive`, its name is no identifier, or the name is taken by
        another primitive or by a member of `Schedule`; also a `ValueError`.
    """

    def register(cls: _Any) -> _Any:
        if not _is_primitive(cls):
            raise ArgumentError(f"cannot register {cls!r}; accepted: a subclass of Primitive")
        name = cls.name()
        if not name.isidentifier() or name.startswith("_"):
            raise ArgumentError(f"{cls.__name__} is named {name!r}; accepted: an identifier, no leading _")
        if name in _PRIMITIVES:
            raise ArgumentError(f"primitive {name!r} is registered already, by {_PRIMITIVES[name].__name__}")
        if name in _members():
            raise ArgumentError(f"primitive {name!r} would hide the member of that name of Schedule")
        _PRIMITIVES[name] = cls
        return cls

    return register


def _is_primitive(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Primitive)


def _members() -> set[str]:
    from makespan.slapo._schedule import Schedule

    return {*dir(Schedule), *Schedule.FIELDS}


def _load() -> None:
    """Import the modules of the built-in primitives, which register themselves."""
    import_module("makespan.slapo._builtin")


def primitive_named(name: str) -> type[Primitive] | None:
    """Return the primitive of a name, None if there is none."""
    _load()
    return _PRIMITIVES.get(name)


@overload
def list_primitives(name_only: Literal[True] = True) -> list[str]: ...
@overload
def list_primitives(name_only: Literal[False]) -> Mapping[str, type[Primitive]]: ...
def list_primitives(name_only: bool = True) -> list[str] | Mapping[str, type[Primitive]]:
    """Return the registered primitives, sorted by name.

    Parameters
    ----------
    name_only
        Whether to return a list of names, or a mapping from the names to the classes.
    """
    _load()
    ordered = dict(sorted(_PRIMITIVES.items()))
    return list(ordered) if name_only else MappingProxyType(ordered)
