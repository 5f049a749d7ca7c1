"""Eight small models that keep what matters of well-known ones: operators, state and kind of task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from makespan.errors import InputError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from makespan.training.zoo._tasks import Samples

__all__ = ["STAND_INS", "STAND_IN_TITLES", "StandIn", "build_stand_in", "stand_in_data", "stand_in_loss"]

STAND_IN_TITLES: Mapping[str, str] = {
    "shufflenetv2": "ShuffleNetv2",
    "resnet50": "ResNet50",
    "vgg19": "VGG19",
    "yolov3": "YOLOv3",
    "neumf": "NeuMF",
    "bert": "Bert",
    "electra": "Electra",
    "swintransformer": "Swin",
}
"""What figures call the stand-ins."""

STAND_INS = tuple(STAND_IN_TITLES)
"""Names of the stand-ins, each that of the model which it stands for."""

_IMAGES = ("shufflenetv2", "resnet50", "vgg19", "yolov3", "swintransformer")
_SIDE, _HEADS = 16, 4


@dataclass(frozen=True, slots=True)
class StandIn:
    """Sizes of a stand-in; an `InputError` names one out of range.

    Parameters
    ----------
    name
        One of `STAND_INS`.

        - ``shufflenetv2``: grouped convolutions, channel split and shuffle, BatchNorm
        - ``resnet50``: bottlenecks of convolution and BatchNorm with residuals
        - ``vgg19``: a plain stack of convolutions, then large linear layers with dropout
        - ``yolov3``: convolution, BatchNorm, heads at three scales that are joined from coarse to fine
        - ``neumf``: embeddings of users and items, their product beside an MLP
        - ``bert``: encoder with LayerNorm and dropout, which marks the span of an answer
        - ``electra``: encoder behind a narrower embedding, which tells replaced tokens
        - ``swintransformer``: attention in plain and shifted windows, LayerNorm, stochastic depth
    width
        Channels of the first layers, or features of an embedding; a multiple of 8.
    depth
        Blocks at each resolution, or layers of an encoder or MLP.
    extent
        Pixels a side, a multiple of 16; tokens a sequence, at least 16.
    n_classes
        Classes of images and boxes.
    n_rows
        Rows of an embedding: users, items or tokens; at least 16.
    dropout
        Probability of dropout and of the deepest block of stochastic depth.
    """

    name: str
    width: int = 32
    depth: int = 1
    extent: int = 16
    n_classes: int = 10
    n_rows: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        """Check name and sizes."""
        if self.name not in STAND_INS:
            raise unknown_name("stand-in", self.name, STAND_INS)
        found: dict[str, tuple[bool, str]] = {
            "width": (_is_multiple(self.width, 2 * _HEADS), f"a multiple of {2 * _HEADS}"),
            "depth": (_is_multiple(self.depth, 1), "a whole number >= 1"),
            "extent": (
                _is_multiple(self.extent, _SIDE) if self.name in _IMAGES else self.extent >= _SIDE,
                f"a multiple of {_SIDE}" if self.name in _IMAGES else f"a whole number >= {_SIDE}",
            ),
            "n_classes": (self.n_classes >= 2, "a whole number >= 2"),
            "n_rows": (self.n_rows >= 16, "a whole number >= 16"),
            "dropout": (0.0 <= self.dropout < 1.0, "a number >= 0 and < 1"),
        }
        for field, (accepted, what) in found.items():
            if not accepted:
                raise InputError(f"{field} of {self.name} is {getattr(self, field)}; accepted: {what}")


def _is_multiple(found: int, unit: int) -> bool:
    return found >= unit and found % unit == 0


def build_stand_in(spec: StandIn, seed: int) -> "nn.Module":
    """Build a stand-in on the CPU, in training mode.

    Each weight follows from the seed and its own name and is drawn uniformly with NumPy, so that it has
    the same bits whatever kernels torch uses. The random state of torch is left as it was.

    Parameters
    ----------
    spec
        What to build.
    seed
        Seed of the weights.

    Returns
    -------
    torch.nn.Module
        Takes the ``inputs`` of a batch of `stand_in_data`; its output is what `stand_in_loss` takes.
    """
    from makespan.training.zoo._attentions import ATTENTIONS
    from makespan.training.zoo._convolutions import CONVOLUTIONS
    from makespan.training.zoo._layers import draw_weights

    return draw_weights({**CONVOLUTIONS, **ATTENTIONS}[spec.name], spec, seed)


def stand_in_data(
    spec: StandIn,
    n_samples: int,
    seed: int,
    *,
    held_out: bool = False,
    augment: bool = True,
    noise: float = 1.0,
) -> "Samples":
    """Return generated samples that a stand-in can learn.

    Parameters
    ----------
    spec
        The model that shall learn them.
    n_samples
        How many there are, from 1.
    seed
        Seed of the task: what belongs to a class, who likes what, which token follows which.
    held_out
        Whether to return samples of the same task that are in no training set of any size.
    augment
        Whether a sample is altered anew each time that it is read, by draws from the global random states
        of Python, NumPy and torch, none of them normal.
    noise
        Strength of what hides the task: in images the amplitude relative to the signal, elsewhere the share
        of wrong targets in twentieths.

    Returns
    -------
    Samples
        A map-style data set of pairs ``inputs, targets``.

        - images ``(3, extent, extent)`` float32, class
        - ``yolov3``: the same images, for each scale ``(6, cells, cells)`` float32: whether an object has its
          centre here, the centre in the cell, width and height in cells, class
        - ``neumf``: ``(2,)`` user and item, whether it is liked as float32
        - ``bert``: ``(extent,)`` tokens, ``(2,)`` first and last token of the answer
        - ``electra``: ``(extent,)`` tokens, ``(extent,)`` float32 whether a token was replaced

    Raises
    ------
    InputError
        If ``n_samples`` or ``noise`` are out of range.
    """
    if n_samples < 1:
        raise InputError(f"n_samples is {n_samples}; accepted: a whole number >= 1")
    if not 0.0 <= noise <= 10.0:
        raise InputError(f"noise is {noise}; accepted: a number from 0 to 10")
    from makespan.training.zoo._tasks import TASKS

    return TASKS[spec.name](spec, n_samples, seed, held_out=held_out, augment=augment, noise=noise)


def stand_in_loss(spec: StandIn, outputs: "Tensor | tuple[Tensor, ...]", targets: object) -> "Tensor":
    """Return the mean loss of a batch.

    Parameters
    ----------
    spec
        The model.
    outputs
        What it returned for the inputs of the batch.
    targets
        The targets of the batch, as a data loader joins those of `stand_in_data`.

    Returns
    -------
    torch.Tensor
        Scalar, float32.
    """
    from makespan.training.zoo._tasks import LOSSES

    return LOSSES[spec.name](outputs, targets)
