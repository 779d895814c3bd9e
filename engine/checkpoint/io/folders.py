"""Folders and tags of checkpoints: rank 0 creates folders, commits them with one rename, and finds them.

    write   .<tag>.tmp-1a2b3c4d/rank_00000-1a2b3c4d.safetensors, ...      every rank, fsync
            .<tag>.tmp-1a2b3c4d/manifest.json                             rank 0, fsync
    commit  .<tag>.tmp-1a2b3c4d -> <tag>        a new tag: the folder is renamed
            <tag>/manifest.json                 an existing tag: new files beside the old, then this rename
    latest  latest                              replaced by a rename, last

A folder without manifest.json is not a checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import time
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any

from torch import Tensor

from ....ops.weights.tensor_table import shown
from ....utils.errors import DamagedError, UsageError
from ....utils.quoting import printable, quoted
from ....utils.small_files import MOST_BYTES
from ..format import dump, parse
from ..manifest import OWN_FILE, Manifest
from ..score import BEST
from .storage import Claim, storage_of

log = logging.getLogger("xds")
MANIFEST, LATEST = "manifest.json", "latest"
TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{8}")
STEP = re.compile(r"global_step([0-9]+)")
UNWRITTEN = ("Cc", "Cs", "Zl", "Zp")  # control characters, surrogates, line separators
MOST_MANIFEST_BYTES = 1 << 30  # of the largest checkpoints: tens of MB
MAX_NAME_BYTES = 255
LOCK_SECONDS, TICK_SECONDS = 60.0, 0.02  # of another save under the same tag
MAX_TAG_BYTES = MAX_NAME_BYTES - len("..tmp-01234567")  # the temporary name is longer than the tag


def check_tag(tag: Any) -> str:
    """The folder name for `tag`, text or a whole number. Raises UsageError: it cannot be a folder name."""
    is_number = hasattr(tag, "__index__") and not isinstance(tag, bool | Tensor)
    if not isinstance(tag, str) and not is_number:
        raise UsageError(
            f"tag = {shown(tag)} is a {type(tag).__name__}: give text, or leave it out"
        )
    name = tag if isinstance(tag, str) else str(index(tag))
    num_bytes = len(name.encode("utf-8", "replace"))
    wrong = ""
    if name in ("", LATEST, MANIFEST) or name.startswith(".") or "/" in name or "\\" in name:
        wrong = (
            f": it names a folder inside save_dir, so it must not be empty, {LATEST!r} or {MANIFEST!r}, begin "
            "with a dot or contain a slash; rename it"
        )
    elif name != name.strip() or any(
        unicodedata.category(character) in UNWRITTEN for character in name
    ):
        wrong = (
            ": it names a folder, so it must not begin or end with a space, nor contain control characters; "
            "rename it"
        )
    elif num_bytes > MAX_TAG_BYTES:
        wrong = f" has {num_bytes} bytes, but it can have at most {MAX_TAG_BYTES}; shorten it"
    if wrong:
        raise UsageError(f"tag = {shown(name)}{wrong}")
    return name


def check_folder(setting: str, folder: Any) -> Path:
    """`folder` as a path. Raises UsageError: it is not a path; `setting` is the name of the argument."""
    is_path = isinstance(folder, str | os.PathLike)
    text = os.fspath(folder) if is_path else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise UsageError(
            f"{setting} = {shown(folder)} is not the path of a folder: give the folder that holds the "
            'checkpoints, such as "checkpoints"'
        )
    return Path(text)


def make_folder(save_dir: Path, tag: str) -> Claim:
    """Create a new folder for `tag`, and remove the folders of killed saves. On one rank."""
    storage = storage_of(save_dir)
    storage.make_folder(save_dir)
    _remove_leftovers(save_dir)
    while True:  # another save may take a new folder for a leftover, until it is locked
        folder = save_dir / hidden(tag)
        storage.make_folder(folder)
        with suppress(FileNotFoundError):
            claim = storage.claim(folder)
            if not claim.is_taken and storage.is_folder(folder):
                return claim
            claim.release()


def hidden(tag: str) -> str:
    """A unique name that no loader reads."""
    return f".{tag}.tmp-{secrets.token_hex(4)}"


def _remove_leftovers(save_dir: Path) -> None:
    """Remove the folders of killed saves."""
    storage = storage_of(save_dir)
    for path in (save_dir / name for name in storage.names(save_dir)):
        if not TEMPORARY.fullmatch(path.name):
            continue
        claim = None
        with suppress(OSError):
            claim = storage.claim(path) if storage.is_folder(path) else None
        if claim is None or not claim.is_taken:
            storage.remove(path)
        if claim is not None:
            claim.release()


def file_name(folder: Path, rank: int) -> str:
    """The name of a rank's file; it is unique per save, so old and new files can be in one folder."""
    return f"rank_{rank:05d}-{folder.name[-8:]}.safetensors"


