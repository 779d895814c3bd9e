"""`deepspeed.inference.v2.model_implementations.sharding`: the part of a weight that a tensor rank holds.

Plain functions of tensors. xds's own tensor parallelism does not use them, see docs/tensor.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SOURCES = {
    "DEFAULT_SHARD_GRANULARITY": ".mlp",
    "attn_out_in_features": ".attn",
    "get_local_heads": ".attn",
    "get_shard_endpoints": ".mlp",
    "qkv_out_features": ".attn",
    "shard_attn_out_param": ".attn",
    "shard_embedding_param": ".mlp",
    "shard_mlp_1_param": ".mlp",
    "shard_mlp_2_param": ".mlp",
    "shard_qkv_param": ".attn",
    "shard_unembed_param": ".mlp",
    "sharded_embedding_dim": ".mlp",
    "sharded_intermediate_dim": ".mlp",
    "sharded_unembed_dim": ".mlp",
}

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    from .....missing import placeholder

    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    return placeholder(__name__, name)
