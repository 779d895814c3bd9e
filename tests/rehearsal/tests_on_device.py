"""The tests of ranks on the device of stand_in.py: `XDS_REHEARSE=1 pytest tests/zero`.

Ranks of `helpers.run_ranks`, `run_processes`, `run_new_ranks` and `warm_ranks` are then processes that have
loaded the device.
What changes in a rank, see rank_on_device.py. A fault of the device fails the call, as in device_ranks.py.
With `XDS_REHEARSE=gloo` the ranks send as several ranks on one GPU do.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
started = 0  # calls of functions on ranks


def use() -> None:
    """From now on; before the first test module is imported."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        raise SystemExit("XDS_REHEARSE needs Linux and g++")
    import helpers
    import warm_ranks

    helpers.run_ranks = helpers.run_processes
    helpers._context.set_forkserver_preload(["rank_on_device"])
    kept = os.environ.get("PYTHONPATH")
    paths = [str(HERE), str(HERE.parent), kept or ""]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if kept is not None:
            os.environ["PYTHONPATH"] = kept
    run, run_new = warm_ranks.WarmRanks.run, helpers.run_new_ranks

    def run_on_device(self: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
        _count()
        return _values(run(self, _called, function, *args))

    def run_new_on_device(
        function: Callable[..., Any], world_size: int, *args: Any, **more: Any
    ) -> list[Any]:
        _count()
        return _values(run_new(_called, world_size, function, *args, **more))

    warm_ranks.WarmRanks.run = run_on_device  # type: ignore[method-assign]
    helpers.run_new_ranks = run_new_on_device


def _called(function: Callable[..., Any], *args: Any) -> bytes:
    """In a rank."""
    from rank_on_device import called

    return called(function, *args)


def _values(answers: list[bytes]) -> list[Any]:
    return [pickle.loads(answer) for answer in answers]


def _count() -> None:
    global started
    started += 1
