"""What a sum of gradients over the ranks is multiplied with to be the gradient of the loss."""

from __future__ import annotations

from typing import final

from ...ops.mesh import Mesh
from ..config.config import Config
from .loss_scale import LossScale


@final
class GradientFactor:
    """The mean over the ranks that have a loss of their own, without the loss scale of now."""

    def __init__(self, config: Config, mesh: Mesh, scale: LossScale) -> None:
        is_mean_of_script = config.sequence.cut_by == "script"  # else losses are parts of one
        num_means = mesh.data * (mesh.sequence if is_mean_of_script else 1)
        self._mean = 1.0 / num_means if config.gradient_allreduce_op == "mean" else 1.0
        self._scale = scale

    def __call__(self) -> float:
        return self._mean / self._scale.value

    def of_own(self) -> float:
        """What one rank's gradients are multiplied with to be those of its own loss."""
        return 1.0 / self._scale.value


__all__ = ["GradientFactor"]
