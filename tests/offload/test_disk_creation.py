"""How the file of a rank is created: without a name, its space reserved, and what is said where that fails."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from types import SimpleNamespace

import pytest
import torch
from broken_disk import SPACE_CALLS, BrokenDisk
from test_disk_file import SMALL, file_of, open_files, pages
from time_limit import limit_time  # noqa: F401

from xds.offload.disk import creation
from xds.offload.disk.creation import create_file
from xds.offload.disk.file import DiskFile
from xds.utils.errors import UsageError

SIZE = 1 << 20


def refuse(code):
    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


def comes_back(folder) -> bool:
    """Whether a file there works."""
    disk, (_, extent) = file_of(folder, 4096, 30_000)
    source, copy = pages(30_000, 1), pages(30_000)
    disk.write(extent, source)
    disk.read(extent, copy).wait()
    disk.close()
    return torch.equal(source, copy)


def test_a_file_has_no_name_and_its_space_is_reserved(tmp_path):
    new = create_file(tmp_path / "not" / "there", SIZE, rank=0)
    state = os.fstat(new.fd)
    assert state.st_size == SIZE and state.st_blocks * 512 >= SIZE
    assert state.st_nlink == 0 and not list((tmp_path / "not" / "there").iterdir())
    assert not os.get_inheritable(new.fd)
    assert state.st_mode & 0o077 == 0  # states of a model are nobody else's business
    os.close(new.fd)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_a_file_system_without_nameless_files(tmp_path, monkeypatch, code):
    plain, names = os.open, []

    def opened(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        names.append(path)
        return plain(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    assert comes_back(tmp_path)
    assert len(names) == 1 and names[0].name.startswith(f".xds-rank0-{os.getpid()}-")
    assert not list(tmp_path.iterdir())


def test_a_name_that_cannot_be_removed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(creation, "_NAMELESS", 0)
    monkeypatch.setattr(os, "unlink", refuse(errno.EIO))
    before = open_files()
    with pytest.raises(UsageError, match="cannot create its file there: EIO"):
        create_file(tmp_path, SIZE, rank=0)
    assert open_files() == before


@pytest.mark.parametrize("where", ["fcntl", "pwritev", "preadv"])
def test_refused_direct_io_falls_back_to_the_page_cache(tmp_path, monkeypatch, where):
    if where == "fcntl":
        plain = fcntl.fcntl

        def call(fd, command, value=0):
            if command == fcntl.F_SETFL and value & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return plain(fd, command, value)

        monkeypatch.setattr(fcntl, "fcntl", call)
    else:
        plain = getattr(os, where)

        def call(fd, buffers, offset):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return plain(fd, buffers, offset)

        monkeypatch.setattr(os, where, call)
    disk = DiskFile(tmp_path, SIZE, SMALL, rank=0)
    assert not disk.is_direct
    disk.close()
    assert comes_back(tmp_path)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF])
def test_space_that_cannot_be_reserved_is_only_checked(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "posix_fallocate", refuse(code))
    assert comes_back(tmp_path)


def test_reserving_never_writes_to_every_block(tmp_path, monkeypatch):
    """glibc does that where the file system cannot reserve, unless the file is for appending."""
    seen, plain = [], os.posix_fallocate

    def call(fd, offset, size):
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND))
        plain(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", call)
    assert comes_back(tmp_path) and seen == [True]


def space(monkeypatch, free_bytes, blocks=10**9):
    answer = SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_blocks=blocks)
    monkeypatch.setattr(os, "fstatvfs", lambda _: answer)


def test_too_little_space_names_the_setting_both_sizes_and_the_remedy(tmp_path, monkeypatch):
    space(monkeypatch, 4096 * 500)
    before = open_files()
    said = re.escape(
        f"nvme_path = {tmp_path}: rank 7 needs 3.00 GB (3000000512 bytes) there, and 2.05 MB "
        "(2048000 bytes) are free; free space there, set nvme_path to a folder on another disk, "
        "or use more ranks"
    )
    with pytest.raises(UsageError, match=f"^{said}$"):
        DiskFile(tmp_path, 3_000_000_512, SMALL, rank=7)
    assert open_files() == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_space_that_others_take_meanwhile_is_the_same_error(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "posix_fallocate", refuse(code))
    with pytest.raises(UsageError, match=r"rank 1 needs 1.05 MB .* are free; free space"):
        create_file(tmp_path, SIZE, rank=1)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match=r"nvme_path = .*taken: rank 2 .*EEXIST.*to a folder"):
        create_file(tmp_path / "taken", SIZE, rank=2)
    with pytest.raises(UsageError, match=r"nvme_path = .*ENOTDIR.*to a folder"):
        create_file(tmp_path / "taken" / "below", SIZE, rank=2)


@pytest.mark.parametrize("kind", ["eio", "full"])
def test_a_disk_that_fails_at_any_call_of_the_creation(tmp_path, kind):
    """One error that names the setting, and no open file; or a file that works."""
    before, folder, reasons = open_files(), tmp_path / "made", []
    for fails_at in range(20):
        disk = BrokenDisk(tmp_path, fails_at, kind, (*SPACE_CALLS, "preadv"))
        with disk.in_place():
            try:
                os.close(create_file(folder, SIZE, rank=4).fd)
            except UsageError as error:
                reasons.append(disk.hit.split()[0])
                assert f"nvme_path = {folder}: rank 4" in str(error), disk.hit
        assert open_files() == before, disk.hit
        assert not list(folder.iterdir()) if folder.exists() else True
        if disk.count <= fails_at:
            break
    assert reasons[:4] == ["mkdir", "open", "posix_fallocate", "pwritev"]
    assert disk.count <= fails_at
