"""One unit at run time: its modules and its flat buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import nn

from .flat_grads import FlatGrads
from .flat_params import FlatParams


@final
@dataclass(eq=False)
class Unit:
    """A set of parameters that is gathered, reduced and updated together.

    params: its flat buffers, one for each (trainable, dtype); grads: those of the trainable ones.
    is_root: holds what lies outside of every block; its modules are called throughout a pass.
    outlives_forward: stays gathered from its forward to its backward, because it is used first there.
    is_running: one of its modules is being called, so that it stays gathered until that call ends.
    entry: the module inside of it whose direct call by the script is running; depth: its calls of itself.
    guests: units whose parameters its modules use as well; pins: how many running hosts it has.
    is_guest: others use its parameters, so a backward is not through with it before its end.
    awaits_backward: a call left a graph that no hook on an output can tell of: whole until the update.
    """

    name: str
    modules: tuple[nn.Module, ...]
    is_root: bool
    params: list[FlatParams] = field(default_factory=list)
    grads: list[FlatGrads] = field(default_factory=list)
    outlives_forward: bool = False
    is_running: bool = False
    entry: nn.Module | None = None
    depth: int = 0
    guests: list[Unit] = field(default_factory=list)
    pins: int = 0
    num_recalls: int = 0  # calls that began in this backward: of reentrant checkpoints
    is_guest: bool = False
    awaits_backward: bool = False

    @property
    def inner_modules(self) -> list[nn.Module]:
        """Modules inside of its own that hold parameters of it themselves: scripts may call them."""
        keys = {id(param) for flat in self.params for param in flat.params}
        return [
            module
            for outer in self.modules
            for module in outer.modules()
            if not self.is_root
            and module not in self.modules
            and any(id(param) in keys for param in module.parameters(recurse=False))
        ]

    @property
    def may_be_resharded(self) -> bool:
        """It is not whole all the time."""
        return any(flat.may_be_resharded for flat in self.params)

    @property
    def has_frozen(self) -> bool:
        """Some of its parameters get no gradient: their arrival cannot tell when backward left it."""
        return len(self.params) > len(self.grads) or any(grads.has_frozen for grads in self.grads)

    @property
    def full_numel(self) -> int:
        return sum(flat.layout.numel for flat in self.params)

    @property
    def is_complete(self) -> bool:
        """Every trainable parameter has got its gradient in this backward."""
        return all(grads.is_complete for grads in self.grads)

    def start_unshard(self) -> None:
        for flat in self.params:
            flat.start_unshard()

    @property
    def is_unsharded(self) -> bool:
        return all(flat.is_unsharded for flat in self.params)

    def unshard(self) -> None:
        for flat in self.params:
            flat.start_unshard()
        for flat in self.params:
            flat.wait()

    def reshard(self) -> None:
        """Give its memory back, unless a running host or a coming backward needs it."""
        if self.pins or self.awaits_backward:
            return
        self.is_running = False
        for flat in self.params:
            flat.wait()
            flat.reshard()

    def forget_calls(self) -> None:
        """No call is running: a forward that raised has left the marks of its calls behind."""
        self.is_running, self.entry, self.depth, self.pins = False, None, 0, 0
