"""Test helper: the links of hosts made of namespaces; they can be cut, delayed and limited.

host0 eth0 ==== port1 |        |
host1 eth0 ==== port2 | bridge |    what a host sends leaves at its eth0, what it receives at its port
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Sequence

HEAD = "head"
NOWHERE = "nowhere"  # resolves to an unused address
# A link that was idle sends so many bytes at once. Packets are cut to this size before they are counted.
_BURST_BYTES = 16 * 1024
_QUEUE_BYTES = 1 << 20  # packets beyond are dropped


class Links:
    """The links of `places`, the first of which is the head. Each place has a name and an address."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = list(places)
        self._subnet = f"10.{random.randrange(64, 250)}.{random.randrange(250)}"
        self._first: dict[str, subprocess.Popen[str]] = {}  # each namespace's first process
        self._delays: dict[str, float] = {}  # by place, in milliseconds
        self._rates: dict[str, float] = {}  # in megabits per second

    def address(self, place: str) -> str:
        """The IPv4 address of a host, of the head, or of NOWHERE."""
        number = 250 if place == NOWHERE else 10 + self._places.index(place)
        return f"{self._subnet}.{number}"

    def cut(self, place: str) -> None:
        """Cut the link of `place` to the others."""
        self._switch(f"link set {self._port(place)} down")

    def mend(self, place: str) -> None:
        """Undo `cut`."""
        self._switch(f"link set {self._port(place)} up")

    def delay(self, place: str, milliseconds: float) -> str:
        """Delay what is sent to `place`; why that cannot be here, "" when it is done."""
        self._delays[place] = milliseconds
        return self._shape(place)

    def limit(self, place: str, megabits: float) -> str:
        """Let `place` send and receive `megabits` per second at most; the reason as for `delay`.

        The headers of packets count: of 100 Mb/s, 11.9 MB/s are left for what is sent.
        """
        self._rates[place] = megabits
        return self._shape(place)

    def _shape(self, place: str) -> str:
        """Set the rates and the delay of `place` anew."""
        if shutil.which("tc") is None:
            return "not installed: tc"
        self._tc("switch", "del", self._port(place))  # there may be none
        above = "root"
        if place in self._rates:
            rate = f"tbf rate {self._rates[place]}mbit burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
            for where, device in ((place, "eth0"), ("switch", self._port(place))):
                self._tc(where, "del", device)
                reason = self._tc(where, "add", device, f"root handle 1: {rate}")
                if reason:
                    return f"tc tbf: {reason}"
            above = "parent 1:1"
        if place in self._delays:
            words = f"{above} netem delay {self._delays[place]}ms"
            reason = self._tc("switch", "add", self._port(place), words)
            if reason:
                return f"tc netem: {reason}"
        return ""

    def _tc(self, place: str, verb: str, device: str, words: str = "root") -> str:
        enter = ["nsenter", "-t", str(self._first[place].pid), "-n"]
        asked = [*enter, "tc", "qdisc", verb, "dev", device, *words.split()]
        done = subprocess.run(asked, capture_output=True, text=True)
        return done.stderr.strip() if done.returncode else ""

    def _port(self, place: str) -> str:
        return f"port{self._places.index(place)}"

    def _switch(self, *lines: str) -> None:
        self._ip("switch", *lines)

    def _ip(self, place: str, *lines: str) -> None:
        words = ["nsenter", "-t", str(self._first[place].pid), "-n", "ip", "-batch", "-"]
        text = "\n".join(lines) + "\n"
        done = subprocess.run(words, input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ip in {place}: {done.stderr.strip()}")
