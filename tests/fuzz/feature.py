"""One way in which real models, configs and training loops differ from the plainest: a class each.

A feature draws its own details from its own stream of random numbers, so that a case without one feature
is otherwise the same case. Every method does nothing by default; the same object serves both sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .case import Case
    from .model import Net
    from .side import Side

REGISTRY: dict[str, type[Feature]] = {}
BlockCall = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Call:
    """Which forward this is. `part` counts the forwards of one micro-batch."""

    rank: int
    step: int
    micro_step: int
    part: int = 0
    is_training: bool = True

    def random(self, case: Case, *, by_rank: bool = False) -> random.Random:
        """Random numbers of this micro-batch: the same on every rank, or each rank its own."""
        own = f" {self.rank}" if by_rank else ""
        return random.Random(f"{case.seed} {self.step} {self.micro_step}{own}")


class Feature:
    """What a case may have. `share`: how many of the cases that it fits have it."""

    share = 0.08
    excludes: tuple[str, ...] = ()  # names of features that it cannot be combined with

    def __init__(self, case: Case, draw: random.Random) -> None:
        self.case = case
        self.draw = draw

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            REGISTRY[cls.__name__] = cls

    @classmethod
    def fits(cls, case: Case) -> bool:
        """The feature means something in this case, and plain PyTorch says what."""
        return True

    # -- the model and the config -----------------------------------------------------------------------

    def configure(self, config: dict[str, Any]) -> None:
        """Change the engine's config."""

    def build(self, net: Net) -> None:
        """Change the model before `xds.initialize`."""

    def initialized(self, side: Side) -> None:
        """Change the model right after `xds.initialize`."""

    # -- inside of forward ------------------------------------------------------------------------------

    def route(self, route: list[int], call: Call) -> list[int]:
        """Which blocks are called, in which order."""
        return route

    def enter(self, net: Net, x: Tensor, call: Call) -> Tensor:
        """At the start of the model's forward."""
        return x

    def wrap(self, net: Net, number: int, block: BlockCall, call: Call) -> BlockCall:
        """Around the call of block `number`."""
        return block

    def leave(self, net: Net, h: Tensor, call: Call) -> Tensor:
        """After the last block."""
        return h

    # -- around it, in the training loop ----------------------------------------------------------------

    def before_step(self, side: Side, step: int) -> None:
        """Before the first forward of a step."""

    def before_micro_step(self, side: Side, call: Call) -> None:
        """Before each micro-batch."""

    def after_backward(self, side: Side, call: Call) -> None:
        """After the last backward of a micro-batch."""

    def before_update(self, side: Side, step: int) -> None:
        """After the last backward of a step."""

    def after_step(self, side: Side, step: int) -> None:
        """After the update."""
