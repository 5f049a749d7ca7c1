"""WideResNet: residual bottlenecks with wide convolutions inside.

Modules have the names that the published weights have.
"""

from torch import Tensor, nn

from makespan.training.zoo._families import ConvolutionSpec

__all__ = ["WideResNet"]

_COLOURS = 3


class Bottleneck(nn.Module):
    """Three convolutions, the inner one wide, beside the way past them."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else None
        )

    def forward(self, images: Tensor) -> Tensor:
        """Transform ``(n, channels, height, width)``."""
        past = images if self.downsample is None else self.downsample(images)
        found = self.relu(self.bn1(self.conv1(images)))
        found = self.relu(self.bn2(self.conv2(found)))
        result: Tensor = self.relu(self.bn3(self.conv3(found)) + past)
        return result


class WideResNet(nn.Module):
    """Stem, four parts of bottlenecks, classifier."""

    def __init__(self, spec: ConvolutionSpec) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(_COLOURS, spec.planes, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(spec.planes)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2, self.layer3, self.layer4 = (_part(spec, part) for part in range(4))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(spec.outputs(3), spec.n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(n, classes)`` logits of ``(n, 3, side, side)`` images."""
        found = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        found = self.layer4(self.layer3(self.layer2(self.layer1(found))))
        result: Tensor = self.fc(self.avgpool(found).flatten(1))
        return result


def _part(spec: ConvolutionSpec, part: int) -> nn.Sequential:
    width, outputs = spec.width(part), spec.outputs(part)
    before = spec.planes if part == 0 else spec.outputs(part - 1)
    first = Bottleneck(before, width, outputs, 1 if part == 0 else 2)
    others = (Bottleneck(outputs, width, outputs, 1) for _ in range(spec.blocks[part] - 1))
    return nn.Sequential(first, *others)
