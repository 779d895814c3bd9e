"""Prints versions, devices and limits of this machine, one per line, with remedies for bad values.

It must work on a broken installation: a part that is missing or fails yields a line with the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from .probes import cpu, gpus, machine, network, shared_memory, software
from .probes.line import Line

_PROBES: tuple[Callable[[], Iterator[Line]], ...] = (
    software.xds,
    machine.name,
    software.python,
    software.torch_and_backends,
    machine.devices,
    gpus.settings,
    network.nvlink,
    network.infiniband,
    network.interfaces,
    network.own_name,
    cpu.cpu,
    machine.memory,
    machine.limits,
    machine.disks,
    software.compilers,
    software.native_ops,
    shared_memory.shared_memory,
    software.variables,
    machine.clock,  # must be last: it is compared with the time at which the answer arrives
)


def show(*, as_one_line: bool) -> int:
    """Print the lines, or one line of JSON. Always returns 0: a bad value is not an error."""
    if as_one_line:
        print(as_json(lines()), flush=True)
        return 0
    for line in lines():
        print(line, flush=True)
    return 0


def as_json(found: Iterator[Line]) -> str:
    """One line: a list of objects with key, value, remedy, varies."""
    return json.dumps([asdict(line) for line in found])


def lines() -> Iterator[Line]:
    """Every line, in the order in which it is printed."""
    for probe in _PROBES:
        try:
            yield from probe()
        except Exception as error:  # report the error as the value
            yield Line(
                probe.__name__.replace("_", " "), f"unknown, {type(error).__name__}: {error}"
            )
