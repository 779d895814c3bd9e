"""What a rank did last: its collectives, and the line of the script that each came from."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import re
import sys
import tempfile
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
FLOORS = (
    "ops",
    "offload",
    "compression",
    "zero",
    "pipe",
    "tensor",
    "engine",
    "launcher",
    "deepspeed",
)
_spec = importlib.util.find_spec("torch")  # not imported: `xds check` reads configs without it
TORCH = os.path.dirname(os.path.abspath(str(_spec and _spec.origin))) + os.sep
DISTRIBUTED = os.path.join(TORCH, "distributed", "")
# what calls back into xds and torch without being the script
STANDARD = tuple(
    os.path.join(os.path.dirname(os.__file__), name)
    for name in ("contextlib.py", "functools.py", "threading.py")
)
Place = tuple[CodeType, int]  # of a frame: its code and the instruction it is at
_is_inside: dict[str, bool] = {}  # file -> it is xds, torch, or between them


@final
class Mark:
    """One collective: the `number`-th of its kind and buffer on this rank, from 1; `serial` counts them all.

    numel, dtype: of what this rank gives; seconds are time.monotonic's, 0 for not yet.
    """

    __slots__ = (
        *("kind", "buffer", "what", "number", "serial"),
        *("numel", "dtype", "place", "started_seconds", "ended_seconds"),
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
    """Where the script is: the first frame outside of xds and torch; None in a device's thread."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        inside = _is_inside.get(code.co_filename)
        if inside is None:
            inside = _look(code.co_filename)
        if not inside:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def _look(file: str) -> bool:
    path = os.path.abspath(file) if not file.startswith("<") else file
    inside = path.startswith((TORCH, "<frozen", "<eval_with_key", *STANDARD))
    if path.startswith(ROOT):  # tests and examples lie there, too
        inside = path[len(ROOT) :].partition(os.sep)[0] in FLOORS
    _is_inside[file] = inside
    return inside


def told_place(place: Place | None) -> str:
    """E.g. "train.py:31 in main"; "" for None."""
    if place is None:
        return ""
    code, at = place
    line = next((n for start, stop, n in code.co_lines() if start <= at < stop and n), 0)
    return told_line(code, line or code.co_firstlineno)


def told_line(code: CodeType, line: int) -> str:
    return _told(code.co_filename, line, code.co_name)


def _told(path: str, line: int, name: str) -> str:
    near = os.path.relpath(path) if os.path.isabs(path) else path
    name = "" if name == "<module>" else f" in {name}"
    return f"{path if near.startswith('..') else near}:{line}{name}"


@final
class Stand:
    """Where another thread is at this moment, told by faulthandler.

    place: e.g. "train.py:31 in main"; call: a collective of the script's own in which it is, e.g.
    "torch.distributed.all_reduce"; moment: equal where the thread has not moved.

    Frame objects of a thread that runs are not touched: torch.compile changes frames while it works, and a
    reference to one of them at the wrong moment was seen to end the process. faulthandler makes none.
    """

    def __init__(self, thread: int) -> None:
        self.place, self.call = "", ""
        self.moment = _lines(thread)
        for line in self.moment:
            match = _FRAME.fullmatch(line)
            if match is None:
                continue
            path, number, name = match.groups()
            if path.startswith(DISTRIBUTED) and not name.startswith(("_", "wrap")):
                self.call = f"torch.distributed.{name}"
            elif not _look(path):
                self.place = _told(path, int(number), name)
                break
            elif path.startswith(ROOT):
                self.call = ""  # xds called it


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+).*")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _lines(thread: int) -> tuple[str, ...]:
    """What faulthandler says of one thread, a line for each frame, the innermost first."""
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
    """E.g. " of float32[7]": what a thread that has long not moved gives to a collective of its own."""
    frame = sys._current_frames().get(thread)
    collective: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(DISTRIBUTED):
            if not code.co_name.startswith(("_", "wrap")):
                collective = frame
        elif collective is not None:
            return _told_tensor(collective)
        frame = frame.f_back
    return ""


def _told_tensor(frame: FrameType) -> str:
    """Of the first tensor among a collective's arguments."""
    local = frame.f_locals
    for name in ("tensor", "input_tensor", "input", "output_tensor", "output", "tensor_list"):
        value: Any = local.get(name)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return f" of {str(value.dtype).rpartition('.')[2]}{list(value.shape)}"
    return ""
