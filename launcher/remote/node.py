"""The node process: runs the ranks of one host on the head's orders, and reports their state to the head.

    -m xds.launcher.remote.node                            orders and heartbeats arrive on standard input
    -m xds.launcher.remote.node --orders TEXT [--index N]  one order, in the arguments; no messages follow

Its messages go to standard output, in frames between rank 0's own output. If the head sends nothing within the
timeout, closes its end of a stream, or sends "quit", all ranks here are stopped, and this process ends. What
they have in memory is held for another head first, if this one has not said "quit": see holding.py.

    message  meaning                                      what the head does then
    here     connected; torch is being imported           connects to the next host
    hello    a free port here, this host's address,       chooses the rendezvous endpoint, and where ranks
             the ranks whose versions are held here       go on
    failed   the first rank here has failed               stops the ranks of the other hosts
    ended    all ranks here have ended: the results       reports, or sends the next order
    beat     heartbeat

    with recovery:
    rank_ended, ranks_stopped    what happened here       decides: "fill" a place, "kill" ranks, "finish"
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

from ...ops.device import show_only
from ...recovery.decider import Fill, Kill
from ...recovery.slots import has_versions
from ...utils.errors import XdsError
from ...utils.messages import write_whole
from ..job import Order
from ..ranks.network import free_port
from ..ranks.rank_zero import RankZero
from ..ranks.run_folder import RunFolder, run_folder
from ..ranks.stop import Stop, stop_signals
from ..ranks.supervise import Outcome, import_torch, supervise
from ..ranks.units import Ended, Finish, HeadLine
from .holding import HOLD_SECONDS, Holding
from .messages import HEARTBEATS_PER_TIMEOUT, PART_BYTES, frame, unpack_order

_DEFAULT_HEARTBEAT_SECONDS = 2.0
_DRAIN_SECONDS = 1.0
_PART_SECONDS = (
    0.002  # pause before each part of a message: mpirun forwards the result of a single read
)
_LEAVE_SECONDS = 20.0  # then this process exits even if something still hangs


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one head until it quits or is lost. Returns 0, or the exit code of a failure here."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.pop("PYTHONSAFEPATH", None)  # was set for this process only, see backends
    with stop_signals(logs_signal=False) as stop:  # the head logs it
        if arguments[:1] == ["--orders"]:
            code = _run_order_in_arguments(arguments, stop)
        else:
            code = _serve(stop)
    sys.stdout.flush()
    os._exit(code)  # a thread of an agent that waits for other hosts cannot be ended


# -- messages to the head -------------------------------------------------------------------------------


@final
class HeadWriter:
    """Writes frames and rank 0's output to the head on one stream, without mixing them."""

    def __init__(self, token: str, sender: str) -> None:
        self._token, self._sender = token, sender
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def send(self, kind: str, **more: Any) -> None:
        """Send a message. Raises OSError if the head is lost."""
        message = {"kind": kind, "sender": self._sender, "now": time.time(), **more}
        data = frame(self._token, message)
        with self._sending:  # parts of two messages of one sender must not mix
            for at in range(0, len(data), PART_BYTES):
                time.sleep(_PART_SECONDS)
                self.write(1, data[at : at + PART_BYTES])

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all bytes of rank 0's output or of a frame."""
        with self._lock:
            write_whole(descriptor, data)


def _send_heartbeats(writer: HeadWriter, seconds: float, stop: Stop) -> None:
    gone = select.poll()
    gone.register(1, 0)  # reports only, and immediately, that the other end is closed
    while True:
        if gone.poll(seconds * 1000):
            _stop_ranks(stop)
            return
        try:
            writer.send("beat")
        except OSError:
            _stop_ranks(stop)
            return


def _stop_ranks(stop: Stop) -> None:
    """The head is lost: stop the ranks, and exit after a time limit even if something hangs."""
    is_held = has_versions(os.getpid())  # what ranks would do at their end, they may do later
    stop.request(signal.SIGKILL if is_held else signal.SIGTERM, is_for_peer=True)
    seconds = _LEAVE_SECONDS + (HOLD_SECONDS if is_held else 0)
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _start_heartbeat(writer: HeadWriter, heartbeat_seconds: float, stop: Stop) -> None:
    seconds = heartbeat_seconds / HEARTBEATS_PER_TIMEOUT or _DEFAULT_HEARTBEAT_SECONDS
    threading.Thread(target=_send_heartbeats, args=(writer, seconds, stop), daemon=True).start()


