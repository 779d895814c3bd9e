"""Finds the checkpoint to load where each node has a folder of its own: one that every rank has its part of.

    rank 0, 1 on host-a    global_step200: node 0    global_step300: node 0     latest: global_step300
    rank 2, 3 on host-b    global_step200: node 1                               latest: global_step200
                           chosen: global_step200    not on all nodes

Every rank says what its folder has, and all decide alike from these inventories.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, final

from ...utils.errors import DamagedError, UsageError
from ...utils.quoting import printable
from .agreement import together
from .finding import Choice, Finder, none_older
from .io.folders import MANIFEST, check_folder, check_tag, read_latest
from .io.node_folders import Candidate, candidates
from .load_plan import DOING
from .manifest import Manifest
from .nodes import missing_nodes, node_of, nodes_text
from .order import newest_first

log = logging.getLogger("xds")


class Entry(TypedDict):
    """One checkpoint in the folder of a rank.

    fits: the rank has all that it needs of it. nodes: each node's text and ranks. has: the numbers of the nodes
    whose files are all here. place: steps and micro-batches.
    """

    tag: str
    save: str
    fits: bool
    world_size: int
    nodes: list[tuple[str, list[int]]]
    has: list[int]
    place: tuple[int, int]


class Inventory(TypedDict):
    """What the folder of a rank has. where: "host:folder"."""

    where: str
    latest: str | None
    entries: list[Entry]


def entry_of(found: Candidate, rank: int, world_size: int) -> Entry:
    """What `rank` of `world_size` says of a checkpoint in its folder."""
    manifest = found.manifest
    missing = missing_nodes(manifest, found.present)
    is_same = manifest.world_size == world_size
    fits = len(found.present) == len(manifest.files)
    if manifest.nodes and is_same:
        fits = node_of(manifest, rank) not in missing
    return Entry(
        tag=manifest.tag,
        save=found.key[1],
        fits=fits,
        world_size=manifest.world_size,
        nodes=[
            (nodes_text(manifest, [at]), list(node.ranks)) for at, node in enumerate(manifest.nodes)
        ],
        has=[at for at in range(len(manifest.nodes)) if at not in missing],
        place=(manifest.global_steps, manifest.micro_steps),
    )


def common(inventories: Sequence[Inventory]) -> list[Choice]:
    """The checkpoints that every rank has its part of."""
    each = [
        {Choice(one["tag"], one["save"]) for one in there["entries"] if one["fits"]}
        for there in inventories
    ]
    return sorted(set.intersection(*each), key=lambda one: (one.tag, one.save))


@final
class NodeFinder(Finder):
    """All ranks look, each in its own folder."""

    _mine: dict[Choice, Candidate]

    def first(self, tag: str | None, *, falls_back: bool) -> Choice | None:
        inventories = self._look(tag)
        ordered = self._newest_first(common(inventories))
        named = {tag} if tag is not None else {one["latest"] for one in inventories} - {None}
        found = next((one for one in ordered if one.tag in named), None)
        if found is not None:
            return found
        if not named and not falls_back:
            return None
        problem = self._problem(named, inventories, ordered)
        if problem is None or not falls_back:
            if problem is None:
                return None
            raise problem
        return self._fall_back(ordered, problem)

    def older(self, refused: list[Choice], error: DamagedError) -> Choice:
        inventories = self._look(None)
        places = {
            Choice(one["tag"], one["save"]): tuple(one["place"])
            for there in inventories
            for one in there["entries"]
        }
        last = places.get(refused[-1])
        ordered = [
            one
            for one in self._newest_first(common(inventories))
            if one not in refused and (last is None or places[one] <= last)
        ]
        return self._fall_back(ordered, error)

    def read(self, choice: Choice) -> Manifest:
        return self._mine[choice].manifest

    def _look(self, tag: str | None) -> list[Inventory]:
        rank, world_size = self._collectives.rank, self._collectives.world_size

        def look() -> Inventory:
            folder = check_folder("load_dir", self._load_dir)
            if tag is not None:
                check_tag(tag)
            found = candidates(folder)
            self._mine = {Choice(*one.key): one for one in found}
            latest = None
            with suppress(DamagedError):
                latest = read_latest(folder)
            entries = [entry_of(one, rank, world_size) for one in found]
            where = f"{platform.node()}:{os.path.abspath(folder)}"
            return Inventory(where=where, latest=latest, entries=entries)

        found: list[Any] = together(self._collectives, DOING, look, share=lambda one: one)[1]
        return found

    def _newest_first(self, found: Sequence[Choice]) -> list[Choice]:
        """Every rank has the manifests of `found`, so all get the same order."""
        by_manifest = {id(self._mine[one].manifest): one for one in found}
        ordered = newest_first([self._mine[one].manifest for one in found])
        return [by_manifest[id(manifest)] for manifest in ordered]

    def _fall_back(self, ordered: Sequence[Choice], error: DamagedError) -> Choice:
        load_dir = Path(self._load_dir)
        if not ordered:
            raise none_older(load_dir, error) from error
        if self._collectives.rank == 0:
            log.warning("%s; falling back to %s", error, load_dir / ordered[0].tag)
        return ordered[0]

    def _problem(
        self, named: set[Any], inventories: Sequence[Inventory], ordered: Sequence[Choice]
    ) -> DamagedError | None:
        """Why none of the `named` tags loads; None: there is no checkpoint at all."""
        entries = [one for there in inventories for one in there["entries"]]
        about = [one for one in entries if one["tag"] in named] if named else entries
        if not about and not named:
            return None
        others = (
            f"; the newest that all nodes have is {printable(ordered[0].tag)}" if ordered else ""
        )
        if not about:
            tags = ", ".join(sorted(printable(str(one)) for one in named))
            raise UsageError(
                f"{DOING}: no rank finds {tags}, with its {MANIFEST}, in {inventories[0]['where']} or the like"
                f"{others}"
            )
        chosen = max(about, key=lambda one: (*one["place"], one["tag"], one["save"]))
        return DamagedError(f"{DOING}: {incomplete(chosen, inventories)}{others}")


def incomplete(chosen: Entry, inventories: Sequence[Inventory]) -> str:
    """Which parts of a checkpoint are missing on which ranks, and what to do."""
    tag, world_size = printable(chosen["tag"]), len(inventories)
    copy_all = (
        f"copy the folders {tag} of all nodes into one that all ranks share, and load from there"
    )
    if chosen["world_size"] != world_size:
        return (
            f"{tag} was saved by {chosen['world_size']} ranks on {len(chosen['nodes']) or 1} nodes, each into "
            f"its own folder, and this job has {world_size}: {copy_all}"
        )
    lacking: dict[str, list[int]] = {}
    for rank, there in enumerate(inventories):
        mine = [one for one in there["entries"] if _key(one) == _key(chosen)]
        if not any(one["fits"] for one in mine):
            has = [chosen["nodes"][at][0] for one in mine for at in one["has"]]
            needed = next((text for text, ranks in chosen["nodes"] if rank in ranks), "a part")
            instead = f", where there is {' and '.join(has)}" if has else ""
            text = f"{needed} in {printable(there['where'])}{instead}"
            lacking.setdefault(text, []).append(rank)
    parts = [f"{text} (needed by rank {_numbers(ranks)})" for text, ranks in lacking.items()]
    return (
        f"{tag} is not complete on all nodes. Missing: {'; '.join(parts)}. Start the job on the "
        f"nodes that saved it, in the same order; or copy their folder {tag} there; or, for other nodes or "
        f"another number of ranks, {copy_all}"
    )


def _key(one: Entry) -> tuple[str, str]:
    return one["tag"], one["save"]


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


__all__ = ["Entry", "Inventory", "NodeFinder", "common", "entry_of", "incomplete"]
