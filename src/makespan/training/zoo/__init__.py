"""The zoo of small models that train for real; here they are described, without torch.

- `SmallModel` is a transformer that trains under any execution plan
- `StandIn` keeps the character of a well-known model, state and random draws included; `build_stand_in`,
  `stand_in_data` and `stand_in_loss` make what training it takes, and import torch when they are called
- `build_link` builds one of the `n_links` links of a `SmallModel`, for those who cut it in their own way;
  `link_loss` is its loss, `global_batch` draws its samples
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.training.zoo._data import Batch, global_batch
    from makespan.training.zoo._links import build_link, link_loss, n_links
    from makespan.training.zoo._spec import MODEL_FAMILIES, SmallModel
    from makespan.training.zoo._stand_ins import (
        STAND_IN_TITLES,
        STAND_INS,
        StandIn,
        build_stand_in,
        stand_in_data,
        stand_in_loss,
    )

__all__ = [
    "MODEL_FAMILIES",
    "STAND_INS",
    "STAND_IN_TITLES",
    "Batch",
    "SmallModel",
    "StandIn",
    "build_link",
    "build_stand_in",
    "global_batch",
    "link_loss",
    "n_links",
    "stand_in_data",
    "stand_in_loss",
]

__getattr__ = shown_lazily(__name__, __file__)
