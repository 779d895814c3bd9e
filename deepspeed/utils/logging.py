"""`deepspeed.utils.logger` and `log_dist`: log lines of the script and of the engine, on standard output.

As in DeepSpeed, lines of level INFO are shown by default, including the engine's progress. Where the program
has already configured logging, nothing is changed.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder

THEIR_LOGGER = "DeepSpeed"  # scripts set its level to see less


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.getLogger(THEIR_LOGGER).level


def _is_shown_here(record: logging.LogRecord) -> bool:
    return (
        not logging.getLogger().handlers
    )  # the script has configured logging since: it shows the line


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


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Show lines from this level on: "debug", "info", "warning", "error" or "critical"."""
    level = get_log_level_from_string(log_level_str)
    chosen = custom_logger or logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


@raises_theirs
def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level's name.

    Raises:
        UsageError: there is no such level.
    """
    if log_level_str.lower() not in log_levels:
        raise UsageError(
            f"log level {log_level_str!r}: must be one of {', '.join(log_levels)}; use one of them"
        )
    return log_levels[log_level_str.lower()]


def get_current_level() -> int:
    """The number of the level from which on lines are shown."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether lines of this level are shown."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


@cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """`logger.warning`, once for the same arguments."""
    logger.warning(*args, **kwargs)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(
    message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
) -> None:
    """`log_dist`, once for the same arguments."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """The message with this rank in front, on the given ranks; None on the others. -1 is every rank."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    is_meant = rank < 0 or bool(ranks and (-1 in ranks or rank in ranks))
    return f"[Rank {rank}] {message}" if is_meant else None


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print what `get_dist_msg` returns."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        print(text)


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str = ""
) -> None:
    """Write `message` and this rank to `path` as JSON, on the given ranks. -1 is every rank."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if get_dist_msg("", ranks) is not None:
        with open(path, "w") as file:
            json.dump({**message, "rank": rank}, file)


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of `args`, a line each."""
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), getattr(args, key))


def print_rank_0(message: str, *, force: bool = False) -> None:
    """Log `message` on rank 0."""
    log_dist(message, ranks=[0])


# libraries call them as methods
logger.warning_once = warning_once  # type: ignore[attr-defined]
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]

__all__ = ["log_dist", "logger", "print_rank_0"]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
