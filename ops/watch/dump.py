"""Writes a rank's last collectives to a file, and ends a process with an error that the launcher reads."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ...utils.messages import write_stderr
from ...utils.small_files import replace_small_file
from .diagnosis import RankReport
from .ring import place_text

if TYPE_CHECKING:
    from .watch import Watch

OWN = 16  # how many of the script's own collectives a report contains


def write_ring(watch: Watch, report: RankReport) -> str:
    """Write rank{N}.collectives.json into XDS_DUMP_DIR or the run's folder.

    Returns: its path; "" where there is no folder or it cannot be written.
    """
    folder = os.environ.get("XDS_DUMP_DIR") or os.environ.get("XDS_RUN_FOLDER")
    if not folder:
        return ""
    path = os.path.join(folder, f"rank{watch.rank}.collectives.json")
    now, clock = time.time(), time.monotonic()
    waiting = watch.waiting
    collectives = [
        {
            "serial": record.serial,
            "collective": watch.call(record.key),
            "number": record.number,
            "shape": [record.numel],
            "dtype": "" if record.dtype is None else str(record.dtype)[6:],
            "bytes": record.size_bytes,
            "script": place_text(record.place),
            "started_seconds": round(now - (clock - record.started_seconds), 6),
            "ended_seconds": round(now - (clock - record.ended_seconds), 6)
            if record.ended_seconds
            else None,
        }
        for record in list(watch.ring)
    ]
    content: dict[str, Any] = {
        "rank": watch.rank,
        "world_size": watch.world_size,
        "engine": watch.engine,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written_seconds": now,
        "steps": watch.steps.count,
        "waits_in": watch.call(waiting[0].key) if waiting is not None else report.waits_in,
        "script": report.place,
        "script_collective": report.call,
        "script_collectives": [list(one) for one in report.own],
        "collectives": collectives,
    }
    try:
        os.makedirs(folder, exist_ok=True)
        replace_small_file(path, json.dumps(content, indent=1))
    except OSError:
        return ""  # a full disk must not hide the diagnosis
    return path


def recorded(group: str) -> list[tuple[int, str, str]]:
    """The script's own last collectives of `group`: (number, op, sizes), from torch's flight recorder.

    [] where the recorder is off (TORCH_FR_BUFFER_SIZE) or this torch has none.
    """
    try:
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        entries = json.loads(c10d._dump_fr_trace_json(True, False)).get("entries", [])
        found = [e for e in entries if e["process_group"][0] == group and not e["is_p2p"]]
        return [
            (e["collective_seq_id"], e["profiling_name"].rpartition(":")[2], str(e["input_sizes"]))
            for e in found[-OWN:]
        ]
    except Exception:  # a private interface of torch; the information is optional
        return []


def end_process(text: str) -> NoReturn:
    """Write the reason for the launcher, in torch's format, and exit: the main thread is blocked."""
    now = time.time()
    write_stderr(f"{text}\n")  # returns even if the output is not read
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path:
        extra = {"py_callstack": f"{text}\n", "timestamp": str(int(now))}
        error_record = {
            "message": {"message": text, "extraInfo": extra},
            "xds": {"time_seconds": now, "exit_code": 1, "text": f"{text}\n"},
        }
        with contextlib.suppress(OSError):
            replace_small_file(path, json.dumps(error_record))
    os._exit(1)
