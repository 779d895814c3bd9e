"""A machine file: how fast a device, its host and their links are. `xds plan` and `xds tune` read it.

A file is JSON. A value is a `Number` or a `Table`, each with its source and its error. `xds bench machine`
writes one for the machine at hand. Ready ones are in the folder machines/: `load_machine("NAME")`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, final

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ...ops.device import KINDS
from ...utils.errors import ConfigError
from ...utils.quoting import printable
from ...utils.schema.section import nearest
from ...utils.schema.values import shown
from ...utils.small_files import parse_json, read_small_text

READY = Path(__file__).parent / "machines"
NEAREST_SHAPES = 4  # measured shapes that a rate is interpolated from
ANY = "any"  # the operation of a link that stands for those without numbers of their own

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Error = Annotated[float, Field(ge=0, le=10)]  # relative: 0.1 is 10 %
Dtype = Literal["fp32", "tf32", "fp16", "bf16", "float8"]
Place = Literal["host", "hosts"]
M = TypeVar("M", bound="Part")


def _same_length(points: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    if len({len(point) for point in points}) != 1:
        raise ValueError("all points must have as many numbers")
    return points


def _known_device(name: str) -> str:
    if name not in KINDS and name != getattr(torch.accelerator.current_accelerator(), "type", None):
        raise ValueError(f"must be one of {', '.join(KINDS)}")
    return name


Points = Annotated[tuple[tuple[Rate, ...], ...], Field(min_length=1), AfterValidator(_same_length)]


class Part(BaseModel):
    """Base of the objects of the file: frozen, and other keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@final
class Number(Part):
    """One value. source: where it is from. error: its relative error."""

    value: Rate
    source: str
    error: Error = 0.0


@final
class Table(Part):
    """Values at points: the last number of a point is the value there, those before it are its coordinates."""

    points: Points
    source: str
    error: Error = 0.0

    def at(self, *place: float) -> float:
        """The value at `place`, which has as many coordinates as the points.

        Linear in the logarithms between neighbouring points, the first coordinate last. Outside it is that of
        the nearest point.
        """
        return _between(self._sorted, place)

    def near(self, *place: float) -> float:
        """The same for points that are no grid: a mean by inverse squared distance of the nearest ones.

        Distances and values are logarithms. At a point it is the value of the point.
        """
        logs = [math.log(max(each, 1e-30)) for each in place]
        near = sorted(
            (sum((a - b) ** 2 for a, b in zip(logs, point, strict=True)), value)
            for *point, value in self._logs
        )[:NEAREST_SHAPES]
        if near[0][0] == 0:
            return math.exp(near[0][1])
        weights = [1 / distance for distance, _ in near]
        total = sum(weight * value for weight, (_, value) in zip(weights, near, strict=True))
        return math.exp(total / sum(weights))

    @cached_property
    def _sorted(self) -> list[tuple[float, ...]]:
        return sorted(self.points)

    @cached_property
    def _logs(self) -> list[tuple[float, ...]]:
        return [tuple(map(math.log, point)) for point in self.points]


@final
class Link(Part):
    """What one operation over a link takes: `latency` + bytes / `rate`.

    latency: points [ranks, seconds] of an empty operation.
    rate: points [ranks, bytes, bytes/s]. Bytes are those that one rank sends, as in "busbw" of nccl-tests.
        Between hosts it is that of groups with one rank on each host, while the host's others send as much.
    overlap: the share of the time that can run beside computation of the same rank.
    """

    latency: Table
    rate: Table
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0

    def seconds(self, ranks: int, size_bytes: float) -> float:
        """Of one operation of `ranks` ranks, each of which sends `size_bytes` to the others."""
        if ranks < 2 or not size_bytes:
            return 0.0
        return self.latency.at(ranks) + size_bytes / self.rate.at(ranks, size_bytes)


@final
class Machine(Part):
    """One kind of host with its devices, and the links between such hosts.

    name: for people. device: a kind of ops/device.py. "cpu": the host itself; others run kernels beside it.
    date: when it was measured or put together. versions: of torch and of others that matter.
    devices_per_host. device_bytes, host_bytes: memory of one device, and of one host.
    matrix: dtype -> points [m, n, k, flop/s] of a product [m, k] x [k, n], 2 m n k operations.
    attention: dtype -> points [width of a head, sequence, flop/s] of a forward; half of the products of a
        causal one count. attention_backward: the same for its gradients; else as fast as the forward.
    memory: points [bytes, bytes/s] of a kernel that reads and writes so many bytes together.
    kernels: name of an operation of torch, such as "gelu" -> the same for those that are slower.
    launch: seconds of the host for one kernel, with what Python and autograd add to it.
    update: bytes/s of an optimizer on the host, by one rank, with all ranks of the host at work at once.
    device_update: the same on the device; else `memory`.
    to_host, to_device: bytes/s of copies between a device and its host, with all devices at work.
    disk_read, disk_write: bytes/s of one host's disks.
    links: place -> operation -> Link. "host": within a host, "hosts": between hosts. Operations are
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send" and "any": the others.
    """

    name: str
    device: Annotated[str, AfterValidator(_known_device)]
    devices_per_host: Annotated[int, Field(ge=1)]
    date: str
    versions: dict[str, str] = {}
    device_bytes: Number
    host_bytes: Number
    matrix: dict[Dtype, Table]
    attention: dict[Dtype, Table] = {}
    attention_backward: dict[Dtype, Table] = {}
    memory: Table
    kernels: dict[str, Table] = {}
    launch: Number
    update: Number
    device_update: Number | None = None
    to_host: Number | None = None
    to_device: Number | None = None
    disk_read: Number | None = None
    disk_write: Number | None = None
    links: dict[Place, dict[str, Link]] = {}

    def link(self, operation: str, *, between: bool) -> Link:
        """The link within a host, or `between` hosts.

        Raises:
            ConfigError: the file has no such link.
        """
        place = "hosts" if between else "host"
        by_operation = self.links.get("hosts" if between else "host", {})
        found = by_operation.get(operation) or by_operation.get(ANY)
        if found is None:
            raise self._lack(f"links.{place}.{operation}", f"{operation} between ranks")
        return found

    def matrix_table(self, dtype: Dtype) -> Table:
        """The rates of products in `dtype`."""
        if dtype not in self.matrix:
            raise self._lack(f"matrix.{dtype}", f"a model that computes in {dtype}")
        return self.matrix[dtype]

    def number(self, key: str) -> Number:
        """A number that not every machine has, such as "to_host"."""
        found = getattr(self, key)
        if not isinstance(found, Number):
            raise self._lack(key, "this config")
        return found

    def _lack(self, key: str, what: str) -> ConfigError:
        return ConfigError(
            [f"{key}: is needed for {what}; measure it with `xds bench machine`, or add it"],
            f"machine {printable(self.name)}",
        )


