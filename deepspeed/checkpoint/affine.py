"""`deepspeed.checkpoint.affine`: which blocks of a whole parameter each rank's shard consists of.

    piece   the same elements as a view of the whole parameter (source) and of a shard (dest)
    map     the shape of the parameter, the shapes of the shards, the pieces of each rank

Offsets and strides count elements, as in `torch.as_strided`. affine_transfer.py plans copies from one map to
another. Checkpoints of xds do not need maps: see the boxes in docs/design/checkpoints.md.
"""

from __future__ import annotations

from typing import Any

from ..missing import placeholder
from .affine_layouts import (
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from .affine_maps import (
    AFFINE_MAP_FORMAT_VERSION,
    SCALE_POWER_BY_STATE,
    AffinePiece,
    ParamAffineMap,
)
from .affine_maps import scaled as _scaled


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "AFFINE_MAP_FORMAT_VERSION",
    "SCALE_POWER_BY_STATE",
    "AffinePiece",
    "ParamAffineMap",
    "_scaled",
    "block_gather_map",
    "contiguous_split_map",
    "replicated_map",
    "segmented_map",
    "sub_param_map",
]
