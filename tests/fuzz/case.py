"""One case: a model, a config and a training loop, as numbers and names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .feature import Feature


@dataclass(frozen=True)
class BlockPlan:
    """One block: its kind (a key of `model.KINDS`), the width of its hidden layer."""

    kind: str
    hidden: int


@dataclass
class Case:
    """Everything that is drawn. `features` are drawn last, each from a stream of its own."""

    seed: int
    world_size: int
    stage: int
    precision: str
    accumulation: int
    num_steps: int
    samples: int
    width: int
    blocks: list[BlockPlan]
    optimizer: str
    lr: float
    weight_decay: float
    clipping: float
    zero: dict[str, Any]
    features: list[Feature] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Any of these features is in it."""
        return any(type(feature).__name__ in names for feature in self.features)

    def uses(self, *kinds: str) -> bool:
        """Any block is of one of these kinds."""
        return any(plan.kind in kinds for plan in self.blocks)

    @property
    def is_sharded(self) -> bool:
        """Parameters are away between forwards."""
        return self.stage == 3 and self.world_size > 1

    @property
    def names(self) -> list[str]:
        """What is special about it: features, and kinds of blocks."""
        kinds = sorted({plan.kind for plan in self.blocks} - {"plain"})
        return [type(feature).__name__ for feature in self.features] + kinds

    def __str__(self) -> str:
        hidden = ",".join(str(plan.hidden) for plan in self.blocks)
        zero = " ".join(f"{key}={value}" for key, value in self.zero.items())
        return (
            f"seed {self.seed}: stage {self.stage} {self.precision} ranks {self.world_size} "
            f"accumulation {self.accumulation} steps {self.num_steps} {self.optimizer} clip {self.clipping:g} "
            f"width {self.width} hidden {hidden} | {zero} | {' '.join(self.names) or 'plain'}"
        )
