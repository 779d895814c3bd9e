"""`deepspeed.utils.zero_to_fp32`: reads weights from an xds checkpoint, with DeepSpeed's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...engine.checkpoint.exports.export import SAFETENSORS, TORCH_BIN, ExportOptions, export_folder
from ...engine.checkpoint.io.reader import CheckpointReader, get_fp32_state_dict
from ...utils.sizes import parse_bytes
from ..missing import placeholder

Model = TypeVar("Model", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """`xds.get_fp32_state_dict`. `lazy_mode` has no effect: the tensors are whole, with `.contiguous()`."""
    name = None if tag is None else str(tag)
    return get_fp32_state_dict(checkpoint_dir, name, exclude_frozen_parameters)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write pytorch_model.bin (or model.safetensors), or several and an index, to output_dir, in fp32.

    Memory: a few MiB. An older export in the folder is replaced when the new one is complete.
    """
    if max_shard_size is None:
        max_shard_bytes = ExportOptions.max_shard_bytes << 40
    else:
        max_shard_bytes = parse_bytes("max_shard_size", str(max_shard_size))
    options = ExportOptions(
        dtype=torch.float32,
        exclude_frozen=exclude_frozen_parameters,
        max_shard_bytes=max_shard_bytes,
        overwrite=True,
    )
    weights = SAFETENSORS if safe_serialization else TORCH_BIN
    with CheckpointReader(checkpoint_dir, None if tag is None else str(tag)) as reader:
        export_folder(reader, Path(output_dir), weights, options)


def load_state_dict_from_zero_checkpoint(
    model: Model, checkpoint_dir: str | Path, tag: str | None = None
) -> Model:
    """`model` on the CPU, with the checkpoint's fp32 values. It is a plain model without an engine."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
