"""A layout by its rule in words: what a config says, as text that ops of a compiled graph can take."""

from __future__ import annotations

import json
import random
from functools import lru_cache

import torch
from torch import Tensor

from . import layouts

REMEMBERED = 256  # layers x lengths
CLASSES: dict[str, type[layouts.Rule]] = {
    "dense": layouts.Dense,
    "fixed": layouts.Fixed,
    "variable": layouts.Variable,
    "bigbird": layouts.BigBird,
    "bslongformer": layouts.BSLongformer,
    "local_sliding_window": layouts.LocalSlidingWindow,
}
AT_LEAST = "num_random_blocks", "num_sliding_window_blocks"  # blocks that a sequence must have


@lru_cache(maxsize=REMEMBERED)
def layout_of(rule: str, heads: int, blocks: int, layer: int) -> Tensor:
    """The layout [1 or heads, n, n] of a sequence of n blocks; not to be changed.

    Args:
        rule: JSON of a mode of the config, the arguments of its class, and the seed of random blocks.
        layer: draws its own random blocks, which are the same on every rank and in every run.

    A sequence with fewer blocks than the rule takes sees all of them.
    """
    more = json.loads(rule)
    kind, seed = CLASSES[more.pop("mode")], more.pop("seed")
    block = more["block"]
    each = more.get("different_layout_per_head", False)
    made = kind(num_heads=heads if each else 1, **more)
    needs = [more.get(name, 0) for name in AT_LEAST]
    if kind is layouts.BigBird:
        needs.append(more["num_global_blocks"])
    if blocks < max(needs):
        return torch.ones(1, blocks, blocks, dtype=torch.uint8)
    rng = random.Random(f"{seed} {layer}")
    return made.make_layout(blocks * block, rng).to(torch.uint8)


__all__ = ["CLASSES", "layout_of"]
