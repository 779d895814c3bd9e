"""One host's part of a run on several: takes orders from the head, runs the ranks here, tells how they do.

    -m xds.launcher.remote.node                            orders and heartbeats come over standard input
    -m xds.launcher.remote.node --orders TEXT [--index N]  one order, in the arguments; nothing is heard later

What it says goes to standard output, in frames between rank 0's own output. When the head says nothing for
a while, when its end of a stream closes, or when it says so, every rank here is stopped, and this process ends.

    here     reached; torch is being imported             head: connects to the next host
    hello    a free port here, this host's address        head: picks where the ranks meet
    failed   the first rank here has failed               head: stops the ranks of the other hosts
    ended    all ranks here have: failures, who finished  head: reports, or gives the next order
    beat     still there
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, final

from ...utils.errors import XdsError
from ...utils.messages import write_whole
from ..job import Order
from ..ranks.network import free_port
from ..ranks.rank_zero import RankZero
from ..ranks.run_folder import RunFolder, run_folder
from ..ranks.stop import Stop, stop_signals
from ..ranks.supervise import Outcome, import_torch, supervise
from .frames import BEATS_A_LIMIT, PART_BYTES, encode

_USUAL_BEAT_SECONDS = 2.0
_DRAIN_SECONDS = 1.0
_PART_SECONDS = (
    0.002  # before each part of a message: mpirun hands on what one read gives, torn or not
)
_LEAVE_SECONDS = 20.0  # then whatever still hangs is left to the kernel


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one head until it is gone or content; 0, or the exit code of the first failure here."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.pop("PYTHONSAFEPATH", None)  # for this process alone, see backends
    with stop_signals(says_so=False) as stop:  # the head does
        if words[:1] == ["--orders"]:
            code = _obey_once(words, stop)
        else:
            code = _serve(stop)
    sys.stdout.flush()
    os._exit(code)  # an agent that waits for other hosts has a thread that nothing ends


# -- what is said ---------------------------------------------------------------------------------------


@final
class Voice:
    """The way to the head: frames and rank 0's output on one stream, one after the other."""

    def __init__(self, token: str, sender: str) -> None:
        self._token, self._sender = token, sender
        self._lock = threading.Lock()
        self._saying = threading.Lock()

    def say(self, kind: str, **more: Any) -> None:
        """Send a message. A head that is gone shows by an OSError."""
        message = {"kind": kind, "sender": self._sender, "now": time.time(), **more}
        data = encode(self._token, message)
        with self._saying:  # parts of two messages of one sender must not mix
            for at in range(0, len(data), PART_BYTES):
                time.sleep(_PART_SECONDS)
                self.write(1, data[at : at + PART_BYTES])

    def write(self, descriptor: int, data: bytes) -> None:
        """Write bytes of rank 0 (or frames), whole."""
        with self._lock:
            write_whole(descriptor, data)


def _beat(voice: Voice, seconds: float, stop: Stop) -> None:
    gone = select.poll()
    gone.register(1, 0)  # tells nothing but that the other end is closed, and that at once
    while True:
        if gone.poll(seconds * 1000):
            _lost(stop)
            return
        try:
            voice.say("beat")
        except OSError:
            _lost(stop)
            return


