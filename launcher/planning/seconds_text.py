"""The seconds of a step as text: its parts, messages that are waited for and that are hidden, and the bound."""

from __future__ import annotations

from ...engine.planning.machine import Machine
from ...engine.planning.plan import Plan
from ...engine.planning.seconds import PARTS, StepSeconds
from .text import MESSAGES, counted, table_text


def seconds_text(step: StepSeconds, machine: Machine, plan: Plan) -> str:
    """A table of the parts, one of the messages, and what follows from them."""
    rows = [
        (part, [duration(step.parts[part]), f"{step.parts[part] / step.total:.1%}"])
        for part in PARTS
        if step.parts[part]
    ]
    rows.append(("all", [f"{duration(step.total)} +- {step.error:.0%}", "100.0%"]))
    text = f"Seconds of a step on {machine.name}\n" + table_text(["time", "share"], rows)
    kinds = [kind for kind in {**step.exposed, **step.hidden} if step.exposed.get(kind, 0) > 0]
    kinds += [kind for kind, seconds in step.hidden.items() if seconds > 0 and kind not in kinds]
    if kinds:
        messages = [
            (
                MESSAGES.get(kind, kind),
                [duration(step.exposed.get(kind, 0.0)), duration(step.hidden.get(kind, 0.0))],
            )
            for kind in kinds
        ]
        text += "\n\nMessages of a step\n" + table_text(
            ["waited for", "beside computation"], messages
        )
    speed = step.tokens_per_second
    return (
        f"{text}\n\n"
        f"  {speed:,.0f} tokens/s, {speed / plan.mesh.size:,.0f} of each of {counted(plan.mesh.size, 'rank')}; "
        f"model FLOP utilisation {step.utilisation:.1%}\n"
        f"  {step.bound}\n"
    )


def duration(seconds: float) -> str:
    """Such as "1.234 s" and "5.6 ms".

    >>> duration(1.2344), duration(0.0056), duration(0)
    ('1.234 s', '5.60 ms', '-')
    """
    if not seconds:
        return "-"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


__all__ = ["duration", "seconds_text"]
