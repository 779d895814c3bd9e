"""Parts of MLPs and embeddings: a dimension is divided in blocks, and the first ranks get one more."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ......utils.errors import UsageError
from .....errors import raises_theirs
from .....missing import placeholder

DEFAULT_SHARD_GRANULARITY = 32  # channels of a block


@raises_theirs
def get_shard_endpoints(
    dim_size: int, shard_rank: int, num_shards: int, granularity: int = DEFAULT_SHARD_GRANULARITY
) -> tuple[int, int]:
    """The first index of the rank's part, and the index after its last.

    Args:
        granularity: of the blocks.
    Raises:
        UsageError: dim_size is not a number of blocks.
    """
    if dim_size % granularity:
        raise UsageError(
            f"a dimension of {dim_size} in blocks of {granularity}: it must be divisible by the block's size"
        )
    per_rank, extra = divmod(dim_size // granularity, num_shards)
    start = shard_rank * per_rank + min(shard_rank, extra)
    end = start + per_rank + int(shard_rank < extra)
    return start * granularity, end * granularity


def _size(dim_size: int, shard_rank: int, num_shards: int, granularity: int) -> int:
    start, end = get_shard_endpoints(dim_size, shard_rank, num_shards, granularity)
    return end - start


def _part(param: Tensor, dim: int, shard_rank: int, num_shards: int, granularity: int) -> Tensor:
    if num_shards == 1:
        return param
    start, end = get_shard_endpoints(param.size(dim), shard_rank, num_shards, granularity)
    return param.narrow(dim, start, end - start).contiguous()


def shard_mlp_1_param(
    param: Tensor, shard_rank: int, num_shards: int, gated: bool = False, is_moe: bool = False
) -> Tensor:
    """Rows of the first layer: [out, in] -> [out_local, in], a bias [out] -> [out_local].

    Args:
        gated: rows of gate and value are in turns, so a block has twice as many.
        is_moe: a dimension of experts is in front.
    """
    dim = -1 if param.ndim == 1 + int(is_moe) else -2
    return _part(param, dim, shard_rank, num_shards, DEFAULT_SHARD_GRANULARITY * (1 + int(gated)))


def shard_mlp_2_param(
    param: Tensor, shard_rank: int, num_shards: int, is_moe: bool = False
) -> Tensor | None:
    """Columns of the second layer: [out, in] -> [out, in_local]; the whole bias on rank 0, else None."""
    if param.ndim == 1 + int(is_moe):
        return param if shard_rank == 0 else None
    return _part(param, -1, shard_rank, num_shards, DEFAULT_SHARD_GRANULARITY)


def sharded_intermediate_dim(intermediate_size: int, num_shards: int, shard_rank: int) -> int:
    """The rank's channels between the two layers."""
    return _size(intermediate_size, shard_rank, num_shards, DEFAULT_SHARD_GRANULARITY)


def shard_embedding_param(param: Tensor, shard_rank: int, num_shards: int) -> Tensor:
    """Channels of an embedding: [vocabulary, model] -> [vocabulary, model_local]."""
    return _part(param, -1, shard_rank, num_shards, DEFAULT_SHARD_GRANULARITY)


def sharded_embedding_dim(embedding_size: int, shard_rank: int, num_shards: int) -> int:
    return _size(embedding_size, shard_rank, num_shards, DEFAULT_SHARD_GRANULARITY)


def shard_unembed_param(param: Tensor, shard_rank: int, num_shards: int) -> Tensor:
    """Words of the last layer: [vocabulary, model] -> [vocabulary_local, model]."""
    return _part(param, -2, shard_rank, num_shards, 1)


def sharded_unembed_dim(vocab_size: int, shard_rank: int, num_shards: int) -> int:
    return _size(vocab_size, shard_rank, num_shards, 1)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
