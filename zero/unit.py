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
    """

    name: str
    modules: tuple[nn.Module, ...]
    is_root: bool
    params: list[FlatParams] = field(default_factory=list)
    grads: list[FlatGrads] = field(default_factory=list)
    outlives_forward: bool = False
    is_running: bool = False

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

    def gather(self) -> None:
        for flat in self.params:
            flat.start_gather()
        for flat in self.params:
            flat.wait()

    def drop(self) -> None:
        self.is_running = False
        for flat in self.params:
            flat.wait()
            flat.drop()
