"""Short forms and old names of DeepSpeed's configs, written out before the sections are read."""

from __future__ import annotations

from typing import Any

from ...utils.schema.keys import Report
from ...utils.schema.rules import shown


def write_out(data: dict[str, Any], report: Report) -> dict[str, Any]:
    """`data`, changed in place: a stage instead of a flag, and `activation_checkpointing.enabled`."""
    zero = data.get("zero_optimization")
    if isinstance(zero, bool):
        data["zero_optimization"] = {"stage": int(zero)}
        report.notes.append(f"zero_optimization = {shown(zero)}: means stage {int(zero)}")
    recompute = data.get("activation_checkpointing")
    if isinstance(recompute, dict):
        _enable(recompute, report)
    return data


def _enable(section: dict[str, Any], report: Report) -> None:
    """Recompute where the section is there, unless it holds flags and all of them are false."""
    if section.get("enabled") is None:
        flags = [value for value in section.values() if isinstance(value, bool)]
        section["enabled"] = any(flags) or not flags
        if not section["enabled"]:
            report.notes.append(
                "activation_checkpointing: all its flags are false, so nothing is recomputed; set enabled to "
                "true to recompute the model's blocks in backward"
            )
    if section["enabled"] is True:
        report.notes.append(
            "activation_checkpointing: the model's blocks are recomputed in backward "
            "(in DeepSpeed the section alone does nothing)"
        )


__all__ = ["write_out"]
