"""Block ``performance_model``: how iteration times are fitted."""

from typing import Literal

from pydantic import field_validator, model_validator

from makespan.config._fields import Block, option

__all__ = ["FormName", "PerformanceModel"]

FormName = Literal["published", "extended"]


class PerformanceModel(Block):
    """How iteration times are fitted."""

    forms: tuple[FormName, ...] = option(
        "forms that are fitted and compared",
        source="docs/background/performance-model.md",
        changes="table2, fits",
        min_length=1,
    )
    experiment_form: FormName = option(
        "form that the experiments use; one of forms",
        source="the form with the smaller error",
        changes="sensitivity, fig7, fig8",
    )

    @field_validator("forms")
    @classmethod
    def _no_repeats(cls, forms: tuple[FormName, ...]) -> tuple[FormName, ...]:
        if len(set(forms)) != len(forms):
            raise ValueError("each form once")
        return forms

    @model_validator(mode="after")
    def _experiment_form_is_fitted(self) -> "PerformanceModel":
        if self.experiment_form not in self.forms:
            raise ValueError(f"experiment_form among the fitted forms ({', '.join(self.forms)})")
        return self
