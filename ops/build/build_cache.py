"""The cache of built libraries: one folder per key, committed with one rename. Locks end with their process.

    wait    cpu-0123456789abcdef.lock               flock: one build of this key at a time
    build   .tmp-cpu-0123456789abcdef-1a2b3c4d/     its .lock file is flocked while the build runs
    commit  .tmp-... -> cpu-0123456789abcdef/       libcpu.so and info.json, after fsync
    use     cpu-0123456789abcdef/info.json          a shared flock of every process that loaded it

Locks are on files, never on folders, and exclusive locks on files that are open for writing: NFS requires this.
A library is built again where info.json is missing or invalid, or the length or checksum differs. The same
applies where another user could have written the files (see trust.py), because loading a library runs its
code. On a file system without locks two processes may build the same key; the rename keeps the result intact.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from ...utils.errors import BuildError
from ...utils.small_files import try_lock
from ...utils.trust import make_folders, why_not_trusted

log = logging.getLogger("xds")
FOLDER_VARIABLE = "XDS_CACHE_DIR"
INFO = "info.json"
QUIET_SECONDS = 5.0  # a shorter wait for another process's build is not logged
PATIENCE_SECONDS = (
    900.0  # after this wait the other build counts as stuck, and this process builds as well
)
POLL_SECONDS = 0.02
OLD_SECONDS = 3600.0  # without locks: a temporary folder of this age counts as abandoned
MIN_FREE_BYTES = 64 * 2**20
TEMPORARY = re.compile(r"\.tmp-.+-[0-9a-f]{8}(\.lock)?")
KEY = re.compile(r"(?P<name>\w+)-[0-9a-f]{16}")
SWEEP = "folder.lock"


@final
@dataclass(frozen=True)
class Info:
    """The contents of a library's info.json."""

    key: str
    name: str
    device: str
    file: str
    size_bytes: int
    sha256: str
    seconds: float
    compiler: str
    built_at: str


@final
@dataclass(frozen=True)
class CachedLibrary:
    """A finished library in the cache."""

    folder: Path
    info: Info

    @property
    def path(self) -> Path:
        return self.folder / self.info.file


def default_folder() -> Path:
    """$XDS_CACHE_DIR, else xds/ in the user's cache folder. It may not exist yet."""
    asked = os.environ.get(FOLDER_VARIABLE)
    if asked:
        return Path(asked).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home).absolute() / "xds"


def folders() -> list[Path]:
    """The folders to search for finished libraries: the cache, and the fallback of one that is not usable."""
    is_trusted = not why_not_trusted(default_folder())
    found = [default_folder()] if is_trusted else []
    may_fall_back = not (is_trusted and os.environ.get(FOLDER_VARIABLE))
    if may_fall_back and _fallback().is_dir() and not why_not_trusted(_fallback()):
        found.append(_fallback())
    return found


def writable_folder() -> Path:
    """A folder that can hold one more library: the cache, else a folder in the system's temporary folder.

    Raises BuildError: neither can be written, or other users may write there.
    """
    wanted = default_folder()
    reason = _why_not_writable(wanted)
    other_user = why_not_trusted(wanted)
    if not (reason or other_user):
        return wanted
    if os.environ.get(FOLDER_VARIABLE) and reason:
        raise BuildError(
            f"{FOLDER_VARIABLE} = {wanted} cannot hold a library: {reason}",
            remedy="free disk space or set it to another folder",
        )
    instead = _fallback()
    with suppress(OSError):
        instead.mkdir(mode=0o700)
    reason, not_private = reason or other_user, why_not_trusted(instead)
    other = f"another user may change it: {not_private}" if not_private else ""
    other = other or _why_not_writable(instead)
    if other:
        raise BuildError(
            f"no folder for native libraries: {wanted}: {reason}; {instead}: {other}",
            remedy=f"set {FOLDER_VARIABLE} to a folder with {MIN_FREE_BYTES >> 20} MiB of free space",
        )
    log.warning(
        "%s cannot hold native libraries (%s); using %s instead; set %s to a permanent folder",
        *(wanted, reason, instead, FOLDER_VARIABLE),
    )
    return instead


def _fallback() -> Path:
    return Path(tempfile.gettempdir()).absolute() / f"xds-{os.getuid()}"


