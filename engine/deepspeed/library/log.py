"""`deepspeed.utils.logger` and `log_dist`: log lines of the script and of the engine, on standard output.

As in DeepSpeed, lines of level INFO are shown by default, including the engine's progress. Where the program
has already configured logging, nothing is changed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

from ....utils.errors import UsageError
from ..errors import raises_theirs

THEIR_LOGGER = "DeepSpeed"  # scripts set its level to see less


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.getLogger(THEIR_LOGGER).level


def _is_shown_here(record: logging.LogRecord) -> bool:
    # a script that has configured logging since shows the line itself
    return not logging.getLogger().handlers


def _shown(logger: logging.Logger) -> logging.Logger:
    logger.addFilter(_is_wanted)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.addFilter(_is_shown_here)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return logger


logger = _shown(logging.getLogger("xds"))
log_levels: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; -1 or None is every rank. Without torch.distributed always."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank < 0 or not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@raises_theirs
def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Show lines from this level on.

    Raises:
        UsageError: there is no such level.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise UsageError(
            f"log level {log_level_str!r}: must be one of {', '.join(log_levels)}; use one of them"
        )
    chosen = custom_logger or logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


@cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """`logger.warning`, once for the same arguments."""
    logger.warning(*args, **kwargs)


def print_rank_0(message: str, *, force: bool = False) -> None:
    """Log `message` on rank 0."""
    log_dist(message, ranks=[0])


# libraries call it as a method
logger.warning_once = warning_once  # type: ignore[attr-defined]
