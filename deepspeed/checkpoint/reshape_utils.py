"""`deepspeed.checkpoint.reshape_utils`: finds DeepSpeed's files in a folder, and joins nested states."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ..errors import in_their_form, raises_theirs
from ..missing import placeholder

_ZERO_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)")


@raises_theirs
def basic_folder_validation(dir: str) -> None:
    """Raise UsageError where `dir` is not a folder."""
    if not os.path.isdir(dir):
        raise UsageError(f"{dir} is not a folder: give the folder of a checkpoint")


def get_files(dir: str) -> list[str]:
    """The paths of all files below `dir`."""
    return [os.path.join(root, name) for root, _, names in os.walk(dir) for name in names]


def get_files_with_prefix(all_files: Sequence[str], prefix: str) -> list[str]:
    """The paths whose file names begin with `prefix`, sorted."""
    return sorted(path for path in all_files if os.path.basename(path).startswith(prefix))


def get_zero_files(dir: str) -> list[str]:
    """The files of optimizer states, by the rank's numbers: first of data, then of the model."""
    found = []
    for path in get_files(dir):
        match = _ZERO_FILE.match(os.path.basename(path))
        if match:
            found.append((int(match[1]), int(match[2]), path))
    return [path for _, _, path in sorted(found)]


@raises_theirs
def partition_data(data_list: Sequence[Any], num_partitions: int) -> list[list[Any]]:
    """`data_list` in so many consecutive parts of equal length. Raises UsageError: it does not divide."""
    size, rest = divmod(len(data_list), num_partitions)
    if rest:
        raise UsageError(
            f"{len(data_list)} items in {num_partitions} parts: the number of parts must divide it"
        )
    return [list(data_list[at * size : (at + 1) * size]) for at in range(num_partitions)]


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Two states of one form as one: tensors are joined along dimension 0, other values are those of the first.

    A tensor without dimensions is a value: a count of steps. Keys that only one has are kept.

    Raises:
        UsageError: the types, or the lengths of lists, differ; it names the keys on the way.
    """
    if type(state_a) is not type(state_b):
        raise _refused(
            f"Cannot merge two states of types {type(state_a)} and {type(state_b)}", key_list
        )
    if isinstance(state_a, Mapping):
        merged = {
            key: merge_state(value, state_b[key], (*key_list, str(key)))
            if key in state_b
            else value
            for key, value in state_a.items()
        }
        merged.update({key: value for key, value in state_b.items() if key not in state_a})
        return type(state_a)(merged)  # type: ignore[call-arg]
    if isinstance(state_a, list | tuple):
        if len(state_a) != len(state_b):
            lengths = f"a = {len(state_a)} b = {len(state_b)}"
            raise _refused(f"Cannot merge lists of different lengths, {lengths}", key_list)
        return type(state_a)(
            merge_state(a, b, key_list) for a, b in zip(state_a, state_b, strict=True)
        )
    if isinstance(state_a, Tensor) and state_a.dim():
        return torch.cat([state_a, state_b], 0)
    return state_a


def _refused(text: str, key_list: Sequence[str]) -> UsageError:
    where = ".".join(key_list)
    print(where)  # DeepSpeed prints it too
    with in_their_form():
        raise UsageError(f"{text}, at {where}" if where else text)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