def discard(folder: Path) -> None:
    """Remove the files of an uncommitted save; errors are ignored."""
    storage_of(folder).remove(folder)


def commit(folder: Path, save_dir: Path, manifest: Manifest) -> Path:
    """Make the files in `folder` the checkpoint `manifest.tag`. Only on rank 0, after every rank's fsync."""
    storage, final_folder = storage_of(save_dir), save_dir / manifest.tag
    storage.write(folder / MANIFEST, dump(manifest))
    storage.sync(folder)
    if not storage.is_folder(final_folder):
        storage.rename(folder, final_folder)
        storage.sync(save_dir)
        return final_folder
    claim = _wait_for(final_folder)
    try:
        _commit_into(final_folder, folder, manifest)
    finally:
        claim.release()
    return final_folder


def _wait_for(folder: Path) -> Claim:
    """The lock on a checkpoint's folder: another process that saves there would remove the new files."""
    deadline = time.monotonic() + LOCK_SECONDS
    claim = storage_of(folder).claim(folder)
    while claim.is_taken and time.monotonic() < deadline:
        claim.release()
        time.sleep(TICK_SECONDS)
        claim = storage_of(folder).claim(folder)
    return claim


def _commit_into(final_folder: Path, folder: Path, manifest: Manifest) -> None:
    """Replace the files of a checkpoint by those in `folder`."""
    storage = storage_of(folder)
    paths = [record.path for record in manifest.files]
    try:  # all new files beside the old ones, or none of them
        for path in paths:
            storage.rename(folder / path, final_folder / path)
        storage.sync(final_folder)
    except OSError:
        for path in paths:
            storage.remove(final_folder / path)
        raise
    storage.rename(folder / MANIFEST, final_folder / MANIFEST)
    storage.sync(final_folder)
    storage.remove(folder)
    with suppress(OSError):  # the next save removes them
        for old in storage.names(final_folder):
            if re.match(OWN_FILE, old) and old not in paths:
                storage.remove(final_folder / old)


def write_latest(save_dir: Path, tag: str) -> None:
    """Set `latest` to `tag` atomically."""
    storage = storage_of(save_dir)
    for is_last in (False, False, True):
        fresh = save_dir / hidden(LATEST)
        try:
            storage.write(fresh, tag.encode())
            storage.rename(fresh, save_dir / LATEST)
            break
        except FileNotFoundError:  # another engine's save removed it as a leftover
            if is_last:
                raise
        except OSError:
            storage.remove(fresh)
            raise
    storage.sync(save_dir)


def read_latest(load_dir: Path) -> str | None:
    """The tag in `latest`; None without this file.

    Raises DamagedError: the content is not a tag, or there is no folder of that name.
    """
    former = None
    while (tag := named_in(load_dir / LATEST)) is not None:
        with suppress(UsageError, ValueError):
            check_tag(tag)
            if storage_of(load_dir).is_folder(load_dir / tag):
                return tag
        if tag == former:
            raise DamagedError(
                f"{load_dir / LATEST} is damaged, or the checkpoint is missing: it names {quoted(tag)}, and "
                f"{_there(load_dir)}"
            )
        former = tag  # a save may have replaced `latest` since, and removed what it named
    return None


def named_in(path: Path) -> str | None:
    """What `latest`, or a file of its kind, names; None without this file. It may not exist.

    Raises: see `_unreadable`; DamagedError: it is not the name of a file.
    """
    try:
        name = storage_of(path).read(path, MOST_BYTES).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    longest = max(len(part.encode()) for part in name.split("/"))
    if "\0" in name or longest > MAX_NAME_BYTES:
        raise DamagedError(f"{path} is damaged: it has {quoted(name)}, and no name of a checkpoint")
    return name


