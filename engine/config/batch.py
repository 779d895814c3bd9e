"""The three batch sizes: train_batch_size = micro-batch x accumulation steps x data-parallel ranks.

DeepSpeed's rules: any two give the third. train_batch_size alone, or the micro-batch alone, means no
accumulation. gradient_accumulation_steps alone is not enough. 0 means "not given".
"""

from __future__ import annotations

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
WORLD_SIZE = "world size"  # what a message calls the data-parallel ranks where all ranks are
DATA_RANKS = "data-parallel ranks"  # ... and where a model has several pipeline stages


def solve_batch(
    train: int,
    micro: int,
    steps: int,
    ranks: int,
    auto: tuple[str, ...] = (),
    named: str = WORLD_SIZE,
) -> tuple[tuple[int, int, int], list[str]]:
    """((train, micro, steps), complaints). Sizes are in samples, and complete if there is no complaint.

    `auto`: the keys whose value is "auto", for the message; `named`: what it calls the data-parallel `ranks`.

    >>> solve_batch(32, 4, 0, 2)
    ((32, 4, 4), [])
    """
    if not train and not micro:
        alone = f" ({STEPS} = {steps} alone is not enough)" if steps else ""
        if auto:
            alone += f' ("auto" for {" and ".join(auto)} cannot be computed)'
        return (train, micro, steps), [
            f"{TRAIN}: no batch size is given{alone}; write {TRAIN} "
            f"(samples per step over all ranks) or {MICRO} (samples per rank and forward)"
        ]
    if train and micro and steps:
        return (train, micro, steps), _check_all(train, micro, steps, ranks, named)
    if not train:
        steps = steps or 1
        return (micro * steps * ranks, micro, steps), []
    if micro:
        return _divide_steps(train, micro, ranks, named)
    return _divide_micro(train, steps or 1, ranks, named, given=bool(steps))


def _check_all(train: int, micro: int, steps: int, ranks: int, named: str) -> list[str]:
    product = micro * steps * ranks
    if train == product:
        return []
    return [
        f"{TRAIN} = {train}: must equal {MICRO} ({micro}) x {STEPS} ({steps}) x {named} "
        f"({ranks}) = {product}; remove one of the three keys or set {TRAIN} to {product}"
    ]


def _divide_steps(
    train: int, micro: int, ranks: int, named: str
) -> tuple[tuple[int, int, int], list[str]]:
    chunk = micro * ranks
    if train % chunk == 0:
        return (train, micro, train // chunk), []
    return (train, micro, 0), [
        f"{TRAIN} = {train}: must be a multiple of {MICRO} ({micro}) x {named} ({ranks}) "
        f"= {chunk}; set {TRAIN} to {_nearby(train, chunk)}, or change {MICRO} or the "
        "number of ranks"
    ]


def _divide_micro(
    train: int, steps: int, ranks: int, named: str, *, given: bool
) -> tuple[tuple[int, int, int], list[str]]:
    chunk = steps * ranks
    if train % chunk == 0:
        return (train, train // chunk, steps), []
    factors = f"{STEPS} ({steps}) x {named} ({ranks}) = {chunk}"
    if not given:
        factors = f"the {named} ({ranks})"
    return (train, 0, steps), [
        f"{TRAIN} = {train}: must be a multiple of {factors}; set {TRAIN} to "
        f"{_nearby(train, chunk)}, or change the number of ranks"
    ]


def _nearby(train: int, chunk: int) -> str:
    below = train // chunk * chunk
    return f"{below} or {below + chunk}" if below else str(chunk)
