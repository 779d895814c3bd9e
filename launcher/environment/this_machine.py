"""Versions, devices and limits of this machine, a line each, and remedies for bad ones.

It has to work where things are broken: a part that is missing or fails gives a line that says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from .probes import cpu, machine, network, software
from .probes.line import Line

_PROBES: tuple[Callable[[], Iterator[Line]], ...] = (
    software.xds,
    machine.name,
    software.python,
    software.torch_and_backends,
    machine.devices,
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
    software.variables,
    machine.clock,  # the last one: it is compared with the time at which the answer comes
)


def show(*, as_one_line: bool) -> int:
    """Print the lines, or one of JSON; always 0: a bad value is for the reader to weigh."""
    if as_one_line:
        print(as_json(lines()), flush=True)
        return 0
    for line in lines():
        print(line, flush=True)
    return 0


def as_json(told: Iterator[Line]) -> str:
    """One line: a list of objects with key, value, remedy, varies."""
    return json.dumps([asdict(line) for line in told])


def lines() -> Iterator[Line]:
    """Every line, in the order in which it is printed."""
    for probe in _PROBES:
        try:
            yield from probe()
        except Exception as error:  # a probe that fails is an answer, too
            yield Line(
                probe.__name__.replace("_", " "), f"unknown, {type(error).__name__}: {error}"
            )
