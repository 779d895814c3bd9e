"""Arithmetic on 1-D buffers, without communication: sizes, sums, fingerprints, copies between devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .device import device_of
from .rounding import narrowed

ALIGN_BYTES = 64  # a cache line and the widest CPU vector, so that kernels need no partial vectors
ALIGN_NUMEL = 16  # ALIGN_BYTES of the narrowest master dtype (fp32)
CHUNK_NUMEL = 1 << 16  # on a CPU, a chunk of this size stays in the L2 cache between two passes


def align_up(numel: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not less than `numel`."""
    return -(-numel // multiple) * multiple


def cut(numel: int, parts: int) -> list[tuple[int, int]]:
    """[start, stop) of `parts` ranges of equal length over [0, numel). The last ones may be shorter."""
    length = -(-numel // parts)
    return [(min(i * length, numel), min((i + 1) * length, numel)) for i in range(parts)]


def overlap(span: tuple[int, int], within: tuple[int, int]) -> tuple[int, int]:
    """The intersection of the ranges `span` and `within`; an empty range in `within` where there is none."""
    start = min(max(span[0], within[0]), within[1])
    return start, max(start, min(span[1], within[1]))


def chunks(numel: int, on_cpu: bool) -> Iterator[slice]:
    """Slices that cover [0, numel): cache-sized on a CPU, the whole range elsewhere."""
    size = CHUNK_NUMEL if on_cpu else max(numel, 1)
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def sum_in_order(out: Tensor, parts: Sequence[Tensor], *, add: bool) -> None:
    """out = parts[0] + parts[1] + ... (with `add`: out += that sum), with the additions in this order.

    Shapes:  every tensor [n]; `parts` share one dtype, `out` may be wider.
    Each element of the result depends only on its own inputs, so it is the same for any bucket size.
    One part may be `out` itself (unless `add`). Computes in `out`'s dtype, one cache-sized chunk at a time.
    """
    on_cpu = out.device.type == "cpu"
    narrow = parts[0].dtype != out.dtype
    size = min(out.numel(), CHUNK_NUMEL) if on_cpu else out.numel()
    needs_total = add or any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = torch.empty(size, dtype=out.dtype, device=out.device) if needs_total else None
    wide = torch.empty(size, dtype=out.dtype, device=out.device) if narrow else None
    for piece in chunks(out.numel(), on_cpu):
        _sum_chunk(out[piece], [part[piece] for part in parts], total, wide, add)


def _sum_chunk(
    out: Tensor, parts: list[Tensor], total: Tensor | None, wide: Tensor | None, add: bool
) -> None:
    target = out if total is None else total[: out.numel()]
    if wide is not None:
        # torch's mixed-dtype add_ converts through a new buffer; converting here is 6 times faster
        wide = wide[: out.numel()]
        target.copy_(parts[0])
        for part in parts[1:]:
            target.add_(wide.copy_(part))
    elif len(parts) == 1:
        target.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target.add_(part)
    if total is not None:
        out.add_(target) if add else out.copy_(target)


def numel_of(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of this shape."""
    return math.prod(shape)


# -- the order of a tensor's elements in memory: row-major, or channels_last (dimension 1 comes last) ----


def is_channels_last(tensor: Tensor) -> bool:
    """The memory format is `channels_last` or `channels_last_3d` of torch, and not row-major as well."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=last)


def shaped(flat: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    """A view of `flat` [n], whose elements are in the order of memory, as a tensor of `shape`."""
    if not channels_last:
        return flat.view(tuple(shape))
    return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def flattened(tensor: Tensor, channels_last: bool) -> Tensor:
    """The elements [n] in that order: a view of a tensor that has it in memory, else a copy."""
    return (tensor.movedim(1, -1) if channels_last else tensor).reshape(-1)


# -- a fingerprint of a flat tensor: whether user code has written to it since the last one --------------
# Sum over the 64-bit words of word * odd weight, modulo 2^64. One changed word always changes it, because an
# odd weight has an inverse; several changed words go unnoticed with a probability of about 2^-64.

DEVICE_CHUNK_NUMEL = 1 << 23  # words per chunk on a GPU: 64 MiB of products
MULTIPLIER = 0x5851F42D4C957F2D  # odd, with mixed bits
CHUNK_FACTOR = 0x2545F4914F6CDD1D


def fingerprint(flat: Tensor) -> Tensor:
    """The fingerprint of a contiguous 1-D tensor, int64 [] on its device. No synchronization."""
    words = _words(flat)
    size = CHUNK_NUMEL if flat.device.type == "cpu" else DEVICE_CHUNK_NUMEL
    size = max(min(size, words.numel()), 1)
    weights = torch.arange(1, 2 * size, 2, dtype=torch.int64, device=flat.device) * MULTIPLIER
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in words.split(size):  # type: ignore[no-untyped-call]
        total = total * CHUNK_FACTOR + (piece * weights[: piece.numel()]).sum()
    return total


def _words(flat: Tensor) -> Tensor:
    """The same memory as integers, of 64 bits if its length allows that."""
    starts = int(flat.storage_offset()) * flat.element_size(), flat.numel() * flat.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if (
            all(start % dtype.itemsize == 0 for start in starts)
            and dtype.itemsize >= flat.element_size()
        ):
            return flat.view(dtype).to(torch.int64)
    return flat.view(torch.uint8).to(torch.int64)


# -- Values of the host on a device, without a wait of the host, and bytes of a device on the host -------
# torch.tensor(values, device=...) and Tensor.to(device) copy from pageable memory: the host waits until the
# stream has come so far. A copy from page-locked memory is only started; torch keeps it till it is done.


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without a wait. The host may write at once to a tensor that it has not pinned."""
    pins = device_of(device).pins_memory
    if tensor.device.type == "cpu" and pins:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=pins)


def bytes_to(device: torch.device, data: bytes) -> Tensor:
    """`data` as uint8 [len(data)] on `device`; not empty."""
    return moved(torch.frombuffer(bytearray(data), dtype=torch.uint8), device)


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor. The host waits for it."""
    return tensor.cpu().numpy().tobytes()


# -- values that user code wrote to parameters in the compute dtype: they are copied to the masters ------


def take_edits(master: Tensor, narrow: Tensor, *, rounds_away: bool = False) -> None:
    """Copy each element of `narrow` that differs from `master` rounded to `master`: a script has written it.

    Shapes: both [n]; `narrow` is bf16 or fp16, `master` wider. Reads both once, without synchronizing a device.
    Of the same dtype, `master` has no bits that `narrow` lacks: it becomes `narrow`.
    rounds_away: `narrow` is rounded as `upper_half`.
    """
    if master.dtype == narrow.dtype:
        master.copy_(narrow)
        return
    on_cpu = master.device.type == "cpu"
    for piece in chunks(master.numel(), on_cpu):
        wide, written = master[piece], narrow[piece]
        rounded = narrowed(wide, written.dtype, rounds_away=rounds_away)
        if on_cpu and _same_bits(rounded, written):
            continue  # on other devices this check would synchronize
        differs = rounded.view(torch.int16) != written.view(torch.int16)
        wide.copy_(torch.where(differs, written.to(wide.dtype), wide))


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Whether two 16-bit tensors are equal. Comparing 64-bit words, where aligned, is four times as fast."""
    starts = (int(tensor.storage_offset()), int(other.storage_offset()), tensor.numel())
    word = torch.int16 if any(start % 4 for start in starts) else torch.int64
    return torch.equal(tensor.view(word), other.view(word))
