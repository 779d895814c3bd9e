"""What a profile says: a tree of modules, the backward passes, and times. Only data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

Number = int | float  # whole, unless it is a mean over micro-batches that differ


@final
@dataclass(frozen=True)
class ModuleProfile:
    """One module, with all modules in it. `macs`, `flops`, `seconds` and `calls` are of forward.

    name: the attribute of its parent; of the root "". kind: its class. extra: its extra_repr.
    params: elements, whole ones where ranks have shards; a slice of a tensor-parallel rank is what it is.
    seconds: 0 where it was not called, else its children's.
    """

    name: str
    kind: str
    extra: str
    params: int
    calls: Number
    macs: Number
    flops: Number
    seconds: float
    children: tuple[ModuleProfile, ...]

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

    macs, flops: of gradients. recomputed_*: of forwards that ran again, for activation checkpointing.
    """

    macs: Number
    flops: Number
    recomputed_macs: Number = 0
    recomputed_flops: Number = 0


@final
@dataclass(frozen=True)
class Profile:
    """The work of one micro-batch on one rank: the mean of those that were profiled.

    num_batches: so many. backward: None where it was not counted.
    seconds: of the regions forward, backward and step, where they were timed.
    unknown: operations whose work is not known, which count 0, with the number of calls in all.
    """

    root: ModuleProfile
    num_batches: int = 1
    backward: BackwardProfile | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)

    @property
    def macs(self) -> Number:
        """Multiply-accumulates of forward."""
        return self.root.macs

    @property
    def flops(self) -> Number:
        """Floating-point operations of forward, those of its MACs included."""
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


__all__ = ["BackwardProfile", "ModuleProfile", "Number", "Profile", "share"]
