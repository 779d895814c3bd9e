"""Cuts the layers of a model over the tensor ranks of an engine."""

from __future__ import annotations

from torch import nn

from ...ops.comm.mesh_groups import MeshGroups
from ...tensor.plan import read_plan
from ...tensor.slicing import Sliced, slice_model
from ...utils.errors import UsageError
from ..config.config import Config


def slice_layers(
    model: nn.Module, config: Config, mesh: MeshGroups, *, has_weights: bool
) -> Sliced:
    """Keep this rank's slices of the layers of `model`, if the config has several tensor ranks.

    Raises:
        UsageError: there is no plan, or it does not fit the model.
    """
    section = config.tensor_parallel
    if section.size == 1:
        return Sliced()
    if has_weights:
        raise UsageError(
            f"weights= with tensor_parallel.tp_size = {section.size} is not supported yet: load the weights "
            "into the model before xds.initialize"
        )
    return slice_model(model, read_plan(section.plan, model), mesh.along("tensor"))


__all__ = ["slice_layers"]
