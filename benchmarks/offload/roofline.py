"""The least time of a step with offload: the longest of compute, copies and updates, and the bytes of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do, measured. Bytes, elements and operations a second."""

    to_host: float
    to_device: float
    adam: float
    matmul: float


@dataclass(frozen=True)
class Compute:
    """Seconds of the bare model: no optimizer, no engine, the same recomputation."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Bound:
    """Seconds of a step's parts."""

    compute: float
    copies: float
    updates: float
    wait: float  # backward, and then the longer of forward and updates

    @property
    def least(self) -> float:
        return max(self.compute, self.copies, self.updates)

    def note(self) -> str:
        return f"compute {self.compute:.3f} s, copies {self.copies:.3f} s, updates {self.updates:.3f} s"


def lane_bytes(num_micro_batches: int, *, params_on_host: bool) -> tuple[int, int]:
    """Bytes of a parameter and step to the host, and to the device: one rank, 16 bits, ratio 1.

    Gradients go to the host once a micro-batch. New values go to the device once a step. With the parameters
    on the host, forward and backward fetch them, and no other copy brings new values.
    """
    fetched = 4 * num_micro_batches if params_on_host else 2
    return 2 * num_micro_batches, fetched


def host_bytes(num_micro_batches: int, *, params_on_host: bool) -> int:
    """Bytes of a parameter on the host: one rank, 16 bits, Adam, ratio 1; buffers are extra.

    Master and two moments take 12. The gradient takes 2, or 4 where several are summed.
    """
    return 12 + (2 if num_micro_batches == 1 else 4) + (2 if params_on_host else 0)


def bound(numel: int, compute: Compute, ceilings: Ceilings, *, params_on_host: bool) -> Bound:
    """The bound of a step with one micro-batch and all states on the host."""
    out, back = lane_bytes(1, params_on_host=params_on_host)
    updates = numel / ceilings.adam
    return Bound(
        compute=compute.forward + compute.backward,
        copies=max(out * numel / ceilings.to_host, back * numel / ceilings.to_device),
        updates=updates,
        wait=compute.backward + max(compute.forward, updates),
    )


__all__ = ["Bound", "Ceilings", "Compute", "bound", "host_bytes", "lane_bytes"]
