"""The messages of ZeRO++ for one group: which of them are in few bits, and which stay inside a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from ...ops.comm.backend import SingleRank
from ...ops.comm.collectives import Collectives
from ...ops.comm.mesh_groups import Levels, Split, block_length
from ...utils.errors import UsageError
from ..config import Loco
from ..scheme import Buffer, CommScheme, ExactReducer, ExactSender, GradientReducer, ParamSender
from ..unit import GradientUnit
from .errors import Errors, NoErrors, RunningErrors
from .reducer import QuantizedReducer
from .secondary import SecondarySender
from .sender import QuantizedSender

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@final
@dataclass(frozen=True)
class ZeroppChoice:
    """What the section zero_optimization asks for.

    weights, frozen_weights: parameters in 8 bits, those that are trained or not. gradients: in 4 bits.
    partition_size: the ranks of a second shard; 1: there is none. loco: None without it.
    """

    weights: bool
    frozen_weights: bool
    gradients: bool
    partition_size: int
    loco: Loco | None


@final
class ZeroppScheme(CommScheme):
    """Builds the messages of one group."""

    def __init__(
        self,
        choice: ZeroppChoice,
        unit: GradientUnit,
        hosts: Sequence[int],
        collectives: Collectives,
        num_copies: int = 1,
        split: Split | None = None,
    ) -> None:
        """
        Args:
            hosts: for each rank of the job, the number of its host.
            num_copies: so many ranks compute the same gradient, which counts once.
            split: opens blocks of the group's ranks. None: messages have one level, and no second shard.
        Raises:
            UsageError: the second shards do not fit the ranks or their hosts.
        """
        self._choice = choice
        self._unit = unit
        self._collectives = collectives
        self._num_copies = num_copies
        self._levels = _one_level(collectives)
        self._inside: Collectives | None = None
        if split is None or collectives.world_size == 1:
            return
        own = block_length([hosts[rank] for rank in collectives.members])
        like = [[hosts[rank] for rank in ranks] for ranks in split.groups]
        # the blocks of one group are opened by all ranks, also where theirs have another length, or none
        for length in sorted({block_length(numbers) for numbers in like}):
            levels = split(length) if 1 < length < collectives.world_size else self._levels
            self._levels = levels if length == own else self._levels
        if choice.partition_size > 1:
            for numbers in like:
                check_partition(choice.partition_size, numbers)
            if choice.partition_size < collectives.world_size:
                self._inside = split(choice.partition_size).inside

    def reducer(self, buffer: Buffer) -> GradientReducer:
        if self._collectives.world_size == 1 or not self._choice.gradients:
            return ExactReducer(self._collectives, buffer.index, self._num_copies)
        _check_dtype("zero_quantized_gradients", buffer.dtype)
        return QuantizedReducer(self._levels, buffer, self._errors(buffer), self._num_copies)

    def _errors(self, buffer: Buffer) -> Errors:
        loco = self._choice.loco
        if loco is None:
            return NoErrors()
        return RunningErrors(buffer.numel, loco.err_beta, loco.reset_T, self._unit)

    def sender(self, buffer: Buffer) -> ParamSender:
        first: ParamSender = ExactSender(self._collectives, buffer.index)
        if self._collectives.world_size == 1 or not buffer.is_gathered:
            return first
        if self._choice.weights if buffer.trains else self._choice.frozen_weights:
            _check_dtype("zero_quantized_weights", buffer.dtype)
            first = QuantizedSender(self._levels, buffer)
        if self._inside is None:
            return first
        return SecondarySender(first, self._inside, buffer.index)


def check_partition(size: int, hosts: Sequence[int]) -> None:
    """Raises UsageError: blocks of `size` ranks do not fit. hosts: that of each rank of the group."""
    key, count = "zero_optimization.zero_hpz_partition_size", len(hosts)
    if count % size:
        raise UsageError(
            f"{key} = {size}: {count} data ranks are not a whole number of such groups; set it to a divisor "
            f"of {count} that is at most the number of ranks of a host, or to 1"
        )
    for start in range(0, count, size):
        block = hosts[start : start + size]
        if len(set(block)) > 1:
            raise UsageError(
                f"{key} = {size}: data ranks {start} to {start + size - 1} are on {len(set(block))} hosts "
                f"(the second begins with data rank {start + _first_other(block)}), and second shards are for "
                "messages inside a host; set it to the number of ranks of a host, or a divisor of it"
            )


def _first_other(block: Sequence[int]) -> int:
    return next(at for at, host in enumerate(block) if host != block[0])


def _check_dtype(key: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise UsageError(
            f"zero_optimization.{key}: quantised messages of {dtype} parameters are not supported, since "
            "magnitudes are fp32; cast the model with model.float(), or remove the key"
        )


def _one_level(collectives: Collectives) -> Levels:
    return Levels(collectives, collectives, Collectives(SingleRank(collectives.device)))


__all__ = ["ZeroppChoice", "ZeroppScheme", "check_partition"]
