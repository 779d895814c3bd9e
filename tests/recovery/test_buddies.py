"""Second copies of states: which rank keeps them, and how they travel between the memories of hosts."""

import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import on_busy_machines

from xds.engine.checkpoint.io.tensor_file import TensorEntry, matches, rewrite_tensors
from xds.recovery import courier, slots
from xds.recovery.buddies import buddies_of, guests_of, newest_common, sources_of, steps_of
from xds.recovery.courier import Courier
from xds.recovery.slots import NONE, SHARED, Slots, files_of
from xds.utils.errors import PeerError, XdsError
from xds.utils.shared_file import SharedFile


@pytest.mark.parametrize(
    ("hosts", "buddies"),
    [
        ([0, 0, 0], [NONE] * 3),
        ([0, 1], [1, 0]),
        (
            [0, 0, 1, 1, 2, 2],
            [2, 3, 4, 5, 0, 1],
        ),  # a ring; an odd number of hosts is no special case
        ([0, 0, 0, 1], [3, 3, 3, 0]),
        ([0, 1, 1, 1, 2, 2], [1, 4, 5, 4, 0, 0]),
        ([7, 2, 7, 2], [1, 0, 3, 2]),  # numbers of hosts, and ranks on them, in any order
    ],
)
def test_the_next_host_keeps_a_second_copy(hosts: list[int], buddies: list[int]) -> None:
    assert buddies_of(hosts) == buddies
    keepers = [guests_of(buddies, rank) for rank in range(len(hosts))]
    if NONE not in buddies:
        assert sorted(sum(keepers, [])) == list(range(len(hosts)))
        assert all(hosts[rank] != hosts[buddy] for rank, buddy in enumerate(buddies))


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 2]])
def test_hosts_of_which_no_two_are_neighbours_may_be_lost(hosts: list[int]) -> None:
    buddies, numbers = buddies_of(hosts), sorted(set(hosts))
    for count in range(1, len(numbers) + 1):
        for lost in combinations(numbers, count):
            own = [(NONE, NONE) if host in lost else (7, 6) for host in hosts]
            held = [
                {} if host in lost else {guest: [6] for guest in guests_of(buddies, rank)}
                for rank, host in enumerate(hosts)
            ]
            after = {a: numbers[(place + 1) % len(numbers)] for place, a in enumerate(numbers)}
            is_saved = not any(after[host] in lost for host in lost)
            step = newest_common(steps_of(own, held))
            assert step == (6 if is_saved else NONE)
            if is_saved:
                gone = [rank for rank, host in enumerate(hosts) if host in lost]
                assert sources_of(step, own, held) == {rank: buddies[rank] for rank in gone}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of the host of all ranks but rank 0, whose slots are in `tmp_path`."""
    monkeypatch.setattr(slots, "_parent", lambda: tmp_path / "next")
    monkeypatch.setenv("GROUP_RANK", "1")
    return tmp_path / "next"


@pytest.fixture
def pair(memory: Path) -> Iterator[list[Courier]]:
    server = socket.create_server(("127.0.0.1", 0))
    found = [Courier(rank, server.getsockname()) for rank in range(2)]
    for each in found:
        each.open(3)
    yield found
    for each in found:
        each.close()
    server.close()


def version(own: Slots, step: int, size: int = 3 << 20, shared: bytes = b"") -> None:
    path = own.begin()
    for old in files_of(path):
        old.unlink()
    if shared:
        name = f"{SHARED}{shared[0]}"
        if name not in own.shared():
            own.begin_shared(path, name).write_bytes(shared)
        own.share(path, name)
    (path / "values").write_bytes(bytes([step]) * size)
    (path / "manifest.partial").write_bytes(bytes([step]) * 2)
    (path / "manifest.partial").rename(path / "manifest.json")  # as images do
    own.commit(path, step)


def test_versions_travel_to_the_buddy_and_back(tmp_path: Path, pair: list[Courier]) -> None:
    own = Slots(tmp_path / "own")
    sender, keeper = pair
    sender.begin(keeper.address)
    files: dict = {}
    for step in (4, 5, 6):
        version(own, step)
        sender.send(step, own, files)
        assert sender.has(step)
    kept = Slots(slots.versions_folder(0))
    assert kept.steps == [6, 5]
    for step in (5, 6):
        for name in ("values", "manifest.json"):
            assert (kept.path_of(step) / name).read_bytes() == (
                own.path_of(step) / name
            ).read_bytes()
    sent = sender.sent_bytes
    sender.end()  # another generation: what the buddy has is not sent again
    sender.open(3)
    sender.begin(keeper.address)
    sender.send(6, own, {})
    assert sender.has(6) and sender.sent_bytes == sent
    own.drop_after(5)  # the run goes back, and takes step 6 again
    Slots(slots.versions_folder(0)).drop_after(5)
    sender.forget()
    version(own, 6, size=10)
    sender.send(6, own, {})
    assert Slots(slots.versions_folder(0)).steps == [6, 5]
    shutil.rmtree(tmp_path / "own")
    new = Slots(tmp_path / "own")
    assert new.steps == [NONE, NONE]
    sender.fetch(keeper.address, 6, new)
    assert new.steps == [6, NONE]
    assert (new.path_of(6) / "values").read_bytes() == bytes([6]) * 10


def test_what_versions_share_travels_once(tmp_path: Path, pair: list[Courier]) -> None:
    own, size = Slots(tmp_path / "own"), 1 << 20
    sender, keeper = pair
    Slots(slots.versions_folder(0)).reserve_shared(size)
    sender.begin(keeper.address)
    sent = []
    for step, content in ((4, b"a"), (5, b"a"), (6, b"b"), (7, b"b")):
        before = sender.sent_bytes
        version(own, step, size=8, shared=content * size)
        sender.send(step, own, {})
        sent.append(sender.sent_bytes - before >= size)
        kept = Slots(slots.versions_folder(0))
        path = kept.path_of(step) / f"{SHARED}{content[0]}"
        assert path.read_bytes() == content * size
        assert path.stat().st_nlink == 1 + (step in (5, 7))  # in the memory of both versions once
    assert sent == [True, False, True, False]
    assert not (kept.folder / "reserved").exists() and kept.shared() == [f"{SHARED}{b'b'[0]}"]
    new = Slots(tmp_path / "new")
    sender.fetch(keeper.address, 7, new)
    assert (new.path_of(7) / f"{SHARED}{b'b'[0]}").read_bytes() == b"b" * size


def test_a_version_that_did_not_come_whole_is_none(tmp_path: Path, pair: list[Courier]) -> None:
    own = Slots(tmp_path / "own")
    version(own, 4)
    asked = {"generation": 3, "rank": 0}
    with courier._call(pair[1].address, asked) as connection:
        assert courier._read_frame(connection) == {"steps": [NONE, NONE], "shared": []}
        head = {"step": 4, "counts": [4, NONE], "files": [("values", 100, True)]}
        courier._write_frame(connection, head)
        connection.sendall(b"x" * 99)
    path = slots.versions_folder(0) / "0" / "values"
    deadline = time.monotonic() + on_busy_machines(10)
    while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    pair[1].end()  # all threads have ended
    assert path.exists() and Slots(slots.versions_folder(0)).steps == [NONE, NONE]


@pytest.mark.parametrize("wrong", ["secret", "generation", "stopped"])
def test_who_is_not_of_this_generation_is_refused(
    tmp_path: Path, pair: list[Courier], wrong: str
) -> None:
    host, port, secret = pair[1].address
    if wrong == "generation":
        pair[0].open(2)
    if wrong == "stopped":
        pair[1].end()
    given = (host, port, "guess" if wrong == "secret" else secret)
    with pytest.raises(PeerError, match="did not come from"):
        pair[0].fetch(given, 4, Slots(tmp_path / "own"))


def test_a_sender_goes_on_when_the_connection_comes_again_and_ends_on_request(
    tmp_path: Path, pair: list[Courier], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Slots(tmp_path / "own")
    version(own, 4)
    sender, keeper = pair
    fails = [True, True]
    send = courier._send_version

    def breaks(connection: socket.socket, *args: object) -> int:
        if fails:
            fails.pop()
            connection.shutdown(socket.SHUT_RDWR)
        return send(connection, *args)

    monkeypatch.setattr(courier, "_send_version", breaks)
    sender.begin(keeper.address)
    sender.send(4, own, {})
    assert sender.has(4) and not fails
    keeper.end()  # it has failed, as nobody knows yet
    version(own, 5)
    thread = threading.Thread(target=sender.send, args=(5, own, {}))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    sender.end()
    thread.join(on_busy_machines(10))
    assert not thread.is_alive() and not sender.has(5)


def test_a_memory_that_is_full_is_named(
    tmp_path: Path, pair: list[Courier], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Slots(tmp_path / "own")
    version(own, 4)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    pair[0].begin(pair[1].address)
    with pytest.raises(XdsError, match=r"cannot be written to .*rank0 on .*No space left"):
        pair[0].send(4, own, {})


@pytest.mark.parametrize("numel", [1, 5, 32_768, 100_001])
def test_sums_of_a_file_in_memory_find_a_wrong_bit_in_any_byte(tmp_path: Path, numel: int) -> None:
    """The file becomes longer and shorter, and its length is no multiple of 8."""
    file, path = SharedFile(tmp_path / "file"), tmp_path / "wrong"
    for odd in (13, 1, 8):
        entries = [
            TensorEntry("values", torch.randn(numel), 0, numel),
            TensorEntry("bytes", torch.arange(odd, dtype=torch.uint8), 0, odd),
        ]
        size, chunk, sums = rewrite_tensors(file, entries)
        whole = (tmp_path / "file").read_bytes()
        assert len(whole) == size and matches(tmp_path / "file", size, chunk, sums)
        assert safetensors.torch.load(whole)["values"].equal(entries[0].tensor)
        for place in (0, size // 2, size - 1):
            wrong = bytearray(whole)
            wrong[place] ^= 128
            path.write_bytes(wrong)
            assert not matches(path, size, chunk, sums)
