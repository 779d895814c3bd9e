"""Finds the attention layers of a model of pictures and text, and what projects pictures into words.

The three tables hold class names of transformers. A script may add its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from ..missing import placeholder

# of picture encoders -> whether the first token stands for the whole picture, and each rank has it
_VIT_HAS_CLS_TOKEN = {
    **dict.fromkeys(("ViTAttention", "CLIPAttention"), True),
    **dict.fromkeys(("SiglipAttention", "InternVisionAttention", "Qwen2VLVisionAttention"), False),
    **dict.fromkeys(("Idefics2VisionAttention", "PaliGemmaVisionAttention"), False),
}
_VIT_ATTN_CLASSNAMES = set(_VIT_HAS_CLS_TOKEN)
_LLM_ATTN_CLASSNAMES = {
    *("LlamaAttention", "MistralAttention", "Qwen2Attention", "InternLM2Attention"),
    *("GemmaAttention", "Phi3Attention", "GPTNeoXAttention", "FalconAttention", "MptAttention"),
}
_VISION_PROJ_KEYWORDS = (  # parts of names
    *("visual_projection", "mm_projector", "vision_proj", "multi_modal_projector"),
    "img_projection",
)


@final
@dataclass
class SPModelInfo:
    """(name, module) of what was found."""

    vit_attn_modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    llm_attn_modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    vision_projection_module: tuple[str, nn.Module] | None = (
        None  # the first, which is the outermost
    )


def detect_model_sp_info(model: nn.Module) -> SPModelInfo:
    """Attention by class, the projection by a part of its name."""
    info = SPModelInfo()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _VIT_ATTN_CLASSNAMES:
            info.vit_attn_modules.append((name, module))
        elif kind in _LLM_ATTN_CLASSNAMES:
            info.llm_attn_modules.append((name, module))
        is_projection = any(part in name for part in _VISION_PROJ_KEYWORDS)
        if is_projection and info.vision_projection_module is None:
            info.vision_projection_module = name, module
    return info


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["SPModelInfo", "detect_model_sp_info"]
