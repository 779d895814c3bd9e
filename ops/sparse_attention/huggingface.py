"""Sparse attention in models of transformers: an entry of its tables of attentions and of masks.

mask of the model ──> build: [B, L] of padding where the model's own mask is causal or whole; else all elements
attention         ──> attend: over the blocks of the layout; with a mask of elements all scores are computed
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from ...utils.transformers_version import need_transformers
from .attention import chosen, element_mask, masked_attention, sparse_attention
from .config import SparseAttention
from .layouts import layout_of
from .modules import SparseSelfAttention
from .on_cpu import blocks_attention

PREFIX = "xds_sparse"
NOT_HERE = "softcap", "s_aux", "sinks", "position_bias"  # arguments that change scores or their sum
_constant: Any = torch.compiler.assume_constant_result
_layout = _constant(layout_of)  # in a graph


def switch(model: nn.Module, section: SparseAttention) -> Callable[[], None]:
    """Let the models of transformers in `model` compute their attention as `section` says; returns the undo.

    A model that is built with `SparseSelfAttention` stays as it is.

    Raises:
        UsageError: the attention of this model cannot be switched.
    """
    found = check_switch(model)
    name = _register(section)
    former = [(config, config._attn_implementation) for config in found.values()]
    for config, _ in former:
        config._attn_implementation = name

    def undo() -> None:
        for config, own in former:
            config._attn_implementation = own

    return undo


def check_switch(model: nn.Module) -> dict[int, Any]:
    """id -> the configs of the models of transformers in `model` whose attention can be switched.

    {}: it is built with `SparseSelfAttention`.

    Raises:
        UsageError: as `switch`.
    """
    if any(isinstance(module, SparseSelfAttention) for module in model.modules()):
        return {}
    found: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(getattr(config, "_attn_implementation", None), str):
            found.setdefault(id(config), config)
            _check(module, config)
    if not found:
        raise UsageError(
            f"sparse_attention: {type(model).__name__} is no model of transformers, so its attention cannot be "
            "switched; build it with xds.ops.sparse_attention.SparseSelfAttention, or remove the section"
        )
    if not any(_looks_up(type(module)) for module in model.modules()):
        raise UsageError(
            f"sparse_attention: {type(model).__name__} has no attention that transformers can replace; remove "
            "the section, or take another model"
        )
    return found


def _looks_up(kind: type) -> bool:
    """The class, or one that it derives from, is in a file that takes transformers' table of attentions."""
    names = {each.__module__ for each in kind.__mro__} - {"transformers.modeling_utils"}
    return any(hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS") for name in names)


def _check(module: nn.Module, config: Any) -> None:
    can: Any = getattr(module, "_can_set_attn_implementation", None)
    name = type(module).__name__
    if can is not None and not can():
        raise UsageError(
            f"sparse_attention: {name} computes attention in its own code, which transformers cannot replace; "
            "remove the section, or take another model"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        raise UsageError(
            f"sparse_attention: {name} has cross-attention, and a layout is of one sequence; remove the "
            "section"
        )


def _register(section: SparseAttention) -> str:
    """Enter the attention of a section in transformers' tables. Returns its name, one for equal sections."""
    need_transformers("sparse_attention")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    text = f"{section.rule} {section.is_causal}"
    name = f"{PREFIX}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention_of(section))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, build)
    return name


def build(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> Tensor | None:
    """The mask for `attend`: [B, L] or None; or of elements, [B, 1, Lq, Lk].

    Raises:
        UsageError: a static cache, whose last keys are not there yet, or one that has dropped its first keys.
    """
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
    )

    is_plain = mask_function in (None, causal_mask_function, bidirectional_mask_function)
    if is_plain and q_length == kv_length and not kv_offset and _covers(attention_mask, kv_length):
        if attention_mask is None:
            return None
        is_traced = torch.compiler.is_compiling()
        return None if not is_traced and bool(attention_mask.all()) else attention_mask
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise UsageError(
            "sparse_attention: a static cache has keys after the queries; generate with a dynamic cache "
            "(cache_implementation=None)"
        )
    if kv_offset:
        raise UsageError(
            "sparse_attention: a cache of a sliding window has dropped its first keys, and layouts count from "
            "there; generate with use_cache=False"
        )
    more |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    given = () if mask_function is None else (mask_function,)
    mask: Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        *given,
        attention_mask=attention_mask,
        **more,
    )
    return mask


def _covers(mask: Tensor | None, length: int) -> bool:
    return mask is None or (mask.dim() == 2 and mask.shape[1] == length)


def attention_of(section: SparseAttention) -> Callable[..., tuple[Tensor, None]]:
    """The attention of one section of a config, as a function that transformers' tables hold."""
    rule, block, is_causal = section.rule, section.block, section.is_causal

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, H, Lq, D], [B, Hkv, Lk, D] -> [B, Lq, H, D].

        Raises:
            UsageError: the attention has an argument that changes scores, or is cross-attention.
        """
        for name in NOT_HERE:
            if kwargs.get(name) is not None:
                raise UsageError(
                    f"sparse_attention: {type(module).__name__} passes {name}, which changes scores; remove "
                    "the section for this model"
                )
        own = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", False) if own is None else own) or is_causal
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        layer = getattr(module, "layer_idx", None) or 0
        heads, length = query.shape[1], key.shape[2]
        is_whole = query.shape[2] == length and (
            attention_mask is None or attention_mask.dim() != 4
        )
        if is_whole and chosen("auto", query, dropout) == "blocks":
            out = blocks_attention(
                *(query, key, value, attention_mask, None, rule, layer, block),
                *(causal, scale, dropout),
            )
            return out.transpose(1, 2).contiguous(), None
        layout = _layout(rule, heads, (length + block - 1) // block, layer)
        more: Any = {"block": block, "is_causal": causal, "scale": scale, "dropout": dropout}
        if is_whole:
            out = sparse_attention(query, key, value, layout, padding=attention_mask, **more)
        else:
            out = _of_elements((query, key, value), attention_mask, layout, **more)
        return out.transpose(1, 2).contiguous(), None

    return attend


def _of_elements(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    layout: Tensor,
    *,
    block: int,
    is_causal: bool,
    **more: Any,
) -> Tensor:
    """With a mask [B, 1, Lq, Lk], or for the last queries of a sequence whose keys are in a cache."""
    query, key, value = tensors
    length, own = key.shape[2], query.shape[2]
    if own > length or (own != length and not is_causal):
        raise UsageError(
            f"sparse_attention: {own} queries and {length} keys are no causal self-attention; remove the "
            "section for this model"
        )
    rows = (length - own, length)
    seen = element_mask(layout.to(query.device), block, rows, length, is_causal=is_causal)
    bias = mask if mask is None or mask.dim() == 4 else mask[:, None, None]
    if bias is not None and bias.dtype == torch.bool:
        seen, bias = seen & bias, None
    return masked_attention(query, key, value, seen, bias=bias, **more)


__all__ = ["switch"]
