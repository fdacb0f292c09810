"""BatchNorm, LayerNorm and no norm in a small convolutional network on drawn shapes."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.lab.ensemble import Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.tasks import Data, split
from clearhead.model.norms import BatchNorm, LayerNorm

CLASSES, SIZE = 8, 12


def shapes(rows: int) -> Data:
    """Return noisy textures of eight orientations at random phase and contrast: "ids" are images (N, 1, S, S)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    angle = labels * torch.pi / CLASSES
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    wave = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    phase, contrast = (torch.rand(rows, 1, 1, generator=generator) for _ in range(2))
    images = (0.2 + contrast) * (wave * 1.2 + 6.28 * phase).sin()
    images = images + 0.8 * torch.randn(images.shape, generator=generator)
    return split({"ids": images[:, None], "labels": labels[:, None]}, CLASSES, 256, 512)


class Network(nn.Module):
    """Three convolutions, each with a norm over channels last, and mean pooling."""

    def __init__(self, norm: Callable[[int], nn.Module], channels: int = 16):
        super().__init__()
        sizes = (1, channels, channels, channels)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(norm(channels) for _ in self.layers)
        self.output = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x).movedim(-3, -1)).movedim(-1, -3))
        return self.output(x.mean((-2, -1)))[:, None]  # (B, 1, classes)


def measure(run: Run) -> Results:
    """Train with each norm."""
    data = shapes(run.pick(4000, 20_000))
    norms: dict[str, Callable[[int], nn.Module]] = {
        "BatchNorm": lambda dim: BatchNorm(dim, 1e-5),
        "LayerNorm": lambda dim: LayerNorm(dim, 1e-5),
        "no norm": lambda dim: nn.Identity(),
    }
    variants = [Variant(name, build=lambda norm=norm: Network(norm)) for name, norm in norms.items()]  # type: ignore[misc]
    training = Training(run.pick(150, 400), 32, (3e-3, 1e-2))
    return run.compare({}, variants, data.train, data.valid, {"": data.test}, training)


EXPERIMENT = Experiment(
    name="batch-norm-cnn",
    title=Text("Norms in a convolutional network", "卷积网络里的归一化"),
    claim=Text("On images BatchNorm works very well, and LayerNorm is worse.", "在图像上 BatchNorm 效果很好，LayerNorm 较差。"),
    checklist=(2, 7, 9, 10),
    predictions=(
        Prediction(Text("BatchNorm is more accurate than no norm", "BatchNorm 比不归一化更准确"),
                   "accuracy", "BatchNorm", "no norm", "higher", 0.02),
        Prediction(Text("BatchNorm is more accurate than LayerNorm", "BatchNorm 比 LayerNorm 更准确"),
                   "accuracy", "BatchNorm", "LayerNorm", "higher", 0.02),
    ),
    measure=measure,
    figures=(Figure("accuracy", Text("Accuracy on noisy textures", "带噪纹理上的准确率")),),
    note=Text("Drawn textures, not photographs; LayerNorm here is per position over channels.",
              "图像为程序生成的纹理，并非照片；这里的 LayerNorm 在每个位置对通道做归一化。"),
)  # fmt: skip
