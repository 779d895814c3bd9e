"""Checks that no other user can change a path, before a file there is run, loaded or relied on.

A file that a user names is read whoever owns it. One that is found without being named has to be trusted.

A path is trusted if root or this user owns every folder and every link on the way and the file or folder at
the end, and no other user may write to them. A folder with the sticky bit, such as /tmp, is allowed on the
way: there no user can replace files that others own. Once these conditions hold, no other user can change
them, so there is no race between the check and the use.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from functools import cache
from pathlib import Path

from .messages import never, write_stderr
from .quoting import printable

_MOST_LINKS = 40  # the kernel's own limit
_OTHERS, _GROUP = 0o002, 0o020


def why_not_trusted(path: str | Path) -> str:
    """Which other user may change `path`, in one sentence; "" where no other user may.

    Where `path` does not exist yet, only the existing folders are checked: call it again once it was created.
    """
    here, num_links = "/", 0
    rest = _names(os.path.join(os.getcwd(), path))
    reason = _why_not(here, os.lstat(here), is_last=not rest)
    while rest and not reason:
        name = rest.pop()
        if name == "..":  # `here` contains no links
            here = os.path.dirname(here)
            continue
        there = os.path.join(here, name)
        try:
            status = os.lstat(there)
            if stat.S_ISLNK(status.st_mode):
                reason, num_links = _whose(there, status, is_last=False), num_links + 1
                target = os.readlink(there)
                here = "/" if target.startswith("/") else here
                rest += _names(target)
                if num_links > _MOST_LINKS:
                    return f"{there} leads through too many links"
                continue
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"{there}: {error.strerror}"
        reason = _why_not(there, status, is_last=not rest)
        here = there
    return reason


def is_found(path: str | Path, naming: str) -> bool:
    """Whether there is a file at `path`, which the user has not named, that no other user may change.

    Standard error says why a file is ignored that others may change. naming: what names it.
    """
    if not os.path.isfile(path):
        return False
    reason = why_not_trusted(path)
    if reason:
        told = f"{printable(path)} is ignored: {printable(reason)}"
        write_stderr(f"xds: {told}; to use it nevertheless, name it: {printable(naming)}\n", never)
    return not reason


def make_folders(path: Path) -> None:
    """Create `path` and its missing parents so that no other user may write there, whatever the umask is."""
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=0o755, exist_ok=True)


def _names(path: str) -> list[str]:
    """The names in `path`, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _why_not(path: str, status: os.stat_result, *, is_last: bool) -> str:
    whose = _whose(path, status, is_last=is_last)
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and not is_last
    if whose or is_sticky:
        return whose
    if status.st_mode & _OTHERS:
        return f"every user may write to {path}"
    if status.st_mode & _GROUP and not _is_own_group(status.st_gid):
        return f"the group {status.st_gid} may write to {path}"
    return ""


def _whose(path: str, status: os.stat_result, *, is_last: bool) -> str:
    owners = {0, os.geteuid()} | (set() if is_last else _unmapped())
    return "" if status.st_uid in owners else f"{path} belongs to user {status.st_uid}"


@cache
def _unmapped() -> set[int]:
    """The user id that represents root and all other users in a namespace that maps one user only."""
    try:
        with open("/proc/self/uid_map") as file:
            num_mapped = sum(int(line.split()[2]) for line in file)
        with open("/proc/sys/kernel/overflowuid") as file:
            return {int(file.read())} if num_mapped < 2**31 else set()
    except (OSError, ValueError, IndexError):
        return set()


def _is_own_group(gid: int) -> bool:
    """Whether it is the private group that many systems create for each user, without other members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_of_user = user.pw_gid == gid and user.pw_name == group.gr_name
    return is_of_user and set(group.gr_mem) <= {user.pw_name}
