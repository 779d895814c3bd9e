"""A plan as a picture: the bytes of each stage, and the schedule in time. Needs matplotlib."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...engine.integrations.optional import need
from ...engine.planning.objects import STATE_KINDS
from ...engine.planning.plan import Plan, RankPlan
from ...engine.planning.timeline import Timeline
from ...pipe.schedules.actions import COMPUTE, Op
from ...utils.errors import UsageError
from .text import place_text, product_text

COLORS = {Op.FORWARD: "#4c78a8", Op.BACKWARD: "#f58518", Op.INPUT: "#e45756", Op.WEIGHT: "#72b7b2"}
NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT: "gradient of inputs",
    Op.WEIGHT: "gradient of weights",
}
INCHES_WIDE, INCHES_A_ROW = 12.0, 0.45


def write(plan: Plan, path: str) -> None:
    """Write a PNG file.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    need("matplotlib", "--png", "plot")
    figures: Any = import_module("matplotlib.figure")
    num_plots = 1 + (plan.timeline is not None)
    height = num_plots * (1.6 + INCHES_A_ROW * max(len(plan.ranks), 2))
    figure = figures.Figure(figsize=(INCHES_WIDE, height), layout="constrained")
    plots = figure.subplots(num_plots, squeeze=False)[:, 0]
    figure.suptitle(f"{plan.name}: {product_text(plan)}")
    _draw_bytes(plots[0], plan)
    if plan.timeline is not None:
        _draw_schedule(plots[1], plan.timeline)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"--png {path}: {error.strerror}; choose another file") from None


def _draw_bytes(plot: Any, plan: Plan) -> None:
    """A bar for each share, with its kinds one after the other."""
    labels = [place_text(plan, [each.share.pipe], each.share.tensors) for each in plan.ranks]
    kinds = (*STATE_KINDS, "activations")
    largest_bytes = max(sum(_size(each, kind) for kind in kinds) for each in plan.ranks)
    unit, unit_bytes = ("GB", 1e9) if largest_bytes >= 1e8 else ("MB", 1e6)
    left = [0.0] * len(labels)
    for kind in kinds:
        sizes = [_size(each, kind) / unit_bytes for each in plan.ranks]
        if any(sizes):
            plot.barh(range(len(labels)), sizes, left=left, label=kind)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    plot.set_yticks(range(len(labels)), labels)
    plot.invert_yaxis()
    plot.set_xlabel(f"{unit} on a rank")
    _legend_beside(plot)


def _size(each: RankPlan, kind: str) -> int:
    return (each.activations or 0) if kind == "activations" else each.states.get(kind, 0)


def _draw_schedule(plot: Any, line: Timeline) -> None:
    """A row for each pipeline rank, a bar for each action."""
    named: set[Op] = set()
    for rank, actions in enumerate(line.table.rows):
        for op in sorted(COMPUTE, key=lambda op: op.value):
            times = zip(actions, line.run.starts[rank], line.run.ends[rank], strict=True)
            bars = [(start, end - start) for action, start, end in times if action.op is op]
            if bars:
                label = None if op in named else NAMES[op]
                named.add(op)
                plot.broken_barh(
                    bars, (rank - 0.4, 0.8), facecolors=COLORS[op], label=label, edgecolor="white"
                )
    plot.set_yticks(
        range(len(line.table.rows)), [f"stage {n}" for n in range(len(line.table.rows))]
    )
    plot.invert_yaxis()
    plot.set_xlabel(f"time, in forwards of an average stage; bubble {line.bubble:.1%}")
    _legend_beside(plot)


def _legend_beside(plot: Any) -> None:
    """Draw the legend to the right of the plot, where it covers no bar."""
    plot.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.5)


__all__ = ["write"]
