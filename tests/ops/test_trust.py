"""Tests of `why_not_trusted`, and that no library is loaded from a path that other users may change."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
from pathlib import Path
from types import SimpleNamespace

import native_sources as tiny
import pytest

from xds.ops.build import build, build_cache
from xds.utils import small_files, trust
from xds.utils.small_files import replace_small_file
from xds.utils.trust import make_folders, why_not_trusted

needs_cxx = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
SOMEBODY = 12345


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "one" / "two"
    make_folders(path)
    (path / "file").write_text("")
    (path / "file").chmod(0o644)
    return path


def test_own_folders_are_trusted_and_what_is_missing_is_no_danger(folder: Path) -> None:
    assert why_not_trusted(folder) == "" == why_not_trusted(folder / "file")
    assert why_not_trusted(folder / "no" / "such") == "" == why_not_trusted("/")


def test_who_may_write_or_owns_anything_on_the_way_may_change_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_is_own_group", lambda gid: False)
    for place in (folder.parent, folder, folder / "file"):
        before = place.stat()
        for mode in (0o777, 0o757, 0o775):
            place.chmod(mode)
            assert str(place) in why_not_trusted(folder / "file")
        place.chmod(before.st_mode)
        if before.st_uid == 0:  # only root gives files away
            os.chown(place, SOMEBODY, 0)
            assert f"belongs to user {SOMEBODY}" in why_not_trusted(folder / "file")
            os.chown(place, before.st_uid, before.st_gid)
        assert why_not_trusted(folder / "file") == ""


def test_a_sticky_folder_is_good_on_the_way_and_not_at_the_end(folder: Path) -> None:
    folder.chmod(0o1777)
    assert why_not_trusted(folder / "file") == ""
    assert "every user may write" in why_not_trusted(folder)


def test_links_are_followed_and_the_folders_that_hold_them_count(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "way").symlink_to("one/../one/two")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    assert why_not_trusted(tmp_path / "way" / "file") == ""
    assert "too many links" in why_not_trusted(tmp_path / "round")
    folder.parent.chmod(0o777)
    assert str(folder.parent) in why_not_trusted(tmp_path / "way" / "file")
    folder.parent.chmod(0o755)
    make_folders(tmp_path / "open")
    (tmp_path / "open" / "way").symlink_to(folder)
    (tmp_path / "open").chmod(0o777)
    assert str(tmp_path / "open") in why_not_trusted(tmp_path / "open" / "way" / "file")


@needs_root
def test_a_link_of_somebody_else_in_a_sticky_folder_is_no_way(folder: Path, tmp_path: Path) -> None:
    make_folders(tmp_path / "open")
    (tmp_path / "open").chmod(0o1777)
    (tmp_path / "open" / "way").symlink_to(folder)
    assert why_not_trusted(tmp_path / "open" / "way" / "file") == ""
    os.lchown(tmp_path / "open" / "way", SOMEBODY, SOMEBODY)
    assert f"belongs to user {SOMEBODY}" in why_not_trusted(tmp_path / "open" / "way" / "file")


def test_a_group_of_the_user_alone_is_the_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gid = folder.stat().st_gid
    user, others = SimpleNamespace(pw_name="me", pw_gid=gid), ["me", "you"]
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    folder.chmod(0o775)
    for name, members, is_own in (("me", [], True), ("me", others, False), ("staff", [], False)):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        assert bool(why_not_trusted(folder)) is not is_own


def test_where_one_user_is_mapped_the_owner_of_all_else_counts_as_root_on_the_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    monkeypatch.setattr(trust, "_unmapped", set)
    if own:
        assert f"belongs to user {own}" in why_not_trusted(folder)
    monkeypatch.setattr(trust, "_unmapped", lambda: {own})
    assert ("belongs" in why_not_trusted(folder)) is bool(own)


def test_folders_are_made_such_that_nobody_else_writes_there(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folders(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / each).stat().st_mode & 0o777 for each in ("a", "a/b")] == [0o755, 0o755]
    make_folders(tmp_path / "a" / "b")


# -- the cache of native libraries --------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build.Library:
    monkeypatch.setenv("XDS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    make_folders(tmp_path / "temporary")
    monkeypatch.setattr(build_cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    return tiny.library(tiny.write_sources(tmp_path / "csrc"))


def plant(entry: build_cache.CachedLibrary) -> None:
    """Put another library in its place, with an info.json that fits, as who may write there can."""
    planted = entry.path.read_bytes() + b"planted"
    entry.path.write_bytes(planted)
    info = json.loads((entry.folder / build_cache.INFO).read_text())
    info |= {"size_bytes": len(planted), "sha256": build.hashlib.sha256(planted).hexdigest()}
    (entry.folder / build_cache.INFO).write_text(json.dumps(info))


@needs_cxx
def test_a_library_that_others_could_have_laid_there_is_not_loaded(
    library: build.Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = build.find_or_build(library)
    plant(entry)
    assert build.build(library) == entry.path  # no other user could have written it
    cache = entry.folder.parent
    places = [(entry.path, None), (entry.folder, None), (cache, None)]
    if os.getuid() == 0:
        places.insert(0, (entry.folder / build_cache.INFO, SOMEBODY))
    for place, owner in places:
        plant(build.find_or_build(library))
        place.chmod(0o777) if owner is None else os.chown(place, owner, owner)
        built = build.build(library)
        assert not built.read_bytes().endswith(b"planted"), (place, owner)
        assert build.build(library) == built
    assert built.is_relative_to(tmp_path / "temporary" / f"xds-{os.getuid()}")
    assert "set XDS_CACHE_DIR to a permanent folder" in caplog.text
    tmp_path.chmod(0o777)  # and so is the temporary folder, which is below it
    with pytest.raises(build.BuildError, match="no folder for native libraries.*set XDS_CACHE"):
        build.build(library)


@needs_cxx
def test_what_is_built_is_closed_to_others_whatever_the_umask(
    library: build.Library, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        entry = build.find_or_build(library)
    finally:
        os.umask(before)
    for path in (entry.folder.parent, entry.folder, entry.path, entry.folder / build_cache.INFO):
        assert not path.stat().st_mode & 0o022
    assert build.find(library) is not None


def test_a_link_that_another_user_has_planted_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, page = tmp_path / "victim", tmp_path / "page"
    victim.write_text("precious")
    names = [f"{number:016x}" for number in range(50)]
    page.symlink_to(victim)
    replace_small_file(page, "new")
    assert page.read_text() == "new" and not page.is_symlink()
    for name in names:  # even where somebody knows the next name
        (tmp_path / f".part-{name}").symlink_to(victim)
    monkeypatch.setattr(small_files.secrets, "token_hex", lambda _: names[0])
    with pytest.raises(FileExistsError):
        replace_small_file(page, "newer")
    assert victim.read_text() == "precious" and page.read_text() == "new"
