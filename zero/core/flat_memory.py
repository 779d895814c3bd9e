"""The memory of a flat buffer of parameters: this rank's own, or one that the ranks of a machine share.

own       raw [world_size * n], on each rank                 publishing gathers the ranks' new values
shared    raw [world_size * n], read-only, on each machine   each rank writes its part of it, in place
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from ...compression.sender import ParameterSender
from ...ops.comm.backend import SharedFlat
from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle
from ...utils.errors import UsageError
from .layout import FlatLayout

KEY = "zero_optimization.shared_parameters"
_REMEDY = (
    "write inside xds.zero.GatheredParameters(params, modifier_rank=0), or use xds.zero.set_full_param or "
    "engine.load_state_dict"
)

_TEXT = (
    f"\nxds: this rank wrote to a parameter of %s. With {KEY} the ranks of a machine have one copy, which "
    f"scripts may only read: {_REMEDY}\n"
)


class FlatMemory(ABC):
    """`raw` [world_size * n]: the buffer. `own` [n]: this rank's part of it, to which the engine may write.

    num_holders: so many ranks have the memory in common. sender: how the buffer is sent.
    writable: `raw` to write to, on the one of these ranks that sets values which no update has computed.
    """

    raw: Tensor
    own: Tensor
    num_holders: int
    sender: ParameterSender
    writable: Tensor | None

    @property
    @abstractmethod
    def is_shared(self) -> bool:
        """Other ranks have the same memory, and scripts may only read it."""

    @abstractmethod
    def fill(self, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` set a tensor like `raw` to the first values, for which it may communicate."""

    @abstractmethod
    def check_place(self) -> None:
        """Raises UsageError: the script has moved the memory."""

    @abstractmethod
    def wait_for_readers(self) -> None:
        """This rank's parts are about to be written, or have been. For all ranks, once for all buffers."""

    @abstractmethod
    def leave(self) -> Tensor:
        """This engine ends: the tensor that takes the place of `raw`, to which scripts may write."""


@final
class OwnFlatMemory(FlatMemory):
    """Memory of this rank."""

    is_shared = False
    num_holders = 1

    def __init__(self, raw: Tensor, collectives: Collectives, sender: ParameterSender) -> None:
        self.sender = sender
        self.raw = self.writable = raw
        self.own = collectives.shard_of(raw)

    def fill(self, fill: Callable[[Tensor], None]) -> None:
        fill(self.raw)

    def check_place(self) -> None:
        return

    def wait_for_readers(self) -> None:
        return

    def leave(self) -> Tensor:
        return self.raw


@final
class SharedFlatMemory(FlatMemory):
    """Memory of the ranks of this machine."""

    is_shared = True

    def __init__(self, found: SharedFlat, collectives: Collectives, buffer: int) -> None:
        self.raw = found.values
        self.own = collectives.shard_of(found.writable)
        self.num_holders = found.num_ranks
        self.sender = _SharedSender(self)
        self.writable = found.writable if found.is_filler else None
        self._found = found
        self._address = found.values.data_ptr()
        self._collectives = collectives
        self._buffer = buffer

    def fill(self, fill: Callable[[Tensor], None]) -> None:
        """One rank of the machine fills the memory; the others drop the same values."""
        target = torch.empty_like(self.raw) if self.writable is None else self.writable
        fill(target.zero_())
        self.wait_for_readers()

    def check_place(self) -> None:
        if self.raw.data_ptr() != self._address:  # share_memory() of the module
            raise UsageError(
                f"the memory of parameters was moved after xds.initialize: with {KEY} the ranks of a machine "
                "have one copy of them; do not call share_memory() of the module"
            )

    def wait_for_readers(self) -> None:
        self._collectives.wait_for_readers()

    def publish(self) -> Handle:
        """Start to let all ranks read what each one has written to its part."""
        return self._collectives.publish_shared(
            self._found.writable, buffer=self._buffer, kind="all_gather"
        )

    def leave(self) -> Tensor:
        return self.raw.clone()


@final
class _SharedSender(ParameterSender):
    """Nothing is sent inside a machine."""

    keeps_master = False
    sends_differences = False
    rounds = False
    held_bytes = 0

    def __init__(self, memory: SharedFlatMemory) -> None:
        self._memory = memory

    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        return self._memory.publish()

    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        raise AssertionError("exact values are gathered")

    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        raise AssertionError("it is never dropped")

    def keep(self, flat: Tensor) -> None:
        return

    def forget(self) -> None:
        return


def own_memory(
    collectives: Collectives,
    numel: int,
    dtype: torch.dtype,
    sender: ParameterSender,
    *,
    is_dropped: bool,
) -> OwnFlatMemory:
    """Memory for a flat buffer; is_dropped: it is dropped between uses."""
    # what is dropped changes its size; what stays is read by other ranks where it is
    empty = torch.empty if is_dropped else collectives.empty
    raw = empty(numel, dtype=dtype, device=collectives.device).zero_()
    return OwnFlatMemory(raw, collectives, sender)


def shared_memory(
    collectives: Collectives, numel: int, dtype: torch.dtype, *, buffer: int, name: str
) -> SharedFlatMemory | None:
    """Memory for flat buffer `buffer`, that of `name`. None: the ranks share none. For all ranks."""
    found = collectives.share(numel, dtype, _TEXT % name)
    return None if found is None else SharedFlatMemory(found, collectives, buffer)


def views_in(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """The parts of `flat` [world_size * n] that are the slots of `layout`."""
    return [flat.narrow(0, slot.offset, slot.numel).view(slot.shape) for slot in layout.slots]


def drop_assigned(assigned: Sequence[tuple[nn.Parameter, Tensor, str]]) -> None:
    """What a script has assigned to `.data` of shared parameters. Of each the parameter, its values, its name.

    Raises UsageError: some are other values; the parameters have their own again.
    """
    given = [param.data for param, _, _ in assigned]
    for param, values, _ in assigned:
        param.data = values
    for new, (_, values, name) in zip(given, assigned, strict=True):
        if new.dtype != values.dtype or not torch.equal(new, values):
            raise UsageError(
                f"{name}.data was assigned after xds.initialize: with {KEY} the ranks of a machine have one "
                f"copy; {_REMEDY}"
            )


def check_not_written(model: nn.Module) -> None:
    """Raises UsageError: forwards of `model` write to a parameter."""
    writers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
    if writers:
        raise UsageError(
            f"{KEY} with max_norm of {writers[0]}: its forward writes to its weight, of which the ranks of a "
            "machine have one copy; remove max_norm or the key"
        )


__all__ = [
    "KEY",
    "FlatMemory",
    "check_not_written",
    "drop_assigned",
    "own_memory",
    "shared_memory",
    "views_in",
]
