"""Processes that wait for the place of a lost rank, on one host. Imports no torch.

    launcher      Spares       "a process, please" ───┐                    variables of rank 2 ──┐
    fork server   serve        imports torch, waits ──┴─> forks                                  │
    spare         take_place                              runs the script up to xds.initialize ──┴─> is rank 2

The fork server imports what every rank imports, once, and never runs the script. So a new spare costs a fork
and the beginning of the script. It runs that as the last rank, with files of its own. The launcher is its
parent, as of every rank: the process that forks it ends at once, and the kernel gives it to the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, final

_IS_SPARE = "XDS_SPARE"  # set while a process waits for its place
_CHANNEL = "XDS_SPARES"  # of the fork server: the descriptor of its socket
_FILES, _ERROR_FILE = "XDS_RANK_FILES", "TORCHELASTIC_ERROR_FILE"
_NICE = 10  # of the thread that imports: the ranks train meanwhile
_MESSAGE_BYTES = 1 << 17
_READY = b"ready"
_PAUSE_SECONDS = 1.0  # before another spare begins: a process that takes its place goes first
_FORK_SECONDS = 2.0  # that forks which were asked for may take at the end
_PATIENCE_SECONDS = 0.001
_MOST_SERVERS = 3  # that are started one after another, where they are killed
_ON_REQUEST = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a run that is stopped
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


# -- in the fork server and in spares -----------------------------------------------------------------------


# what a script may read to know which rank it is
_OF_PLACE = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "CROSS_RANK", "XDS_JOINS")


class _Waiting:
    """What a process keeps until it has its place. place: a descriptor, from which its variables are read."""

    def __init__(self, place: int) -> None:
        self.place, self.pid = place, os.getpid()
        self.terminal = os.dup(1), os.dup(2)


class _Unplaced(type(os.environ)):  # type: ignore[misc]
    """The environment of a spare. Who asks it for the number of the rank waits until there is one."""

    def __getitem__(self, key: str) -> str:
        if key in _OF_PLACE:
            take_place()  # this object has the class of other environments from then on
            return os.environ[key]
        value: str = super().__getitem__(key)
        return value


_waiting: _Waiting | None = None  # in a spare


def serve(launcher_pid: str, modules: Sequence[str]) -> None:
    """Import what ranks import, and fork a spare for each request. Returns in every spare."""
    global _waiting  # noqa: PLW0603 (one for the process)
    channel = socket.socket(fileno=int(os.environ.pop(_CHANNEL)))
    # Ctrl-C is for the launcher, which ends this process
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.pop("XDS_RANK_CORES", None)  # they are those of another rank
    # the nice value of a thread is its own on Linux, so this one and its forks keep theirs
    importing = threading.Thread(target=_import, args=(modules,))
    importing.start()
    importing.join()
    gc.freeze()  # a collection of a fork would copy the memory that it shares
    channel.send(_READY)
    while True:
        message, places, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
        if not message:
            os._exit(0)  # the launcher needs no more
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            os.close(places[0])
            continue
        if os.fork():
            os._exit(0)
        break
    _wait_for_parent(int(launcher_pid))
    os.setsid()
    signal.signal(signal.SIGINT, interrupted)
    variables = json.loads(message)
    channel.send(f"{os.getpid()} {variables[_FILES]}".encode())
    channel.close()
    os.environ.update(variables)
    os.environ[_IS_SPARE] = "1"
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # as in a process that has just imported it
    _waiting = _Waiting(places[0])


def _import(modules: Sequence[str]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    first = sys.path.pop(0)  # the folder of the worker's file
    for module in modules:
        with contextlib.suppress(ImportError):
            import_module(module)
    sys.path.insert(0, first)


def _wait_for_parent(launcher_pid: int) -> None:
    former = os.getppid()
    while os.getppid() == former != launcher_pid:
        time.sleep(_PATIENCE_SECONDS)
    if os.getppid() != launcher_pid:  # it has ended
        os._exit(1)


def begin_script() -> None:
    """In a spare: the script runs from now on. It waits for the place where it reads the number of its rank."""
    os.environ.__class__ = _Unplaced


def take_place() -> None:
    """In a spare: wait until a place is free, and be that rank from now on. The process ends if none comes."""
    global _waiting  # noqa: PLW0603 (one for the process)
    if isinstance(os.environ, _Unplaced):
        os.environ.__class__ = _Unplaced.__base__
    waiting, _waiting = _waiting, None
    os.environ.pop(_IS_SPARE, None)
    if waiting is None or waiting.pid != os.getpid():  # a process that the script has started
        return
    with open(waiting.place, "rb") as file:
        line = file.readline()
    if not line:
        os._exit(0)
    former = os.environ[_FILES]
    os.environ.update(json.loads(line))
    os.environ.pop("XDS_LAUNCHER_PID", None)
    streams = [os.environ.pop(name, "") for name in ("XDS_RANK_OUT", "XDS_RANK_ERR")]
    files = os.environ[_FILES]
    with contextlib.suppress(OSError):  # faulthandler keeps its descriptor
        os.replace(f"{former}.fault.txt", f"{files}.fault.txt")
    if os.environ["RANK"] != "0":
        streams = 2 * [f"{files}.log"]
    _take_streams(Path(f"{former}.log"), streams, waiting.terminal)
    cores = os.environ.pop("XDS_RANK_CORES", "")
    if cores and sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), [int(core) for core in cores.split(",")])


def _take_streams(former: Path, paths: Sequence[str], terminal: tuple[int, int]) -> None:
    """Write to the log of the rank; as a new rank 0 to the launcher. What was written before comes first.

    paths: of both streams. "": to the terminal.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    targets = list(terminal)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
    for number, path in enumerate(paths):
        with contextlib.suppress(FileNotFoundError):  # none, or the run folder was removed
            targets[number] = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError), open(former, "rb") as before:
        shutil.copyfileobj(before, open(targets[0], "wb", closefd=False))
    former.unlink(missing_ok=True)
    for number, target in zip((1, 2), targets, strict=True):
        os.dup2(target, number)
    for descriptor in {*targets, *terminal}:
        os.close(descriptor)