def _addresses() -> dict[str, str]:
    """By which the head reached this host, or else its name; and the head's own, "" if it is not known."""
    arguments = os.environ.get("SSH_CONNECTION", "").split()
    if len(arguments) != 4:
        return {"address": socket.gethostname(), "head": ""}
    return {"address": arguments[2], "head": arguments[0]}


# -- orders ---------------------------------------------------------------------------------------------


@final
class _Node:
    """The state of this host that persists from one start of the ranks to the next."""

    def __init__(
        self, writer: HeadWriter, process_stop: Stop, holding: Holding | None = None
    ) -> None:
        """holding: for orders with recovery."""
        self._writer, self._process_stop, self._holding = writer, process_stop, holding
        self._folders = contextlib.ExitStack()
        self._folder: RunFolder | None = None
        self.outcome = Outcome()

    def run(self, order: Order, stop: Stop, line: HeadLine | None = None) -> None:
        """Run the ranks of one order, and report how they ended. line: for one with recovery."""
        try:
            outcome = self._run(order, stop, line)
        except (XdsError, OSError) as error:
            outcome = Outcome(error=str(error))
        if line is not None and self._holding is not None:
            self._holding.note(line.attempts)
            if not self._process_stop.is_for_peer:  # the head is there
                self._holding.remove()
        self._writer.send(
            "ended",
            generation=order.generation,
            failures=[vars(failure) for failure in outcome.failures],
            finished=outcome.finished,
            error=outcome.error,
            port=free_port(),
            was_stopped_here=bool(self._process_stop.signum),
        )
        self.outcome = outcome

    def _run(self, order: Order, stop: Stop, line: HeadLine | None) -> Outcome:
        os.environ.update(order.environment)
        if order.devices is not None:
            show_only(order.devices)
        os.chdir(order.folder)
        if self._folder is None:
            run_id = order.rendezvous.run_id.partition(".")[0]
            self._folder = self._folders.enter_context(run_folder(order.job.log_dir, run_id))
        folder = self._folder
        if self._holding is not None:
            self._holding.begin(order)
        with RankZero(folder.path, folder.log(0), self._writer.write, stop.is_requested) as tee:
            failed = partial(self._writer.send, "failed", generation=order.generation)
            if line is None:
                outcome = supervise(order, folder, stop, tee.environment, failed)
            else:
                telling = threading.Thread(target=self._tell, args=(order, line), daemon=True)
                telling.start()
                outcome = supervise(order, folder, stop, tee.environment, line=line)
                telling.join(_DRAIN_SECONDS)
            tee.drain(_DRAIN_SECONDS, stop.is_requested)
        return outcome

    def _tell(self, order: Order, line: HeadLine) -> None:
        """Send what happens to ranks, until they have all ended."""
        with contextlib.suppress(OSError):  # the head is lost
            while (event := line.events.get()) is not None:
                kind = "rank_ended" if isinstance(event, Ended) else "ranks_stopped"
                self._writer.send(kind, generation=order.generation, **vars(event))

    def leave(self) -> None:
        """Clean up the run folder."""
        self._folders.close()


def _run_order_in_arguments(arguments: list[str], stop: Stop) -> int:
    """Run the order in the arguments. They hold the orders of all hosts; this host's is found by its index."""
    from .backends import node_index

    has_index = arguments[2:3] == ["--index"]
    index = int(arguments[3]) if has_index else node_index(os.environ)
    token, order = unpack_order(arguments[1], index, None if has_index else os.environ)
    writer = HeadWriter(token, order.host)
    _start_heartbeat(writer, order.heartbeat_seconds, stop)
    writer.send("hello", pid=os.getpid(), port=0, **_addresses())
    node = _Node(writer, stop)
    node.run(order, stop)
    node.leave()
    if stop.signum:
        return 128 + stop.signum
    codes = [failure.exit_code for failure in node.outcome.failures]
    return min(codes, default=int(bool(node.outcome.error)))


