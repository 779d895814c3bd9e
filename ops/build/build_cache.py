"""The cache of built libraries: a folder per key, committed by one rename; locks die with their holders.

    wait    cpu-0123456789abcdef.lock               flock: one builder of this key at a time
    build   .tmp-cpu-0123456789abcdef-1a2b3c4d/     beside it a .lock, flocked: its builder lives
    commit  .tmp-... -> cpu-0123456789abcdef/       libcpu.so and info.json, after fsync
    use     cpu-0123456789abcdef/info.json          a shared flock of every process that loaded it

Locks are on files, never on folders, and exclusive ones on files open for writing: NFS asks for that. A folder
without a good info.json, or whose library has another length or checksum, is built anew. So is one that another
user could have laid there (see trust.py): loading it would run it. On a file system without locks two processes
may build the same; the rename keeps the result whole.
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
from ...utils.trust import make_folders, why_not_trusted

log = logging.getLogger("xds")
FOLDER_VARIABLE = "XDS_CACHE_DIR"
INFO = "info.json"
QUIET_SECONDS = 5.0  # a wait for another process's build that is not worth a line
PATIENCE_SECONDS = 900.0  # then its builder counts as stuck, and this process builds beside it
POLL_SECONDS = 0.02
OLD_SECONDS = 3600.0  # without locks: a temporary folder of this age has no builder any more
MIN_FREE_BYTES = 64 * 2**20
TEMPORARY = re.compile(r"\.tmp-.+-[0-9a-f]{8}(\.lock)?")
KEY = re.compile(r"(?P<name>\w+)-[0-9a-f]{16}")
SWEEP = "folder.lock"


@final
@dataclass(frozen=True)
class Info:
    """What info.json says about a library."""

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
class Entry:
    """A finished library in the cache."""

    folder: Path
    info: Info

    @property
    def path(self) -> Path:
        return self.folder / self.info.file


def default_folder() -> Path:
    """$XDS_CACHE_DIR, else xds/ in the user's cache folder. It need not exist."""
    asked = os.environ.get(FOLDER_VARIABLE)
    if asked:
        return Path(asked).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home).absolute() / "xds"


def folders() -> list[Path]:
    """Where finished libraries may be: the cache, and what stands in for one that cannot be used."""
    is_trusted = not why_not_trusted(default_folder())
    found = [default_folder()] if is_trusted else []
    may_stand_in = not (is_trusted and os.environ.get(FOLDER_VARIABLE))
    if may_stand_in and _stand_in().is_dir() and not why_not_trusted(_stand_in()):
        found.append(_stand_in())
    return found


def writable_folder() -> Path:
    """A folder that can hold one more library: the cache, else one under the temporary folder.

    Raises BuildError: neither can be written, or other users may write there, too.
    """
    wanted = default_folder()
    reason = _why_not_writable(wanted)
    other_user = why_not_trusted(wanted)
    if not (reason or other_user):
        return wanted
    if os.environ.get(FOLDER_VARIABLE) and reason:
        raise BuildError(
            f"{FOLDER_VARIABLE} = {wanted} cannot hold a library: {reason}",
            remedy="make room or set it to another folder",
        )
    instead = _stand_in()
    with suppress(OSError):
        instead.mkdir(mode=0o700)
    reason, not_private = reason or other_user, why_not_trusted(instead)
    other = f"it belongs to somebody else: {not_private}" if not_private else ""
    other = other or _why_not_writable(instead)
    if other:
        raise BuildError(
            f"no folder for native libraries: {wanted}: {reason}; {instead}: {other}",
            remedy=f"set {FOLDER_VARIABLE} to a folder with {MIN_FREE_BYTES >> 20} MiB of room",
        )
    log.warning(
        "%s cannot hold native libraries (%s): they go to %s; set %s to a folder that lasts",
        *(wanted, reason, instead, FOLDER_VARIABLE),
    )
    return instead


def _stand_in() -> Path:
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


def read_entry(folder: Path) -> Entry | None:
    """The library in a folder of the cache; None where none is finished, it is damaged, or not ours."""
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
    return Entry(folder, info) if is_whole and info.key == folder.name else None


def keys(folder: Path) -> list[Path]:
    """The folders of a cache's libraries: finished, damaged, or with a lock alone."""
    with suppress(OSError):
        names = {path.name.removesuffix(".lock") for path in folder.iterdir()}
        return [folder / name for name in sorted(names) if KEY.fullmatch(name)]
    return []


