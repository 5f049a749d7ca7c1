"""What every configuration block and every option has in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Block", "option"]


class Block(BaseModel):
    """A group of options: immutable, without defaults of its own, closed to unknown keys.

    Defaults stand once, in the YAML files under ``config/``; a block only says what is accepted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def option(description: str, *, unit: str = "", source: str = "", changes: str = "", **limits: Any) -> Any:
    """Describe one required option.

    Parameters
    ----------
    description
        What the value means.
    unit
        Unit of the value; empty for names, switches and pure numbers.
    source
        Where the default comes from: a section of a paper, a data sheet, a choice.
    changes
        Tables and figures that depend on the option.
    limits
        Constraints in the words of `pydantic.Field`, for example ``ge=1``.

    Returns
    -------
    pydantic.fields.FieldInfo
        Typed as ``Any``, so that it can stand at the right of an annotated field.
    """
    extra = {"unit": unit, "source": source, "changes": changes}
    return Field(description=description, json_schema_extra=dict(extra), **limits)
