"""The share of the time that two sites compute over a link of 100 Mbit/s and 50 ms.

    python benchmarks/outer/link.py [--megabits 100] [--milliseconds 50] [--seconds 0.3] [--steps 60]

Two hosts made of namespaces (tests/real_hosts.py, needs root), one rank on each. `Link` carries the packets
between them: each way has this rate, and a packet and its answer take the milliseconds. The first line has what
a plain TCP connection sees of both. The model has 11 M parameters. Forward is a sleep, so that the ranks do
not compete for processors; the optimizer updates all parameters. Share: the median step of a rank that trains
alone, over the mean step. Meeting: the time that the training thread spends in meetings, over that of all
steps; `cpu`: what it computes of it.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import select
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEVICE, MTU_BYTES = "wan0", 9000
QUEUE_SECONDS = 0.1  # of the router before the link: packets that would wait for longer are lost
ALONE = "alone"
WAYS: dict[str, dict[str, Any] | None] = {
    ALONE: None,
    "H 30, 4 bits, fragments 3, delay 5": {"steps": 30, "bits": 4, "fragments": 3, "delay": 5},
    "H 30, 4 bits": {"steps": 30, "bits": 4},
    "H 30, 32 bits": {"steps": 30},
    "plain": None,
}


class Link(threading.Thread):
    """A link between the network namespaces of two processes: a TUN device in each of them, and this thread."""

    def __init__(self, pids: Sequence[int], megabits: float, seconds: float) -> None:
        """seconds: of a packet from one end to the other."""
        super().__init__(daemon=True)
        self._pids, self._bits, self._seconds = pids, megabits * 1e6, seconds
        self.made = threading.Event()

    def run(self) -> None:
        ends = [self._device(pid) for pid in self._pids]
        self.made.set()
        waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        is_sent = [0.0, 0.0]  # when the link has sent all that it took from an end
        while True:
            due = min((queue[0][0] for queue in waiting if queue), default=None)
            left = None if due is None else max(0.0, due - time.monotonic())
            for end in select.select(ends, [], [], left)[0]:
                way, packet, now = ends.index(end), os.read(end, 1 << 16), time.monotonic()
                sent = max(is_sent[way], now) + 8 * len(packet) / self._bits
                if sent - now <= QUEUE_SECONDS:
                    is_sent[way] = sent
                    waiting[way].append((sent + self._seconds, packet))
            for way, queue in enumerate(waiting):
                while queue and queue[0][0] <= time.monotonic():
                    packet = queue.popleft()[1]
                    with suppress(OSError):  # the device is not up yet
                        os.write(ends[1 - way], packet)

    @staticmethod
    def _device(pid: int) -> int:
        """A new device in the namespace of a process, which this thread enters."""
        with open(f"/proc/{pid}/ns/net") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        tun, set_device, is_tun_without_header = (
            os.open("/dev/net/tun", os.O_RDWR),
            0x400454CA,
            0x1001,
        )
        fcntl.ioctl(tun, set_device, struct.pack("16sH", DEVICE.encode(), is_tun_without_header))
        return tun


def join(hosts: Any, options: argparse.Namespace) -> list[str]:
    """Make the link between both hosts, and print what is seen of it. The addresses of its ends."""
    pids = [hosts._first[place].pid for place in hosts.names]
    link = Link(pids, options.megabits, options.milliseconds / 2000)
    link.start()
    if not link.made.wait(10):
        raise RuntimeError("there is no TUN device")
    addresses = ["10.60.0.1", "10.60.0.2"]
    for place, address in zip(hosts.names, addresses, strict=True):
        lines = f"address add {address}/24 dev {DEVICE}", f"link set {DEVICE} mtu {MTU_BYTES} up"
        hosts._ip(place, *lines)
    receive = (
        "import socket, time; s = socket.create_server(('', 7777)).accept()[0]; n = 0\n"
        "while got := len(s.recv(1 << 20)):\n"
        "    begin, n = (begin if n else time.time()), n + got\n"
        "print(8e-6 * n / (time.time() - begin))"
    )
    send = (
        "import socket, time; time.sleep(1); begin = time.time()\n"
        f"s = socket.create_connection(('{addresses[1]}', 7777))\n"
        "print(1000 * (time.time() - begin)); s.sendall(bytes(40_000_000))"
    )
    ends = [
        hosts.popen([sys.executable, "-c", text], place=place, stdout=subprocess.PIPE)
        for place, text in (("host1", receive), ("host0", send))
    ]
    megabits, milliseconds = (round(float(end.communicate()[0]), 1) for end in ends)
    print(json.dumps({"megabits": megabits, "milliseconds": milliseconds}), flush=True)
    return addresses


def train(way: str, steps: int, seconds: float, alone: float) -> None:
    import torch
    from torch import nn

    import xds

    torch.set_num_threads(1)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(1350, 1350) for _ in range(6))

        def forward(self, scale: float) -> Any:
            time.sleep(seconds)
            return sum(part.bias.sum() + part.weight.view(-1)[0] for part in self.parts) * scale

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"unit_min_numel": 1},
        "log_level": "error",
    }
    if WAYS[way] is not None:
        config["outer"] = {"groups": 2, "mix": 0.5} | (WAYS[way] or {})
    engine = xds.initialize(Wide(), config)
    loop, advance, meeting = engine._parts.outer, engine._parts.outer.advance, [0.0, 0.0]

    def timed(weight: float) -> None:
        begin = time.perf_counter(), time.thread_time()
        advance(weight)
        meeting[0] += time.perf_counter() - begin[0]
        meeting[1] += time.thread_time() - begin[1]

    loop.advance = timed  # type: ignore[method-assign]
    every = []
    for _ in range(steps if way != "plain" else min(steps, 5)):
        begin_seconds = time.perf_counter()
        engine.backward(engine(1.0))
        engine.step()
        every.append(time.perf_counter() - begin_seconds)
    if engine.global_rank == 0:
        total = sum(every)
        taken = statistics.median(every) if way == ALONE else total / len(every)
        found = {"way": way, "step_seconds": round(taken, 4)}
        if way != ALONE:
            found |= {"share": round(alone / taken, 4), "meeting": round(meeting[0] / total, 4)}
            found |= {"cpu": round(meeting[1] / total, 4), "bytes": engine.bytes_sent()}
        print(json.dumps(found), flush=True)
    engine.destroy()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabits", type=float, default=100)
    parser.add_argument("--milliseconds", type=float, default=50, help="of a packet and its answer")
    parser.add_argument("--seconds", type=float, default=0.3, help="of the sleep of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[1:])
    parser.add_argument("--way", choices=WAYS, help="on a rank: train")
    parser.add_argument("--alone", type=float, default=1.0, help="on a rank: the step of one alone")
    options = parser.parse_args()
    if options.way:
        train(options.way, options.steps, options.seconds, options.alone)
        return 0
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from real_hosts import Hosts, why_not

    if reason := why_not(needs_ssh=False):
        print(f"skipped: {reason}")
        return 0
    with Hosts(2, has_ssh=False) as hosts:
        addresses = join(hosts, options)
        alone = options.alone
        for way in (ALONE, *options.ways):
            ranks, places = [], hosts.names[:1] if way == ALONE else hosts.names
            for rank, place in enumerate(places):
                env = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": "0"}
                env |= {"MASTER_ADDR": addresses[0], "MASTER_PORT": "29511"}
                env |= {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
                words = [sys.executable, str(Path(__file__).resolve()), "--way", way]
                words += ["--steps", str(options.steps), "--seconds", str(options.seconds)]
                words += ["--alone", str(alone)]
                ranks.append(hosts.popen(words, env, place=place, stdout=subprocess.PIPE))
            for text in [process.communicate()[0] for process in ranks][:1]:
                print(text.decode(), end="", flush=True)
                alone = json.loads(text.splitlines()[-1])["step_seconds"] if way == ALONE else alone
    return 0


if __name__ == "__main__":
    sys.exit(main())
