"""`deepspeed.utils.zero_to_fp32`: reads weights from an xds checkpoint, with DeepSpeed's arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...engine.checkpoint.exports.export import SAFETENSORS, TORCH_BIN, ExportOptions, export_folder
from ...engine.checkpoint.io.reader import CheckpointReader, get_fp32_state_dict
from ...utils.errors import UsageError
from ...utils.sizes import parse_bytes
from ..checkpoint.theirs import refuse_theirs
from ..errors import in_their_form, raises_theirs
from ..missing import placeholder
from .lazy_weights import LazyWeights, WeightsInMemory

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


def to_torch_tensor(
    state_dict: Mapping[str, Tensor],
    return_empty_tensor: bool = False,
    dtype: str | torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Contiguous tensors of the same values; two names of one tensor keep one tensor.

    Args:
        return_empty_tensor: only shapes and dtypes matter, the values are not set.
        dtype: of floating-point tensors; None: as they are.
    Raises:
        UsageError: another dtype than fp32, fp16 and bf16.
    """
    cast = None if dtype is None else _dtype_of(dtype)
    made: dict[int, Tensor] = {}
    for value in state_dict.values():
        if id(value) in made:
            continue
        wanted = cast if cast is not None and value.dtype.is_floating_point else value.dtype
        if return_empty_tensor:
            made[id(value)] = torch.empty(value.shape, dtype=wanted)
        else:
            made[id(value)] = value.contiguous().to(wanted)
    return {name: made[id(value)] for name, value in state_dict.items()}


def atoi(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """A key to sort by in which numbers count as numbers: "zero_2" comes before "zero_10"."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


@raises_theirs
def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """The files of a folder that fit a pattern, in natural order.

    Raises:
        UsageError: there are none.
    """
    folder = Path(checkpoint_dir)
    found = sorted((str(path) for path in folder.glob(glob_pattern)), key=natural_keys)
    if not found:
        raise UsageError(
            f"no {glob_pattern!r} in {folder}: that is not a folder of DeepSpeed's files. For a checkpoint "
            "of xds call get_fp32_state_dict_from_zero_checkpoint"
        )
    return found


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """DeepSpeed's files of optimizer states, one of each rank."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """DeepSpeed's files of weights."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


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
    if isinstance(found, LazyWeights):
        with found.reader as reader:
            export_folder(reader, Path(output_dir), weights, options)
    else:  # a script has put its own function in place of the one above
        there: Any = WeightsInMemory(found)
        export_folder(there, Path(output_dir), weights, options)


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


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


if __name__ == "__main__":
    main()
