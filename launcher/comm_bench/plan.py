"""Data classes of `xds bench comm`: what is measured, and the rows of the table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple, final

MESSAGES = "xds-gloo"  # rows by xds over messages of gloo, where "xds" uses shared memory
FIRST_BYTES = 1024
FACTOR = 4
# of compressed messages: smaller buffers are all latency, larger ones have the ratio of the last
FIRST_COMPRESSED_BYTES, LAST_COMPRESSED_BYTES = 64 << 10, 16 << 20
COMPRESSED_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = ("float32", "float16", "bfloat16", "int8")
OPS = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "gather_small", "send_recv", "barrier"),
)


@final
@dataclass(frozen=True)
class Plan:
    """What is measured. The launcher passes it to every rank.

    max_bytes: the largest size; 0 means 1 GiB on GPUs and 64 MiB on CPUs.
    trials: consecutive calls that are timed together, three times, and up to 15 times if they are short; fewer
        if they take longer than `seconds`.
    compares: schemes of compressed messages, instead of collectives.
    """

    ops: tuple[str, ...] = OPS
    min_bytes: int = FIRST_BYTES
    max_bytes: int = 0
    dtype: str = "float32"
    trials: int = 20
    seconds: float = 0.5
    is_json: bool = False
    compares: bool = False

    def as_text(self) -> str:
        """The plan as one argument of a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Plan:
        """The plan from the result of `as_text`."""
        fields = json.loads(text)
        return Plan(**{**fields, "ops": tuple(fields["ops"])})


def sizes(first_bytes: int, last_bytes: int) -> list[int]:
    """The sizes from the first to the last, each four times the previous; always includes the last."""
    found = []
    size = first_bytes
    while size < last_bytes:
        found.append(size)
        size *= FACTOR
    return [*found, last_bytes]


def bus_factor(op: str, world_size: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth, as in nccl-tests' doc/PERFORMANCE.md.

    Algorithm bandwidth is size / time. The size is that of the full tensor: the output of an all_gather, the
    input of a reduce_scatter or an all_to_all. The factor converts it to the traffic of each rank's link in one
    direction, which can be compared with the link at any number of ranks. gather_small is an all_gather.
    """
    if world_size == 1 or op == "barrier":
        return 0.0
    if op == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if op in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (world_size - 1) / world_size


@final
@dataclass(frozen=True)
class Link:
    """The link between two ranks, without any collective.

    what: a description. bytes_per_second: in one direction. latency_seconds: of one byte, one way; 0: unknown.
    """

    what: str
    bytes_per_second: float
    latency_seconds: float = 0.0

    def __str__(self) -> str:
        latency = f", {time_text(self.latency_seconds)} one way" if self.latency_seconds else ""
        speed = self.bytes_per_second
        shown = f"{speed / 1e9:.2f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.1f} MB/s"
        return f"{self.what}: {shown}{latency}"


@final
@dataclass(frozen=True)
class Row:
    """The result for one collective at one size.

    by: "xds" (ops.comm, as a run uses it), "xds-gloo" (the same over messages of gloo, where ranks share
        memory) or "torch" (the backend's own op).
    size_bytes: of the full tensor, a multiple of the number of ranks. seconds: of one call.
    of_link: the time that the link alone needs for this rank's bytes (its latency plus bytes / speed), divided
        by `seconds`: a ratio of bandwidths for large sizes, and of latencies for small sizes.
    copy_seconds: of a plain copy of size_bytes by every rank at once, beside the calls; None: not measured.
    over_copy: `seconds` over `copy_seconds`, the median of the rounds.
    """

    op: str
    by: str
    size_bytes: int
    seconds: float
    trials: int
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    of_link: float | None
    copy_seconds: float | None = None
    over_copy: float | None = None


class Timing(NamedTuple):
    """Seconds of one call, the number of calls it is the mean of, and for the copy the values of `Row`."""

    seconds: float
    trials: int
    copy_seconds: float | None = None
    over_copy: float | None = None


def row(op: str, by: str, size_bytes: int, timing: Timing, context: Baseline) -> Row:
    """A row with both bandwidths."""
    seconds = timing.seconds
    algorithm = size_bytes / seconds
    factor = bus_factor(op, context.world_size)
    of_link = None
    if context.link is not None and context.world_size > 1:
        alone = size_bytes * factor / context.link.bytes_per_second + context.link.latency_seconds
        of_link = alone / seconds
    speeds = algorithm, algorithm * factor
    copy = timing.copy_seconds, timing.over_copy
    return Row(op, by, size_bytes, seconds, timing.trials, *speeds, of_link, *copy)


@final
@dataclass(frozen=True)
class Baseline:
    """The values that rows are compared with."""

    world_size: int
    link: Link | None


HEADING = (
    f"{'collective':<15}{'by':<9}{'size':>9}{'time':>12}{'algbw':>9}{'busbw':>9}{'of link':>9}"
    f"{'/ copy':>9}"
)


def row_text(line: Row) -> str:
    """A line of the table."""
    ratios = (line.of_link, line.over_copy)
    of_link, over_copy = (
        "-" if ratio is None else f"{ratio:.{2 if ratio < 100 else 0}f}" for ratio in ratios
    )
    found = (line.algorithm_bytes_per_second, line.bus_bytes_per_second)
    speeds = [f"{speed / 1e9:.3f}" if speed else "-" for speed in found]
    return (
        f"{line.op:<15}{line.by:<9}{binary(line.size_bytes):>9}{time_text(line.seconds):>12}"
        f"{speeds[0]:>9}{speeds[1]:>9}{of_link:>9}{over_copy:>9}"
    )


def binary(size_bytes: int) -> str:
    """ "64 KiB", or "1.5 MiB"."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):  # noqa: B007 (the one where it stops)
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def time_text(seconds: float) -> str:
    """ "12.3 us", "4.56 ms", "1.23 s"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
