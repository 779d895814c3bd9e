"""Writes weights in 8 or 4 bits through torchao, as transformers loads them.

    model.safetensors    torchao's tensors: name_qdata, name_scale, name_zero_point; all else as it is
    config.json          the model's own, with a quantization_config

int8: a scale for each row; they run on every device. int4: an affine range for each 32 inputs, two values
in a byte; they run on GPUs, with the package mslk. Biases, norms, embeddings and heads stay whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....compression.training.layers import STATES
from ....utils.arguments import wrong
from ....utils.errors import UsageError
from ....utils.progress import counted
from ....utils.sizes import size_text
from ....utils.small_files import parse_json, read_small_file
from ...integrations.optional import need
from ..io.reader import CheckpointReader
from .publish import published

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of torchao's quantizers
GROUP = 32  # inputs that share a range of int4
KEPT = r"embed|wte|wpe|lm_head|norm"  # names of weights that stay whole
WHO = "xds checkpoint export --int8 or --int4"


def export_quantized(
    reader: CheckpointReader,
    out: Path,
    bits: int,
    *,
    config: Path | None,
    keep: str,
    overwrite: bool,
) -> str:
    """Write a checkpoint's weights; the sentence with the sizes. The model is held in memory.

    Args:
        config: the model's config.json, which is written with a quantization_config.
        keep: a regular expression of names that stay whole.
    Raises:
        UsageError: torchao is missing, or the checkpoint has masks of compressed training.
    """
    state = {name: reader.read(saved) for name, saved in reader.values.items()}
    return save_quantized(state, out, bits, config=config, keep=keep, overwrite=overwrite)


def save_quantized(
    state: Mapping[str, Tensor],
    out: Path | str,
    bits: int,
    *,
    config: Path | str | None = None,
    keep: str = KEPT,
    overwrite: bool = False,
) -> str:
    """The same for a state dict, such as that of a model after `redundancy_clean`.

    Weights are matrices whose names end in ".weight", in fp32 or 16 bits. Tied names are written once.

    Raises UsageError: an argument is wrong, or a matrix has values that are not finite.
    """
    out = Path(out)
    if type(bits) is not int or bits not in (4, 8):
        raise UsageError(f"save_quantized: bits = {bits!r}: must be 4 or 8")
    if not isinstance(state, Mapping):
        raise wrong("save_quantized: state", state, "a state dict")
    states = [name for pair in STATES.values() for name in pair]
    if masks := [name for name in state if name.rpartition(".")[2] in states]:
        raise UsageError(
            f"{WHO}: {masks[0]} is a mask or score of compressed training; call "
            "xds.compression.redundancy_clean on the model, and export its state dict"
        )
    kept = _pattern(keep)
    need("torchao", WHO, "torchao")
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    values: dict[str, Tensor] = {}
    first: dict[Any, str] = {}  # the name of each tensor that is written
    before, quantized = 0, 0
    whole: list[str] = []
    for name, value in counted(state.items(), "quantizing", len(state), "tensors"):
        _check_dense(name, value)
        is_matrix = value.dim() == 2 and name.endswith(".weight") and value.dtype in DTYPES
        stays = kept.search(name) or not value.numel() or (bits == 4 and value.shape[-1] % GROUP)
        if is_matrix and stays:
            whole.append(name.rpartition(".")[0])
        if first.setdefault(_place(value), name) != name:
            continue
        values[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        before += values[name].nbytes
        if is_matrix and not stays:
            _check_matrix(name, value, state.get(f"{name[: -len('weight')]}bias"))
            values[name] = _int8(values[name]) if bits == 8 else _int4(values[name])
            quantized += 1
    tensors, metadata = flatten_tensor_state_dict(values)
    told = _config_text(config, bits, whole)
    with published(out, is_folder=True, overwrite=overwrite) as part:
        save_file(tensors, part / "model.safetensors", {"format": "pt", **metadata})
        if told:
            (part / "config.json").write_text(told)
    after = sum(value.nbytes for value in tensors.values())
    return (
        f"{size_text(before)} -> {size_text(after)} of tensors: "
        f"{quantized} matrices in int{bits}, {len(whole)} whole"
    )


def _check_dense(name: str, value: Any) -> None:
    """Raises UsageError: `value` cannot be written."""
    if not torch.is_tensor(value) or value.layout != torch.strided or value.is_meta:
        raise wrong(f"save_quantized: {name}", value, "a dense tensor with values")


def _check_matrix(name: str, weight: Tensor, bias: Tensor | None) -> None:
    """Raises UsageError: torchao could not compute with the matrix."""
    if not weight.isfinite().all():
        raise UsageError(
            f"save_quantized: {name} has NaN or infinite values, which no scale fits; train from an earlier "
            "checkpoint"
        )
    if bias is not None and len(bias) == weight.shape[1] != weight.shape[0]:
        raise UsageError(
            f"save_quantized: {name} is [inputs, outputs], as Conv1D of transformers has it, and torchao has "
            "no such product; call xds.compression.convert_conv1d_to_linear(model, Conv1D) before, and on the "
            "model that loads the file"
        )


def _place(value: Tensor) -> tuple[Any, ...]:
    """What is equal for tied names: `state_dict` makes a tensor of its own for each name."""
    return value.device, value.data_ptr() or id(value), value.dtype, value.shape, value.stride()


def _pattern(keep: str) -> re.Pattern[str]:
    try:
        return re.compile(keep or r"(?!)")
    except re.error as error:
        raise UsageError(f"--keep {keep}: {error}; give a regular expression") from None


def _int8(weight: Tensor) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig(version=2))
    return layer.weight.data


def _int4(weight: Tensor) -> Any:
    """torchao's Int4Tensor in its plain layout: q in [-8, 7], and q * scale + zero point is the value."""
    from torchao.quantization import Int4Tensor

    rows, inputs = weight.shape
    groups = weight.float().view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (high - low).clamp(min=1e-6) / 15
    steps = ((groups - low) / scale).round().clamp(0, 15).sub(8).to(torch.int8)
    steps = steps.view(rows, inputs)
    packed = (steps[:, ::2] & 0xF) | (steps[:, 1::2] << 4)
    dtype = torch.bfloat16  # of torchao's kernels
    scales, zeros = (
        column.view(rows, -1).t().contiguous().to(dtype) for column in (scale, low + 8 * scale)
    )
    return Int4Tensor(packed.contiguous(), scales, zeros, [1, GROUP], weight.shape)


def _config_text(path: Path | str | None, bits: int, whole: list[str]) -> str:
    """The config.json of the export; "" without one."""
    if path is None:
        return ""
    from torchao.core.config import config_to_dict
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    kind = Int8WeightOnlyConfig(version=2) if bits == 8 else Int4WeightOnlyConfig(group_size=GROUP)
    try:
        model_config = parse_json(read_small_file(path))
        if not isinstance(model_config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path}: {error}; give the model's config.json") from None
    model_config["quantization_config"] = {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(kind)},
        "modules_to_not_convert": whole or None,
    }
    return json.dumps(model_config, indent=2) + "\n"


__all__ = ["KEPT", "export_quantized", "save_quantized"]
