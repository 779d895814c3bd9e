"""Carries versions between the memories of hosts, over connections of its own, in threads.

    rank 1, host 0   thread: version 7 is in slot 1 ── files ──>  thread of rank 3, host 1: slot 1 of rank 1
                                                    <─ has 7 ──   the slot is complete
    new rank 1       asks rank 3 for version 7      <─ files ──   slot 1 of rank 1

No message of it is in the group of the ranks: nothing waits for it but the vote of a step. A connection that
fails is opened again, because only the launcher knows whether a rank has failed. Those of an earlier generation
are refused.
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import struct
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from ..utils.errors import PeerError, XdsError
from ..utils.shared_file import SharedFile
from .slots import SHARED, Slots, files_of, versions_folder

PIECE_BYTES = 4 << 20  # received at a time
_STALL_SECONDS = 30  # in which no byte of a version moves: the connection is opened again
_CONNECT_SECONDS = 1.0
_AGAIN_SECONDS = 0.05
_MOST_FRAME_BYTES = 1 << 16
_BULK = 0x08  # type of service: other messages of this host go first
Address = tuple[str, int, str]  # host, port, secret
Files = dict[Path, SharedFile]  # that are mapped


@final
class Courier:
    """Sends versions of this rank to its buddy, keeps those of other ranks, and gives them back.

    address: where other ranks reach it. sent_bytes: to the buddy.
    """

    def __init__(self, rank: int, towards: tuple[str, int]) -> None:
        """towards: the store of the launcher. Messages take the network that leads to it."""
        self._rank = rank
        family, kind, protocol, _, there = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # sends nothing
            host = probe.getsockname()[0]
        self._listener = socket.create_server((host, 0), family=family)
        self.address: Address = (host, self._listener.getsockname()[1], secrets.token_hex(16))
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._generation: int | None = None
        self._threads: dict[threading.Thread, socket.socket] = {}  # that serve other ranks
        self._ended = threading.Event()  # nothing is sent
        self._ended.set()
        self._buddy: Address | None = None
        self._connection: socket.socket | None = None
        self._at_buddy: set[int] = set()
        self._shared: set[str] = set()  # the names of such files there
        threading.Thread(target=self._accept, name="xds-courier", daemon=True).start()

    # -- of a generation --------------------------------------------------------------------------------

    def open(self, generation: int) -> None:
        """Serve other ranks of this generation."""
        with self._lock:
            self._generation = generation

    def begin(self, buddy: Address) -> None:
        """Send to this rank from now on."""
        self._drop_connection()
        self._buddy, self._at_buddy = buddy, set()
        self._ended.clear()

    def end(self) -> None:
        """Serve and send no more: afterwards no thread of this process reads or writes a version for others."""
        self._ended.set()
        with self._lock:
            self._generation = None
            serving = dict(self._threads)
            _shut(self._connection)
        for connection in serving.values():
            _shut(connection)
        for thread in serving:
            thread.join()

    def close(self) -> None:
        """The run has ended."""
        self.end()
        self._listener.close()

    # -- to the buddy -----------------------------------------------------------------------------------

    def has(self, step: int) -> bool:
        """The buddy has the version of `step`, as far as this rank knows."""
        return step in self._at_buddy

    def forget(self) -> None:
        """The versions of the buddy count no longer."""
        self._at_buddy = set()

    def send(self, step: int, slots: Slots, files: Files) -> None:
        """Return when the buddy has the version of `step`, or after `end`. In a thread.

        files: those of the slots that are mapped.

        Raises:
            XdsError: the memory of its host is full.
            OSError: a file is missing here.
        """
        parts = _open_version(slots, step, files)
        while not self._ended.is_set():
            try:
                connection = self._connect()
                if step not in self._at_buddy:
                    counts = slots.steps
                    self.sent_bytes += _send_version(connection, counts, step, parts, self._shared)
                    answer = _read_frame(connection)
                    if "error" in answer:
                        raise XdsError(answer["error"])
                    self._take(answer)
                return
            except (OSError, ValueError):
                self._drop_connection()
                self._ended.wait(_AGAIN_SECONDS)
        self._drop_connection()

    def _connect(self) -> socket.socket:
        """The connection to the buddy, which says which versions it has."""
        if self._connection is None:
            assert self._buddy is not None and self._generation is not None
            connection = _call(self._buddy, {"generation": self._generation, "rank": self._rank})
            with self._lock:
                self._connection = connection
                if self._ended.is_set():
                    _shut(connection)
            self._take(_read_frame(connection))
        return self._connection

    def _take(self, answer: dict[str, Any]) -> None:
        self._at_buddy, self._shared = set(answer["steps"]), set(answer["shared"])

    def _drop_connection(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # -- from another rank ------------------------------------------------------------------------------

    def fetch(self, giver: Address, step: int, slots: Slots) -> None:
        """Get the version of `step` of this rank. Raises PeerError: that rank has failed."""
        asked = {"generation": self._generation, "rank": self._rank, "step": step}
        try:
            with _call(giver, asked) as connection:
                _receive_version(connection, slots, {})
        except (OSError, ValueError) as error:
            raise PeerError(
                f"rank {self._rank}: the copy of its states after step {step} did not come from "
                f"{giver[0]}: {error}"
            ) from error

    # -- for others -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="xds-courier", daemon=True
            )
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, LookupError, TypeError):
            _wait_at_most(connection, _STALL_SECONDS)
            asked = _read_frame(connection)
            secret = str(asked["secret"]).encode()
            if not secrets.compare_digest(secret, self.address[2].encode()):
                return
            with self._lock:
                if asked["generation"] != self._generation:
                    return
                self._threads[threading.current_thread()] = connection
            try:
                slots = Slots(versions_folder(int(asked["rank"])))
                if "step" in asked:
                    step = int(asked["step"])
                    parts = _open_version(slots, step, {})
                    _send_version(connection, slots.steps, step, parts)
                else:
                    self._keep(connection, slots)
            finally:
                with self._lock:
                    self._threads.pop(threading.current_thread(), None)

    def _keep(self, connection: socket.socket, slots: Slots) -> None:
        """Write the versions that come, until the connection ends."""
        files: Files = {}
        while True:
            _write_frame(connection, {"steps": slots.steps, "shared": slots.shared()})
            _wait_at_most(connection, 0)  # the next one comes with the next step
            try:
                _receive_version(connection, slots, files)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.ENOMEM):
                    text = (
                        "recovery.enabled: the copy of the states of a rank of another host cannot be written "
                        f"to {slots.folder} on {socket.gethostname()} ({error.strerror}): free memory there, "
                        "or set recovery.enabled to false"
                    )
                    _write_frame(connection, {"error": text})
                raise


# -- messages -----------------------------------------------------------------------------------------------
#
# frame      4 bytes of length, JSON
# version    frame: its step, the steps that count beside it, its files: names, lengths, whether they travel;
#            then their bytes


def _call(address: Address, asked: dict[str, Any]) -> socket.socket:
    host, port, secret = address
    connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError):  # of IPv4 alone
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _BULK)
    _wait_at_most(connection, _STALL_SECONDS)
    _write_frame(connection, {"secret": secret, **asked})
    return connection


def _wait_at_most(connection: socket.socket, seconds: int) -> None:
    """Of each call; 0: without end. The socket stays blocking, so that pieces arrive whole."""
    limit = struct.pack("@ll", seconds, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _shut(connection: socket.socket | None) -> None:
    """End it for those that wait for it."""
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _write_frame(connection: socket.socket, values: dict[str, Any]) -> None:
    text = json.dumps(values).encode()
    connection.sendall(struct.pack("!I", len(text)) + text)


def _read_frame(connection: socket.socket) -> Any:
    (length,) = struct.unpack("!I", _read(connection, bytearray(4)))
    if length > _MOST_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return json.loads(bytes(_read(connection, bytearray(length))))


def _read(connection: socket.socket, out: bytearray | memoryview) -> bytearray | memoryview:
    """Fill `out`. Raises OSError: the connection has ended before."""
    view, count = memoryview(out), 0
    while count < len(view):
        # each call lets threads run that wait for the interpreter
        part = view[count : count + PIECE_BYTES]
        received = connection.recv_into(part, 0, socket.MSG_WAITALL)
        if not received:
            raise ConnectionError("the connection has ended")
        count += received
    return out


def _open_version(slots: Slots, step: int, files: Files) -> list[tuple[str, memoryview]]:
    """The names and bytes of the files of a complete version. Raises OSError: one is missing."""
    # another one may have replaced a file, such as a manifest, under the same name
    paths = files_of(slots.path_of(step))
    return [(path.name, files.get(path, SharedFile(path)).whole()) for path in paths]


def _send_version(
    connection: socket.socket,
    counts: Sequence[int],
    step: int,
    parts: Sequence[tuple[str, memoryview]],
    there: Collection[str] = (),
) -> int:
    """Send a version. Returns its bytes. there: the names of files that the other side has."""
    files = [(name, len(part), name not in there) for name, part in parts]
    _write_frame(connection, {"step": step, "counts": counts, "files": files})
    sent = [part for name, part in parts if name not in there]
    for part in sent:
        connection.sendall(part)
    return sum(map(len, sent))


def _receive_version(connection: socket.socket, slots: Slots, files: Files) -> None:
    """Write the version that comes into the older slot.

    Raises:
        OSError: it did not come whole, or does not fit into memory.
        ValueError: it is none.
    """
    head = _read_frame(connection)
    _wait_at_most(connection, _STALL_SECONDS)
    slots.keep(set(head["counts"]) - {head["step"]})
    path = slots.begin()
    names = [str(name) for name, _, _ in head["files"]]
    if any(Path(name).name != name for name in names):
        raise ValueError(f"names of files: {names}")
    for old in files_of(path):
        if old.name not in names:
            old.unlink()
            files.pop(old, None)
    for name, size, travels in head["files"]:
        if not name.startswith(SHARED):
            _read(connection, _mapped(files, path / name).resized(size))
            continue
        if travels:
            _read(connection, SharedFile(slots.begin_shared(path, name)).resized(size))
        slots.share(path, name)
    slots.commit(path, head["step"])


def _mapped(files: Files, path: Path) -> SharedFile:
    return files.setdefault(path, SharedFile(path))


def as_address(told: Sequence[Any]) -> Address:
    """An address that came as JSON."""
    host, port, secret = told
    return str(host), int(port), str(secret)


__all__ = ["Address", "Courier", "as_address"]
