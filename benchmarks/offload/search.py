"""Which size to try next, and how to divide its states between device, host and disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """Bytes that model states may take."""

    device: float
    host: float
    disk: float = 0.0


@dataclass(frozen=True)
class Places:
    """Bytes of a parameter with a share r of the optimizer's states away from the device.

    device: `device` + `device_states` (1 - r); host: `host` + `host_states` r; disk: `disk_states` r.
    """

    device: float
    device_states: float
    host: float
    host_states: float
    disk_states: float

    def share(self, numel: int, room: Room) -> tuple[float, bool]:
        """A share r, and whether it fits.

        It is between the least for the device and the most for host and disk. If nothing is between, it is the
        most for host and disk: too little device memory is an error, and too little host memory kills.
        """
        low = 1 - (room.device / numel - self.device) / self.device_states
        high = (room.host / numel - self.host) / self.host_states
        if self.disk_states:
            high = min(high, room.disk / numel / self.disk_states)
        low, high = max(0.0, low), min(1.0, high)
        share = (low + high) / 2 if low <= high else max(0.0, high)
        return round(share, 4), low <= high


# A unit on the device takes 12 bytes of states and 4 of gradient sums. On the host the gradient has 16 bits.
HOST = Places(device=2, device_states=16, host=0, host_states=14, disk_states=0)
DISK = Places(device=0, device_states=16, host=2, host_states=2, disk_states=12)


def estimate(numel_of: Callable[[int], int], places: Places, room: Room, max_layers: int) -> int:
    """The largest number of layers whose states fit; at least 1. numel_of: parameters of so many layers."""
    counts = range(1, max_layers + 1)
    return max((n for n in counts if places.share(numel_of(n), room)[1]), default=1)


def next_layers(tried: Mapping[int, bool], first: int, max_layers: int) -> int | None:
    """The next number of layers to try: `first`, then away from it in growing steps, then between.

    None: the largest one that trains is known to within 2 % of `first`, or none does.
    """
    if not tried:
        return first
    good = max((layers for layers, trains in tried.items() if trains), default=0)
    bad = min((layers for layers, trains in tried.items() if not trains), default=max_layers + 1)
    reach = max(1, first // 16) * 2 ** max(0, len(tried) - 1)
    if not good:
        return None if bad <= 1 else max(1, bad - reach)
    if bad > max_layers:
        return min(max_layers, good + reach) if good < max_layers else None
    if bad - good <= max(1, first // 50):
        return None
    return (good + bad) // 2


__all__ = ["DISK", "HOST", "Places", "Room", "estimate", "next_layers"]
