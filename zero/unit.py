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
    def has_frozen(self) -> bool:
        """Some of its parameters get no gradient: their arrival cannot tell when backward left it."""
        return len(self.params) > len(self.grads)

    @property
    def full_numel(self) -> int:
        return sum(flat.layout.numel for flat in self.params)

    @property
    def is_complete(self) -> bool:
        """Every trainable parameter has got its gradient in this backward."""
        return all(grads.remaining <= 0 for grads in self.grads)

    def start_gather(self) -> None:
        for flat in self.params:
            flat.start_gather()

    @property
    def is_gathered(self) -> bool:
        return all(flat.is_gathered for flat in self.params)

    def gather(self) -> None:
        for flat in self.params:
            flat.start_gather()
        for flat in self.params:
            flat.wait()

    def drop(self) -> None:
        """Give its memory back, unless a running host needs it."""
        if self.pins:
            return
        self.is_running = False
        for flat in self.params:
            flat.wait()
            flat.drop()

    def forget_calls(self) -> None:
        """No call is running: a forward that raised has left the marks of its calls behind."""
        self.is_running, self.entry, self.depth, self.pins = False, None, 0, 0
