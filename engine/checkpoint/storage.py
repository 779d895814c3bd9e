"""Where checkpoints are: in one folder that all ranks share, or in a folder of each node.

`checkpoint.use_node_local_storage` chooses. A save asks which ranks see one folder; a load asks for a finder.
"""

from __future__ import annotations

import platform
import secrets
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import final

from ...ops.comm.collectives import Collectives
from ..config.checkpoint import Checkpoint
from .agreement import together
from .finding import Finder, SharedFinder
from .io.folders import check_folder
from .manifest import SavedNode
from .node_finding import NodeFinder
from .nodes import Nodes
from .saver import DOING


class Storage(ABC):
    """Where checkpoints are."""

    @abstractmethod
    def nodes(self, collectives: Collectives, save_dir: str | Path) -> Nodes | None:
        """The nodes that save into folders of their own; None: all ranks share `save_dir`. A collective."""

    @abstractmethod
    def finder(self, collectives: Collectives, load_dir: str | Path) -> Finder:
        """What finds a checkpoint in `load_dir`."""


@final
class SharedStorage(Storage):
    """One folder for all ranks."""

    def nodes(self, collectives: Collectives, save_dir: str | Path) -> None:
        return None

    def finder(self, collectives: Collectives, load_dir: str | Path) -> Finder:
        return SharedFinder(collectives, load_dir)


@final
class NodeStorage(Storage):
    """A folder for each node: `save_dir` has the same name there, or each rank gives its own.

    Every rank puts an empty file into its folder, and looks which ones it sees. So a node is the ranks that see
    the same files, whatever the launcher calls a node.
    """

    def nodes(self, collectives: Collectives, save_dir: str | Path) -> Nodes | None:
        rank = collectives.rank
        mark = (
            f".rank_{rank:05d}.tmp-{secrets.token_hex(4)}"  # a leftover is removed by the next save
        )

        def put() -> Path:
            folder = check_folder("save_dir", save_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / mark).touch(exist_ok=False)
            marked.append(folder / mark)
            return folder

        marked: list[Path] = []
        try:
            folder, marks = together(collectives, DOING, put, share=lambda _: mark)
            _, answers = together(
                collectives,
                DOING,
                lambda: [
                    at for at, one in enumerate(marks) if at == rank or (folder / one).exists()
                ],
                share=lambda seen: [platform.node(), seen],
            )
        finally:
            for path in marked:
                with suppress(OSError):
                    path.unlink()
        first = {min(seen): host for host, seen in reversed(answers)}
        nodes = tuple(
            SavedNode(
                first[leader], tuple(at for at, (_, s) in enumerate(answers) if min(s) == leader)
            )
            for leader in sorted(first)
        )
        # every mark is gone before the first rank of a node makes its folder, which removes leftovers
        together(collectives, DOING, lambda: None)
        return None if len(nodes) == 1 else Nodes(nodes, rank)

    def finder(self, collectives: Collectives, load_dir: str | Path) -> Finder:
        return NodeFinder(collectives, load_dir)


def storage_of(section: Checkpoint) -> Storage:
    """The storage that a config names."""
    return NodeStorage() if section.use_node_local_storage else SharedStorage()


__all__ = ["NodeStorage", "SharedStorage", "Storage", "storage_of"]
