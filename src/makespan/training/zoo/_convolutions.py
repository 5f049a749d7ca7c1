"""Stand-ins of convolutions: ShuffleNetv2, ResNet50, VGG19 and YOLOv3."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from makespan.training.zoo._layers import conv_norm, upsample
from makespan.training.zoo._stand_ins import StandIn

__all__ = ["CONVOLUTIONS"]

_COLOURS, _BOX = 3, 5


class ShuffleUnit(nn.Module):
    """Unit of ShuffleNetv2: half of the channels pass by, or at stride 2 both halves see all of them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        seen = inputs if stride == 2 else half
        self.side = (
            nn.Sequential(
                conv_norm(inputs, inputs, 3, 2, groups=inputs, active=False), conv_norm(inputs, half)
            )
            if stride == 2
            else None
        )
        self.main = nn.Sequential(
            conv_norm(seen, half),
            conv_norm(half, half, 3, stride, groups=half, active=False),
            conv_norm(half, half),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Transform, join and shuffle the channels of both halves."""
        if self.side is None:
            past, seen = images.chunk(2, 1)
        else:
            past, seen = self.side(images), images
        joined = torch.cat([past, self.main(seen)], 1)
        batch, channels, height, width = joined.shape
        pairs = joined.view(batch, 2, channels // 2, height, width).transpose(1, 2)
        return pairs.reshape(batch, channels, height, width)


class Bottleneck(nn.Module):
    """Unit of ResNet50: three convolutions beside the way past them."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            conv_norm(inputs, inner),
            conv_norm(inner, inner, 3, stride),
            conv_norm(inner, outputs, active=False),
        )
        self.past = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else conv_norm(inputs, outputs, 1, stride, active=False)
        )
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """Add what the convolutions make of the images to what passes by."""
        result: Tensor = self.activation(self.main(images) + self.past(images))
        return result


class Pool(nn.Module):
    """Mean over all pixels; a plain sum, because adaptive pooling has no fixed order on GPUs."""

    def forward(self, images: Tensor) -> Tensor:
        """Return one value a channel."""
        return images.mean((2, 3))


def _shufflenet(spec: StandIn) -> nn.Module:
    layers: list[nn.Module] = [conv_norm(_COLOURS, spec.width, 3)]
    channels = spec.width
    for _ in range(2):
        layers.append(ShuffleUnit(channels, 2 * channels, stride=2))
        channels *= 2
        layers += [ShuffleUnit(channels, channels, stride=1) for _ in range(spec.depth)]
    layers += [conv_norm(channels, 2 * channels), Pool(), nn.Linear(2 * channels, spec.n_classes)]
    return nn.Sequential(*layers)


def _resnet(spec: StandIn) -> nn.Module:
    layers: list[nn.Module] = [conv_norm(_COLOURS, spec.width, 3)]
    channels = spec.width
    for part in range(3):
        inner, outputs = (spec.width // 2) * 2**part, 2 * spec.width * 2**part
        layers.append(Bottleneck(channels, inner, outputs, stride=1 if part == 0 else 2))
        layers += [Bottleneck(outputs, inner, outputs, stride=1) for _ in range(spec.depth - 1)]
        channels = outputs
    return nn.Sequential(*layers, Pool(), nn.Linear(channels, spec.n_classes))


def _vgg(spec: StandIn) -> nn.Module:
    layers: list[nn.Module] = []
    channels = _COLOURS
    for part in range(3):
        for _ in range(spec.depth):
            layers += [nn.Conv2d(channels, spec.width * 2**part, 3, padding=1), nn.ReLU()]
            channels = spec.width * 2**part
        layers.append(nn.MaxPool2d(2))
    large = 16 * spec.width
    layers += [nn.Flatten(), nn.Linear(channels * (spec.extent // 8) ** 2, large), nn.ReLU()]
    layers += [nn.Dropout(spec.dropout), nn.Linear(large, large), nn.ReLU(), nn.Dropout(spec.dropout)]
    return nn.Sequential(*layers, nn.Linear(large, spec.n_classes))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.main = nn.Sequential(conv_norm(channels, channels // 2), conv_norm(channels // 2, channels, 3))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = images + self.main(images)
        return result


class Detector(nn.Module):
    """Stand-in of YOLOv3: three resolutions, joined from coarse to fine, with a head at each."""

    def __init__(self, spec: StandIn) -> None:
        super().__init__()
        widths = [spec.width * 2**part for part in range(4)]
        self.stem = conv_norm(_COLOURS, widths[0], 3)
        self.down = nn.ModuleList(
            nn.Sequential(conv_norm(inputs, outputs, 3, 2), *(_Residual(outputs) for _ in range(spec.depth)))
            for inputs, outputs in pairwise(widths)
        )
        self.up = nn.ModuleList(
            conv_norm(fine + coarse, fine, 3)
            for coarse, fine in ((widths[3], widths[2]), (widths[2], widths[1]))
        )
        self.heads = nn.ModuleList(nn.Conv2d(inputs, _BOX + spec.n_classes, 1) for inputs in widths[:0:-1])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return ``(batch, 5 + classes, cells, cells)`` for each scale, the coarsest first."""
        seen = [self.stem(images)]
        for down in self.down:
            seen.append(down(seen[-1]))
        features = [seen.pop()]
        for up in self.up:
            features.append(up(torch.cat([seen.pop(), upsample(features[-1])], 1)))
        return tuple(head(found) for head, found in zip(self.heads, features, strict=True))


CONVOLUTIONS: Mapping[str, Callable[[StandIn], nn.Module]] = {
    "shufflenetv2": _shufflenet,
    "resnet50": _resnet,
    "vgg19": _vgg,
    "yolov3": Detector,
}
"""Networks by the name of the model that they stand for; weights are not drawn yet."""
