"""Compressed training by an engine, and the functions of `xds.compression`: they read the whole config.

init_compression ──> xds.initialize ──> steps: the engine runs the schedule ──> destroy ──> redundancy_clean
"""

from __future__ import annotations

import logging
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from ...compression.training.clean import clean
from ...compression.training.config import CompressionTraining
from ...compression.training.layers import STATES
from ...compression.training.prepare import (
    Schedule,
    check_layers,
    compress,
    compressed_layers,
    is_compressed_by,
)
from ...compression.training.reduction import copy_layers
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...zero.access.full import get_full_param
from ...zero.core.owners import find_owner
from ..config.config import Config, parse_config
from .arguments import is_part

log = logging.getLogger("xds")


@final
class Compression:
    """Runs the schedule of one engine's compressed layers, with masks from whole weights at every stage."""

    def __init__(self, model: nn.Module) -> None:
        self._schedule = Schedule(model)
        self._layers = [layer for _, layer in compressed_layers(model)]
        self._bits: list[int] = []

    def begin(self) -> None:
        self.advance(0)

    def advance(self, step: int) -> None:
        self._schedule.advance(step, get_full_param)
        self._log_bits(step)

    def resume(self, step: int) -> None:
        self._schedule.resume(step)
        self._log_bits(step)

    def _log_bits(self, step: int) -> None:
        before, self._bits = self._bits, [layer.weight_bits for layer in self._layers]
        if before == self._bits or dist.get_rank():
            return
        said = [
            layer.weight_bits
            for layer in self._layers
            if layer.weight_bits and layer.settings["weight_quantization"][0].quantize_verbose
        ]
        for bits in sorted(set(said)):
            log.info("step %d: %d layers have weights of %d bits", step, said.count(bits), bits)


def section_of(config: Config) -> CompressionTraining:
    """The section compression_training, with what quantize_training adds."""
    return config.quantize_training.applied_to(config.compression_training)


def check_prepare(model: nn.Module, config: Config) -> None:
    """
    Raises:
        UsageError: the model's layers are built later.
        ConfigError: a pattern of the section matches no layer, or two match the same.
    """
    if is_part(model):
        raise UsageError(
            "compression_training with a PipelineModule: its layers are built by each rank; pass the whole "
            "model, and set pipeline.stages"
        )
    if not compressed_layers(model):
        check_layers(model, section_of(config))


def prepare(model: nn.Module, config: Config, optimizer: Any, params: Any) -> None:
    """Compress the layers of `model`, unless the script has.

    Raises:
        UsageError: the model's layers are built later, or an optimizer would not have the scores.
    """
    check_prepare(model, config)
    section = section_of(config)
    if compressed_layers(model):
        if section.enabled and not is_compressed_by(model, section):
            raise UsageError(
                "compression_training: init_compression has prepared this model for another section; give both "
                "calls the same one, or leave it out here"
            )
        return
    compress(model, section)
    has_scores = any(
        STATES[name][1] in layer._parameters
        for _, layer in compressed_layers(model)
        for name in layer.settings
        if name in STATES
    )
    if has_scores and (isinstance(optimizer, torch.optim.Optimizer) or params is not None):
        raise UsageError(
            'compression_training: method "topk" adds scores to the model, which the given optimizer does not '
            "have; call xds.compression.init_compression(model, config) before the optimizer is made"
        )


# -- functions of xds.compression ---------------------------------------------------------------------------


def init_compression(
    model: nn.Module, config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Prepare `model` for compressed training, in place; returns it. Before `xds.initialize`, on every rank.

    Layers that the config names get a class that derives from their own; names of parameters do not change.
    `xds.initialize` calls it for a script that does not. With layer_reduction it needs `teacher_model`, whose
    layers are copied.

    Args:
        config: as `xds.initialize` takes it; its section compression_training counts.
        mpu: None; tensor slices are not compressed.

    Raises:
        ConfigError: the config is wrong, or its patterns do not fit the model.
        UsageError: there is no teacher, or a layer cannot be compressed.
    """
    section = _section("init_compression", model, config, mpu)
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise UsageError(
                "init_compression: compression_training.layer_reduction copies layers of a teacher; pass "
                "teacher_model, or set layer_reduction.enabled to false"
            )
        copy_layers(_inner(model), _inner(teacher_model), section.layer_reduction)
    compress(_inner(model), section)
    return model


def redundancy_clean(model: Any, config: Any, mpu: Any = None) -> nn.Module:
    """Turn compressed layers into plain ones, in place, with the same results; returns the model.

    Quantized values are written to the weights, and pruned ones become zero. With `related_modules` in the
    config rows, heads and channels are cut out of weights, and of those that follow. Inputs stay whole.

    The model must be whole: call `engine.destroy()` first, or load an exported state dict. Where training ended
    before the schedule, a warning says so: weights get their target_bits.

    Args:
        model: or its engine, which is destroyed: then all ranks call it.

    Raises:
        UsageError: an engine has the parameters, or related modules do not fit.
    """
    inner = getattr(model, "module", None)
    is_engine = isinstance(inner, nn.Module) and callable(getattr(model, "destroy", None))
    whole: Any = inner if is_engine else model
    section = _section("redundancy_clean", whole, config, mpu)
    if is_engine:
        model.destroy()
    if any(find_owner(param) is not None for param in whole.parameters()):
        raise UsageError(
            "redundancy_clean: an engine has the parameters of this model; call engine.destroy() first, which "
            "leaves the whole model, or pass the engine"
        )
    clean(_inner(whole), section)
    return cast(nn.Module, whole)


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, config: Any) -> None:
    """Copy layers of a teacher to a student with fewer, as the config's layer_reduction says.

    Raises UsageError: names, numbers or shapes do not fit; nothing has changed.
    """
    section = _section("student_initialization", student_model, config, None)
    copy_layers(_inner(student_model), _inner(teacher_model), section.layer_reduction)


@final
class CompressionScheduler:
    """Runs the schedule of a model without an engine: call `step()` after each optimizer step."""

    def __init__(self, model: nn.Module, config: Any = None) -> None:
        self.training_steps = 0
        self._schedule = Schedule(_inner(model))
        self._schedule.advance(0, nn.Parameter.detach)

    def step(self, step_zero_check: bool = False) -> None:
        """One more optimizer step. step_zero_check: none, as in DeepSpeed."""
        if not step_zero_check:
            self.training_steps += 1
            self._schedule.advance(self.training_steps, nn.Parameter.detach)


def _section(call: str, model: Any, config: Any, mpu: Any) -> CompressionTraining:
    if not isinstance(model, nn.Module):
        raise wrong(f"{call}: model", model, "a torch module")
    if mpu is not None:
        raise UsageError(
            f"{call}: mpu is given: layers of tensor ranks are not compressed; pass None"
        )
    return section_of(parse_config(config))


def _inner(model: nn.Module) -> nn.Module:
    """The model in a wrapper such as DistributedDataParallel."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


__all__ = [
    "Compression",
    "CompressionScheduler",
    "init_compression",
    "prepare",
    "redundancy_clean",
    "student_initialization",
]
