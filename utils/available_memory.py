"""How much host memory this process may still take."""

from __future__ import annotations

import re
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def container_limit_bytes() -> int:
    """The memory limit of the control group; 0 if there is none."""
    return _first_number(_LIMITS)


def available_bytes() -> int:
    """Free memory of the machine, or of this container if that is less; 0 if the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    found = re.search(r"(?m)^MemAvailable:\s+(\d+) kB", text)
    free = int(found[1]) * 1024 if found else 0
    limit = container_limit_bytes()
    return min(free, max(0, limit - _first_number(_USED))) if limit else free


def _first_number(files: tuple[str, ...]) -> int:
    for file in files:
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else 0
    return 0


__all__ = ["available_bytes", "container_limit_bytes"]
