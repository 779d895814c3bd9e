"""Records a rank's last collectives, each with the line of the script that called it."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import re
import sys
import tempfile
from functools import cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
PACKAGES = (
    "ops",
    "offload",
    "compression",
    "zero",
    "pipe",
    "tensor",
    "engine",
    "launcher",
    "deepspeed",
    "experts",
    "recovery",
    "utils",
)
_spec = importlib.util.find_spec("torch")  # not imported: `xds check` reads configs without torch
TORCH = os.path.dirname(os.path.abspath(str(_spec and _spec.origin))) + os.sep
DISTRIBUTED = os.path.join(TORCH, "distributed", "")
# files of the standard library that call xds and torch functions, and are not the script
STANDARD = tuple(
    os.path.join(os.path.dirname(os.__file__), name)
    for name in ("contextlib.py", "functools.py", "threading.py")
)
Place = tuple[CodeType, int]  # the code of a frame and the index of its current instruction


@final
class Record:
    """One collective: the `number`-th of its kind and buffer on this rank, from 1; `serial` counts all of them.

    members: the ranks that take part; None: all.
    numel, dtype: of this rank's input. Seconds are those of time.monotonic; 0 means not yet.
    """

    __slots__ = (
        *("kind", "buffer", "what", "number", "serial"),
        *("numel", "dtype", "place", "started_seconds", "ended_seconds", "members"),
    )

    def __init__(  # noqa: PLR0913
        self, kind: str, buffer: int, what: str, number: int, serial: int, started_seconds: float
    ) -> None:
        self.kind = kind
        self.buffer = buffer
        self.what = what
        self.number = number
        self.serial = serial
        self.numel = 0
        self.dtype: torch.dtype | None = None
        self.place: Place | None = None
        self.started_seconds = started_seconds
        self.ended_seconds = 0.0
        self.members: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.kind, self.buffer, self.what

    @property
    def shape(self) -> str:
        """E.g. "float32[1024]"."""
        return "" if self.dtype is None else f"{str(self.dtype)[6:]}[{self.numel}]"

    @property
    def size_bytes(self) -> int:
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize


def place_of_caller() -> Place | None:
    """The position of the script: the first frame outside of xds and torch; None in a device's thread."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not _is_inside(code.co_filename):
            return code, frame.f_lasti
        frame = frame.f_back
    return None


@cache
def _is_inside(file: str) -> bool:
    """It belongs to xds, torch or the files above."""
    path = os.path.abspath(file) if not file.startswith("<") else file
    inside = path.startswith((TORCH, "<frozen", "<eval_with_key", *STANDARD))
    if path.startswith(ROOT):  # the folder also contains tests and examples
        inside = path[len(ROOT) :].partition(os.sep)[0] in PACKAGES
    return inside


def place_text(place: Place | None) -> str:
    """E.g. "train.py:31 in main"; "" for None."""
    if place is None:
        return ""
    code, at = place
    line = next((n for start, stop, n in code.co_lines() if start <= at < stop and n), 0)
    return line_text(code, line or code.co_firstlineno)


def line_text(code: CodeType, line: int) -> str:
    return _line_text(code.co_filename, line, code.co_name)


def _line_text(path: str, line: int, name: str) -> str:
    near = os.path.relpath(path) if os.path.isabs(path) else path
    name = "" if name == "<module>" else f" in {name}"
    return f"{path if near.startswith('..') else near}:{line}{name}"


@final
class ThreadPosition:
    """The current position of another thread, read with faulthandler.

    place: e.g. "train.py:31 in main"; call: the script's own collective that it is in, e.g.
    "torch.distributed.all_reduce"; frames: equal where the thread has not moved.

    Frame objects of a running thread are not accessed: torch.compile changes frames while it works, and a
    reference to one of them at the wrong moment has crashed the process. faulthandler creates none.
    """

    def __init__(self, thread: int) -> None:
        self.place, self.call = "", ""
        self.frames = _lines(thread)
        for line in self.frames:
            match = _FRAME.fullmatch(line)
            if match is None:
                continue
            path, number, name = match.groups()
            if path.startswith(DISTRIBUTED) and not name.startswith(("_", "wrap")):
                self.call = f"torch.distributed.{name}"
            elif not _is_inside(path):
                self.place = _line_text(path, int(number), name)
                break
            elif path.startswith(ROOT):
                self.call = ""  # xds called it


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+).*")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _lines(thread: int) -> tuple[str, ...]:
    """faulthandler's lines about one thread: one line for each frame, the innermost first."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode(errors="replace")
    found: list[str] = []
    is_it = False
    for line in text.splitlines():
        match = _THREAD.match(line)
        if match is not None:
            is_it = int(match[1], 16) == thread
        elif is_it:
            found.append(line)
    return tuple(found)


def tensor_of_call(thread: int) -> str:
    """E.g. " of float32[7]": the input of the script's own collective that a thread has long waited in."""
    frame = sys._current_frames().get(thread)
    collective: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(DISTRIBUTED):
            if not code.co_name.startswith(("_", "wrap")):
                collective = frame
        elif collective is not None:
            return _tensor_text(collective)
        frame = frame.f_back
    return ""


def _tensor_text(frame: FrameType) -> str:
    """Dtype and shape of the first tensor among a collective's arguments."""
    local = frame.f_locals
    for name in ("tensor", "input_tensor", "input", "output_tensor", "output", "tensor_list"):
        value: Any = local.get(name)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return f" of {str(value.dtype).rpartition('.')[2]}{list(value.shape)}"
    return ""
