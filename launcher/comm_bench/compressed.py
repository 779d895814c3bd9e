"""Compares compressed with exact messages over the links of a group: time, bytes, and cost of packing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ...compression.legs import Buffer
from ...ops.comm.collectives import Collectives
from ...ops.comm.on_paper import PaperCollectives
from ...ops.libraries import load
from .cases import Case, RankContext
from .plan import Plan, binary, sizes, time_text
from .schemes import PART_NUMEL, Scheme, schemes_for
from .timing import check, timed

PAYS = 1.1  # less is the spread of the measurement


@final
@dataclass(frozen=True)
class Result:
    """One scheme at one size. Seconds of the slowest rank; bytes that a rank sends.

    size_bytes: of the whole buffer, in the dtype of the run. pack_seconds: of computing the messages and what
    arrives, part of the other two; None: nothing is packed. speed_up: the time of exact messages over its own.
    """

    scheme: str
    is_exact: bool
    size_bytes: int
    reduce_seconds: float
    gather_seconds: float
    reduce_bytes: int
    gather_bytes: int
    pack_seconds: float | None
    speed_up: float

    @property
    def seconds(self) -> float:
        return self.reduce_seconds + self.gather_seconds


def results_of(context: RankContext, plan: Plan, max_bytes: int) -> Iterator[list[Result]]:
    """The results of each size; none with one rank, which sends nothing."""
    if context.world_size == 1:
        return
    _load_kernels(context.collectives.device)
    least = PART_NUMEL * context.world_size
    seen = set()
    for asked in sizes(plan.min_bytes, max_bytes):
        numel = max(asked // (least * context.dtype.itemsize), 1) * least
        if numel not in seen:
            yield _at_size(context, plan, numel)
        seen.add(numel)


def _load_kernels(device: torch.device) -> None:
    load("cuda_quantize" if device.type == "cuda" else "cpu")


def _at_size(context: RankContext, plan: Plan, numel: int) -> list[Result]:
    found: list[Result] = []
    for scheme in schemes_for(context.dtype):
        exact_seconds = found[0].seconds if found else None
        found.append(_measured(context, plan, scheme, numel, exact_seconds))
    return found


def _measured(
    context: RankContext, plan: Plan, scheme: Scheme, numel: int, exact_seconds: float | None
) -> Result:
    seconds, sent = [], []
    size_bytes = numel * context.dtype.itemsize
    for what, case in zip(("reduce", "gather"), _cases(context, scheme, numel), strict=True):
        # the first call may send what later ones do not
        check(context, case, f"{what} of {scheme.name}, {binary(size_bytes)}")
        before = _sent(context.collectives)
        case.call()
        sent.append(_sent(context.collectives) - before)
        seconds.append(timed(context, case, plan).seconds)
    pack = None
    if not scheme.is_exact:
        where = context.collectives
        paper = PaperCollectives(where.rank, where.world_size, (), device=where.device)
        alone = _cases(context, scheme, numel, paper)
        for case in alone:
            case.fill()
        pack = sum(timed(context, case, plan).seconds for case in alone)
    total = sum(seconds)
    speed_up = (exact_seconds or total) / total
    return Result(
        scheme.name,
        scheme.is_exact,
        size_bytes,
        reduce_seconds=seconds[0],
        gather_seconds=seconds[1],
        reduce_bytes=sent[0],
        gather_bytes=sent[1],
        pack_seconds=pack,
        speed_up=speed_up,
    )


def _sent(collectives: Collectives) -> int:
    return sum(size for kind, size in collectives.sent_bytes.items() if kind != "control")


def _cases(
    context: RankContext, scheme: Scheme, numel: int, collectives: Collectives | None = None
) -> tuple[Case, Case]:
    """The two exchanges as cases. collectives: another group of as many ranks."""
    collectives = collectives or context.collectives
    dtype = scheme.dtype or context.dtype
    exchanges = scheme.make(collectives, Buffer(0, numel, (), dtype, is_sharded=True))
    rank, world_size = collectives.rank, collectives.world_size
    part = numel // world_size
    flat, full = (collectives.empty(numel, dtype).zero_() for _ in range(2))
    own, out = (collectives.empty(part, dtype).zero_() for _ in range(2))

    def summed() -> bool:
        want = torch.zeros_like(out)
        for peer in range(world_size):
            want += _signs(rank * part, want, peer)
        return torch.equal(out, want)

    def gathered() -> bool:
        parts = [(peer, collectives.shard_of(full, peer)) for peer in range(world_size)]
        return all(torch.equal(got, _signs(0, got, peer)) for peer, got in parts)

    def fill_reduce() -> None:
        flat.copy_(_signs(0, flat, rank))

    def fill_gather() -> None:
        own.copy_(_signs(0, own, rank))
        full.zero_()

    reduce = Case(fill_reduce, lambda: exchanges.reduce(flat, out), summed)
    return reduce, Case(fill_gather, lambda: exchanges.gather(own, full), gathered)


def _signs(start: int, like: Tensor, rank: int) -> Tensor:
    """1 and -1 in an order of this rank's own, from element `start` on."""
    index = torch.arange(start, start + like.numel(), device=like.device)
    return (((31 * index + 17 * rank) % 113 % 2) * 2 - 1).to(like.dtype)


HEADING = (
    f"{'scheme':<22}{'size':>9}{'reduce':>10}{'sent':>11}{'gather':>10}{'sent':>11}{'pack':>10}"
    f"{'speed-up':>10}"
)


def row_text(line: Result) -> str:
    """A line of the table."""
    pack = "-" if line.pack_seconds is None else time_text(line.pack_seconds)
    return (
        f"{line.scheme:<22}{binary(line.size_bytes):>9}{time_text(line.reduce_seconds):>10}"
        f"{binary(line.reduce_bytes):>11}{time_text(line.gather_seconds):>10}"
        f"{binary(line.gather_bytes):>11}{pack:>10}{line.speed_up:>9.2f}x"
    )


def sentence(found: Sequence[Result]) -> str:
    """Which scheme pays at one size."""
    exact = found[0]
    lossy = sorted((one for one in found if not one.is_exact), key=lambda one: -one.speed_up)
    best, size = lossy[0], binary(exact.size_bytes)
    times = f"{time_text(best.seconds)} instead of {time_text(exact.seconds)}"
    pack = f"{time_text(best.pack_seconds or 0.0)} of it for packing"
    if best.speed_up < PAYS:
        return f"{size}: no scheme pays: the fastest, {best.scheme}, takes {times}, {pack}"
    others = [f"{one.scheme} {one.speed_up:.1f}x" for one in lossy[1:] if one.speed_up >= PAYS]
    also = f"; these pay as well: {'; '.join(others)}" if others else ""
    return f"{size}: {best.scheme} pays most, {best.speed_up:.1f}x as fast: {times}, {pack}{also}"


__all__ = ["HEADING", "Result", "results_of", "row_text", "sentence"]
