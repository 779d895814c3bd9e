"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: tiles of a sequence, with DeepSpeed's arguments.

There are three differences. Every tensor argument gets its gradient. Each weight gets one gradient per
backward, and `compute_params` may be None with ZeRO too. Backward of `TiledFusedLogitsLoss` computes the tiles
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ....tensor.tiles.run import run_in_tiles
from ....utils.errors import UsageError


@final
class TiledMLP:
    """An MLP over tiles of the sequence."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """`fn(self, x)` over `shards` tiles.

        Args:
            x: [..., tokens, width].
            compute_params: the weights that `fn` uses; by default the parameters of `self`.
        """

        def tile(x: Tensor) -> Tensor:
            return fn(self, x)

        weights = _weights(self, compute_params)
        output: Tensor = run_in_tiles(tile, [x], tiles=shards, dim=-2, weights=weights)
        return output


@final
class TiledFusedLogitsLoss:
    """A head and its loss over tiles of the sequence. `xds.tensor.tiled_loss` is faster for cross-entropy."""

    @staticmethod
    def apply(  # noqa: PLR0913 (DeepSpeed's arguments)
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """The mean or the sum of `fn(self, x, y)` over `shards` tiles of all tokens.

        Args:
            x: [batch, tokens, ...], of which a tile is [tokens, ...]; y: [batch, tokens, ...].
            mask: [batch, tokens]; `fn` gets its tile too, if it is not None.
            compute_params: the weights that `fn` uses. By default they are found by one more run of the first
                tile.
            output_reduction: "mean" of the tiles' values, whatever their lengths, or "sum".
        Raises:
            UsageError: shapes that do not fit, or an unknown reduction.
        """
        if output_reduction not in ("mean", "sum"):
            raise UsageError(
                f'TiledFusedLogitsLoss(output_reduction={output_reduction!r}): pass "mean" or "sum"'
            )
        parts = [x, y] if mask is None else [x, y, mask]
        shapes = [tuple(part.shape) for part in parts]
        if min(map(len, shapes)) < 2 or len({shape[:2] for shape in shapes}) > 1:
            raise UsageError(
                f"TiledFusedLogitsLoss: tensors of the shapes {shapes} need the same first two dimensions; "
                "pass x and y as [batch, tokens, ...] and mask as [batch, tokens]"
            )

        def tile(*tiles: Tensor) -> Tensor:
            return fn(self, *tiles).unsqueeze(0)

        rows = [part.flatten(0, 1) for part in parts]
        output: Tensor = run_in_tiles(tile, rows, tiles=shards, dim=0, weights=compute_params)
        return torch.sum(output) if output_reduction == "sum" else torch.mean(output)


def _weights(owner: Any, given: Sequence[Tensor] | None) -> list[Tensor] | None:
    if given is None:
        return list(owner.parameters()) if isinstance(owner, nn.Module) else None
    return list(given)
