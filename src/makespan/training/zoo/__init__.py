"""The zoo of small models that train for real; here they are described, without torch."""

from makespan.training.zoo._spec import MODEL_FAMILIES, SmallModel, small_model, small_models

__all__ = ["MODEL_FAMILIES", "SmallModel", "small_model", "small_models"]