def use(entry: Entry) -> int:
    """A file descriptor that keeps the library from `remove` while it is open, at most for this process."""
    fd = os.open(entry.folder / INFO, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def remove(folder: Path) -> bool:
    """Remove one library and its lock, unless a process has it loaded or builds it; whether it is gone."""
    lock = folder.with_name(f"{folder.name}.lock")
    with suppress(OSError), _held(lock) as is_ours, _held(folder / INFO) as is_unused:
        if is_ours and is_unused:
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                lock.unlink(missing_ok=True)
    return not folder.exists()


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Whether the lock on `path` is held while the block runs; a file that is not there needs none."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _try_lock(fd) is not False
    finally:
        os.close(fd)


@contextmanager
def locked(folder: Path, key: str) -> Iterator[KeyLock]:
    """Waits until no other process builds `key`, and holds it until the block ends."""
    lock = KeyLock(folder / f"{key}.lock")
    try:
        lock.acquire(key)
        yield lock
    finally:
        lock.release()


@final
class KeyLock:
    """The right to build one key. The lock goes with the process, however that ends.

    What the file holds is the last failure: who waited for that build takes it over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = time.time()
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)

    def acquire(self, key: str) -> None:
        """Returns with the lock, or without one where the file system has none or its holder is stuck."""
        is_told = False
        while not self._try():
            waited_seconds = time.time() - self.began
            if waited_seconds > PATIENCE_SECONDS:
                log.warning("another process holds %s for %.0f s", self.path, waited_seconds)
                return
            if waited_seconds > QUIET_SECONDS and not is_told:
                log.info("waiting for another process that builds %s", key)
                is_told = True
            time.sleep(POLL_SECONDS)

    def _try(self) -> bool:
        if _try_lock(self._fd) is False:
            return False
        with suppress(OSError):
            if os.path.sameopenfile(self._fd, fresh := self._open()):
                os.close(fresh)
                return True
            # `remove` took the file away before it was locked here
            self._fd, old = fresh, self._fd
            os.close(old)
            return False
        return True

    def release(self) -> None:
        os.close(self._fd)

    def failure(self) -> BuildError | None:
        """How the build ended that this process waited for, if it failed."""
        try:
            kept = json.loads(os.pread(self._fd, 2**20, 0) or b"{}")
            if kept["failed_at"] < self.began:
                return None
            return BuildError(kept["what"], kept["command"], kept["lines"], kept["remedy"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def tell_failure(self, error: BuildError) -> None:
        kept = {"failed_at": time.time(), "what": error.what, "command": error.command}
        text = json.dumps({**kept, "lines": error.lines, "remedy": error.remedy})
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)


def _try_lock(fd: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def temporary(folder: Path, key: str) -> Iterator[Path]:
    """A fresh folder to build in; it goes with the block, or with the next builder if this one is killed."""
    path = folder / f".tmp-{key}-{secrets.token_hex(4)}"
    with _sweeping(folder):
        _discard_dead(folder)
        fd = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT, 0o644)
        _try_lock(fd)
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
    """Remove what killed builders left behind."""
    with suppress(OSError), _sweeping(folder):
        _discard_dead(folder)


@contextmanager
def _sweeping(folder: Path) -> Iterator[None]:
    """Between making a folder and locking it nobody may take it for a dead one's."""
    fd = os.open(folder / SWEEP, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _discard_dead(folder: Path) -> None:
    # folders first: one that outlives its lock is taken for a dead one's, too
    for path in sorted(folder.iterdir()):
        if TEMPORARY.fullmatch(path.name) and _is_dead(path):
            discard(path)


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(_lock_of(path), os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # somebody else's
        return False
    try:
        is_ours = _try_lock(fd)
        if is_ours is None:
            return time.time() - os.fstat(fd).st_mtime > OLD_SECONDS
        return is_ours
    finally:
        os.close(fd)


def discard(path: Path) -> None:
    """Several times over: the compiler of a killed builder may still be writing into it."""
    if path.is_file():
        with suppress(OSError):
            path.unlink()
        return
    for _ in range(5):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return


def commit(built: Path, folder: Path, info: Info) -> Entry:
    """Make the library in the temporary folder `built` the one of its key: all of it, or nothing."""
    (built / INFO).write_text(json.dumps(asdict(info), indent=1))
    for path in (built / info.file, built / INFO):  # whatever the umask and the linker say
        path.chmod(path.stat().st_mode & 0o755)
    built.chmod(folder.stat().st_mode & 0o755)
    for path in (built / info.file, built / INFO, built):
        _sync(path)
    final_folder = folder / info.key
    for _ in range(3):
        if final_folder.exists():  # damaged, or of a builder without locks
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
