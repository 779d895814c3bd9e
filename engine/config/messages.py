"""Checks of what is sent: one-bit optimizers and ZeRO++."""

from __future__ import annotations

from typing import Any

from ...utils.schema.keys import Report
from ...zero.config import ZeroConfig
from .one_bit import check_one_bit
from .zeropp import check_zeropp


def check_messages(optimizer: Any, scheduler: Any, zero: ZeroConfig, report: Report) -> None:
    """Report what does not work together. optimizer, scheduler: their sections, or None."""
    check_one_bit(optimizer, scheduler, zero, report)
    check_zeropp(zero, None if optimizer is None else optimizer.type, report)


__all__ = ["check_messages"]