def load_machine(path_or_name: str | Path) -> Machine:
    """The machine of a file, or of a ready one by its name, such as "h100-nvlink".

    Raises:
        ConfigError: there is no such file, or a value of it is wrong.
    """
    path = Path(path_or_name)
    names = sorted(each.stem for each in READY.glob("*.json"))
    if str(path_or_name) in names:
        path = READY / f"{path_or_name}.json"
    source = f"machine {printable(path_or_name)}"
    try:
        data = parse_json(read_small_text(path))
    except OSError as error:
        near = nearest(str(path_or_name), names)
        hint = (
            f'did you mean "{near[0]}"?' if near else f"ready ones are {', '.join(names) or 'none'}"
        )
        raise ConfigError(
            [f"{error.strerror or error}; give a file, or a name: {hint}"], source
        ) from None
    except ValueError as error:
        raise ConfigError([f"is no JSON: {printable(error)}; correct it"], source) from None
    return parse_machine(data, source)


def parse_machine(data: object, source: str = "machine") -> Machine:
    """The machine of JSON values.

    Raises:
        ConfigError: a value is wrong; `source` names the file in the text.
    """
    try:
        machine = Machine.model_validate(data)
    except ValidationError as error:
        raise ConfigError(list(map(_complaint, error.errors(include_url=False))), source) from None
    widths = [
        *((f"matrix.{dtype}", table, 4) for dtype, table in machine.matrix.items()),
        *((f"attention.{dtype}", table, 3) for dtype, table in machine.attention.items()),
        *((f"attention_backward.{dtype}", t, 3) for dtype, t in machine.attention_backward.items()),
        *((f"kernels.{name}", table, 2) for name, table in machine.kernels.items()),
        ("memory", machine.memory, 2),
        *_link_tables(machine),
    ]
    wrong = [
        f"{key}.points = {shown(table.points[0])}: a point must have {width} numbers"
        for key, table, width in widths
        if len(table.points[0]) != width
    ]
    if wrong:
        raise ConfigError(wrong, source)
    return machine


def _link_tables(machine: Machine) -> Iterable[tuple[str, Table, int]]:
    for place, links in machine.links.items():
        for operation, link in links.items():
            yield f"links.{place}.{operation}.latency", link.latency, 2
            yield f"links.{place}.{operation}.rate", link.rate, 3


def dtype_name(dtype: torch.dtype) -> Dtype:
    """The key of `matrix` for products in `dtype`."""
    names: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if dtype.is_floating_point and dtype.itemsize == 1:
        return "float8"
    return names.get(dtype, "fp32")


def _complaint(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"]) or "the file"
    if error["type"] == "extra_forbidden":
        near = nearest(str(error["loc"][-1]), Machine.model_fields)
        hint = f'did you mean "{near[0]}"?' if near else "docs/design/time.md has the keys"
        return f"{printable(place)}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{printable(place)}: is missing; docs/design/time.md says what it is"
    message = error["msg"].removeprefix("Value error, ")
    return f"{printable(place)} = {shown(error['input'])}: {message[:1].lower()}{message[1:]}"


def _between(points: Sequence[Sequence[float]], place: Sequence[float]) -> float:
    """See `Table.at`. points: sorted."""
    if not place:
        return points[0][0]
    first, rest = place[0], place[1:]
    below = [point for point in points if point[0] <= first]
    above = [point for point in points if point[0] > first]
    values = []
    for start, group in ((-1, below), (0, above)):
        if group:
            edge = group[start][0]
            same = [point[1:] for point in group if point[0] == edge]
            values.append((edge, _between(same, rest)))
    if len(values) == 1 or values[0][0] == first:
        return values[0][1]
    (low, one), (high, other) = values
    share = math.log(first / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(one) + share * math.log(other))


__all__ = [
    "Dtype",
    "Link",
    "Machine",
    "Number",
    "Table",
    "dtype_name",
    "load_machine",
    "parse_machine",
]
