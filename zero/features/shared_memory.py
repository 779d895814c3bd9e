"""`shared_parameters`: the ranks of a machine have one copy of the full parameters, in memory that they share.

Each rank writes its part of it, in place. User code may only read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from ...compression.scheme import ParamSender
from ...ops.comm.backend import SharedFlat
from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle
from ...utils.errors import UsageError
from ..core.param_bucket import ParamMemory

KEY = "zero_optimization.shared_parameters"
_REMEDY = (
    "write inside xds.zero.GatheredParameters(params, modifier_rank=0), or use xds.zero.set_full_param or "
    "engine.load_state_dict"
)

_TEXT = (
    f"\nxds: this rank wrote to a parameter of %s. With {KEY} the ranks of a machine have one copy, which "
    f"scripts may only read: {_REMEDY}\n"
)


@final
class SharedMemory(ParamMemory):
    """Memory of the ranks of this machine."""

    is_shared = True

    def __init__(self, shared: SharedFlat, collectives: Collectives, buffer: int) -> None:
        self.raw = shared.values
        self.own = collectives.shard_of(shared.writable)
        self.num_holders = shared.num_ranks
        self.sender = _SharedSender(self)
        self.writable = shared.writable if shared.is_filler else None
        self._shared = shared
        self._address = shared.values.data_ptr()
        self._collectives = collectives
        self._buffer = buffer

    def fill(self, fill: Callable[[Tensor], None]) -> None:
        """One rank of the machine fills the memory.

        The others call `fill` as well, because it may communicate, and drop its values.
        """
        target = torch.empty_like(self.raw) if self.writable is None else self.writable
        fill(target.zero_())
        self.wait_for_readers()

    def refuse_assigned(self, assigned: Sequence[tuple[nn.Parameter, Tensor, str]]) -> None:
        given = [param.data for param, _, _ in assigned]
        for param, values, _ in assigned:
            param.data = values
        for new, (_, values, name) in zip(given, assigned, strict=True):
            if new.dtype != values.dtype or not torch.equal(new, values):
                raise UsageError(
                    f"{name}.data was assigned after xds.initialize: with {KEY} the ranks of a machine have "
                    f"one copy; {_REMEDY}"
                )

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
            self._shared.writable, buffer=self._buffer, kind="all_gather"
        )

    def release(self) -> Tensor:
        return self.raw.clone()


@final
class _SharedSender(ParamSender):
    """Nothing is sent inside a machine."""

    keeps_master = False
    sends_differences = False
    rounds = False
    held_bytes = 0

    def __init__(self, memory: SharedMemory) -> None:
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


def shared_memory(
    collectives: Collectives, numel: int, dtype: torch.dtype, *, buffer: int, name: str
) -> SharedMemory | None:
    """Memory for flat buffer `buffer`, that of `name`. None: the ranks share none. For all ranks."""
    shared = collectives.share(numel, dtype, _TEXT % name)
    return None if shared is None else SharedMemory(shared, collectives, buffer)


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


__all__ = ["KEY", "check_not_written", "shared_memory"]
