"""`TiledLinear`: a linear layer as a grid of small ones, so that stage 3 can gather one tile at a time.

               in tile 0   in tile 1
    out tile 0  L00    +    L01 + bias 0   ──> first part of the output
    out tile 1  L10    +    L11 + bias 1   ──> the rest

The sum over the input tiles is computed tile after tile. Only the last one has the bias.
Source: DeepSpeed's class of this name, https://deepspeed.readthedocs.io/en/latest/zero3.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ....utils.errors import UsageError
from ....zero.access.gathered import GatheredParameters
from ...missing import placeholder


class TilingError(UsageError, RuntimeError):
    """The layer cannot be cut into so many tiles."""


class TiledLinear(nn.Module):
    """`nn.Linear(in_features, out_features)` as `out_splits` x `in_splits` tiles, `linears[out][in]`.

    Shapes:  input [..., in_features], or a sequence of its tiles; output [..., out_features], or its tiles.
    """

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            input_is_already_split: forward gets the tiles of the input.
            combine_out_splits: forward joins the tiles of the output.
            linear_cls: the class of a tile; gets `kwargs` too.
            init_linear: a layer whose values the tiles get.
        Raises:
            TilingError: fewer than one tile, or more than elements.
        """
        super().__init__()
        for name, splits, size in (
            ("in", in_splits, in_features),
            ("out", out_splits, out_features),
        ):
            if not 1 <= splits <= size:
                raise TilingError(
                    f"TiledLinear({name}_splits={splits}): must be from 1 to {name}_features, {size}"
                )
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.use_bias = bias
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds(in_features, in_splits)
        self.out_parts = _bounds(out_features, out_splits)
        widths = [stop - start for start, stop in pairwise(self.in_parts)]
        heights = [stop - start for start, stop in pairwise(self.out_parts)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and at == in_splits - 1, **kwargs)
                for at, width in enumerate(widths)
            )
            for height in heights
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        sums = [self._reduce(tiles, self._inputs(input_)) for tiles in self._rows()]
        return self._combined(sums) if self.combine_out_splits else sums

    def copy_params_from(self, other: Any) -> None:
        """Copy weight and bias of a whole layer. A collective where the tiles or the layer are sharded.

        Raises:
            UsageError: the layer has other sizes, or only one of the two has a bias.
        """
        self._check(other)
        with GatheredParameters(other), torch.no_grad():
            for row, (top, bottom) in zip(self._rows(), pairwise(self.out_parts), strict=True):
                for tile, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                    with GatheredParameters(tile, modifier_rank=0):
                        tile.weight.copy_(other.weight[top:bottom, left:right])
                        if tile.bias is not None:
                            tile.bias.copy_(other.bias[top:bottom])

    def _check(self, other: Any) -> None:
        whole = getattr(other.weight, "ds_shape", other.weight.shape)
        if tuple(whole) != (self.out_features, self.in_features):
            raise UsageError(
                f"TiledLinear.copy_params_from: the layer has a weight {tuple(whole)}, and needs "
                f"{(self.out_features, self.in_features)}"
            )
        if (other.bias is not None) != self.use_bias:
            raise UsageError(
                "TiledLinear.copy_params_from: only one of the two layers has a bias; build the tiles with "
                f"bias={other.bias is not None}"
            )

    def _rows(self) -> list[list[Any]]:
        return [list(row.children()) for row in self.linears]

    def _inputs(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if self.input_is_already_split:
            if len(input_) != self.in_splits:
                raise UsageError(
                    f"TiledLinear: the input has {len(input_)} tiles, and needs in_splits = {self.in_splits}"
                )
            return list(input_)
        assert isinstance(input_, Tensor)
        return split_tensor_along_last_dim(input_, self.in_parts)

    def _reduce(self, tiles: Sequence[Any], inputs: Sequence[Tensor]) -> Any:
        total: Any = None
        for tile, part in zip(tiles, inputs, strict=True):
            found = tile(part)
            total = found if total is None else total + found
        return total

    def _combined(self, sums: list[Any]) -> Any:
        return torch.cat(sums, dim=-1)

    def extra_repr(self) -> str:
        return f"tiles {self.out_splits} x {self.in_splits}"


class TiledLinearReturnBias(TiledLinear):
    """Tiles that return (output, bias): the bias is returned as well, not added. None: there is none."""

    def _reduce(
        self, tiles: Sequence[Any], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        total, bias = None, None
        for tile, part in zip(tiles, inputs, strict=True):
            found, bias = tile(part)
            total = found if total is None else total + found
        assert total is not None
        return total, bias

    def _combined(self, sums: list[Any]) -> tuple[Tensor, Tensor | None]:
        biases = [bias for _, bias in sums if bias is not None]
        outputs = torch.cat([output for output, _ in sums], dim=-1)
        return outputs, torch.cat(biases, dim=-1) if biases else None


def _bounds(numel: int, parts: int) -> list[int]:
    """Starts of the parts, and the end. The first parts have one more where they cannot be equal."""
    short, longer = divmod(numel, parts)
    return [at * short + min(at, longer) for at in range(parts + 1)]


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Views of `tensor` [..., n] between the bounds `partitions`, or copies."""
    parts = torch.split(tensor, [stop - start for start, stop in pairwise(partitions)], dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
