"""Which tokens each tile has."""

from __future__ import annotations

from ...utils.errors import UsageError


def tile_ranges(length: int, tiles: int) -> list[tuple[int, int]]:
    """The first token and the number of tokens of each tile, as `torch.chunk` cuts.

    All tiles but the last have ceil(length / tiles) tokens. There may be fewer tiles than asked for. An empty
    sequence is one empty tile.

    Raises:
        UsageError: `tiles` is not a positive integer.
    """
    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise UsageError(
            f"tiles={tiles!r}: a sequence is cut into a positive number of tiles; pass 1 or more"
        )
    size = max(1, -(-length // tiles))
    return [(start, min(size, length - start)) for start in range(0, max(1, length), size)]


def tiles_for(length: int, tile_length: int) -> int:
    """How many tiles of at most `tile_length` tokens `length` tokens need; at least 1.

    Raises:
        UsageError: `tile_length` is not positive.
    """
    if tile_length < 1:
        raise UsageError(
            f"tile_length={tile_length!r}: a tile has at least one token; pass 1 or more"
        )
    return max(1, -(-length // tile_length))


__all__ = ["tile_ranges", "tiles_for"]
