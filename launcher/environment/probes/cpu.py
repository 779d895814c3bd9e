"""The CPU of this machine: its name and vector extensions. Cached on disk, as the query takes a second."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .line import Line


def cpu() -> Iterator[Line]:
    """The CPU's name, vector extensions and cores."""
    info = cpu_info()
    flags = set(info.get("flags", ()))
    simd = [flag for flag in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    yield Line("cpu", str(info.get("brand_raw") or platform.processor() or "unknown"))
    yield Line("cpu vectors", ", ".join(simd) or "none known")
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield Line("cores", f"{usable} usable of {os.cpu_count()}")


def cpu_info() -> dict[str, Any]:
    """The result of py-cpuinfo for this machine's CPU; empty if it has none.

    The result is cached in the user's cache folder, by machine and CPU.
    """
    kept = _cache_folder() / f"cpu-{cpu_key()}.json"
    try:
        answer: dict[str, Any] = json.loads(kept.read_text())
        return answer
    except (OSError, ValueError):  # missing or incomplete
        pass
    try:
        import cpuinfo

        answer = dict(cpuinfo.get_cpu_info())
    except Exception:  # not installed, or an unknown architecture
        return {}
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            json.dump(answer, file)
        os.replace(file.name, kept)
    except OSError:  # no home folder, or read-only: query again next time
        pass
    return answer


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "xds"


def cpu_key() -> str:
    """A key for this machine's CPU: several machines may share one home folder."""
    seen = [platform.node(), platform.machine()]
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    seen += re.findall(r"(?m)^(?:model name|model|stepping|flags|Features)\s*:.*", text)[:5]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]
