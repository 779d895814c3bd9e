"""A unit: the modules and flat buffers that are gathered, reduced and updated together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

from torch import nn

from ...offload.interfaces import MasterStore
from .grad_bucket import GradBucket
from .param_bucket import ParamBucket


@final
@dataclass(eq=False)
class Unit:
    """A set of parameters that is gathered, reduced and updated together, and the state of its calls.

    `Gatherer` and `UnitHooks` set the state of the calls, from `is_running` on.

    Attributes:
        params: the flat parameter buffers, one for each `_Kind` of zero/model/building.py. Trained ones come
            first, in the order of `grads`.
        grads: the flat gradient buffers of the trained ones.
        master_stores: where the masters of the trainable ones are stored at first.
        is_root: holds the parameters outside of every block; its modules are called throughout a pass.
        most_numel: elements of its buffers on the tensor rank that has the most. The same on all tensor ranks,
            which share some of the buffers: it decides what is gathered when.
        is_kept_until_backward: stays gathered from its forward to its backward, which uses it first.
        is_running: one of its modules is being called; the end of another unit's call does not drop it.
        entry: the inner module that user code called directly and whose call is running.
        depth: the number of nested calls of `entry` by itself.
        used_units: other units whose parameters the modules of this unit use as well -> a forward has found
            that, and user code has not declared it.
        num_running_users: the number of running units that use the parameters of this unit.
        num_recomputes: calls that began in this backward (reentrant checkpoints).
        is_used_by_others: other units use its parameters, so only the end of backward ends its use.
        is_kept_until_update: the graph of a call has no output to hook; gathered until the update.
        is_held: stays gathered until `release`, whatever calls it.
    """

    name: str
    modules: tuple[nn.Module, ...]
    is_root: bool
    params: list[ParamBucket] = field(default_factory=list)
    grads: list[GradBucket] = field(default_factory=list)
    master_stores: list[MasterStore] = field(default_factory=list)
    most_numel: int = 0
    is_kept_until_backward: bool = False
    is_running: bool = False
    entry: nn.Module | None = None
    depth: int = 0
    used_units: dict[Unit, bool] = field(default_factory=dict)
    num_running_users: int = 0
    num_recomputes: int = 0
    is_used_by_others: bool = False
    is_kept_until_update: bool = False
    is_held: bool = False

    @cached_property
    def _outer_modules(self) -> frozenset[nn.Module]:
        return frozenset(self.modules)

    @property
    def inner_modules(self) -> list[nn.Module]:
        """Submodules that hold parameters of this unit directly: user code may call them."""
        if self.is_root:
            return []
        keys = {id(param) for flat in self.params for param in flat.params}
        return [
            module
            for outer in self.modules
            for module in outer.modules()
            if module not in self._outer_modules
            and any(id(param) in keys for param in module.parameters(recurse=False))
        ]

    def is_entry(self, module: nn.Module) -> bool:
        """Calls begin with this module; other modules of the root run inside the model's call."""
        if self.is_root:
            return module is self.entry or module is self.modules[0]
        return module is self.entry or module in self._outer_modules

    @property
    def may_be_resharded(self) -> bool:
        """Some of its buffers do not stay gathered all the time."""
        return any(flat.may_be_resharded for flat in self.params)

    @property
    def full_bytes(self) -> int:
        """Bytes of its gathered buffers on this rank, without those that stay gathered all the time."""
        return sum(flat.full_bytes for flat in self.params if flat.may_be_resharded)

    @property
    def has_frozen(self) -> bool:
        """Some parameters get no gradient, so gradients cannot show when backward has left the unit."""
        return len(self.params) > len(self.grads) or any(
            grads.arrivals.has_frozen for grads in self.grads
        )

    @property
    def is_complete(self) -> bool:
        """Every trainable parameter has its gradient of this backward."""
        return all(grads.arrivals.is_complete for grads in self.grads)

    def start_unshard(self) -> None:
        for flat in self.params:
            flat.start_unshard()

    @property
    def may_start(self) -> bool:
        """`start_unshard` would not wait for an update on the host."""
        return all(flat.may_start for flat in self.params)

    @property
    def is_unsharded(self) -> bool:
        return all(flat.is_unsharded for flat in self.params)

    def unshard(self) -> None:
        for flat in self.params:
            flat.start_unshard()
        for flat in self.params:
            flat.wait()

    def reshard(self) -> None:
        """Free the gathered buffers, unless a running unit, `is_kept_until_update` or `hold` keeps them."""
        if self.num_running_users or self.is_kept_until_update or self.is_held:
            return
        self.is_running = False
        for flat in self.params:
            flat.wait()
            flat.reshard()

    # -- the state of its calls -------------------------------------------------------------------------

    def clear_calls(self) -> None:
        """Reset the state of all calls: a forward that raised did not reset its own."""
        self.is_running, self.entry, self.depth, self.num_running_users = False, None, 0, 0

    def hold(self) -> None:
        """Start to gather the unit; `reshard` does nothing until `release`."""
        self.is_held = True
        for flat in self.params:
            flat.is_held = flat.may_be_resharded
        self.start_unshard()

    def release(self) -> None:
        """End `hold`, and drop the unit."""
        self.is_held = False
        for flat in self.params:
            flat.is_held = False
        self.reshard()
