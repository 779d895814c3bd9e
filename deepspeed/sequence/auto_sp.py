"""`auto_wrap_model_for_sp`: cuts the tokens of a picture encoder over sequence ranks."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder
from .autosp_detector import _VIT_HAS_CLS_TOKEN, detect_model_sp_info
from .autosp_vit import UlyssesSPViTAttention

logger = logging.getLogger(__name__)


@raises_theirs
def auto_wrap_model_for_sp(model: nn.Module, process_group: Any) -> nn.Module:
    """Replace the attention of picture encoders in `model`, and return it.

    Warnings name what stays as it is: the attention of the text, and the projection of pictures.

    Raises:
        UsageError: the model has no attention of a known class.
    """
    info = detect_model_sp_info(model)
    if not (info.vit_attn_modules or info.llm_attn_modules):
        raise UsageError(
            f"auto_wrap_model_for_sp: no recognisable attention modules found in {type(model).__name__}; add "
            "the name of their class to autosp_detector._VIT_ATTN_CLASSNAMES or _LLM_ATTN_CLASSNAMES"
        )
    for name, module in info.vit_attn_modules:
        has_cls = _VIT_HAS_CLS_TOKEN.get(type(module).__name__, True)
        wrapped = UlyssesSPViTAttention(module, process_group, has_cls_token=has_cls)
        _set_module_by_name(model, name, wrapped)
    for name, module in info.llm_attn_modules:
        logger.warning(
            "auto_wrap_model_for_sp: %s (%s) is left as it is; pass the mpu of "
            "UlyssesSPAttentionHF.register_with_transformers to deepspeed.initialize",
            name,
            type(module).__name__,
        )
    if info.vision_projection_module is not None:
        logger.warning(
            "auto_wrap_model_for_sp: %s is left as it is; wrap it in an adapter of autosp_fusion",
            info.vision_projection_module[0],
        )
    return model


def _set_module_by_name(model: nn.Module, dotted_name: str, new_module: nn.Module) -> None:
    parent, _, child = dotted_name.rpartition(".")
    setattr(model.get_submodule(parent), child, new_module)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["auto_wrap_model_for_sp"]
