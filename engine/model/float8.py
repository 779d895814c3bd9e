"""Converts linear layers of this rank's part of a model, so that they multiply in 8 bits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection

import torch
from torch import nn

from ...compression.float8.layers import convert, linear_layers, needs_gpu, report_of
from ...ops.comm.exchange import agreeing, all_gather_json
from ...utils.errors import UsageError
from ...zero.layout.groups import FlatGroups
from ..config.config import Config
from ..integrations.optional import need

log = logging.getLogger("xds")


def convert_layers(
    model: nn.Module, config: Config, groups: FlatGroups, experts: Collection[int]
) -> tuple[list[nn.Parameter], Callable[[], None]]:
    """Convert the layers that the section float8 names. **Collective.** Rank 0 logs which are left out.

    experts: id of the parameters of experts, which stay in high precision.

    Returns:
        the weights of the converted layers on this rank, and what undoes the conversion.

    Raises:
        UsageError: no layer is converted, an expression matches none, or the device cannot multiply so.
    """
    section, world = config.float8, groups.world
    with agreeing(world, "xds.initialize"):
        need("torchao", "float8.enabled = true", "torchao")
        _check_device(config, world.device)
        apart = {*experts, *groups.shared, *groups.slices}
        try:
            layers = linear_layers(model, section.recipe, section.filter, groups.name_of, apart)
        except ValueError as error:
            raise UsageError(f"float8.filter: an expression {error}") from None
    own = [(layer.name, layer.reason) for layer in layers]
    is_whole = config.pipeline.stages == 1 and not experts
    by_rank = [own] if is_whole else all_gather_json(world, own, "linear layers")
    everywhere = {name: reason for of_rank in by_rank for name, reason in of_rank}
    report = report_of(section.recipe, list(everywhere.items()))
    if all(everywhere.values()):
        shown = json.dumps(section.shown_value("filter"))
        raise UsageError(
            f"float8.filter = {shown}: {report}; write expressions that find layers to convert, e.g. "
            '["mlp"], or remove the section'
        )
    if world.rank == 0:
        log.info("%s", report)
    chosen = [layer.module for layer in layers if not layer.reason]
    weights = [param for layer in chosen if (param := layer._parameters["weight"]) is not None]
    return weights, convert(chosen, section.recipe)


def _check_device(config: Config, device: torch.device) -> None:
    recipe = config.float8.recipe
    missing = needs_gpu(device, recipe)
    if missing:
        raise UsageError(f'float8.recipe = "{recipe}" needs {missing}; remove the section float8')
    if recipe == "rowwise_with_gw_hp" and config.torch_autocast.enabled and device.type == "cpu":
        raise UsageError(
            'float8.recipe = "rowwise_with_gw_hp" with torch_autocast on a CPU: torchao multiplies gradients '
            "of autocast's dtype with inputs of another; set bf16.enabled, or another recipe"
        )


__all__ = ["convert_layers"]
