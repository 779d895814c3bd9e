"""Compares two checkpoints element by element, independent of the layouts they were saved in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..io.reader import CheckpointReader, Saved

PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Difference:
    """One difference: the name of the value, and a description."""

    name: str
    text: str


def compare_bytes(a: CheckpointReader, b: CheckpointReader) -> int:
    """How many bytes of `a` a comparison reads."""
    return sum(one.size_bytes for _, one, _ in _pairs(a, b) if isinstance(one, Saved))


def differences(
    a: CheckpointReader, b: CheckpointReader, on_read: Callable[[int], None]
) -> Iterator[Difference]:
    """Differences of `a` and `b` in names, shapes, dtypes, elements, optimizer states and engine state.

    Elements are the same if they are equal or both NaN. Memory: a few pieces of 4 MiB.
    `on_read` is called with the bytes of each piece of `a`.
    """
    yield from _only(a.values, b.values)
    for name, one, two in _pairs(a, b):
        if isinstance(one, Saved) and isinstance(two, Saved):
            yield from _compare(a, b, name, one, two, on_read)
        elif not _same(one, two):
            yield Difference(name, f"{_shown(one)} in the first, {_shown(two)} in the second")
    yield from _compare_states(_flat(a.state()), _flat(b.state()))


def _only(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    yield from (Difference(name, "only in the first") for name in a if name not in b)
    yield from (Difference(name, "only in the second") for name in b if name not in a)


def _pairs(a: CheckpointReader, b: CheckpointReader) -> Iterator[tuple[str, Any, Any]]:
    """Values and optimizer states of the names that both have. A key that one lacks is None."""
    for name, one in a.values.items():
        if name not in b.values:
            continue
        yield name, one, b.values[name]
        here, there = a.states(name), b.states(name)
        for key in dict.fromkeys([*here, *there]):
            yield f"{name} ({key})", here.get(key), there.get(key)


def _compare(  # noqa: PLR0913
    a: CheckpointReader,
    b: CheckpointReader,
    name: str,
    one: Saved,
    two: Saved,
    on_read: Callable[[int], None],
) -> Iterator[Difference]:
    if one.shape != two.shape:
        yield Difference(name, f"{list(one.shape)} in the first, {list(two.shape)} in the second")
        return
    if one.dtype != two.dtype:
        yield Difference(name, f"{_dtype(one)} in the first, {_dtype(two)} in the second")
    count, largest = 0, 0.0
    pairs = zip(_pieces(a, one), _pieces(b, two), strict=True)
    for here, there in pairs:
        on_read(here.numel() * one.dtype.itemsize)
        if torch.equal(here, there):
            continue
        differ = here != there
        if here.is_floating_point():
            differ &= ~(here.isnan() & there.isnan())
        if differ.any():
            count += int(differ.sum())
            gap = (here.double() - there.double()).abs()[differ].nan_to_num(nan=torch.inf)
            largest = max(largest, float(gap.max()))
    if count:
        yield Difference(name, f"{count} of {one.numel} elements differ, by at most {largest:.3g}")


def _pieces(reader: CheckpointReader, saved: Saved) -> Iterator[Tensor]:
    """Pieces with the same number of elements for every dtype; 16-bit and 8-bit floats as fp32."""
    is_narrow = saved.dtype.is_floating_point and saved.dtype.itemsize < 4
    dtype = torch.float32 if is_narrow else saved.dtype
    return reader.pieces(saved, dtype, PIECE_BYTES // 8 * dtype.itemsize)


def _dtype(saved: Saved) -> str:
    return str(saved.dtype).removeprefix("torch.")


# -- the engine's state -------------------------------------------------------------------------------------


def _compare_states(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    yield from _only(a, b)
    for name, one in a.items():
        if name in b and not _same(one, b[name]):
            yield Difference(name, f"{_shown(one)} in the first, {_shown(b[name])} in the second")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists by path, as in "counters.global_steps"."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    if not items:
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found.update(_flat(inner, f"{name}.{key}" if name else str(key)))
    return found


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return torch.equal(one, two)
    if isinstance(one, Tensor | Saved) or isinstance(two, Tensor | Saved):
        return False
    is_nan = isinstance(one, float) and isinstance(two, float) and one != one and two != two
    return bool(one == two) or is_nan


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Saved) or (isinstance(value, Tensor) and value.ndim):
        return f"a tensor {list(value.shape)}"
    return str(value.item()) if isinstance(value, Tensor) else repr(value)
