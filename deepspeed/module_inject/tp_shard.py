"""`deepspeed.module_inject.tp_shard`: the sizes of the parts of a dimension that tensor ranks divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder

_KEY_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads"),
    *("num_attention_heads", "n_heads", "attention_heads"),
)
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads")
_WIDTHS = ("n_embd", "hidden_size")
_IN_GRAINS = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # parts of names
_LAST = ("lm_head", "embed_out")  # whole names


@dataclass(frozen=True)
class AutoTPMeta:
    """What a model's config says of its heads. tp_grain_size: of other dimensions each part is a multiple."""

    num_kv_heads: int | None = None
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1

    @classmethod
    def from_model_config(cls, model_config: Any, tp_grain_size: int = 1) -> AutoTPMeta:
        """From a config of transformers, or its text_config; None knows nothing."""
        text = getattr(model_config, "text_config", None) or model_config

        def first(names: tuple[str, ...]) -> Any:
            known = (getattr(text, name, None) for name in names)
            return next((value for value in known if value is not None), None)

        return cls(first(_KEY_HEADS), first(_HEADS), first(_WIDTHS), tp_grain_size)


def _even(total: int, parts: int, rank: int) -> int:
    return total // parts + int(rank < total % parts)


@raises_theirs
def get_shard_size(
    total_size: int,
    mp_size: int,
    meta: AutoTPMeta,
    name: Any = None,
    rank: int | None = None,
    mp_group: Any = None,
) -> int:
    """The size of a rank's part: whole heads for attention, else whole grains. The last has the remainder.

    Args:
        name: of the layer; MLPs and the last layer are not divided by heads.
        rank: in the tensor group; None: this process's.
    Raises:
        UsageError: neither a rank nor a group is given, and the group is not that of all ranks.
    """
    if rank is None:
        if mp_group is None and dist.get_world_size() != mp_size:
            raise UsageError(
                f"get_shard_size(mp_size={mp_size}) with {dist.get_world_size()} ranks: pass rank or mp_group"
            )
        rank = dist.get_rank(mp_group)
    heads, text = meta.num_kv_heads, str(name)
    by_heads = text not in _LAST and not any(part in text for part in _IN_GRAINS)
    if heads is not None and by_heads and total_size % heads == 0:
        return total_size // heads * _even(heads, mp_size, rank)
    if total_size < meta.tp_grain_size:
        return _even(total_size, mp_size, rank)
    grains, rest = divmod(total_size, meta.tp_grain_size)
    return _even(grains, mp_size, rank) * meta.tp_grain_size + rest * int(rank == mp_size - 1)


def get_shard_size_list(
    total_size: int, mp_size: int, meta: AutoTPMeta, name: Any = None
) -> list[int]:
    """The sizes of all parts."""
    return [get_shard_size(total_size, mp_size, meta, name, rank) for rank in range(mp_size)]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["AutoTPMeta", "get_shard_size", "get_shard_size_list"]
