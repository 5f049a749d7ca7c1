"""Zoo of small models that really train; their descriptions need no torch.

- `SmallModel` is a transformer that trains under any execution plan
- `StandIn` keeps the character of a well-known model, state and random draws included; `build_stand_in`,
  `stand_in_data` and `stand_in_loss` make model, samples and loss, and import torch when called
- `build_link` builds one of the `n_links` links of a `SmallModel`, for callers that cut the model themselves;
  `link_loss` is its loss, `global_batch` draws its samples
- `FAMILIES` are architectures as their authors wrote them, in sizes from tiny to billions of parameters:
  `family_spec` describes one, `family_weights`, `parameter_count` and `forward_flop` count; `build_family`,
  `family_batch` and `family_loss` make model, samples and loss, and import torch when called
"""

from typing import TYPE_CHECKING

from makespan.lazy import lazy_exports

if TYPE_CHECKING:
    from makespan.training.zoo.families import FamilyBatch as FamilyBatch
    from makespan.training.zoo.small import (
        Batch as Batch,
        global_batch as global_batch,
    )
    from makespan.training.zoo.specs import (
        FAMILIES as FAMILIES,
        MODEL_FAMILIES as MODEL_FAMILIES,
        STAND_IN_TITLES as STAND_IN_TITLES,
        STAND_INS as STAND_INS,
        ConvolutionSpec as ConvolutionSpec,
        FamilySpec as FamilySpec,
        SmallModel as SmallModel,
        StandIn as StandIn,
        TransformerSpec as TransformerSpec,
        Weights as Weights,
        build_family as build_family,
        build_link as build_link,
        build_stand_in as build_stand_in,
        family_batch as family_batch,
        family_loss as family_loss,
        family_sizes as family_sizes,
        family_spec as family_spec,
        family_weights as family_weights,
        forward_flop as forward_flop,
        link_loss as link_loss,
        n_links as n_links,
        parameter_count as parameter_count,
        stand_in_data as stand_in_data,
        stand_in_loss as stand_in_loss,
    )


__getattr__ = lazy_exports(__name__, __file__)
