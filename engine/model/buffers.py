"""Selects the buffers that are cast to 16 bits together with the parameters.

Buffers that are used with parameters of that dtype are cast: running statistics, and tables that are added
to activations. These keep their dtype:

- Rotary frequencies. An angle is position x frequency, and with 8 bits of precision it is off by radians at
  position 1000. Their modules compute in fp32 and cast the result, as `transformers` does with
  `dtype=bfloat16`.
- Buffers that the model names in `_keep_in_fp32_modules_strict`.
- Buffers of modules without parameters whose dtype differs from the model's: their author chose it.
- Buffers of 8 bits, which are scales or have one elsewhere. Parameters of 8 bits keep their dtype too.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

FREQUENCIES = (
    "inv_freq"  # the names of rotary frequencies end so in transformers and most other libraries
)


def buffers_that_follow(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers to cast with the parameters. Call it before the parameters are cast."""
    usual = _usual_dtype(model)
    named = {
        name
        for module in model.modules()
        for name in getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    }
    found: dict[int, Tensor] = {}
    for module in model.modules():
        has_params = any(True for _ in module.parameters(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            is_kept_by_name = name.endswith(FREQUENCIES) or name in named
            is_chosen = not has_params and buffer.dtype != usual
            is_float = buffer.is_floating_point() and buffer.itemsize > 1
            if is_float and not is_kept_by_name and not is_chosen:
                found[id(buffer)] = buffer
    return list(found.values())


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    """The floating-point dtype that most elements of the model's parameters have."""
    numel: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point():
            numel[param.dtype] += param.numel()
    return numel.most_common(1)[0][0] if numel else None


__all__ = ["buffers_that_follow"]
