"""Checks that the config switches on one precision."""

from __future__ import annotations

from typing import Any

from ...utils.schema.keys import Report


def check_precision(sections: Any, wanted: str | None, report: Report) -> None:
    """Report two precisions at once, and another dtype of parameters than theirs. sections: of the config."""
    enabled = [
        name for name in ("fp16", "bf16", "torch_autocast") if getattr(sections, name).enabled
    ]
    if len(enabled) > 1:
        pair = " and ".join(f"{name}.enabled" for name in enabled)
        report.complain(
            f"{enabled[0]}.enabled", True, f"{pair} exclude one another; switch on one of them"
        )
    actual = enabled[0] if enabled and enabled[0] != "torch_autocast" else "fp32"
    if wanted is not None and len(enabled) < 2 and wanted != actual:
        report.complain(
            "data_types.param_dtype",
            wanted,
            f"must be {actual}, the precision that the config switches on; remove it "
            f"or set fp16.enabled or bf16.enabled to match",
        )


__all__ = ["check_precision"]
