"""The times of a step under DeepSpeed's names, from the times of the engine's regions.

forward ───> fwd
backward ──> bwd_inner ─────┐
reduce ────> bwd_allreduce ─┴─> bwd     waits for the last gradients; within step(), before the update
step ──────> step                       the update alone
"""

from __future__ import annotations

from collections.abc import Mapping

EVENT_NAMES = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_inner": "backward_inner",
    "bwd_allreduce": "backward_allreduce",
    "step": "step",
}
"""The names of monitor events."""


def breakdown(milliseconds: Mapping[str, float]) -> dict[str, float]:
    """The five times, in DeepSpeed's order, of a region's times; {} of none.

    >>> breakdown({"forward": 1.0, "backward": 2.0, "reduce": 0.5, "step": 0.25})
    {'fwd': 1.0, 'bwd': 2.5, 'bwd_inner': 2.0, 'bwd_allreduce': 0.5, 'step': 0.25}
    """
    if not milliseconds:
        return {}
    forward, backward, reduce, step = (
        milliseconds.get(name, 0.0) for name in ("forward", "backward", "reduce", "step")
    )
    return {
        "fwd": forward,
        "bwd": backward + reduce,
        "bwd_inner": backward,
        "bwd_allreduce": reduce,
        "step": step,
    }


def times_line(milliseconds: Mapping[str, float], suffix: str = "") -> str:
    """ "time (ms) | fwd: 1.00 | bwd: 2.50"; `suffix` is added to each name."""
    parts = [f"{name}{suffix}: {value:.2f}" for name, value in milliseconds.items()]
    return " | ".join(["time (ms)", *parts])


__all__ = ["EVENT_NAMES", "breakdown", "times_line"]
