"""Groups of options: the base class, and how an option is described, shared and checked."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticUndefined

from makespan.errors import MakespanError


class Block(BaseModel):
    """A group of options with their defaults: immutable, and closed to unknown keys.

    A configuration only holds what differs from the defaults. Entries of a list have required options, and
    none occurs twice: a seed or policy that is run again would count as another one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        if isinstance(value, tuple) and len(set(map(repr, value))) != len(value):
            raise ValueError("each entry once")
        return value


Count = Annotated[int, Field(ge=1)]
"""A whole number of at least one."""


def option(
    description: str,
    default: Any = PydanticUndefined,
    *,
    unit: str = "",
    source: str = "",
    changes: str = "",
    **limits: Any,
) -> Any:
    """Describe one option; typed as ``Any``, to stand at the right of an annotated field.

    Parameters
    ----------
    default
        Value unless a configuration changes it; without one the option is required.
    unit
        Unit of the value; empty for names, switches and pure numbers.
    source, changes
        Where the default comes from (a section of a paper, a data sheet, a choice), and what depends on it.
    limits
        Constraints in the words of `pydantic.Field`, for example ``ge=1``.
    """
    extra = {"unit": unit, "source": source, "changes": changes}
    return Field(default, description=description, json_schema_extra=dict(extra), **limits)


def shared(path: str) -> Any:
    """Return a field of an option that stands at another path of the configuration, where a user sets it."""
    return Field(None, exclude=True, json_schema_extra={"shared": path})


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Accept the names that a registry has when a configuration is checked, for example `policy_names`."""

    def check(name: str) -> str:
        if name not in set(names()):
            raise ValueError(f"one of {', '.join(names())}")
        return name

    return AfterValidator(check)


def parsed_by(read: Callable[[str], str], accepted: str) -> AfterValidator:
    """Accept texts that a reader of the package accepts and puts into their usual form."""

    def check(text: str) -> str:
        try:
            return read(text)
        except MakespanError as error:
            raise ValueError(f"{accepted} ({error})") from None

    return AfterValidator(check)
