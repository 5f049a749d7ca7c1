"""The zoo of small models that train for real; here they are described, without torch.

- `SmallModel` is a transformer that trains under any execution plan
- `StandIn` keeps the character of a well-known model, state and random draws included; `build_stand_in`,
  `stand_in_data` and `stand_in_loss` make what training it takes, and import torch when they are called
- `build_link` builds one of the `n_links` links of a `SmallModel`, for those who cut it in their own way;
  `link_loss` is its loss, `global_batch` draws its samples
- `FAMILIES` are architectures as their authors wrote them, in sizes from tiny to billions of parameters:
  `family_spec` describes one, `family_weights`, `parameter_count` and `forward_flop` count; `build_family`,
  `family_batch` and `family_loss` make what training it takes, and import torch when they are called
"""

from typing import TYPE_CHECKING

from makespan.lazy import shown_lazily

if TYPE_CHECKING:
    from makespan.training.zoo._data import Batch, global_batch
    from makespan.training.zoo._families import (
        FAMILIES,
        ConvolutionSpec,
        FamilySpec,
        TransformerSpec,
        Weights,
        build_family,
        family_batch,
        family_loss,
        family_sizes,
        family_spec,
        family_weights,
        forward_flop,
        parameter_count,
    )
    from makespan.training.zoo._family_samples import FamilyBatch
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
    "FAMILIES",
    "MODEL_FAMILIES",
    "STAND_INS",
    "STAND_IN_TITLES",
    "Batch",
    "ConvolutionSpec",
    "FamilyBatch",
    "FamilySpec",
    "SmallModel",
    "StandIn",
    "TransformerSpec",
    "Weights",
    "build_family",
    "build_link",
    "build_stand_in",
    "family_batch",
    "family_loss",
    "family_sizes",
    "family_spec",
    "family_weights",
    "forward_flop",
    "global_batch",
    "link_loss",
    "n_links",
    "parameter_count",
    "stand_in_data",
    "stand_in_loss",
]

__getattr__ = shown_lazily(__name__, __file__)
