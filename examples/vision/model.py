"""The models by name: two small ones, those of torchvision, and those of timm."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

SMALL = ("small", "small_bn")


class SmallNet(nn.Module):
    """Three convolutions, for images of 8 x 8 pixels or a little more.

    With BatchNorm each rank normalizes by its own samples. With GroupNorm the loss does not depend on the
    number of ranks.
    """

    def __init__(self, channels: int, num_classes: int, *, has_batch_norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, stride in ((16, 1), (32, 1), (64, 2)):
            norm = nn.BatchNorm2d(width) if has_batch_norm else nn.GroupNorm(8, width)
            layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), norm, nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4))
        self.head = nn.Linear(channels * 16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, num_classes]"""
        return self.head(self.features(images).flatten(1))


def build_model(
    name: str, num_channels: int, num_classes: int, *, is_pretrained: bool
) -> nn.Module:
    """The model `name`. Rank 0 alone reads pretrained weights: xds gives its values to all ranks.

    Raises:
        SystemExit: there is no such model, or it has no pretrained weights.
    """
    reads = is_pretrained and int(os.environ.get("RANK", "0")) == 0
    if name in SMALL:
        if is_pretrained:
            raise SystemExit(f"--pretrained: the model {name} has no pretrained weights")
        return SmallNet(num_channels, num_classes, has_batch_norm=name == "small_bn")
    try:
        from torchvision import models
    except ImportError:
        models = None
    if models is not None and name in models.list_models():
        model = models.get_model(name, num_classes=num_classes)
        if reads:
            weights = models.get_model_weights(name).DEFAULT
            load_fitting(model, weights.get_state_dict(progress=False, check_hash=True))
        return model
    try:
        import timm
    except ImportError:
        raise SystemExit(
            f"-a {name}: the models without torchvision and timm are {', '.join(SMALL)}; install one of "
            "both for others"
        ) from None
    if not timm.is_model(name):
        raise SystemExit(f"-a {name}: no model of torchvision or timm has this name")
    return timm.create_model(name, pretrained=reads, num_classes=num_classes)


def load_fitting(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load the weights whose shapes fit; a head for other classes keeps its initial values."""
    own = model.state_dict()
    fitting = {name: one for name, one in weights.items() if own[name].shape == one.shape}
    model.load_state_dict(fitting, strict=False)
    new = sorted(own.keys() - fitting.keys())
    if new:
        print(f"not pretrained, as the classes differ: {', '.join(new)}", flush=True)


@torch.no_grad()
def batch_norm_statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of all BatchNorm layers."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
