"""Images and labels: digits of scikit-learn, folders, or one constant image for measurements of speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
IMAGENET = (1_281_167, 50_000, 1000)  # images for training and for validation, classes


class Splits(NamedTuple):
    """Items are (image [num_channels, height, width], label)."""

    training: Dataset[tuple[Tensor, int]]
    validation: Dataset[tuple[Tensor, int]]
    num_classes: int
    num_channels: int = 3


class Images(Dataset[tuple[Tensor, int]]):
    """Images in memory [n, channels, height, width]; with `augments` moved by up to one pixel of 8."""

    def __init__(self, images: Tensor, labels: Tensor, *, augments: bool) -> None:
        self.images, self.labels, self.augments = images, labels, augments

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.augments:
            step = image.shape[-1] // 8
            down, right = torch.randint(0, 2 * step + 1, (2,)).tolist()
            height, width = image.shape[-2:]
            image = F.pad(image, [step] * 4)[..., down : down + height, right : right + width]
        return image, int(self.labels[index])


class Seeded(Dataset[Any]):
    """A dataset whose random numbers depend on the seed, `epoch` and the index alone.

    So an image is augmented alike at any number of ranks and workers, and in a resumed run. Set `epoch` before
    each pass.
    """

    def __init__(self, inner: Dataset[Any], seed: int) -> None:
        self.inner, self.seed, self.epoch = inner, seed, 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would prepare every kind of device too, which takes milliseconds
            torch.default_generator.manual_seed(hash((self.seed, self.epoch, index)))
            return self.inner[index]


class Constant(Dataset[tuple[Tensor, int]]):
    """The same random image `length` times, with the labels in turn: reading costs next to nothing."""

    def __init__(self, length: int, size: int, num_classes: int) -> None:
        self.length, self.num_classes = length, num_classes
        self.image = torch.randn(3, size, size, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.image, index % self.num_classes


def digits(size: int, channels: int) -> Splits:
    """1,797 digits written by hand, 8 x 8 pixels. The first half, by other writers than the rest, trains."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            'the digits need scikit-learn: pip install -e ".[vision]", or name a folder of images, or --dummy'
        ) from None
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16 - 0.3
    if size != images.shape[-1]:
        images = F.interpolate(images, size=(size, size), mode="bilinear")
    images, labels = images.expand(-1, channels, -1, -1), torch.from_numpy(found.target)
    half = len(images) // 2
    training = Images(images[:half], labels[:half], augments=True)
    validation = Images(images[half:], labels[half:], augments=False)
    return Splits(training, validation, 10, channels)


def folders(path: Path, size: int) -> Splits:
    """`path`/train and `path`/val, with a folder of images for each class."""
    try:
        from torchvision import datasets, transforms
    except ImportError:
        raise SystemExit("a folder of images needs torchvision: pip install torchvision") from None
    for part in ("train", "val"):
        if not (path / part).is_dir():
            raise SystemExit(
                f"{path / part} is no folder; it needs a folder of images for each class"
            )
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    first = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    middle = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    training = datasets.ImageFolder(path / "train", transforms.Compose([*first, *last]))
    validation = datasets.ImageFolder(path / "val", transforms.Compose([*middle, *last]))
    if training.classes != validation.classes:
        raise SystemExit(f"{path}/train and {path}/val have other classes")
    return Splits(training, validation, len(training.classes))


def dummy(size: int) -> Splits:
    """As many constant images as ImageNet has."""
    num_training, num_validation, num_classes = IMAGENET
    sizes = (size, num_classes)
    return Splits(Constant(num_training, *sizes), Constant(num_validation, *sizes), num_classes)
