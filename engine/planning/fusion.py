"""The kernels of compiled blocks: what runs between two products is one kernel.

torch.compile writes one kernel for operations that follow each other, so tensors between them are in no memory.
What is made of one tensor alone, such as silu(gate), runs where it is read. A backward reads what such kernels
read, and computes again what they did not write: torch divides a graph into forward and backward so. Products,
attention and exchanges of ranks end a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from ...ops.comm.fake import Journal
from ...ops.torch_internals import tree_leaves
from .work import OTHER, Call, Kernel, Kernels, KernelWatch, kernel_of, payload

APART = ("embedding", "index", "gather", "scatter", "sort", "topk", "cumsum", "bincount", "nonzero")
"""Names of operations begin so that have kernels of their own."""


@final
@dataclass(eq=False)
class _Group:
    """One kernel. reads: memory -> bytes. own: memory that it makes. to: where it is counted."""

    to: Kernels
    like: Kernel
    reads: dict[int, int] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    written_bytes: int = 0


@final
@dataclass(frozen=True, eq=False)
class _Made:
    """A tensor that nothing outside of its group has read. sources: memory -> bytes, from which it is made."""

    group: _Group
    size_bytes: int
    sources: Mapping[int, int]
    is_backward: bool


@final
class FusedWatch(KernelWatch):  # type: ignore[no-untyped-call]
    """A `KernelWatch` that fuses kernels while `fuses` is set. `end` counts them.

    is_backward: set by the owner when the backward begins.
    """

    def __init__(self, journal: Journal, calls: dict[Kernel, Call] | None) -> None:
        super().__init__(journal, calls)
        self.fuses = self.is_backward = False
        self._groups: list[_Group] = []
        self._group: _Group | None = None
        self._made: dict[int, _Made] = {}
        self._alive: dict[int, object] = {}  # so that no other tensor gets their memory

    def end(self, kept: Iterable[Tensor]) -> None:
        """All groups are complete. kept: what is in memory afterwards, as gradients are."""
        for key in _memories(list(kept)):
            self._write(key)
        for group in self._groups:
            if group.written_bytes:
                size_bytes = sum(group.reads.values()) + group.written_bytes
                group.to[group.like._replace(name="fused", size_bytes=size_bytes)] += 1

    def see(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        """See `KernelWatch`."""
        kernel = kernel_of(func, args, kwargs, out)
        if kernel is None:
            return
        given, made = _memories((args, kwargs)), _memories(out)
        self._alive |= {key: storage for key, (_, storage) in {**given, **made}.items()}
        if not self.fuses or kernel.kind != OTHER or kernel.name.startswith(APART):
            self._group = None
            for key in given:
                self._write(key)
            self.add(kernel, (func, args, kwargs))
            return
        group = self._open(kernel)
        sources: dict[int, int] = {}
        for key, (size_bytes, _) in given.items():
            sources |= self._read(group, key, size_bytes)
        for key, (size_bytes, _) in made.items():
            if key in given and key not in self._made:  # written in place
                group.written_bytes += size_bytes
                continue
            group.own.add(key)
            self._made[key] = _Made(group, size_bytes, sources, self.is_backward)

    def _open(self, kernel: Kernel) -> _Group:
        to = self.kernels()
        if self._group is None or self._group.to is not to:
            self._group = _Group(to, kernel)
            self._groups.append(self._group)
        return self._group

    def _read(self, group: _Group, key: int, size_bytes: int) -> Mapping[int, int]:
        """`group` reads a tensor. Returns from what it is made."""
        made = self._made.get(key)
        if key in group.own and made is not None:
            return made.sources
        if made is not None and made.is_backward == self.is_backward:
            if len(made.sources) > 1 or made.group.to is not group.to:
                self._write(key)
                made = None
        found = {key: size_bytes} if made is None else made.sources
        for source, size in found.items():
            group.reads[source] = max(size, group.reads.get(source, 0))
        return found

    def _write(self, key: int) -> None:
        """A tensor is in memory after all."""
        made = self._made.pop(key, None)
        if made is not None:
            made.group.written_bytes += made.size_bytes


def _memories(value: Any) -> dict[int, tuple[int, object]]:
    """memory -> bytes of the tensor in it, and what keeps it alive."""
    found: dict[int, tuple[int, object]] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            storage = payload(leaf).untyped_storage()
            size_bytes = min(leaf.numel() * payload(leaf).itemsize, storage.nbytes())
            found[storage._cdata] = (size_bytes, storage)
    return found


__all__ = ["FusedWatch"]
