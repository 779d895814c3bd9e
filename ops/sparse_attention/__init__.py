"""Block-sparse attention: layouts, three ways to compute it, and the modules of DeepSpeed over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...utils import exports as _exports

if TYPE_CHECKING:
    from .attention import sparse_attention as sparse_attention
    from .layouts import BigBird as BigBird
    from .layouts import BSLongformer as BSLongformer
    from .layouts import Dense as Dense
    from .layouts import Fixed as Fixed
    from .layouts import LocalSlidingWindow as LocalSlidingWindow
    from .layouts import SparsityConfig as SparsityConfig
    from .layouts import Variable as Variable
    from .modules import BertSparseSelfAttention as BertSparseSelfAttention
    from .modules import SparseAttentionUtils as SparseAttentionUtils
    from .modules import SparseSelfAttention as SparseSelfAttention

# loaded on first use: reading a config imports .config and must not import torch
LOCATIONS = {
    "sparse_attention": ".attention",
    **dict.fromkeys(("BigBird", "BSLongformer", "Dense", "Fixed"), ".layouts"),
    **dict.fromkeys(("LocalSlidingWindow", "SparsityConfig", "Variable"), ".layouts"),
    **dict.fromkeys(
        ("BertSparseSelfAttention", "SparseAttentionUtils", "SparseSelfAttention"), ".modules"
    ),
}

__all__ = sorted(LOCATIONS)


def __getattr__(name: str) -> Any:
    return _exports.load(__name__, LOCATIONS, name)


def __dir__() -> list[str]:
    return _exports.names(__name__, LOCATIONS)
