"""Groups of options: the base class, and how an option is described, shared and checked."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticUndefined

from makespan.errors import MakespanError


class Block(BaseModel):
    """A group of options with their defaults: immutable, and closed to unknown keys.

    A configuration only holds what differs from the defaults. Entries of a list have required options.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
"""A whole number of at least one."""


class PaperSettings(Block):
    """The options of one paper, and what the workflow asks it.

    Attributes
    ----------
    unjudged
        Tables that no statement of the paper is about.
    judged_on_profile
        The only tables that decide statements where iteration times are a profile of small workloads.
    untimed
        Tables that no iteration time of a source enters, because they hold what was really trained or rest on
        printed cells alone.
    self_contained
        Sources of which its tables need no file of authors, so that they are built by default.
    judged_cells
        Artifacts whose printed cells its checks read, ``config/published/<paper>_<artifact>.csv``.
    judges_live
        Whether its checks read the live runs, if those are part of what is built by default.
    contents
        What each of its files holds, by path below ``results/<source>/<paper>/`` without the ending.
    """

    unjudged: ClassVar[frozenset[str]] = frozenset()
    judged_on_profile: ClassVar[frozenset[str]] = frozenset()
    untimed: ClassVar[frozenset[str]] = frozenset()
    self_contained: ClassVar[frozenset[str]] = frozenset()
    judged_cells: ClassVar[tuple[str, ...]] = ()
    judges_live: ClassVar[bool] = False
    contents: ClassVar[Mapping[str, str]] = {}

    def tables(self, source: str, is_profiled: bool) -> list[str]:
        """Return the tables that are built of the paper, ``results/<source>/<paper>/<table>.csv``.

        ``is_profiled``: iteration times are a profile of small workloads, which lacks those of the paper.
        """
        return []

    def throughput_workloads(self) -> tuple[str, ...]:
        """Return the workloads whose iteration times the paper needs."""
        return ()

    def published_datasets(self) -> tuple[str, ...]:
        """Return the names in the register of what the paper reads besides published iteration times."""
        return ()


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


def taken_from(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Accept the names that a registry has when a configuration is checked, for example `policy_names`."""

    def check(name: str) -> str:
        if name not in set(names()):
            raise ValueError(f"one of {', '.join(names())}")
        return name

    return AfterValidator(check)


def readable(read: Callable[[str], str], accepted: str) -> AfterValidator:
    """Accept texts that a reader of the package accepts and puts into their usual form."""

    def check(text: str) -> str:
        try:
            return read(text)
        except MakespanError as error:
            raise ValueError(f"{accepted} ({error})") from None

    return AfterValidator(check)


def unlike(accepted: str) -> AfterValidator:
    """Accept lists without repeats; ``accepted`` says what is accepted, for example "each form once"."""

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) != len(values):
            raise ValueError(accepted)
        return values

    return AfterValidator(check)
