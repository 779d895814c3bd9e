"""What accelerate needs to see of DeepSpeed, where xds stands in for it, and warnings where it ignores it.

    Standing                 its version, which accelerate asks for before it imports anything
    warn_of_ignored_plugin   `Accelerator(cpu=True, deepspeed_plugin=...)` trains with DDP and says nothing
    count_ranks_again        on a machine without a GPU `PartialState()` counts one rank; an Accelerator that
                             gets a plugin afterwards would read the whole dataset on each rank
    warn_of_unused           at the end of a run that asked for DeepSpeed and trained without it
    tell_accelerate          the backend, on a machine without a GPU, where accelerate knows none
    engine_that_saves        the engine whose weights `Accelerator.get_state_dict` asks for, on every rank
    put_command_on_path      `accelerate launch` on several machines runs `deepspeed --hostfile ...`. xds
                             installs no such command: it would hide a real one

torch is not imported above: the stand-in is active before the script.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import shutil
import sys
import tempfile
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path
from types import FrameType
from typing import Any, final

from .names import ALIAS, VERSION

CALLER = "accelerate.accelerator"
CPU = "ACCELERATE_USE_CPU"  # `accelerate launch --cpu` sets it
TRUE = ("1", "y", "yes", "t", "true", "on")


@final
class Standing(Distribution):
    """The metadata of a distribution `deepspeed`: name and version only; it lists no files."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        summary = "xds stands in for deepspeed"
        return f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {VERSION}\nSummary: {summary}\n"

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).resolve().parent / path


def warn_of_ignored_plugin() -> None:
    """Warn once, on rank 0, if an Accelerator that ignores its plugin is the caller."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true" or os.environ.get("RANK", "0") != "0":
        return
    cause = _cause(accelerator_frame("__init__"))
    if cause is not None:
        _say_ignored(cause)


@cache
def _say_ignored(cause: str) -> None:
    logging.getLogger("xds").warning(
        "accelerate ignores the DeepSpeedPlugin, because %s is set: this run trains with DDP, without ZeRO; "
        "leave %s out, it is not needed on a machine without a GPU",
        cause,
        cause,
    )


def accelerator_frame(method: str) -> FrameType | None:
    """The frame of this method of an Accelerator, if it is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == method and frame.f_globals.get("__name__") == CALLER:
            return frame
        frame = frame.f_back
    return None


def _cause(frame: FrameType | None) -> str | None:
    """What makes the Accelerator ignore its plugin; None: it has none, or uses it."""
    if frame is None or not frame.f_locals.get("deepspeed_plugins"):
        return None
    if frame.f_locals.get("cpu"):
        return "cpu=True"
    return CPU if os.environ.get(CPU, "").lower() in TRUE else None


def count_ranks_again() -> None:
    """Drop accelerate's count of one rank, if an Accelerator with a plugin is the caller; rank 0 warns."""
    num_ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if num_ranks < 2 or os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return
    frame = accelerator_frame("__init__")
    if frame is None or frame.f_locals.get("cpu") or not frame.f_locals.get("deepspeed_plugins"):
        return
    early = _state("PartialState")
    if early.get("num_processes") != 1 or _state("AcceleratorState"):
        return
    early.clear()
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("xds").warning(
            "PartialState() came before the Accelerator, when accelerate did not know of DeepSpeed: it counted "
            "one rank, and counts %d from here on; make the Accelerator first, or set "
            "ACCELERATE_USE_DEEPSPEED=true",
            num_ranks,
        )


def _state(name: str) -> dict[str, Any]:
    """What all objects of that class share; empty: there is none yet."""
    found = getattr(getattr(sys.modules.get("accelerate.state"), name, None), "_shared_state", None)
    return found if isinstance(found, dict) else {}


WITH = "DEEPSPEED"  # the name of accelerate's DistributedType


def engine_that_saves() -> Any:
    """The engine of which `Accelerator.get_state_dict` asks, if it is among the callers; else None.

    Below stage 3 accelerate takes the state dict of its module, also where the module has parts of experts.
    """
    frame = accelerator_frame("get_state_dict")
    return None if frame is None else frame.f_locals.get("model")


def warn_of_unused() -> None:
    """Warn on rank 0 of several, if this process had an Accelerator without DeepSpeed."""
    if int(os.environ.get("WORLD_SIZE") or 1) < 2 or os.environ.get("RANK", "0") != "0":
        return
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared: dict[str, Any] = getattr(state, "_shared_state", {})
    kind = getattr(shared.get("distributed_type"), "name", WITH)
    if kind == WITH:
        return
    how = "each rank alone" if kind == "NO" else kind
    logging.getLogger("xds").warning(
        "deepspeed was asked for, but accelerate trained without it (%s): it had no DeepSpeedPlugin; set "
        "ACCELERATE_USE_DEEPSPEED=true and ACCELERATE_DEEPSPEED_ZERO_STAGE, or use `accelerate launch "
        "--use_deepspeed`",
        how,
    )


def tell_accelerate() -> None:
    """Enter the backend into accelerate's state, where accelerate is being set up and has none."""
    state = _state("PartialState")
    if "backend" in state and state["backend"] is None:
        import torch.distributed as dist

        state["backend"] = dist.get_backend()


COMMAND = "deepspeed"
LAUNCHED = "accelerate.commands.launch"
# first: the working folder, from which Python would import, may have files of other users
_SAFE = "import sys; sys.path[:] = filter(None, sys.path)"
START = f"{_SAFE}; from xds.deepspeed.launcher.runner import main; main()"


def put_command_on_path() -> None:
    """Put a folder with the command on PATH, in a process of `accelerate launch`, until it ends.

    For processes in which the stand-in is active.
    """
    if LAUNCHED not in sys.modules or shutil.which(COMMAND):
        return
    folder = Path(tempfile.mkdtemp(prefix="xds_command_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = folder / COMMAND
    line = f'exec {shlex.quote(sys.executable)} -c {shlex.quote(START)} "$@"'
    command.write_text(f"#!/bin/sh\n{line}\n")
    command.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
