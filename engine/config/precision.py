"""Checks of the precision that a config switches on."""

from __future__ import annotations

from typing import Any

from ...utils.schema.keys import Report


def check_precision(sections: Any, wanted: str | None, report: Report) -> None:
    """Report two precisions at once, and another dtype of parameters than theirs. sections: of the config."""
    enabled = [name for name in ("fp16", "bf16") if getattr(sections, name).enabled]
    if len(enabled) > 1:
        pair = " and ".join(f"{name}.enabled" for name in enabled)
        report.complain(
            f"{enabled[0]}.enabled", True, f"{pair} exclude one another; switch on one of them"
        )
    actual = enabled[0] if enabled else "fp32"
    if wanted is not None and len(enabled) < 2 and wanted != actual:
        report.complain(
            "data_types.param_dtype",
            wanted,
            f"must be {actual}, the precision that the config switches on; remove it "
            f"or set fp16.enabled or bf16.enabled to match",
        )
    _note_autocast(sections, report)
    _check_scale(sections.fp16, report)


def _note_autocast(sections: Any, report: Report) -> None:
    """autocast of parameters that are 16 bits already is allowed, as in DeepSpeed."""
    autocast = sections.torch_autocast
    if not autocast.enabled:
        return
    for name in ("fp16", "bf16"):
        if not getattr(sections, name).enabled:
            continue
        already = " already" if autocast.dtype == name else ""
        report.notes.append(
            f"torch_autocast.enabled = true: parameters are {name}{already}; forward computes in "
            f"{autocast.dtype}, and operations such as softmax and losses in fp32"
        )


def _check_scale(fp16: Any, report: Report) -> None:
    """A dynamic loss scale cannot fall to 0, and has to grow; a fixed one has neither limit."""
    if not fp16.enabled or fp16.loss_scale:
        return
    for key, need in (
        ("min_loss_scale", "a dynamic loss scale never falls to 0: set it above 0"),
        (
            "loss_scale_window",
            "a dynamic loss scale grows after so many steps: set it to 1 or more",
        ),
    ):
        if getattr(fp16, key) == 0:
            report.complain(f"fp16.{key}", 0, f"{need}, or set a fixed fp16.loss_scale")


__all__ = ["check_precision"]
