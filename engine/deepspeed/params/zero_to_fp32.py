"""`deepspeed.utils.zero_to_fp32`: reads weights from an xds checkpoint, with DeepSpeed's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from ....utils.errors import UsageError
from ....utils.sizes import parse_bytes
from ...checkpoint.exports.export import SAFETENSORS, TORCH_BIN, ExportOptions, export_folder
from ...checkpoint.io.reader import CheckpointReader, Saved, chosen, get_fp32_state_dict
from ..errors import in_their_form, raises_theirs
from ..training.checkpoints import refuse_theirs


@final
class LazyTensor:
    """A tensor of a checkpoint: `contiguous()` reads it. It has no other values or operations."""

    def __init__(self, reader: CheckpointReader, saved: Saved) -> None:
        self._reader = reader
        self._saved = saved
        self.shape = torch.Size(saved.shape)
        self.dtype = torch.float32 if saved.dtype.is_floating_point else saved.dtype

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> Tensor:
        """The values on the CPU, read and verified at each call; numbers with a point in fp32."""
        return self._reader.read(self._saved, self.dtype)


@final
class LazyWeights(dict[str, LazyTensor]):
    """The state dict of an open checkpoint; tied names have one object."""

    def __init__(self, reader: CheckpointReader, *, exclude_frozen: bool) -> None:
        kept = chosen(reader, exclude_frozen=exclude_frozen)
        super().__init__({name: LazyTensor(reader, one) for name, one in kept.items()})
        self.update({other: self[name] for other, name in reader.tied.items() if name in self})
        self.reader = reader


Model = TypeVar("Model", bound=nn.Module)

OUTPUT_DTYPE_NAMES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def _dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    found = OUTPUT_DTYPE_NAMES.get(dtype.lower()) if isinstance(dtype, str) else dtype
    if found is None or found not in OUTPUT_DTYPE_NAMES.values():
        with in_their_form():
            raise UsageError(
                f"Unsupported output dtype: dtype = {dtype!r} must be one of {', '.join(OUTPUT_DTYPE_NAMES)}"
            )
    return found


@raises_theirs
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> Mapping[str, Any]:
    """`xds.get_fp32_state_dict`.

    Args:
        lazy_mode: nothing is read yet: the values have `shape`, `dtype` and `contiguous()`, which reads one.
            Memory then is one tensor. The files stay open as long as the result exists.
    """
    name = None if tag is None else str(tag)
    refuse_theirs(Path(checkpoint_dir), name)
    if lazy_mode:
        reader = CheckpointReader(checkpoint_dir, name)
        return LazyWeights(reader, exclude_frozen=exclude_frozen_parameters)
    return get_fp32_state_dict(checkpoint_dir, name, exclude_frozen_parameters)


@raises_theirs
def convert_zero_checkpoint_to_state_dict(  # noqa: PLR0913 (DeepSpeed's arguments)
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write pytorch_model.bin (or model.safetensors), or several and an index, to output_dir.

    Memory: a few MiB. An older export in the folder is replaced when the new one is complete.
    """
    if max_shard_size is None:
        max_shard_bytes = ExportOptions.max_shard_bytes << 40
    else:
        max_shard_bytes = parse_bytes("max_shard_size", str(max_shard_size))
    options = ExportOptions(
        dtype=_dtype_of(dtype),
        exclude_frozen=exclude_frozen_parameters,
        max_shard_bytes=max_shard_bytes,
        overwrite=True,
    )
    weights = SAFETENSORS if safe_serialization else TORCH_BIN
    found = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True
    )
    assert isinstance(found, LazyWeights)
    with found.reader as reader:
        export_folder(reader, Path(output_dir), weights, options)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: Model, checkpoint_dir: str | Path, tag: str | None = None
) -> Model:
    """`model` on the CPU, with the checkpoint's fp32 values. It is a plain model without an engine."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def main(args: list[str] | None = None) -> None:
    """`python zero_to_fp32.py CHECKPOINT OUT`; `save_checkpoint` puts this script beside the checkpoint."""
    parser = argparse.ArgumentParser(description="Writes the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that holds `latest` and the tags")
    parser.add_argument("output_dir", help="the folder to write")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file, such as 500MB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="default: the one in `latest`")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="without effect")
    given = parser.parse_args(args)
    convert_zero_checkpoint_to_fp32_state_dict(
        given.checkpoint_dir,
        given.output_dir,
        given.max_shard_size,
        given.safe_serialization,
        given.tag,
        given.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
