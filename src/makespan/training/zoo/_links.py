"""A small model as a chain of links, each built by itself: embedding, numbered layers, head."""

from typing import TYPE_CHECKING

from makespan.errors import InputError
from makespan.training.zoo._spec import SmallModel

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["build_link", "link_loss", "n_links"]


def n_links(spec: SmallModel) -> int:
    """Return how many links a model has: its layers, the embedding and the head."""
    return spec.n_layers + 2


def build_link(spec: SmallModel, seed: int, index: int) -> "nn.Module":
    """Build one link of a model, on the CPU.

    Parameters
    ----------
    spec, seed
        The model, and the seed of its weights: those of a link are the same whatever else is built.
    index
        0 for the embedding, then the layers, last the head; an `InputError` for others.

    Returns
    -------
    torch.nn.Module
        It takes what the link before it returns, samples or hidden states ``(batch, seq, hidden)``; a tuple
        of two for ``t5``.
    """
    if not 0 <= index < n_links(spec):
        raise InputError(f"link {index} of a model with {n_links(spec)}; accepted: 0 to {n_links(spec) - 1}")
    from makespan.training.zoo._models import link_of

    return link_of(spec, seed, index)


def link_loss(logits: "Tensor", targets: "Tensor") -> "Tensor":
    """Return the mean cross entropy of what the last link returns, over the targets that count."""
    from torch.nn import functional as F

    from makespan.training.zoo._data import IGNORED

    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
