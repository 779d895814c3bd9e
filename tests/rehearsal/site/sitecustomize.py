"""With XDS_REHEARSAL=1 every Python process that has this folder on its path gets the device of stand_in.py.

A larger number is that of devices, which are all the same memory.

For scripts that start processes of their own, like benchmarks/gpu. What a build for CPUs lacks is replaced:

- the backends nccl and gloo are messages of messages.py; gloo refuses on a device what it refuses there;
- inductor cannot compile for the device: its backend is `eager`;
- the profiler records the host alone.

A fault of the device raises where it happens.
"""

from __future__ import annotations

import os


def _start() -> None:
    import sys
    from pathlib import Path

    sys.path.append(str(Path(__file__).parents[1]))
    import stand_in

    stand_in.load(stand_in.compiled())
    import processes

    processes.replace()


if os.environ.get("XDS_REHEARSAL"):
    _start()
