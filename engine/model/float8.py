"""Converts linear layers of this rank's part of a model, so that they multiply in 8 bits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...compression.float8.layers import (
    Layer,
    convert,
    linear_layers,
    needs_gpu,
    report_of,
)
from ...compression.float8.sender import CastScheme
from ...ops.comm.exchange import agreeing, all_gather_json
from ...utils.errors import UsageError
from ...utils.patterns import matching
from ...utils.quoting import quoted
from ...zero.layout.groups import FlatGroups
from ..config.config import Config
from ..integrations.optional import need

log = logging.getLogger("xds")


def convert_layers(
    model: nn.Module, config: Config, groups: FlatGroups, experts: Collection[int]
) -> tuple[FlatGroups, Callable[[], None]]:
    """Convert the layers that the section float8 names. **Collective.** Rank 0 logs which are left out.

    experts: id of the parameters of experts, which stay in high precision.

    Returns:
        the groups, which gather weights in 8 bits if their layers would cast them to the same; and what undoes
        the conversion.

    Raises:
        UsageError: no layer is converted, an expression matches none, or the device cannot multiply so.
    """
    section, world = config.float8, groups.world
    with agreeing(world, "xds.initialize"):
        need("torchao", "float8.enabled = true", "torchao")
        _check_device(config, world.device)
        layers = layers_of(model, config, groups, experts)
    own = [(layer.name, layer.reason) for layer in layers]
    is_whole = config.pipeline.stages == 1 and not experts
    by_rank = [own] if is_whole else all_gather_json(world, own, "linear layers")
    everywhere = {name: reason for of_rank in by_rank for name, reason in of_rank}
    report = report_of(section.recipe, list(everywhere.items()))
    for text in () if isinstance(section.filter, str) else section.filter:
        if not any(matching(text, list(everywhere), anywhere=True)):
            raise UsageError(
                f"float8.filter: no linear layer has a name with {quoted(text)}; correct the expression, or "
                "remove it"
            )
    if all(everywhere.values()):
        shown = json.dumps(section.shown_value("filter"))
        raise UsageError(
            f"float8.filter = {shown}: {report}; write expressions that find layers to convert, e.g. "
            '["mlp"], or remove the section'
        )
    if world.rank == 0:
        log.info("%s", report)
    chosen = [layer.module for layer in layers if not layer.reason]
    undo = convert(model, chosen, section.recipe)
    dtypes: set[Any] = {layer.config.cast_config_weight.target_dtype for layer in chosen}  # type: ignore
    return with_casts(groups, config, layers, *dtypes), undo


def layers_of(
    model: nn.Module, config: Config, groups: FlatGroups, experts: Collection[int]
) -> list[Layer]:
    """The linear layers of this rank. Arguments and errors as above; sends nothing."""
    section = config.float8
    apart = {*experts, *groups.shared, *groups.slices, *groups.fp32}
    try:
        return linear_layers(model, section.recipe, section.filter, groups.name_of, apart)
    except ValueError as error:
        raise UsageError(f"float8.filter: an expression {error}") from None


def with_casts(
    groups: FlatGroups,
    config: Config,
    layers: Sequence[Layer],
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> FlatGroups:
    """`groups` with the weights of converted layers as `casts`.

    Only of tensors that have one scale. Other compressed messages, and gathers in two levels, stay as they are.
    """
    zero, optimizer = config.zero_optimization, config.optimizer
    is_one_bit = optimizer is not None and optimizer.type in ONE_BIT_OPTIMIZERS
    others = is_one_bit or zero.compresses or zero.mics_hierarchical_params_gather
    if config.float8.recipe != "tensorwise" or others:
        return groups
    weights = [layer.module._parameters["weight"] for layer in layers if not layer.reason]
    data = replace(groups.data, scheme=CastScheme(groups.data.scheme, groups.data.collectives))
    return replace(groups, data=data, casts=dict.fromkeys(map(id, weights), dtype))


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


__all__ = ["convert_layers", "layers_of", "with_casts"]
