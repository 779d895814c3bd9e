"""Compares two checkpoints element by element, independent of the layouts they were saved in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..io.reader import CheckpointReader, Saved
from ..packing import pack

PIECE_NUMEL = 1 << 19


class Difference(NamedTuple):
    """One difference: the name of the value, a description, and the largest difference of its elements."""

    name: str
    text: str
    largest: float = 0.0


def compare_bytes(a: CheckpointReader, b: CheckpointReader) -> int:
    """How many bytes of `a` a comparison reads."""
    return sum(saved.size_bytes for _, saved, _ in _pairs(a, b) if isinstance(saved, Saved))


def differences(
    a: CheckpointReader, b: CheckpointReader, on_read: Callable[[int], None]
) -> Iterator[Difference]:
    """Differences of `a` and `b` in names, shapes, dtypes, elements, optimizer states and engine state.

    Elements are the same if they are equal or both NaN. Memory: a few pieces of 4 MiB.
    `on_read` is called with the bytes of each piece of `a`.
    """
    yield from _only(a.values, b.values)
    for name, first, second in _pairs(a, b):
        if isinstance(first, Saved) and isinstance(second, Saved):
            yield from _differ(name, a, b, first, second, on_read)
        else:
            yield from _unlike(name, first, second)
    first_state, second_state = _flat(a.state()), _flat(b.state())
    yield from _only(first_state, second_state)
    for name in first_state:
        if name in second_state:
            yield from _unlike(name, first_state[name], second_state[name])


def _only(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    yield from (Difference(name, "only in the first") for name in a if name not in b)
    yield from (Difference(name, "only in the second") for name in b if name not in a)


def _pairs(a: CheckpointReader, b: CheckpointReader) -> Iterator[tuple[str, Any, Any]]:
    """Values and optimizer states of the names that both have. A key that one lacks is None."""
    for name in a.values:
        if name in b.values:
            yield name, a.values[name], b.values[name]
            here, there = a.states(name), b.states(name)
            for key in dict.fromkeys([*here, *there]):
                yield f"{name} ({key})", here.get(key), there.get(key)


def _differ(
    name: str,
    a: CheckpointReader,
    b: CheckpointReader,
    first: Saved,
    second: Saved,
    on_read: Callable[[int], None],
) -> Iterator[Difference]:
    if first.shape != second.shape:
        text = f"{list(first.shape)} in the first, {list(second.shape)} in the second"
        yield Difference(name, text)
        return
    if first.dtype != second.dtype:
        names = [str(saved.dtype).removeprefix("torch.") for saved in (first, second)]
        yield Difference(name, f"{names[0]} in the first, {names[1]} in the second")
    count, largest = 0, 0.0
    for here, there in zip(_pieces(a, first), _pieces(b, second), strict=True):
        on_read(here.numel() * first.dtype.itemsize)
        if torch.equal(here, there):  # quick
            continue
        differ = ~_equal(here, there)
        if differ.any():
            count += int(differ.sum())
            exact = torch.complex128 if here.is_complex() else torch.float64
            gap = (here.to(exact) - there.to(exact)).abs()[differ].nan_to_num(nan=torch.inf)
            largest = max(largest, float(gap.max()))
    if count:
        text = f"{count} of {first.numel} elements differ, by at most {largest:.3g}"
        yield Difference(name, text, largest)


def _equal(first: Tensor, second: Tensor) -> Tensor:
    """Which elements are equal, or both NaN."""
    return (first == second) | ((first != first) & (second != second))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same values that can be compared: torch does not compare all 8-bit and 16-bit floats."""
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _pieces(reader: CheckpointReader, saved: Saved) -> Iterator[Tensor]:
    """Pieces with the same number of elements for every dtype."""
    dtype = _wide(saved.dtype)
    return reader.pieces(saved, dtype, PIECE_NUMEL * dtype.itemsize)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists by path, as in "counters.global_steps"."""
    pairs = enumerate(value) if isinstance(value, list | tuple) else ()
    items: list[tuple[Any, Any]] = [*(value.items() if isinstance(value, Mapping) else pairs)]
    if not items:
        return {name: value}
    leaves: dict[str, Any] = {}
    for key, inner in items:
        leaves.update(_flat(inner, f"{name}.{key}" if name else str(key)))
    return leaves


def _unlike(name: str, first: Any, second: Any) -> Iterator[Difference]:
    """The difference of two values, one of which is no tensor of a file."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        is_same = first.shape == second.shape
        is_same = is_same and bool(
            _equal(first.to(_wide(first.dtype)), second.to(_wide(second.dtype))).all()
        )
    elif isinstance(first, Tensor | Saved) or isinstance(second, Tensor | Saved):
        is_same = False
    else:  # packed values have one meaning for NaN and arrays
        is_same = _packed(first) == _packed(second)
    if not is_same:
        yield Difference(name, f"{_shown(first)} in the first, {_shown(second)} in the second")


def _packed(value: Any) -> Any:
    return pack(value, "", lambda tensor: str(tensor.tolist()))


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Saved) or (isinstance(value, Tensor) and value.ndim):
        return f"a tensor {list(value.shape)}"
    return str(value.item()) if isinstance(value, Tensor) else repr(value)
