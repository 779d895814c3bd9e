"""The run folder: only the user can read it, other users cannot prepare it, the newest twenty are kept."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xds.launcher.job import Job, Order, Rendezvous
from xds.launcher.ranks import run_folder as module
from xds.launcher.ranks.rank_zero import RankZero
from xds.launcher.ranks.run_folder import run_folder
from xds.utils.errors import UsageError

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "runs"


def mode(path):
    return path.stat().st_mode & 0o777


def a_run(number, run_id=""):
    """The folder of a run that has left a log, begun at second `number` of a day."""
    hours, rest = divmod(number, 3600)
    clock = f"20300101-{hours:02}{rest // 60:02}{rest % 60:02}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "strftime", lambda _: clock)
        with run_folder("", run_id) as folder:
            folder.log(0).write_text("told")
    return folder.path


def test_nobody_else_may_read_what_ranks_print(runs, tmp_path):
    before = os.umask(0)
    try:
        for asked in ("", str(tmp_path / "logs")):
            with run_folder(asked) as folder:
                folder.ranks.add(0)
                with RankZero(folder.path, folder.log(0), lambda *_: None) as tee:
                    streams = {os.open(path, os.O_WRONLY) for path in tee.environment.values()}
                    for stream in streams:
                        os.write(stream, b"secret")
                        os.close(stream)
                    assert tee.drain(30)
                assert mode(folder.path) == 0o700 and mode(folder.log(0)) == 0o600
    finally:
        os.umask(before)
    assert mode(runs) == 0o700


def test_the_newest_twenty_stay_and_a_run_that_goes_on_however_old(runs):
    with contextlib.ExitStack() as going_on:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.time, "strftime", lambda _: "20290101-000000")
            old = going_on.enter_context(run_folder("")).path
        (old / "rank0.log").write_text("told")
        paths = [a_run(number) for number in range(24)]
        (runs / "notes").mkdir()  # none of ours
        assert sorted(runs.iterdir()) == [old, *paths[-20:], runs / "notes"]
    assert a_run(30).exists() and not old.exists()


def test_a_launcher_that_was_killed_keeps_no_folder(runs):
    text = (
        "import os\nfrom xds.launcher.ranks.run_folder import run_folder\n"
        "with run_folder('') as folder:\n    print(folder.path, flush=True)\n"
        "    folder.log(0).write_text('told')\n    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    path = Path(killed.stdout.strip())
    assert (path / module._LOCK).exists()
    for number in range(21):
        a_run(40_000 + number)
    assert not path.exists()


def test_hosts_that_share_the_folder_count_as_one_run(runs):
    shared = [a_run(number, "abcdef12") for number in range(30)]
    others = [a_run(100 + number) for number in range(19)]
    assert sorted(runs.iterdir()) == [*shared, *others]
    a_run(200)
    assert not any(path.exists() for path in shared)


def test_nothing_is_left_of_a_run_that_told_nothing(runs):
    with contextlib.suppress(ValueError), run_folder("") as folder:
        raise ValueError
    assert not folder.path.exists() and list(runs.iterdir()) == []


@pytest.mark.parametrize("how", ["mode", pytest.param("owner", marks=needs_root)])
def test_where_others_may_write_the_folder_is_made_elsewhere(runs, tmp_path, how):
    """They could lay a link in the place of a log, and have us write through it."""
    runs.mkdir(parents=True)
    runs.parent.chmod(0o777) if how == "mode" else os.chown(runs.parent, 12345, 12345)
    with run_folder("") as folder:
        assert folder.path.parent == tmp_path and mode(folder.path) == 0o700
    shutil.rmtree(folder.path, ignore_errors=True)


def test_a_folder_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for name, reason in {"/proc/x": "No such file", "file": "exists", "a\0": "null"}.items():
        with pytest.raises(UsageError, match=f"^--log-dir = .*{reason}.*; name a folder"):
            run_folder(name).__enter__()


def test_no_failure_of_an_earlier_start_is_seen_once_the_ranks_of_a_start_are_known(runs):
    """The launcher would stop the ranks of the other hosts, and the new rank would wait for them."""
    from xds.launcher.ranks.elastic import _RankFiles

    class Ranks(dict):
        def update(self, *given):
            super().update(*given)
            seen.append(folder.first_error_seconds(list(self.values())))

    seen = []
    order = Order(Job("script", "train.py"), Rendezvous(), 1, generation=1)
    with run_folder("") as folder:
        folder.error(2).write_text("{}")
        place = dict.fromkeys(("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"), "1")
        _RankFiles(folder, order, 1, Ranks(), {}).reify({0: {"RANK": "2", **place}})
    assert seen == [None]


def test_hosts_that_share_the_folder_show_their_own_output_though_their_process_ids_are_equal(runs):
    shown = {"first": b"", "second": b""}

    def show(name):
        def write(descriptor, data):
            shown[name] += data

        return write

    with run_folder("", "abcdef12") as folder, contextlib.ExitStack() as hosts:
        tees = [
            hosts.enter_context(RankZero(folder.path, folder.log(rank), show(name)))
            for rank, name in enumerate(shown)
        ]
        for name, tee in zip(shown, tees, strict=True):
            stream = os.open(next(iter(tee.environment.values())), os.O_WRONLY)
            os.write(stream, name.encode())
            os.close(stream)
        assert all(tee.drain(30) for tee in tees)
    assert shown == {"first": b"first", "second": b"second"}
