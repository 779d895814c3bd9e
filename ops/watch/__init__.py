"""Which rank is missing, differs or is slow, in which collective, of which module, at which line of the script.

ring        the last collectives of this rank, with the script's lines
watch       counts them, and turns a failed wait into a PeerError
sentinel    one thread a process: shows that it lives, answers others' alarms, ends what cannot raise
exchange    what the ranks say to one another, through their store
diagnosis   reports of all ranks -> one sentence
stragglers  times of all ranks -> who is slow
dump        what stays in files

Names are loaded on first use: reading a config imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diagnosis import Report as Report
    from .diagnosis import explain as explain
    from .ring import Mark as Mark
    from .store import Store as Store
    from .watch import Watch as Watch

_HOMES = {
    "Store": ".store",
    "Mark": ".ring",
    "Report": ".diagnosis",
    "Watch": ".watch",
    "explain": ".diagnosis",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
