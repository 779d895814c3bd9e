"""A profile as text: the sums, the modules that take most at each depth, and the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from .profile import ModuleProfile, Number, Profile
from .units import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

_WIDTH = 100
_LABEL = 48
_EXTRA = 60  # characters of a module's own description


@final
@dataclass(frozen=True)
class Detail:
    """How much is shown. depth: of modules, from the model itself, 0; -1 is all. top: modules at each depth."""

    depth: int = -1
    top: int = 1
    tree: bool = True


@final
@dataclass(frozen=True)
class Setting:
    """Where and when the profile was taken.

    step: which one. places: numbers of ranks and samples, by name.
    samples: of a step, on all ranks. num_batches: micro-batches of a step on a rank.
    recompute_factor: forwards that backward runs again, where backward was not counted; None: no estimate.
    totals: lines about all ranks.
    """

    step: int | str = 1
    places: Mapping[str, object] = field(default_factory=dict)
    samples: int = 0
    num_batches: int = 1
    recompute_factor: float | None = None
    totals: Mapping[str, str] = field(default_factory=dict)


def report(profile: Profile, setting: Setting, detail: Detail) -> str:
    """The whole text."""
    lines = [
        _heading("Flops profiler"),
        f"Profile of step {setting.step}",
        "params: parameters. MACs: multiply-accumulates of products. flops: 2 for each MAC.",
        "FLOPS: flops per second. latency: with the profiler's own time.",
    ]
    if profile.num_batches > 1:
        lines.append(
            f"All figures are those of one micro-batch: the mean of {profile.num_batches}."
        )
    lines += ["", *(_line(label, value) for label, value in _summary(profile, setting))]
    lines += ["", _heading("Aggregated profile"), *aggregated(profile, detail)]
    if detail.tree:
        lines += ["", _heading("Detailed profile"), *tree(profile, detail.depth)]
    return "\n".join(["", *lines, "-" * _WIDTH, ""])


def _heading(title: str) -> str:
    return f" {title} ".center(_WIDTH, "-")


def _line(label: str, value: object) -> str:
    return f"{label + ':':<{_LABEL}}  {value}"


def _summary(profile: Profile, setting: Setting) -> Iterator[tuple[str, object]]:
    yield from setting.places.items()
    seconds = profile.seconds
    forward = seconds.get("forward", 0.0) or profile.root.seconds
    yield "params per GPU", params_to_string(profile.params)
    yield "fwd MACs per GPU", macs_to_string(profile.macs)
    yield "fwd flops per GPU", number_to_string(profile.flops)
    yield "fwd latency", duration_to_string(forward)
    yield "fwd FLOPS per GPU", _rate(profile.flops, forward)
    flops: Number = profile.flops
    if profile.backward is None:
        if setting.recompute_factor is None:
            return
        factor = 2 + setting.recompute_factor
        if seconds:
            yield "bwd flops per GPU", "not counted: the script called backward of the loss itself"
        estimate = number_to_string(factor * profile.flops)
        yield f"bwd flops per GPU, estimated as {factor:g} * fwd", estimate
        if not seconds:
            return
        flops += factor * profile.flops
    else:
        found, latency = profile.backward, seconds.get("backward", 0.0)
        yield "bwd flops per GPU", number_to_string(found.flops)
        if found.recomputed_flops:
            yield "recomputed flops per GPU", number_to_string(found.recomputed_flops)
        flops += found.flops + found.recomputed_flops
        yield "bwd latency", duration_to_string(latency)
        yield (
            "bwd FLOPS per GPU, with recomputation",
            _rate(found.flops + found.recomputed_flops, latency),
        )
    step = seconds.get("step", 0.0) * setting.num_batches
    yield "step latency", duration_to_string(step)
    whole = (forward + seconds.get("backward", 0.0)) * setting.num_batches + step
    yield "iter latency", duration_to_string(whole)
    yield "FLOPS per GPU", _rate(flops * setting.num_batches, whole)
    if setting.samples and whole:
        yield "samples/second", round(setting.samples / whole, 2)
    yield from setting.totals.items()


def _rate(flops: Number, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0)


# ---- the modules that take most -------------------------------------------------------------------


def aggregated(profile: Profile, detail: Detail) -> list[str]:
    """For each depth the classes with most parameters, MACs and time, summed over their modules."""
    sums: list[dict[str, list[float]]] = []
    for depth, module in profile.root.walk():
        if 0 <= detail.depth < depth:
            continue
        while len(sums) <= depth:
            sums.append({})
        total = sums[depth].setdefault(module.kind, [0, 0, 0])
        for at, value in enumerate((module.params, module.macs, module.seconds)):
            total[at] += value
    lines = [f"Top {detail.top} modules in params, MACs and fwd latency at each depth:"]
    for depth, found in enumerate(sums):
        lines.append(f"depth {depth}:")
        for at, (label, text) in enumerate(_COLUMNS):
            most = sorted(found, key=lambda kind: found[kind][at], reverse=True)[: detail.top]
            values = ", ".join(f"{kind} {text(found[kind][at])}" for kind in most)
            lines.append(f"    {label:<12} {values}")
    return lines


_COLUMNS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("params", params_to_string),
    ("MACs", macs_to_string),
    ("fwd latency", duration_to_string),
)


# ---- the tree -------------------------------------------------------------------------------------


def tree(profile: Profile, depth: int = -1) -> list[str]:
    """A line for each module down to `depth`; what is below is part of its parent's figures."""
    shown = [(d, module) for d, module in profile.root.walk() if not 0 <= depth < d]
    names = ["  " * d + _name(module) for d, module in shown]
    width = max(map(len, names))
    top = profile.root
    lines = [
        "Each module: params, fwd MACs, fwd flops, fwd latency, each with its share of the model, and FLOPS.",
        "A module's figures contain those of the modules in it, and of functions that it calls itself.",
    ]
    for name, (_, module) in zip(names, shown, strict=True):
        figures = (
            f"{params_to_string(module.params)} = {_percent(module.params, top.params)} params",
            f"{macs_to_string(module.macs)} = {_percent(module.macs, top.macs)} MACs",
            f"{number_to_string(module.flops).strip()} = {_percent(module.flops, top.flops)} flops",
            f"{duration_to_string(module.seconds)} = {_percent(module.seconds, top.seconds)} latency",
            _rate(module.flops, module.seconds),
        )
        extra = f"  ({module.extra[:_EXTRA]})" if module.extra and not module.children else ""
        lines.append(f"{name:<{width}}  {', '.join(figures)}{extra}")
    return lines


def _name(module: ModuleProfile) -> str:
    return f"{module.name}: {module.kind}" if module.name else module.kind


def _percent(part: float, total: float) -> str:
    return f"{round(100 * part / total, 2) if total else 0:g}%"


__all__ = ["Detail", "Setting", "aggregated", "report", "tree"]
