"""Whether a checkpoint has everything that its manifest speaks of: one rule for `verify` and for a load.

values                 every element of every parameter and buffer, unless they were left out on request
optimizer states       of a parameter: each for all of its elements, and all that a step needs, or none
what was not sent      the errors of all ranks of a buffer, or of none
"""

from __future__ import annotations

from collections.abc import Iterator

from ...ops.flat import numel_of
from ...zero.checkpoint.ranges import ERROR, Catalogue, Piece, SavedFlat
from .manifest import Manifest

_STATES = [  # of optimizers with the same states for each parameter: a step needs all of a set
    {f"state/{key}" for key in keys}
    for keys in (
        {"step", "exp_avg", "exp_avg_sq"},
        {"step", "exp_avg", "exp_inf"},
        {"step", "square_avg"},
        {"step", "sum"},
        {"exp_avg"},
    )
]


def lacking(manifest: Manifest, catalogue: Catalogue, *, with_optimizer: bool = True) -> list[str]:
    """Names of what is in no file: "blocks.0.weight", or "blocks.0.weight (state/exp_avg)"."""
    found = catalogue.uncovered()
    for flat in manifest.flats if with_optimizer else ():
        if flat.kind == "param" and flat.trains:
            found += _lacking_of(flat, catalogue, len(manifest.holders_of(flat)))
    return list(dict.fromkeys(found))


def _lacking_of(flat: SavedFlat, catalogue: Catalogue, num_ranks: int) -> Iterator[str]:
    for slot in flat.slots:
        numel = numel_of(slot.whole_shape)
        if not numel:
            continue
        numels = catalogue.numels_of(Piece("param", slot.name, 0, numel, 0))
        keys = set(numels)
        states = {key for key in keys if key.startswith("state/")}
        # steps alone say nothing: Adafactor has states of other shapes beside them
        if states - {"state/step"}:
            keys |= min((one for one in _STATES if states <= one), key=len, default=set())
        if any(key.startswith(ERROR) for key in keys):
            keys |= {f"{ERROR}{rank}" for rank in range(num_ranks)}
        for key in sorted(keys - {"value"}):
            if numels.get(key, 0) < numel:
                yield f"{slot.name} ({key})"


__all__ = ["lacking"]
