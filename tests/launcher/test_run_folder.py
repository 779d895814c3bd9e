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


def write_as_ranks(folder):
    """What ranks 0 and 1 of a run write, as worker.py does."""
    folder.prepare([0, 1], is_first=True)
    (folder.path / module._RECORD).write_text("/dev/null")
    for rank in (0, 1):
        with open(folder.log(rank), "a") as log:
            log.write(f"of {rank}")
    part = folder.path / "rank1.error.json.part"
    part.write_text("{}")
    part.replace(folder.error(1))
    folder.record("failed")


@needs_root
def test_links_that_another_user_plants_in_the_log_folder_are_never_followed(runs, tmp_path):
    victim, logs = tmp_path / "victim", tmp_path / "logs"
    victim.write_text("precious")
    logs.mkdir()
    os.chown(logs, 12345, 12345)
    logs.chmod(0o1777)
    names = ("rank0.log", "rank1.log", "rank1.error.json", "rank1.error.json.part", "record")
    for name in names:
        (logs / name).symlink_to(victim)
    with run_folder(str(logs)) as folder:
        write_as_ranks(folder)
        (logs / "rank1.log").unlink()  # the owner of the folder may, at any time
        (logs / "rank1.log").symlink_to(victim)
        with open(folder.log(1), "a") as log:
            log.write(" and more")
        assert folder.log(1).read_text() == "of 1 and more"
    assert victim.read_text() == "precious"
    assert (logs / "rank0.log").read_text() == "of 0" and mode(logs / "rank0.log") == 0o600
    assert not (logs / "rank1.error.json").is_symlink()
    assert list(runs.iterdir()) == [folder.path] or not folder.path.exists()


def test_a_second_run_with_the_same_log_folder_is_refused_and_sees_no_failure_of_the_first(
    runs, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_LOCK_PATIENCE_SECONDS", 0.0)
    logs = str(tmp_path / "logs")
    with run_folder(logs) as first:
        write_as_ranks(first)
        with run_folder(logs) as second:
            assert first.first_error_seconds([0, 1]) and not second.first_error_seconds([0, 1])
            with pytest.raises(UsageError, match="another run writes rank1.log .*; name a folder"):
                second.prepare([1], is_first=True)
            second.prepare([2], is_first=True)  # another host of the run
    assert sorted(os.listdir(logs)) == ["rank0.log", "rank1.error.json", "rank1.log", "rank2.log"]
    assert (tmp_path / "logs" / "rank1.log").read_text() == "of 1"
    with run_folder(logs) as third:
        third.prepare([0, 1], is_first=True)
        third.prepare([1], is_first=False)  # rank 0 has moved to another host
        assert third.log(1).read_text() == "" and not third.log(0).exists()
    (tmp_path / "logs" / "rank3.log").mkdir()
    with run_folder(logs) as fourth, pytest.raises(UsageError, match="rank3.log .* be replaced"):
        fourth.prepare([3], is_first=True)
    assert list(runs.iterdir()) == []


def test_no_failure_of_an_earlier_start_is_seen_once_the_ranks_of_a_start_are_known(runs):
    """The launcher would stop the ranks of the other hosts, and the new rank would wait for them."""
    from xds.launcher.ranks.elastic import RankFiles

    class Ranks(dict):
        def update(self, *given):
            super().update(*given)
            seen.append(folder.first_error_seconds(list(self.values())))

    seen = []
    order = Order(Job("script", "train.py"), Rendezvous(), 1, generation=1)
    with run_folder("") as folder:
        folder.error(2).write_text("{}")
        place = dict.fromkeys(("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"), "1")
        RankFiles(folder, order, 1, Ranks(), {}).reify({0: {"RANK": "2", **place}})
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
