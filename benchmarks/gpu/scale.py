"""The sizes that are measured, and tiny ones for a dry run and a first look."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from offload.model import Shape  # noqa: E402  (a GPT with tied embeddings and fused attention)

FULL = {
    "125M": Shape(12, 768, 12, context=2048),
    "350M": Shape(24, 1024, 16, context=2048),
    "1.3B": Shape(24, 2048, 16, context=2048),
    "6.7B": Shape(32, 4096, 32, context=2048),
}
TINY = {name: Shape(2, 32, 2, context=16, vocabulary=64) for name in FULL}
STATE_BYTES = 18  # a parameter: bf16, and fp32 gradient, master and two moments
WIDE = Shape(1, 4096, 32, context=2048)  # a layer of the search for the largest model
WIDE_TINY = Shape(1, 32, 2, context=16, vocabulary=64)


def shape_of(size: str, *, small: bool) -> Shape:
    """The model called `size`; `wide-N`: N layers of the search. small: tiny ones of these names."""
    if size.startswith("wide-"):
        one = WIDE_TINY if small else WIDE
        layers = int(size.partition("-")[2])
        return Shape(layers, one.width, one.heads, one.context, one.vocabulary)
    return (TINY if small else FULL)[size]


def recomputes(size: str) -> bool:
    """Models whose blocks are recomputed in backward."""
    return size == "6.7B" or size.startswith("wide-")


def sequences(size: str, total_bytes: int) -> int:
    """Sequences in a step: so many that two contestants fit the device at once, except 6.7B."""
    if total_bytes < 20 * 2**30 or size.startswith("wide-"):
        return 1
    big = total_bytes > 100 * 2**30
    return {"125M": 16, "350M": 8, "1.3B": 4 if big else 2, "6.7B": 2}[size]
