"""Modules whose forward runs in tiles."""

from __future__ import annotations

from typing import Any, TypeVar, final

from torch import Tensor, nn

from ...utils.errors import UsageError
from .ranges import tiles_for
from .run import run_in_tiles

Module = TypeVar("Module", bound=nn.Module)


def tiled_mlp(module: nn.Module, x: Tensor, tiles: int) -> Any:
    """`module(x)`, computed for one tile of the tokens at a time; see `run_in_tiles`.

    Args:
        module: an MLP, or any other module that treats each token alone.
        x: [..., tokens, width].
        tiles: how many tiles.

    Returns:
        The module's output, [..., tokens, any width].
    """
    return run_in_tiles(module, [x], tiles=tiles, dim=-2)


@final
class TiledForward:
    """The forward of a module, in tiles. `tile_forward` puts it in the place of the module's own."""

    def __init__(self, module: nn.Module, tile_length: int | None) -> None:
        """tile_length: tokens of a tile; None: as many as the input is wide."""
        self._module, self._forward, self.tile_length = module, module.forward, tile_length

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Tensors with the tokens of `x` [..., tokens, width] are cut too; the rest is not."""
        given, module_forward = [*args, *kwargs.values()], self._forward
        is_cut = [
            isinstance(v, Tensor) and v.dim() > 1 and v.shape[:-1] == x.shape[:-1] for v in given
        ]

        def forward(x: Tensor, *values: Any) -> Any:
            cut, rest = iter(values), iter(values[sum(is_cut) :])
            in_order = [next(cut) if one else next(rest) for one in is_cut]
            named = dict(zip(kwargs, in_order[len(args) :], strict=True))
            return module_forward(x, *in_order[: len(args)], **named)

        return run_in_tiles(
            forward,
            [x, *(v for v, one in zip(given, is_cut, strict=True) if one)],
            others=[v for v, one in zip(given, is_cut, strict=True) if not one],
            tiles=tiles_for(x.shape[-2], self.tile_length or x.shape[-1]),
            dim=-2,
            weights=list(self._module.parameters()),
        )


def tile_forward(module: Module, tile_length: int | None) -> Module:
    """Let `module` run in tiles of `tile_length` tokens from now on. Names of parameters do not change.

    Call it before `xds.initialize`. `del module.forward` undoes it.

    Args:
        module: an MLP, or any other module that treats each token alone. Its first argument has the shape
            [..., tokens, width]. Further tensors with the same tokens, such as a residual, are cut as well.
        tile_length: tokens of a tile, in dimension -2. Memory does not grow with the sequence. None: as many
            as the input is wide, so that a tile's input is a square matrix (Bekman et al., section 3.1).

    Returns:
        The same module.

    Raises:
        UsageError: the module runs in tiles already, or `tile_length` is below 1.
    """
    if tile_length is not None:
        tiles_for(1, tile_length)
    if isinstance(module.forward, TiledForward):
        raise UsageError(
            f"tile_forward({type(module).__name__}): it runs in tiles of {module.forward.tile_length} already; "
            "call tile_forward once for each module"
        )
    module.forward = TiledForward(module, tile_length)
    return module


__all__ = ["TiledForward", "tile_forward", "tiled_mlp"]
