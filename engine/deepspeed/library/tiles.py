"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: tiles of a sequence, with DeepSpeed's arguments.

There are three differences. Every tensor argument gets its gradient. Each weight gets one gradient per
backward, and `compute_params` may be None with ZeRO too. Backward of `TiledFusedLogitsLoss` computes the tiles
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ....tensor.tiles.run import run_in_tiles
from ....utils.errors import UsageError


def sequence_tiled_compute(  # noqa: PLR0913 (DeepSpeed's arguments)
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """`fn(**kwargs_to_shard, **kwargs_to_pass)`, computed for one of `shards` tiles at a time.

    Args:
        seqlen: tokens of the sequence, in dimension 1 of all `kwargs_to_shard`.
        grad_requiring_tensor_key: without effect, all tensors get their gradients.
        compute_params: the weights that `fn` uses. By default they are found by one more run of the first tile.
        output_unshard_dimension: the dimension in which outputs are joined. 0: `fn` returns a scalar, which
            becomes one element of [tiles].
        output_reduction: "mean" or "sum" of the joined output, or None for all of it.
    Raises:
        UsageError: a length that is not `seqlen`, or an unknown reduction.
    """
    if output_reduction not in (None, "mean", "sum"):
        raise UsageError(
            f'sequence_tiled_compute(output_reduction={output_reduction!r}): pass None, "mean" or "sum"'
        )
    keys, passed = list(kwargs_to_shard), list(kwargs_to_pass)
    for key, value in kwargs_to_shard.items():
        if value.shape[1] != seqlen:
            raise UsageError(
                f"sequence_tiled_compute(seqlen={seqlen}): {key!r} of shape {tuple(value.shape)} needs "
                f"{seqlen} tokens in dimension 1; pass the length of the sequences"
            )

    def tile(*values: Any) -> Tensor:
        output = fn(**dict(zip([*keys, *passed], values, strict=True)))
        return output.unsqueeze(0) if output_unshard_dimension == 0 else output

    output: Tensor = run_in_tiles(
        tile,
        list(kwargs_to_shard.values()),
        others=list(kwargs_to_pass.values()),
        tiles=shards,
        output_dim=output_unshard_dimension,
        weights=compute_params,
    )
    return output if output_reduction is None else getattr(output, output_reduction)()


@final
class SequenceTiledCompute:
    """`sequence_tiled_compute` with flat arguments."""

    @staticmethod
    def apply(  # noqa: PLR0913 (DeepSpeed's arguments)
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """`args` are the values of `keys_to_shard`, then those of `keys_to_pass`."""
        count = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[:count], strict=True)),
            dict(zip(keys_to_pass, args[count:], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


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
