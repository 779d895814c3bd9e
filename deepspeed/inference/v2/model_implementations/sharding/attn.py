"""Parts of attention: each rank has whole query heads, and the key and value heads that these use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ......utils.errors import UsageError
from .....errors import raises_theirs
from .....missing import placeholder
from .mlp import get_shard_endpoints


def _heads(rank: int, num: int, n_q: int, n_kv: int | None) -> tuple[slice, slice]:
    """The query heads and the key and value heads of a rank."""
    n_kv = n_q if n_kv is None else n_kv
    if n_q < num:
        raise UsageError(f"{n_q} query heads on {num} ranks: each rank needs one; use fewer ranks")
    if n_q == n_kv:
        mine = slice(*get_shard_endpoints(n_q, rank, num, granularity=1))
        return mine, mine
    if n_q % n_kv or (n_kv % num and num % n_kv):
        raise UsageError(
            f"{n_q} query heads and {n_kv} key and value heads on {num} ranks: the query heads must be a "
            "multiple of the others, and these a multiple or a divisor of the ranks"
        )
    per_kv = n_q // n_kv
    if n_kv >= num:
        kv = slice(*get_shard_endpoints(n_kv, rank, num, granularity=1))
        return slice(kv.start * per_kv, kv.stop * per_kv), kv
    sharers = num // n_kv
    start, end = get_shard_endpoints(per_kv, rank % sharers, sharers, granularity=1)
    head = rank // sharers
    return slice(head * per_kv + start, head * per_kv + end), slice(head, head + 1)


def _count(heads: slice) -> int:
    return int(heads.stop - heads.start)


@raises_theirs
def get_local_heads(
    shard_rank: int, num_shards: int, n_heads_q: int, n_heads_kv: int | None = None
) -> tuple[int, int]:
    """How many query heads a rank has, and how many key and value heads.

    Args:
        n_heads_kv: None: as many as query heads.
    Raises:
        UsageError: a rank would have no query head, or the heads cannot be divided.
    """
    q, kv = _heads(shard_rank, num_shards, n_heads_q, n_heads_kv)
    return _count(q), _count(kv)


@raises_theirs
def shard_qkv_param(
    param: Tensor,
    shard_rank: int,
    num_shards: int,
    head_size: int,
    n_heads_q: int | None = None,
    n_heads_kv: int | None = None,
) -> Tensor:
    """Rows of the layer that makes queries, keys and values, whose rows are in this order.

    [(q + 2 kv) head_size, model] or a bias -> the same of the rank's heads.

    Raises:
        UsageError: the shape does not fit the heads, or they cannot be divided.
    """
    if n_heads_q is None:
        if n_heads_kv is not None:
            raise UsageError("n_heads_kv without n_heads_q: pass both, or none")
        n_heads_q, rest = divmod(param.shape[0], 3 * head_size)
        if rest:
            raise UsageError(
                f"{param.shape[0]} rows: needs 3 x heads x head_size = {head_size} rows; pass n_heads_q"
            )
    n_kv = n_heads_q if n_heads_kv is None else n_heads_kv
    q, kv = _heads(shard_rank, num_shards, n_heads_q, n_kv)
    sizes = [n * head_size for n in (n_heads_q, n_kv, n_kv)]
    if param.shape[0] != sum(sizes):
        raise UsageError(f"{param.shape[0]} rows: these heads have {sum(sizes)}")
    parts = zip(torch.split(param, sizes), (q, kv, kv), strict=True)
    return torch.cat([part[mine.start * head_size : mine.stop * head_size] for part, mine in parts])


@raises_theirs
def qkv_out_features(
    in_features: int,
    shard_rank: int,
    num_shards: int,
    head_size: int,
    n_heads_q: int | None = None,
    n_heads_kv: int | None = None,
) -> int:
    """The rows of `shard_qkv_param`."""
    n_q = in_features // head_size if n_heads_q is None else n_heads_q
    if n_q * head_size != in_features:
        raise UsageError(f"in_features = {in_features}: {n_q} heads of {head_size} have others")
    q, kv = _heads(shard_rank, num_shards, n_q, n_heads_kv)
    return (_count(q) + 2 * _count(kv)) * head_size


@raises_theirs
def shard_attn_out_param(
    param: Tensor,
    shard_rank: int,
    num_shards: int,
    head_size: int,
    n_heads_q: int | None = None,
    n_heads_kv: int | None = None,
) -> Tensor | None:
    """Columns of the layer after attention: [model, q head_size] -> [model, q_local head_size].

    Returns:
        None for a bias on other ranks than 0: the ranks' results are added.
    """
    if param.ndim == 1:
        return param if shard_rank == 0 else None
    n_q = param.shape[-1] // head_size if n_heads_q is None else n_heads_q
    q, _ = _heads(shard_rank, num_shards, n_q, n_heads_kv)
    return param[..., q.start * head_size : q.stop * head_size].contiguous()


@raises_theirs
def attn_out_in_features(
    out_features: int,
    shard_rank: int,
    num_shards: int,
    head_size: int,
    n_heads_q: int | None = None,
    n_heads_kv: int | None = None,
) -> int:
    """The columns of `shard_attn_out_param`."""
    n_q = out_features // head_size if n_heads_q is None else n_heads_q
    return _count(_heads(shard_rank, num_shards, n_q, n_heads_kv)[0]) * head_size


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