def _serve(stop: Stop) -> int:
    """Run orders from standard input, one after another. The first line holds the token and the host's name."""
    stream = _own_input()
    first = json.loads(stream.readline() or b"{}")
    if "token" not in first:
        return 2
    writer = HeadWriter(first["token"], first["host"])
    writer.send("here")
    if first["head"] is None:
        return _serve_orders(stream, first, writer, stop)
    with Holding(first["token"], first["host"], first["head"]) as holding:
        return _serve_orders(stream, first, writer, stop, holding)


def _serve_orders(
    stream: BinaryIO,
    first: Mapping[str, Any],
    writer: HeadWriter,
    stop: Stop,
    holding: Holding | None = None,
) -> int:
    held = {} if holding is None else holding.take_over()
    # done first: it may take long from a cold disk, and blocks every thread
    import_torch()
    reader = _HeadReader(stream, stop, first["heartbeat_seconds"])
    node = _Node(writer, stop, holding)
    try:
        _start_heartbeat(writer, first["heartbeat_seconds"], stop)
        addresses = _addresses()
        if addresses["head"]:
            os.environ["XDS_HOST_ADDRESS"] = addresses["address"]  # for the ranks
        told = {"held": list(held.items()), **addresses}
        writer.send("hello", pid=os.getpid(), port=free_port(), **told)
        reader.start()
        while (taken := reader.orders.get()) is not None:
            node.run(*taken)
            if stop.signum:  # a signal on this host, not a message of the head
                return 128 + stop.signum
    except OSError:  # the head is lost
        return 1
    finally:
        node.leave()
        if holding is not None and reader.is_lost():
            holding.hold()
    return 0


def _own_input() -> BinaryIO:
    """Standard input, replaced by /dev/null for the ranks: they would read messages for this process."""
    stream = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return stream


@final
class _HeadReader(threading.Thread):
    """A thread that reads the head's messages. A timeout, or the end of the stream, stops everything."""

    def __init__(self, stream: BinaryIO, stop: Stop, heartbeat_seconds: float) -> None:
        super().__init__(name="xds-ears", daemon=True)
        self.orders: queue.Queue[tuple[Order, Stop, HeadLine | None] | None] = queue.Queue()
        self._has_quit = False  # the head has ended as it should
        self._line: HeadLine | None = None  # of the order being run
        self._stream = stream
        self._process_stop = stop  # its follower is the stop of the order being run
        self._last_received = time.monotonic()
        self._limit_seconds = heartbeat_seconds
        if heartbeat_seconds:
            threading.Thread(target=self._watch_silence, daemon=True).start()

    def run(self) -> None:
        for line in self._stream:
            self._last_received = time.monotonic()
            self._take(json.loads(line))
        self._on_head_lost()

    def _take(self, message: Mapping[str, Any]) -> None:
        kind, current = message["kind"], self._process_stop.follower
        if kind == "run":
            self._process_stop.follower = Stop()
            order = Order.from_dict(message["order"])
            self._line = HeadLine() if order.job.recovers else None
            self.orders.put((order, self._process_stop.follower, self._line))
        elif kind == "stop" and current is not None:
            current.request(message["signum"], is_for_peer=message["is_for_peer"])
        elif kind == "forward" and current is not None:
            current.forward(message["signum"])
        elif kind == "quit":
            self._has_quit = True
            self.orders.put(None)
        elif kind in ("fill", "kill", "finish") and self._line is not None:
            self._line.commands.put(_command(kind, message))

    def is_lost(self) -> bool:
        """The head has ended, or is not reached, and nobody has ended this process."""
        if self.is_alive():  # its last word may be on the way
            self.join(_DRAIN_SECONDS)
        stop = self._process_stop
        return not self._has_quit and (stop.is_for_peer or not stop.signum)

    def _watch_silence(self) -> None:
        while time.monotonic() - self._last_received < self._limit_seconds:
            time.sleep(self._limit_seconds / 20)
        self._on_head_lost()

    def _on_head_lost(self) -> None:
        """Stop the ranks and end this process."""
        self.orders.put(None)
        _stop_ranks(self._process_stop)


def _command(kind: str, message: Mapping[str, Any]) -> Fill | Kill | Finish:
    if kind == "fill":
        return Fill(0, message["rank"], message["generation"], message["attempt"])
    return Kill(0, tuple(message["ranks"])) if kind == "kill" else Finish()


if __name__ == "__main__":
    main()
