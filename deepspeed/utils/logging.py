"""`deepspeed.utils.logger` and `log_dist`: log lines of the script and of the engine, on standard output.

As in DeepSpeed, lines of level INFO are shown by default, including the engine's progress. Where the program
has already configured logging, nothing is changed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..missing import placeholder


def _shown(logger: logging.Logger) -> logging.Logger:
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return logger


logger = _shown(logging.getLogger("xds"))


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; -1 or None is every rank. Without torch.distributed always."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank < 0 or not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_rank_0(message: str, *, force: bool = False) -> None:
    """Log `message` on rank 0."""
    log_dist(message, ranks=[0])


__all__ = ["log_dist", "logger", "print_rank_0"]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
