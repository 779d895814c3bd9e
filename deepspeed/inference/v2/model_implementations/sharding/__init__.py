"""`deepspeed.inference.v2.model_implementations.sharding`: the part of a weight that a tensor rank holds.

Plain functions of tensors. xds's own tensor parallelism does not use them, see docs/tensor.md.
"""

from __future__ import annotations

from typing import Any

from .....missing import placeholder
from .attn import (
    attn_out_in_features,
    get_local_heads,
    qkv_out_features,
    shard_attn_out_param,
    shard_qkv_param,
)
from .mlp import (
    DEFAULT_SHARD_GRANULARITY,
    get_shard_endpoints,
    shard_embedding_param,
    shard_mlp_1_param,
    shard_mlp_2_param,
    shard_unembed_param,
    sharded_embedding_dim,
    sharded_intermediate_dim,
    sharded_unembed_dim,
)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "DEFAULT_SHARD_GRANULARITY",
    "attn_out_in_features",
    "get_local_heads",
    "get_shard_endpoints",
    "qkv_out_features",
    "shard_attn_out_param",
    "shard_embedding_param",
    "shard_mlp_1_param",
    "shard_mlp_2_param",
    "shard_qkv_param",
    "shard_unembed_param",
    "sharded_embedding_dim",
    "sharded_intermediate_dim",
    "sharded_unembed_dim",
]
