"""What a profile says: a tree of modules, the backward passes, and times. Only data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

Number = int | float  # whole, unless it is a mean over micro-batches that differ


@final
@dataclass(frozen=True)
class ModuleProfile:
    """One module, with all modules in it. `flops`, `seconds` and `calls` are of forward.

    name: the attribute of its parent; of the root "". kind: its class. extra: its extra_repr.
    params: elements, whole ones where ranks have shards; a slice of a tensor-parallel rank is what it is.
    seconds: 0 where it was not called, else its children's.
    """

    name: str
    kind: str
    extra: str
    params: int
    calls: Number
    flops: Number
    seconds: float
    children: tuple[ModuleProfile, ...]

    @property
    def macs(self) -> Number:
        """Multiply-accumulates: a product's FLOPs are two for each."""
        return half(self.flops)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ModuleProfile]]:
        """Each module with its depth, parents first."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def find(self, path: str) -> ModuleProfile:
        """The module at a dotted path. Raises KeyError: there is none."""
        here = self
        for part in path.split(".") if path else ():
            found = [child for child in here.children if child.name == part]
            if not found:
                raise KeyError(path)
            here = found[0]
        return here


@final
@dataclass(frozen=True)
class BackwardProfile:
    """The backward passes of a micro-batch.

    flops: of gradients. recomputed_flops: of forwards that ran again, for activation checkpointing.
    """

    flops: Number
    recomputed_flops: Number = 0

    @property
    def macs(self) -> Number:
        """Multiply-accumulates of gradients."""
        return half(self.flops)

    @property
    def recomputed_macs(self) -> Number:
        """Multiply-accumulates of forwards that ran again."""
        return half(self.recomputed_flops)


@final
@dataclass(frozen=True)
class Profile:
    """The work of one micro-batch on one rank: the mean of those that were profiled.

    num_batches: so many. backward: None where it was not counted.
    seconds: of the regions forward, backward and step, where they were timed.
    """

    root: ModuleProfile
    num_batches: int = 1
    backward: BackwardProfile | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def macs(self) -> Number:
        """Multiply-accumulates of forward."""
        return self.root.macs

    @property
    def flops(self) -> Number:
        """Floating-point operations of the products of forward."""
        return self.root.flops

    @property
    def params(self) -> int:
        """Parameters of the model, or of this rank's part of it."""
        return self.root.params


def share(total: int, count: int) -> Number:
    """`total` / `count`, whole where it is.

    >>> share(12, 4), share(5, 2)
    (3, 2.5)
    """
    return total // count if total % count == 0 else total / count


def half(flops: Number) -> Number:
    """The multiply-accumulates of products that take so many FLOPs.

    >>> half(12), half(2.5)
    (6, 1.25)
    """
    return flops // 2 if isinstance(flops, int) and flops % 2 == 0 else flops / 2


__all__ = ["BackwardProfile", "ModuleProfile", "Number", "Profile", "half", "share"]