def _why_not_writable(folder: Path) -> str:
    try:
        make_folders(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    if free_bytes < MIN_FREE_BYTES:
        return f"{free_bytes >> 20} MiB are free, {MIN_FREE_BYTES >> 20} needed"
    return ""


def read_entry(folder: Path) -> CachedLibrary | None:
    """The library in a folder of the cache; None where it is not finished, damaged or not trusted."""
    try:
        if why_not_trusted(folder / INFO):
            return None
        info = Info(**json.loads((folder / INFO).read_text()))
        if os.path.basename(info.file) != info.file or why_not_trusted(folder / info.file):
            return None
        data = (folder / info.file).read_bytes()
    except (OSError, ValueError, TypeError):
        return None
    is_whole = len(data) == info.size_bytes and hashlib.sha256(data).hexdigest() == info.sha256
    return CachedLibrary(folder, info) if is_whole and info.key == folder.name else None


def keys(folder: Path) -> list[Path]:
    """The folders of a cache's libraries: finished, damaged, or with only a lock file."""
    with suppress(OSError):
        names = {path.name.removesuffix(".lock") for path in folder.iterdir()}
        return [folder / name for name in sorted(names) if KEY.fullmatch(name)]
    return []


def use(entry: CachedLibrary) -> int:
    """A file descriptor that protects the library from `remove` while it is open. It ends with the process."""
    fd = os.open(entry.folder / INFO, os.O_RDONLY)
    try_lock(fd, shared=True)
    return fd


def remove(folder: Path) -> bool:
    """Remove one library and its lock, unless a process has loaded it or builds it.

    Returns: whether the library is removed.
    """
    lock = folder.with_name(f"{folder.name}.lock")
    with suppress(OSError), _held(lock) as is_ours, _held(folder / INFO) as is_unused:
        if is_ours and is_unused:
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                lock.unlink(missing_ok=True)
    return not folder.exists()


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Yield whether the lock on `path` is held during the block; a file that does not exist needs no lock."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    try:
        yield try_lock(fd) is not False
    finally:
        os.close(fd)


@contextmanager
def locked(folder: Path, key: str) -> Iterator[KeyLock]:
    """Wait until no other process builds `key`, and hold the lock until the block ends."""
    lock = KeyLock(folder / f"{key}.lock")
    try:
        lock.acquire(key)
        yield lock
    finally:
        lock.release()


@final
class KeyLock:
    """The lock for building one key. The operating system releases it when the process ends.

    The file contains the last failure; processes that waited for that build raise the same error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = time.time()
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)

    def acquire(self, key: str) -> None:
        """Wait for the lock. Returns without it where the file system has no locks or the holder is stuck."""
        is_logged = False
        while not self._try():
            waited_seconds = time.time() - self.began
            if waited_seconds > PATIENCE_SECONDS:
                log.warning("another process holds %s for %.0f s", self.path, waited_seconds)
                return
            if waited_seconds > QUIET_SECONDS and not is_logged:
                name = key.rpartition("-")[0]
                log.info("waiting for another process that compiles %s (once, about 20 s)", name)
                is_logged = True
            time.sleep(POLL_SECONDS)

    def _try(self) -> bool:
        if try_lock(self._fd) is False:
            return False
        with suppress(OSError):
            if os.path.sameopenfile(self._fd, fresh := self._open()):
                os.close(fresh)
                return True
            # `remove` deleted the file before it was locked here
            self._fd, old = fresh, self._fd
            os.close(old)
            return False
        return True

    def release(self) -> None:
        os.close(self._fd)

    def failure(self) -> BuildError | None:
        """The error of the build that this process waited for; None where it did not fail."""
        try:
            kept = json.loads(os.pread(self._fd, 2**20, 0) or b"{}")
            if kept["failed_at"] < self.began:
                return None
            return BuildError(kept["what"], kept["command"], kept["lines"], kept["remedy"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def record_failure(self, error: BuildError) -> None:
        kept = {"failed_at": time.time(), "what": error.what, "command": error.command}
        text = json.dumps({**kept, "lines": error.lines, "remedy": error.remedy})
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)


@contextmanager
def temporary(folder: Path, key: str) -> Iterator[Path]:
    """A new folder to build in. It is removed after the block, or by the next build if this one is killed."""
    path = folder / f".tmp-{key}-{secrets.token_hex(4)}"
    with _sweeping(folder):
        _discard_dead(folder)
        fd = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT, 0o644)
        try_lock(fd)
        path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        discard(path)
        os.close(fd)
        discard(_lock_of(path))


def _lock_of(path: Path) -> Path:
    return path if path.suffix == ".lock" else path.with_name(f"{path.name}.lock")


def sweep(folder: Path) -> None:
    """Remove the temporary folders of builds that were killed."""
    with suppress(OSError), _sweeping(folder):
        _discard_dead(folder)


@contextmanager
def _sweeping(folder: Path) -> Iterator[None]:
    """Hold the sweep lock, so that no process treats a folder as abandoned before its creator has locked it."""
    fd = os.open(folder / SWEEP, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _discard_dead(folder: Path) -> None:
    # folders before their lock files: a folder without a lock file counts as abandoned as well
    for path in sorted(folder.iterdir()):
        if TEMPORARY.fullmatch(path.name) and _is_dead(path):
            discard(path)


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(_lock_of(path), os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # it belongs to another user
        return False
    try:
        is_ours = try_lock(fd)
        if is_ours is None:
            return time.time() - os.fstat(fd).st_mtime > OLD_SECONDS
        return is_ours
    finally:
        os.close(fd)


def discard(path: Path) -> None:
    """Remove a file or folder. Tries several times: the compiler of a killed build may still be writing."""
    if path.is_file():
        with suppress(OSError):
            path.unlink()
        return
    for _ in range(5):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return


def commit(built: Path, folder: Path, info: Info) -> CachedLibrary:
    """Move the library in the temporary folder `built` to the folder of its key, atomically."""
    (built / INFO).write_text(json.dumps(asdict(info), indent=1))
    for path in (built / info.file, built / INFO):  # independent of the umask and the linker
        path.chmod(path.stat().st_mode & 0o755)
    built.chmod(folder.stat().st_mode & 0o755)
    for path in (built / info.file, built / INFO, built):
        _sync(path)
    final_folder = folder / info.key
    for _ in range(3):
        if final_folder.exists():  # damaged, or built at the same time without locks
            with suppress(OSError):
                os.rename(final_folder, built.with_name(f".tmp-{info.key}-{secrets.token_hex(4)}"))
        with suppress(OSError):
            os.rename(built, final_folder)
            break
    _sync(folder)
    entry = read_entry(final_folder)
    if entry is None:
        raise BuildError(f"{final_folder} cannot be written", remedy=f"set {FOLDER_VARIABLE}")
    return entry


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
