"""The checkpoints of groups that train alone: each group saves its own, and group 0 commits last.

    save_dir/global_step90              of group 0, with the outer parameters and their momentum
    save_dir/groups/1/global_step90     of group 1: its own parameters, optimizer states and outer errors
    save_dir/latest                     group 0 writes it when all groups have saved

A group that has no folder, because there were fewer groups, loads that of group 0 and begins with the outer
parameters. Where sites share no disk, each site has the folders of its groups, and group 0's is copied there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import agreeing, all_gather_json
from ...utils.errors import UsageError
from .io.folders import MANIFEST, check_folder, read_manifest
from .io.storage import storage_of
from .load import find_tag
from .load_plan import DOING as LOADING
from .saver import DOING as SAVING

FOLDER = "groups"
Result = TypeVar("Result")


def folder_of(folder: str | Path, group: int) -> str | Path:
    """Where a group saves."""
    return folder if not group else Path(folder) / FOLDER / str(group)


def save_in_turn(
    meet: Collectives, folder: str | Path, save: Callable[[str | Path], Result]
) -> Result:
    """`save` into the folder of each group, group 0 last. For all groups; raises on all if one raises."""
    check_folder("save_dir", folder)
    own = folder_of(folder, meet.rank)
    results = []
    for is_turn in (meet.rank > 0, meet.rank == 0):
        with agreeing(meet, f"{SAVING} of a group"):
            results += [save(own)] if is_turn else []
    return results[0]


def choose(
    meet: Collectives,
    group: Collectives,
    folder: str | Path,
    tag: str | None,
    *,
    falls_back: bool,
) -> tuple[str | Path, str | None, bool]:
    """The folder and tag that this group loads, and whether it takes those of group 0. For all groups.

    group: the ranks of this group. The tag is that of group 0; None: there is none.
    """
    found: tuple[str | None, int] = (None, 0)
    with agreeing(meet, LOADING):
        if not meet.rank:
            chosen = find_tag(group, folder, tag, falls_back=falls_back)
            found = (chosen, _num_groups(Path(folder), chosen))
    chosen, num_groups = all_gather_json(meet, found, "the checkpoint of group 0")[0]
    if chosen is None or not meet.rank:
        return folder, chosen, False
    own = Path(folder_of(folder, meet.rank))
    has_own = storage_of(own).size_of(own / chosen / MANIFEST) >= 0
    if any(all_gather_json(group, has_own, "its checkpoint")) and meet.rank < num_groups:
        return own, chosen, False
    return folder, chosen, True


def _num_groups(folder: Path, tag: str | None) -> int:
    """The groups that have saved it; 0: a run without groups, or it cannot be read."""
    try:
        state = read_manifest(folder, tag).state if tag is not None else {}
    except (UsageError, OSError):
        return 0  # the load says why
    return int((state.get("outer") or {}).get("groups", 0))


def check_steps(meet: Collectives, step: int) -> None:
    """Raises UsageError: the groups have loaded checkpoints of different steps. For all groups."""
    steps = all_gather_json(meet, step, "the steps of the groups")
    if len(set(steps)) > 1:
        shown = ", ".join(f"{each} in group {number}" for number, each in enumerate(steps))
        raise UsageError(
            f"{LOADING}: the groups have loaded different steps ({shown}): load a tag that all of them have"
        )


__all__ = ["check_steps", "choose", "folder_of", "save_in_turn"]
