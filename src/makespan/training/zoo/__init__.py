"""The zoo of small models that train for real; here they are described, without torch."""

from makespan.training.zoo._spec import MODEL_FAMILIES, SmallModel

__all__ = ["MODEL_FAMILIES", "SmallModel"]
