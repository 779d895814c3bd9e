"""The arguments of a block: its hidden states, and the part of the others that belongs to some tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn

from ...utils.errors import UsageError

HIDDEN = "hidden_states"  # the argument of transformers' blocks
KEY = "random_ltd"


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first positional tensor, or the first of the tuple there; else `hidden_states`, or any tensor."""
    first = args[0] if args else None
    if isinstance(first, tuple | list) and first:
        first = first[0]
    if isinstance(first, Tensor):
        return first
    named = [kwargs.get(HIDDEN), *kwargs.values()]
    return next((value for value in named if isinstance(value, Tensor)), None)


def names_of(module: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """The names of positional arguments of the module's forward; "" where it has none."""
    try:
        params = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        params = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [param.name for param in params if param.kind in kinds]
    return [*names[: len(args)], *[""] * (len(args) - len(names))]


@final
@dataclass(frozen=True)
class Kept:
    """The tokens that a layer computes: `rows` [samples, kept], ascending, of `length` tokens each.

    batch_first: hidden states are [samples, tokens, ...]; else [tokens, samples, ...].
    """

    rows: Tensor
    length: int
    batch_first: bool
    layer: str  # for messages

    @property
    def _samples(self) -> int:
        return self.rows.shape[0]

    @cached_property
    def _columns(self) -> Tensor:
        return self.rows.t().contiguous()

    # -- hidden states ------------------------------------------------------------------------------------

    def gather(self, x: Tensor) -> Tensor:
        """The kept tokens of hidden states."""
        return x.gather(*self._place(x))

    def scatter(self, x: Tensor, part: Tensor) -> Tensor:
        """Hidden states with `part` at the kept tokens."""
        return x.scatter(*self._place(x), part.to(x.dtype))

    def _place(self, x: Tensor) -> tuple[int, Tensor]:
        """The dimension of tokens, and the index there, [samples, kept, ...] or [kept, samples, ...]."""
        index = self.rows if self.batch_first else self._columns
        index = index.view(*index.shape, *[1] * (x.dim() - 2))
        return int(self.batch_first), index.expand(*index.shape[:2], *x.shape[2:])

    # -- what goes with them --------------------------------------------------------------------------------

    def part_of(self, name: str, value: Any, *, is_mask: bool = False) -> Any:
        """The part of another argument. Masks are gathered by rows and columns, positions by tokens.

        Raises:
            UsageError: it has a dimension of tokens at an unknown place.
        """
        if isinstance(value, tuple | list):
            parts = [self.part_of(name, one, is_mask=is_mask) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            return {key: self.part_of(name, one, is_mask=is_mask) for key, one in value.items()}
        is_mask = is_mask or "mask" in name
        if type(value).__name__ == "BlockMask":
            raise self._unknown(name, "a BlockMask, of which no part can be taken")
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if "cu_seq" in name:
            raise self._unknown(
                name, "where packed samples begin, which changes for each kept token"
            )
        if self.length not in value.shape:
            return value
        found = self._part(value, is_mask=is_mask)
        if found is None:
            raise self._unknown(name, f"a tensor {list(value.shape)}")
        return found

    def _part(self, value: Tensor, *, is_mask: bool) -> Tensor | None:
        """The part of a tensor that has a dimension of tokens; None: it is not known which one."""
        is_square = value.dim() >= 2 and value.shape[-1] == value.shape[-2] == self.length
        if value.dim() in (3, 4) and (is_mask or is_square):
            return self._part_of_mask(value)
        if not self.batch_first and not is_mask and value.dim() > 1 and len(value) == self.length:
            if value.shape[1] not in (1, self._samples):
                return None
            wide = value.expand(self.length, self._samples, *value.shape[2:])
            return wide.gather(*self._place(wide))
        if value.dim() > 1 and value.shape[0] in (1, self._samples) and not is_square:
            found = [dim for dim in (1, 2) if value.shape[dim:] and value.shape[dim] == self.length]
            return self._along(value, found[0]) if found else None
        return self._part_of_shared(value, is_square=is_square)

    def _part_of_mask(self, value: Tensor) -> Tensor | None:
        """Of [samples or 1, heads, queries, keys], or [samples * heads or 1, queries, keys]."""
        repeats, rest = divmod(value.shape[0], self._samples) if value.dim() == 3 else (1, 0)
        if value.dim() == 4 and value.shape[0] not in (1, self._samples):
            return None
        return (
            None if rest and value.shape[0] != 1 else self._rows_and_columns(value, max(repeats, 1))
        )

    def _part_of_shared(self, value: Tensor, *, is_square: bool) -> Tensor | None:
        """Of a tensor without samples: kept tokens differ by sample, so that only positions have one."""
        if is_square and value.dim() == 2 and self._samples > 1 and len(value) == self._samples:
            return self._along(value, 1)  # [samples, tokens]
        if self._samples == 1 and len(value) == self.length:
            found = value[self.rows[0]]
            return found[:, self.rows[0]] if is_square else found
        return value[self.rows] if value.dim() == 1 else None

    def _along(self, value: Tensor, dim: int) -> Tensor:
        """The kept tokens of a tensor [samples or 1, ...] along `dim`."""
        wide = value.expand(self._samples, *value.shape[1:])
        shape = [self._samples, *[1] * (wide.dim() - 1)]
        shape[dim] = self.rows.shape[1]
        index = self.rows.view(shape)
        sizes = list(wide.shape)
        sizes[dim] = self.rows.shape[1]
        return wide.gather(dim, index.expand(sizes))

    def _rows_and_columns(self, value: Tensor, repeats: int) -> Tensor:
        """Of a mask [samples * repeats or 1, ..., queries, keys]: kept queries and keys."""
        rows = self.rows if repeats == 1 else self.rows.repeat_interleave(repeats, 0)
        found = value.expand(len(rows), *value.shape[1:])
        for dim in (-2, -1):
            if found.shape[dim] != self.length:  # the same for all tokens
                continue
            shape = [len(rows), *[1] * (found.dim() - 1)]
            shape[dim] = rows.shape[1]
            sizes = list(found.shape)
            sizes[dim] = rows.shape[1]
            found = found.gather(dim, rows.view(shape).expand(sizes))
        return found

    def _unknown(self, name: str, what: str) -> UsageError:
        return UsageError(
            f"{KEY}: the argument {name or 'without a name'} of {self.layer} is {what}: it is not known which "
            "part of it belongs to the kept tokens; take the layer out of random_ltd_layer_id, or give it "
            "masks and positions [samples, tokens, ...]"
        )


__all__ = ["HIDDEN", "Kept", "hidden_of", "names_of"]
