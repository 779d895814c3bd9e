"""What a run shows on rank 0: messages of the logger `xds`, and the lines at its start.

xds logs to `logging.getLogger("xds")`. A script that has set up logging gets every message through its own
handlers. For other scripts `show_messages` adds one handler, which writes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from typing import Literal, get_args

import torch
import torch.distributed as dist

from ...utils.messages import write_stderr
from ...utils.quoting import plain_lines
from ...utils.schema.values import shown
from ...utils.sizes import size_text
from ...utils.version import __version__
from ...zero.model.sharded_model import ShardedModel
from ..config.auto import unfilled
from ..config.config import Config, canonical_path

LEVEL_VARIABLE = "XDS_LOG_LEVEL"  # set by `xds --log-level` and `xds --quiet`
Level = Literal["debug", "info", "warning", "error", "critical"]

log = logging.getLogger("xds")
_LEVELS = {name: getattr(logging, name.upper()) for name in get_args(Level)}


class ScreenHandler(logging.Handler):
    """Writes a message to standard error, above a progress bar of tqdm. The script's own handlers win."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:  # the script has set up logging since
            return
        text = plain_lines(record.getMessage())  # it may name paths and keys
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        _write(text if text.startswith("xds") else f"xds: {text}")


def _write(text: str) -> None:
    """Never fails. A reader that does not read gets a second; the training goes on."""
    bars = sys.modules.get("tqdm")
    if bars is not None and getattr(bars.tqdm, "_instances", None):
        with contextlib.suppress(OSError, ValueError):
            bars.tqdm.write(text, file=sys.stderr)
    else:
        write_stderr(f"{text}\n")


def show_messages(level: Level | None) -> None:
    """Show messages from `level` on: on rank 0 "info" by default, on other ranks warnings and errors alone.

    The variable XDS_LOG_LEVEL wins over `level`. Without both, a level that the script has set stays.
    """
    asked = os.environ.get(LEVEL_VARIABLE, "").lower() or level
    wanted = _LEVELS.get(asked or "info", logging.INFO)
    if dist.get_rank() != 0:
        wanted = max(wanted, logging.WARNING)
    if asked or log.level == logging.NOTSET:
        log.setLevel(wanted)
    if not log.hasHandlers():
        log.addHandler(ScreenHandler())


def run_in_words(config: Config, num_ranks: int) -> str:
    """The ZeRO stage, the number of ranks and the precision: "stage 3, 2 ranks, bf16".

    A pipeline has stages too: "ZeRO stage 1, 2 pipeline stages, 4 ranks, bf16".
    """
    precision = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    stage = f"stage {config.zero_optimization.stage}"
    if config.pipeline.stages > 1:
        stage = f"ZeRO {stage}, {config.pipeline.stages} pipeline stages"
    return f"{stage}, {ranks}, {precision}"


def log_notes(config: Config, rank: int) -> None:
    """Log, on rank 0, what a reader of `config` should know."""
    if rank == 0:
        values = unfilled(config, canonical_path)
        if values:
            text = ", ".join(f"{path} is {shown(value)}" for path, value in values.items())
            log.info('%s: "auto" that no integration has filled: %s', config.source, text)
        for note in config.notes:
            log.debug("%s: %s", config.source, note)


def log_start(
    config: Config, sharded: ShardedModel, num_states: int, device: torch.device, backend: str
) -> None:
    """Log on rank 0 what has been built, the bytes of model states, and where the output of all ranks is.

    Args:
        num_states: state tensors of the optimizer for each parameter.
    """
    if dist.get_rank() != 0:
        return
    memory = sharded.memory
    own, whole = memory.expected_bytes(num_states)
    is_part = config.model_ranks > 1 or sharded.flat_groups.mesh.experts > 1
    place = " on rank 0" if is_part else ""
    run = run_in_words(config, dist.get_world_size())
    log.info(
        "xds %s: %s on %s (%s), %s parameters%s",
        *(__version__, run, device.type, backend, f"{memory.numel():,}", place),
    )
    log.info("model states take %s a rank, %s without ZeRO", size_text(own), size_text(whole))
    folder = os.environ.get("XDS_LOG_FOLDER")
    if folder:
        log.info("output of every rank: %s", folder)
    if config.dump_state:
        log.info("config: %s", json.dumps(config.as_dict(), indent=2))


__all__ = [
    "LEVEL_VARIABLE",
    "Level",
    "ScreenHandler",
    "log_notes",
    "log_start",
    "run_in_words",
    "show_messages",
]
