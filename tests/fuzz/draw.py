"""From a seed to a case. Every part has a stream of its own: leaving one out leaves the others as they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from . import (  # noqa: F401 (they fill the registry)
    features_config,
    features_loop,
    features_model,
    features_passes,
    features_writes,
)
from .case import BlockPlan, Case
from .feature import REGISTRY
from .model import KINDS
from .optimizers import OPTIMIZERS

# Weights of the code's threshold of 16 Ki elements (SMALL_NUMEL): width -> hidden sizes on both sides of it.
AROUND_SMALL = {127: (127, 129, 130), 128: (127, 128, 129), 113: (144, 145, 146)}
SMALL_WIDTHS = (2, 3, 5, 8, 16, 17, 24)
SMALL_HIDDEN = (1, 2, 7, 16, 31, 33, 64)


def draw(
    seed: int, *, drop: Sequence[str] = (), keep: Sequence[str] | None = None, **changes: Any
) -> Case:
    """The case of `seed`.

    Args:
        drop: features to leave out, and kinds of blocks to make plain.
        keep: where given, it has these features and kinds of blocks, wherever they fit, and no others.
        changes: other values of the case's fields, or of `zero`'s; `hidden` has one for each block.
    """
    case = _case(seed)
    if "hidden" in changes:
        case.blocks = [BlockPlan("plain", hidden) for hidden in changes.pop("hidden")]
    case.blocks = _with_kinds(case.blocks, drop, keep)
    for name, value in changes.items():
        if name in case.zero or name not in Case.__dataclass_fields__:
            case.zero[name] = value
        else:
            setattr(case, name, value)
    stream = random.Random(f"{seed} order")
    names = sorted(REGISTRY)
    stream.shuffle(names)
    for name in names:
        kind, own = REGISTRY[name], random.Random(f"{seed} {name}")
        chance = own.random()
        wanted = chance < kind.share if keep is None else name in keep
        if wanted and name not in drop and kind.fits(case) and _agrees(name, case):
            case.features.append(kind(case, own))
    return case


def _with_kinds(
    blocks: Sequence[BlockPlan], drop: Sequence[str], keep: Sequence[str] | None
) -> list[BlockPlan]:
    if keep is None:
        return [BlockPlan("plain" if b.kind in drop else b.kind, b.hidden) for b in blocks]
    kinds = [name for name in keep if name in KINDS and name not in drop] or ["plain"]
    return [BlockPlan(kinds[n % len(kinds)], b.hidden) for n, b in enumerate(blocks)]


def _agrees(name: str, case: Case) -> bool:
    chosen = {type(feature).__name__: feature for feature in case.features}
    if set(REGISTRY[name].excludes) & (chosen.keys() | {plan.kind for plan in case.blocks}):
        return False
    return not any(name in feature.excludes for feature in chosen.values())


def _case(seed: int) -> Case:
    pick = random.Random(f"{seed} case")
    world_size = pick.choice((1, 2, 2, 2, 2, 3))
    is_big = pick.random() < 0.5
    width = pick.choice(tuple(AROUND_SMALL) if is_big else SMALL_WIDTHS)
    blocks = _blocks(seed, width, is_big)
    return Case(
        seed=seed,
        world_size=world_size,
        stage=pick.choice((0, 1, 2, 3, 3)),
        precision=pick.choice(("fp32", "fp32", "fp32", "bf16", "bf16", "fp16")),
        accumulation=pick.choice((1, 1, 1, 2, 2, 3)),
        num_steps=pick.choice((2, 3, 4)),
        samples=pick.choice((2, 3)),
        width=width,
        blocks=blocks,
        optimizer=pick.choice(tuple(OPTIMIZERS)),
        lr=pick.choice((1e-3, 3e-3)),
        weight_decay=pick.choice((0.0, 0.1)),
        clipping=pick.choice((0.0, 0.0, 0.05, 0.5, 100.0)),
        zero=_zero(random.Random(f"{seed} zero"), width, blocks),
    )


def _blocks(seed: int, width: int, is_big: bool) -> list[BlockPlan]:
    """Kinds have streams of their own: a new one leaves the sizes of the fixed cases as they are."""
    pick, kinds = random.Random(f"{seed} hidden"), sorted(set(KINDS) - {"plain"})
    is_plain = pick.random() < 0.4
    plans = []
    for number in range(pick.choice((1, 2, 3, 3, 4, 6))):
        near = AROUND_SMALL[width] if is_big and pick.random() < 0.8 else SMALL_HIDDEN
        own = random.Random(f"{seed} kind {number}")
        kind = "plain" if is_plain or own.random() < 0.5 else own.choice(kinds)
        plans.append(BlockPlan(kind, pick.choice(near)))
    return plans


def _zero(pick: random.Random, width: int, blocks: Sequence[BlockPlan]) -> dict[str, Any]:
    """Every threshold on both sides of what a block has, zero, and the default."""
    unit = 2 * width * blocks[0].hidden + 3 * width + blocks[0].hidden
    near = (0, unit - 1, unit, unit + 1, 3 * unit)
    zero: dict[str, Any] = {
        "unit_min_numel": pick.choice((0, 0, 0, *near, 2_097_152)),
        "stage3_param_persistence_threshold": pick.choice((0, 0, 0, *near, 100_000)),
        "stage3_prefetch_bucket_size": pick.choice((*near, 50_000_000)),
        "stage3_max_reuse_distance": pick.choice((0, *near, 50_000_000)),
        "stage3_max_live_parameters": pick.choice((0, *near, 1_000_000_000, 1_000_000_000)),
        "overlap_comm": pick.random() < 0.75,
    }
    if pick.random() < 0.12:
        zero["divergent_graphs"] = True
    return zero
