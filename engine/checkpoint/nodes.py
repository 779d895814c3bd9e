"""Checkpoints whose nodes have folders of their own: who has which files, and which copy of an element counts.

    host-a:/local/out/global_step300/    manifest.json, rank_00000, rank_00001
    host-b:/local/out/global_step300/    manifest.json, rank_00002, rank_00003      the same manifest

A node is the ranks that see one folder. Every node has all elements that its ranks hold. So elements that ranks
of several nodes hold are in the folder of each: in whole or not at all. All files together in one folder are a
checkpoint as any other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ...utils.quoting import printable
from ...zero.checkpoint.ranges import Range
from .manifest import FileRecord, Manifest, SavedNode


@dataclass(frozen=True)
class Nodes:
    """The nodes of a save, by their first rank, and this rank."""

    nodes: tuple[SavedNode, ...]
    rank: int

    @property
    def local(self) -> frozenset[int]:
        """The ranks of this node."""
        return frozenset(next(node.ranks for node in self.nodes if self.rank in node.ranks))

    @property
    def is_leader(self) -> bool:
        """This rank is the first one of its node, which makes and commits the node's folder."""
        return min(self.local) == self.rank


def node_of(manifest: Manifest, rank: int) -> int:
    """The number of the node that has the file of `rank`."""
    return next(at for at, node in enumerate(manifest.nodes) if rank in node.ranks)


def state_files(manifest: Manifest) -> list[int]:
    """The files that have the tensors of the engine's state: the first one of each node."""
    return [node.ranks[0] for node in manifest.nodes] or [0]


def present_files(folder: Path, manifest: Manifest) -> frozenset[int]:
    """The numbers of the files that are in `folder`; all, without a look, where nodes shared one folder."""
    everything = range(len(manifest.files))
    if not manifest.nodes:
        return frozenset(everything)
    return frozenset(at for at in everything if is_there(folder, manifest.files[at]))


def is_there(folder: Path, record: FileRecord) -> bool:
    """A file is in `folder`, with its length."""
    try:
        return (folder / record.path).stat().st_size == record.size_bytes
    except OSError:
        return False


def missing_nodes(manifest: Manifest, present: Collection[int]) -> list[int]:
    """The numbers of the nodes of which some file is not present."""
    return [at for at, node in enumerate(manifest.nodes) if not set(node.ranks) <= set(present)]


def nodes_text(manifest: Manifest, numbers: Iterable[int]) -> str:
    """ "node 1 (host-b: ranks 2, 3)"."""
    found = []
    for at in numbers:
        node = manifest.nodes[at]
        ranks = ", ".join(map(str, node.ranks))
        word = "rank" if len(node.ranks) == 1 else "ranks"
        found.append(f"node {at} ({printable(node.name)}: {word} {ranks})")
    return " and ".join(found)


def ranges_of(manifest: Manifest, near: Collection[int] = ()) -> list[Range]:
    """All ranges, each element once: of the first node that has it, and before those of nodes that are `near`.

    near: numbers of files; a node is near if all of its files are.
    Raises ValueError: a range has some of its elements on another node, and some not.
    """
    if not manifest.nodes:
        return [one for record in manifest.files for one in record.ranges]
    inside = [set(node.ranks) <= set(near) for node in manifest.nodes]
    order = sorted(range(len(inside)), key=lambda at: (not inside[at], at))
    taken: dict[tuple[int, str], _Spans] = {}
    found: list[Range] = []
    for at in order:
        fresh = [
            one
            for rank in manifest.nodes[at].ranks
            for one in manifest.files[rank].ranges
            if not taken.setdefault((one.flat, one.key), _Spans()).have(one)
        ]
        for one in fresh:  # within a node nothing is there twice, which `Catalogue` checks
            taken[one.flat, one.key].add(one.start, one.stop)
        found += fresh
    return found


@final
class _Spans:
    """Disjoint intervals, in order; touching ones are joined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def have(self, one: Range) -> bool:
        """All elements are in an interval. Raises ValueError: some are and some are not."""
        at = bisect_right(self._starts, one.start) - 1
        if at >= 0 and self._stops[at] >= one.stop:
            return True
        after = at + 1 < len(self._starts) and self._starts[at + 1] < one.stop
        if after or (at >= 0 and self._stops[at] > one.start):
            raise ValueError(
                f"elements [{one.start}, {one.stop}) of {one.key} are only in part on another node"
            )
        return False

    def add(self, start: int, stop: int) -> None:
        """Add an interval, which may overlap others."""
        low = bisect_right(self._stops, start - 1)
        high = bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high], self._stops[low:high] = [start], [stop]


__all__ = [
    "Nodes",
    "is_there",
    "missing_nodes",
    "node_of",
    "nodes_text",
    "present_files",
    "ranges_of",
    "state_files",
]