def _lost(stop: Stop) -> None:
    """The head is gone: end the ranks in seconds, and this process even if something hangs."""
    stop.ask(signal.SIGTERM, is_for_peer=True)
    timer = threading.Timer(_LEAVE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _start_beating(voice: Voice, heartbeat_seconds: float, stop: Stop) -> None:
    seconds = heartbeat_seconds / BEATS_A_LIMIT or _USUAL_BEAT_SECONDS
    threading.Thread(target=_beat, args=(voice, seconds, stop), daemon=True).start()


def _own_address() -> str:
    """The address by which the head reached this host, or else its name."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else socket.gethostname()


# -- what is done ---------------------------------------------------------------------------------------


@final
class _Here:
    """This host: what stays the same from one start of the ranks to the next."""

    def __init__(self, voice: Voice, process_stop: Stop) -> None:
        self._voice, self._process_stop = voice, process_stop
        self._folders = contextlib.ExitStack()
        self._folder: RunFolder | None = None
        self.outcome = Outcome()

    def run(self, order: Order, stop: Stop) -> None:
        """Run the ranks of one order, and say how they ended."""
        try:
            outcome = self._run(order, stop)
        except (XdsError, OSError) as error:
            outcome = Outcome(error=str(error))
        self._voice.say(
            "ended",
            generation=order.generation,
            failures=[vars(failure) for failure in outcome.failures],
            finished=outcome.finished,
            error=outcome.error,
            port=free_port(),
            was_stopped_here=bool(self._process_stop.signum),
        )
        self.outcome = outcome

    def _run(self, order: Order, stop: Stop) -> Outcome:
        os.environ.update(order.environment)
        if order.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order.devices))
        os.chdir(order.folder)
        if self._folder is None:
            run_id = order.rendezvous.run_id.partition(".")[0]
            self._folder = self._folders.enter_context(run_folder(order.job.log_dir, run_id))
        folder = self._folder
        with RankZero(folder.path, folder.log(0), self._voice.write, stop.was_asked) as tee:
            failed = partial(self._voice.say, "failed", generation=order.generation)
            outcome = supervise(order, folder, stop, tee.environment, failed)
            tee.drain(_DRAIN_SECONDS, stop.was_asked)
        return outcome

    def leave(self) -> None:
        """Tidy up the run's folder."""
        self._folders.close()


def _obey_once(words: list[str], stop: Stop) -> int:
    """The order is in the arguments: of all hosts, this one's by its number."""
    from .backends import node_index
    from .backends.orders import decode

    is_told = words[2:3] == ["--index"]
    index = int(words[3]) if is_told else node_index(os.environ)
    token, order = decode(words[1], index, None if is_told else os.environ)
    voice = Voice(token, order.host)
    _start_beating(voice, order.heartbeat_seconds, stop)
    voice.say("hello", pid=os.getpid(), address=_own_address(), port=0)
    here = _Here(voice, stop)
    here.run(order, stop)
    here.leave()
    if stop.signum:
        return 128 + stop.signum
    codes = [failure.exit_code for failure in here.outcome.failures]
    return min(codes, default=int(bool(here.outcome.error)))


def _serve(stop: Stop) -> int:
    """Orders come over standard input, one after another; the first line says who asks."""
    stream = _own_input()
    first = json.loads(stream.readline() or b"{}")
    if "token" not in first:
        return 2
    voice = Voice(first["token"], first["host"])
    voice.say("here")
    # first: it may take long, from a cold disk, and holds up every thread meanwhile
    import_torch()
    ears = _Ears(stream, stop, first["heartbeat_seconds"])
    _start_beating(voice, first["heartbeat_seconds"], stop)
    voice.say("hello", pid=os.getpid(), address=_own_address(), port=free_port())
    ears.start()
    here = _Here(voice, stop)
    try:
        while (taken := ears.orders.get()) is not None:
            here.run(*taken)
            if stop.signum:  # somebody here, not the head
                return 128 + stop.signum
    except OSError:  # nobody is there to be told
        return 1
    finally:
        here.leave()
    return 0


def _own_input() -> BinaryIO:
    """Standard input, taken away from the ranks: they would read what is meant for this process."""
    stream = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return stream


@final
class _Ears(threading.Thread):
    """Listens to the head. A long silence, or the end of the stream, stops everything."""

    def __init__(self, stream: BinaryIO, stop: Stop, heartbeat_seconds: float) -> None:
        super().__init__(name="xds-ears", daemon=True)
        self.orders: queue.Queue[tuple[Order, Stop] | None] = queue.Queue()
        self._stream = stream
        self._process_stop = stop  # its follower is the stop of the order being run
        self._heard = time.monotonic()
        self._limit_seconds = heartbeat_seconds
        if heartbeat_seconds:
            threading.Thread(target=self._watch_silence, daemon=True).start()

    def run(self) -> None:
        for line in self._stream:
            self._heard = time.monotonic()
            self._take(json.loads(line))
        self._deaf()

    def _take(self, message: Mapping[str, Any]) -> None:
        kind, current = message["kind"], self._process_stop.follower
        if kind == "run":
            self._process_stop.follower = Stop()
            order = Order.from_dict(message["order"])
            self.orders.put((order, self._process_stop.follower))
        elif kind == "stop" and current is not None:
            current.ask(message["signum"], is_for_peer=message["is_for_peer"])
        elif kind == "forward" and current is not None:
            current.forward(message["signum"])
        elif kind == "quit":
            self.orders.put(None)

    def _watch_silence(self) -> None:
        while time.monotonic() - self._heard < self._limit_seconds:
            time.sleep(self._limit_seconds / 20)
        self._deaf()

    def _deaf(self) -> None:
        """Nobody will hear how it ends."""
        self.orders.put(None)
        _lost(self._process_stop)


if __name__ == "__main__":
    main()