# -- in the launcher ----------------------------------------------------------------------------------------


@final
class Forked:
    """A process that the fork server has forked, and the kernel has given to this one. Used as Popen."""

    def __init__(self, pid: int, place: int, files: str) -> None:
        """place: a descriptor, to which its variables are written. files: the prefix of its own files."""
        self.pid, self.place, self.files = pid, place, files
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        code = self._reap(0)
        assert code is not None
        return code

    def _reap(self, flags: int) -> int | None:
        with self._lock:  # its number may belong to another process once it is reaped
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, flags)
                except ChildProcessError:
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def remove_files(self) -> None:
        for ending in (".log", ".fault.txt", ".error.json", ".ended"):
            Path(f"{self.files}{ending}").unlink(missing_ok=True)


Process = subprocess.Popen[bytes] | Forked


@final
class Spares:
    """The fork server of a host and its spares. No method but `end` waits.

    given_up: why there are no more spares, for people; "": there are.
    """

    def __init__(self, number: int, folder: Path) -> None:
        """number: that wait at a time. folder: of files of their own."""
        self.given_up = ""
        self.number = number if sys.platform == "linux" else 0
        self._folder = folder
        self._argv: list[str] = []
        self._environment: dict[str, str] = {}
        self._free: list[Forked] = []
        self._asked: dict[str, int] = {}  # forks that have not come: place by files
        self._num_asked = 0
        self._num_servers = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        self._taken_seconds = 0.0  # when a spare has got a place

    def begin(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the fork server. argv, environment: of the last rank, as whom spares run the script."""
        if not self.number or self.given_up or self._num_servers == _MOST_SERVERS:
            return
        self._argv, self._environment = list(argv), dict(environment)
        self._num_servers += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        more = {_CHANNEL: str(theirs.fileno()), _FILES: str(self._folder / "spares")}
        self._server = subprocess.Popen(
            self._argv,
            env={**environment, **more},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        ours.setblocking(False)
        self._channel, self._is_ready = ours, False

    def look(self) -> None:
        """Note what has happened, and ask for the spares that are missing."""
        self._receive()
        self._forget_ended()
        if self._channel is None and self._server is not None and self._server.poll() is not None:
            self._server = None
            self.begin(self._argv, self._environment)
        is_early = time.monotonic() - self._taken_seconds < _PAUSE_SECONDS
        while self._is_ready and self._missing > 0 and not is_early:
            self._ask()

    @property
    def _missing(self) -> int:
        return 0 if self.given_up else self.number - len(self._free) - len(self._asked)

    def take(self, variables: Mapping[str, Any]) -> Forked | None:
        """Let a spare be the rank of these variables. None: there is none now."""
        self._receive()
        self._forget_ended()
        if not self._free:
            return None
        spare = self._free.pop(0)
        self._taken_seconds = time.monotonic()
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.write(spare.place, json.dumps(dict(variables)).encode() + b"\n")
        os.close(spare.place)
        return spare

    def expect(self, count: int) -> bool:
        """Ask for so many at once. False: none comes, so a new process has to be started."""
        while self._is_ready and not self.given_up and len(self._free) + len(self._asked) < count:
            self._ask()
        return self._is_ready and not self.given_up

    def note_end(self, process: Process, prefix: str) -> None:
        """A process that had a place has ended. prefix: of the files of its rank, which get its output."""
        if not isinstance(process, Forked):
            return
        former = Path(f"{process.files}.log")
        if not former.exists():  # it was that rank already
            return
        if process.returncode is not None and process.returncode >= 0:
            self._give_up(process)
        with contextlib.suppress(OSError):
            os.replace(f"{process.files}.error.json", f"{prefix}.error.json")
        with contextlib.suppress(OSError), open(former, "rb") as before:
            opened = os.open(f"{prefix}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(opened, "wb") as log:
                shutil.copyfileobj(before, log)

    def end(self) -> None:
        """End what waits."""
        self.given_up = self.given_up or "the run ends"
        if self._channel is not None:
            deadline = time.monotonic() + _FORK_SECONDS
            while self._asked and time.monotonic() < deadline:
                time.sleep(_PATIENCE_SECONDS)
                self._receive()
        self._close()
        for spare in self._free:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(spare.pid, signal.SIGKILL)
            spare.wait()
            os.close(spare.place)
            spare.remove_files()
        self._free.clear()
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def _forget_ended(self) -> None:
        for spare in [spare for spare in self._free if spare.poll() is not None]:
            self._free.remove(spare)
            os.close(spare.place)
            if spare.returncode is not None and spare.returncode >= 0:  # it was not killed
                self._give_up(spare)

    def _ask(self) -> None:
        assert self._channel is not None
        read_end, write_end = os.pipe()
        files = str(self._folder / f"spare{self._num_asked}")
        variables = {_FILES: files, _ERROR_FILE: f"{files}.error.json"}
        _be_subreaper(is_on=True)
        self._num_asked += 1
        self._asked[files] = write_end
        try:
            socket.send_fds(self._channel, [json.dumps(variables).encode()], [read_end])
        except OSError:
            self._close()
        finally:
            os.close(read_end)

    def _receive(self) -> None:
        """Note the forks that have come."""
        while self._channel is not None:
            try:
                message = self._channel.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._close()
            elif message == _READY:
                self._is_ready = True
            else:
                pid, _, files = message.decode().partition(" ")
                self._free.append(Forked(int(pid), self._asked.pop(files), files))
                if not self._asked:
                    _be_subreaper(is_on=False)

    def _close(self) -> None:
        """The fork server has ended, or is to end."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self._is_ready = None, False
        for place in self._asked.values():
            os.close(place)
        if self._asked:
            self._asked.clear()
            _be_subreaper(is_on=False)

    def _give_up(self, spare: Forked) -> None:
        """Its script has ended before it has asked for its place: so would the next one's."""
        if self.given_up or spare.returncode in _ON_REQUEST:
            return
        how = "has ended"
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(Path(f"{spare.files}.error.json").read_text())
            how = f"has failed ({record['message']['message']})"
        self.given_up = (
            f"the script of a spare process {how} before xds.initialize: no spares wait from now on, and new "
            f"processes start when they are needed; its output is in {spare.files}.log"
        )


def _be_subreaper(*, is_on: bool) -> None:
    """Let the kernel give processes to this one whose parents have ended, below it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


__all__ = ["Forked", "Process", "Spares", "begin_script", "serve", "take_place"]
