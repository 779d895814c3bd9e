"""`deepspeed.checkpoint.utils`: copies of states for `torch.save`, and the names of DeepSpeed's files."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ..missing import placeholder

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """A copy of `item` in which each tensor has memory of its own, on `device`.

    `torch.save` writes the whole storage of a view, and parameters of an engine are views of large buffers.

    Args:
        item: a tensor, or lists, tuples and dicts of them, nested; all else is kept as it is. Two names of one
            tensor stay one tensor.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, made: dict[int, Tensor]) -> Any:
    if isinstance(item, Tensor):
        if id(item) not in made:
            made[id(item)] = item.detach().to(device, copy=True)
        return made[id(item)]
    if isinstance(item, dict):
        return type(item)((key, _clone(value, device, made)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(
        item, "_fields"
    ):  # a named tuple takes its values one by one
        return type(item)(*(_clone(value, device, made) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_clone(value, device, made) for value in item)
    return item


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """The file of the weights of a model-parallel rank, such as "00"."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(
    base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int
) -> str:
    """The file in which DeepSpeed stores the optimizer states of a rank."""
    return os.path.join(
        base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
    )


def get_layer_ckpt_name_for_rank(
    base_folder: str | os.PathLike[str], layer_id: str, tp_rank: int
) -> str:
    """The file in which DeepSpeed stores a layer of a pipeline."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
