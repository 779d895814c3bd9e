"""Random configs of layouts, and the digest of their layouts."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

CLASSES = ("Dense", "Fixed", "Variable", "BigBird", "BSLongformer", "LocalSlidingWindow")
COUNT, GROUP = 10_000, 200


def configs(  # noqa: C901 (a choice for each argument)
    seed: int = 0, count: int = COUNT
) -> Iterator[tuple[str, dict[str, Any], int, int]]:
    """The name of a class, its arguments, the tokens of a sequence, and the state of `random`."""
    rng = random.Random(seed)
    for number in range(count):
        name = rng.choice(CLASSES)
        block = rng.choice((1, 2, 16, 64))
        blocks = rng.randint(1, 24)
        attention = rng.choice(("bidirectional", "unidirectional"))
        more: dict[str, Any] = {"num_heads": rng.randint(1, 5), "block": block}
        if name != "LocalSlidingWindow":
            more["different_layout_per_head"] = rng.random() < 0.5
        if name != "Dense":
            more["attention"] = attention
        if name == "Fixed":
            more["num_global_blocks"] = rng.randint(1, 3)
            places = rng.randint(1, 4)
            more["num_local_blocks"] = more["num_global_blocks"] * places
            more["num_different_global_patterns"] = (
                rng.randint(1, places) if more["different_layout_per_head"] else 1
            )
        if name in ("Fixed", "Variable"):
            more["horizontal_global_attention"] = (
                attention == "bidirectional" and rng.random() < 0.5
            )
        if name == "Variable":
            more["local_window_blocks"] = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        if name in ("Variable", "BSLongformer"):
            starts = sorted(rng.sample(range(26), rng.randint(1, 3)))
            more["global_block_indices"] = starts
            if rng.random() < 0.5:
                ends = [start + rng.randint(1, 4) for start in starts]
                more["global_block_end_indices"] = ends
        if name == "Variable":
            more["num_random_blocks"] = rng.randint(0, min(4, blocks))
        if name == "BigBird":
            most = 1 if attention == "unidirectional" else min(4, blocks)
            more["num_random_blocks"] = rng.randint(0, most)
            more["num_global_blocks"] = rng.randint(1, min(3, blocks))
        if name in ("BigBird", "BSLongformer", "LocalSlidingWindow"):
            more["num_sliding_window_blocks"] = rng.randint(1, min(7, blocks))
        yield name, more, blocks * block, number


def digests(make: Any, count: int = COUNT) -> list[str]:
    """One digest for each GROUP layouts. make: from the name of a class and its arguments."""
    found, current = [], hashlib.sha256()
    for name, more, length, seed in configs(count=count):
        random.seed(seed)
        layout = make(name, more).make_layout(length)
        current.update(bytes(layout.shape) + layout.numpy().tobytes())
        current.update(repr(random.random()).encode())  # as many were drawn
        if (seed + 1) % GROUP == 0:
            found.append(current.hexdigest()[:16])
            current = hashlib.sha256()
    return found
