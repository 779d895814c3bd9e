"""Which buffers follow the parameters into 16 bits, and which would lose their meaning there.

A buffer follows if it is used with parameters of that dtype (running statistics, tables that are added to
activations). Rotary frequencies stay: an angle is position x frequency, and 8 bits of it are off by radians
at position 1000; their modules compute in fp32 and cast the result, as `transformers` does with
`dtype=bfloat16`. So do buffers that the model names in `_keep_in_fp32_modules_strict`, and those of modules
without parameters that have another dtype than the model: somebody chose it.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

FREQUENCIES = "inv_freq"  # how names of rotary frequencies end, in transformers and most others


def buffers_that_follow(model: nn.Module) -> list[Tensor]:
    """The floating buffers to cast when parameters are. Ask before the parameters change their dtype."""
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
            stays = name.endswith(FREQUENCIES) or name in named
            chosen = not has_params and buffer.dtype != usual
            if buffer.is_floating_point() and not stays and not chosen:
                found[id(buffer)] = buffer
    return list(found.values())


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    """The floating dtype of most elements of the model's parameters."""
    numel: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point():
            numel[param.dtype] += param.numel()
    return numel.most_common(1)[0][0] if numel else None


__all__ = ["buffers_that_follow"]
