"""Finds the rank that stalls, differs or is slow, with the collective, the module and the line of the script.

ring        the last collectives of this rank, with the lines of the script
watch       records collectives, times steps, and turns a failed wait into a PeerError
watcher     one thread per process: sends heartbeats, answers alarms, ends a process that cannot raise
reports     reports between the ranks, through their store
diagnosis   reports of all ranks -> one message
stragglers  step times of all ranks -> slow ranks
dump        files for the analysis after a failure

Names are loaded on first use, so that reading a config does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diagnosis import RankReport as RankReport
    from .diagnosis import explain as explain
    from .ring import Record as Record
    from .store import Store as Store
    from .watch import Watch as Watch

_MODULES = {
    "Store": ".store",
    "Record": ".ring",
    "RankReport": ".diagnosis",
    "Watch": ".watch",
    "explain": ".diagnosis",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