def _unreadable(path: Path, error: OSError) -> UsageError:
    """DamagedError, so that a load may fall back; UsageError where the user may not read the file."""
    kind = UsageError if isinstance(error, PermissionError) else DamagedError
    return kind(f"{path} cannot be read: {error.strerror}")


def read_manifest(load_dir: Path, tag: str) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        DamagedError: the manifest is damaged, or missing in its folder. UsageError: there is no such folder.
    """
    path = load_dir / tag / MANIFEST
    try:
        return parse_file(path)
    except (FileNotFoundError, NotADirectoryError):
        if tag == BEST and not storage_of(path).is_folder(path.parent):
            raise UsageError(
                f'load_checkpoint("{load_dir}", "{BEST}"): no checkpoint there was saved with a metric; give '
                f"save_checkpoint(metric=...), or another tag; {_there(load_dir)}"
            ) from None
        kind = DamagedError if storage_of(path).is_folder(path.parent) else UsageError
        raise kind(
            f"{path.parent} is not a committed checkpoint: it has no {MANIFEST}; {_there(load_dir)}"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def parse_file(path: Path) -> Manifest:
    """The manifest in a file. Raises OSError, or as `parse`."""
    return parse(storage_of(path).read(path, MOST_MANIFEST_BYTES), str(path))


def _there(load_dir: Path) -> str:
    tags = _tags(load_dir)
    return f"in {load_dir} there " + (
        f"are {', '.join(map(printable, tags))}" if tags else "is none"
    )


def _tags(save_dir: Path) -> list[str]:
    """The folders with a manifest, sorted."""
    storage = storage_of(save_dir)
    names = [name for name in storage.names(save_dir) if not name.startswith(".")]
    return [name for name in names if storage.size_of(save_dir / name / MANIFEST) >= 0]


def holds_checkpoints(save_dir: Path) -> bool:
    """There is a checkpoint, or a `latest`; they may be damaged."""
    return storage_of(save_dir).size_of(save_dir / LATEST) >= 0 or bool(_tags(save_dir))


def committed(save_dir: Path) -> list[Manifest]:
    """The manifests of all committed checkpoints, newest first: see `newest_first`.

    Each has the folder's name as its tag. Hidden and uncommitted folders are left out. Checkpoints whose
    manifest is unreadable, or with a missing file or a wrong file length, are left out with a warning.
    """
    manifests = newest_first(_manifests(save_dir))
    return [manifest for manifest in manifests if _is_there(save_dir / manifest.tag, manifest)]


def _is_there(folder: Path, manifest: Manifest) -> bool:
    """Its files are there, with their lengths."""
    for path, size_bytes in (
        (folder / record.path, record.size_bytes) for record in manifest.files
    ):
        if storage_of(path).size_of(path) != size_bytes:
            log.warning("%s is left out: %s is missing or has another length", folder, path)
            return False
    return True


def _manifests(save_dir: Path) -> list[Manifest]:
    manifests = []
    for tag in _tags(save_dir):
        try:
            manifests.append(replace(read_manifest(save_dir, tag), tag=tag))
        except (UsageError, OSError) as error:
            log.warning("%s is left out: %s", save_dir / tag, error)
    return manifests


def newest_first(unsorted: Iterable[Manifest]) -> list[Manifest]:
    """Sort by steps, then by micro-batches, then by the numbers in tags of the same kind.

    The clock decides only between tags of different kinds ("best", "global_step7") of the same step and
    micro-batch.
    """
    manifests = list(unsorted)
    times: dict[tuple[int, int, str], float] = {}  # by (steps, micro-batches, kind)
    for manifest in manifests:
        times[_place(manifest)] = max(times.get(_place(manifest), 0.0), manifest.saved_seconds)

    def age(manifest: Manifest) -> tuple[int, int, float, str, list[int], str]:
        steps, micro_steps, kind = _place(manifest)
        return (
            steps,
            micro_steps,
            times[_place(manifest)],
            kind,
            _numbers(manifest.tag),
            manifest.tag,
        )

    return sorted(manifests, key=age, reverse=True)


def best_first(newest_first: Sequence[Manifest]) -> list[Manifest]:
    """Those with a score, the best one first; of equal ones the earliest. The newest score says the mode."""
    scored = [manifest for manifest in reversed(newest_first) if manifest.score is not None]
    if not scored or scored[-1].score is None:
        return []
    sign = -1 if scored[-1].score.mode == "max" else 1

    def badness(manifest: Manifest) -> float:
        metric = None if manifest.score is None else manifest.score.metric
        return math.inf if metric is None else sign * metric

    return sorted(scored, key=badness)


def kind_of(tag: str) -> str:
    """The tag without its numbers: "global_step300" and "global_step310" are of one kind."""
    return re.sub(r"[0-9]+", "0", tag)


def _place(manifest: Manifest) -> tuple[int, int, str]:
    return manifest.global_steps, manifest.micro_steps, kind_of(manifest.tag)


def _numbers(tag: str) -> list[int]:
    return [int(digits[:4000]) for digits in re.findall(r"[0-9]+", tag)]


def newest_checkpoint(save_dir: str | Path) -> str | None:
    """The tag of the newest committed checkpoint in `save_dir`; None if there is none. Not a collective.

    It can be newer than the tag in `latest`: a save can be killed before it updates `latest`.
    """
    manifests = committed(check_folder("save_dir", save_dir))
    return manifests[0].tag if manifests else None


def meant_tag(save_dir: Path, tag: str, left_out: Collection[str] = ()) -> str:
    """`tag`; for "best" that of the best checkpoint not in `left_out`, unless one was saved as "best"."""
    if tag != BEST or storage_of(save_dir).is_folder(save_dir / tag):
        return tag
    manifests = newest_first(_manifests(save_dir))  # also damaged ones: a load says so
    ranked = best_first(manifests)
    return next((manifest.tag for manifest in ranked if manifest.tag not in left_out), tag)


def older_checkpoint(save_dir: Path, tag: str, left_out: Collection[str]) -> str | None:
    """The newest committed checkpoint before `tag` that is not in `left_out`; None if there is none.

    If the manifest of `tag` is unreadable, the step in its name decides (`global_step300`). Without a step in
    the name, all checkpoints qualify.
    """
    manifests = committed(save_dir)
    order = [manifest.tag for manifest in newest_first(_manifests(save_dir))]
    if tag in order:
        older = order[order.index(tag) :]
        manifests = [manifest for manifest in manifests if manifest.tag in older]
    elif match := STEP.fullmatch(tag):
        manifests = [manifest for manifest in manifests if manifest.global_steps < int(match[1])]
    return next((manifest.tag for manifest in manifests if manifest.tag not in left_out), None)


def prune(save_dir: Path, tag: str, keep_last: int) -> None:
    """Of the checkpoints whose tags differ from `tag` only in numbers, keep the newest `keep_last` (0: all).

    Of those with a metric the best ones stay, as many as the newest `keep_best` says, and without `keep_last`
    the others are removed. These are never removed: the tag in `latest`, `tag` itself, and checkpoints with
    more steps than `tag`. So a new run in the folder of an old one removes nothing. A folder is renamed to a
    hidden name before its files are removed, so a visible checkpoint is always complete.
    """
    kind = kind_of(tag)
    manifests = [manifest for manifest in committed(save_dir) if kind_of(manifest.tag) == kind]
    steps = next((manifest.global_steps for manifest in manifests if manifest.tag == tag), 0)
    same = [manifest for manifest in manifests if manifest.global_steps <= steps]
    ranked = best_first(same)
    newest = next((manifest.score for manifest in same if manifest.score is not None), None)
    keep_best = 0 if newest is None else newest.keep_best
    stay: set[str | None] = {tag, *(manifest.tag for manifest in ranked[: max(keep_best, 1)])}
    old_ones = same[keep_last:] if keep_last else ranked if keep_best else []
    with suppress(DamagedError):
        stay.add(read_latest(save_dir))
    storage = storage_of(save_dir)
    for old in {manifest.tag for manifest in old_ones} - stay:
        try:
            aside = save_dir / hidden(old)
            storage.rename(save_dir / old, aside)
            storage.sync(save_dir)
            storage.remove(aside)
        except OSError as error:
            log.warning("keep_last, keep_best: cannot remove %s: %s", save_dir / old, error)
