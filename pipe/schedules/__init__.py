"""The order in which each pipeline rank computes, sends and receives. Nothing here imports torch.

actions      an action, the placement of the virtual stages, a table
gpipe, one_forward_one_backward, interleaved, zero_bubble, zbv, dualpipev   the orders of the compute actions
lowering     adds messages to an order, then the gathering of parameters and the reduction of gradients
simulation   the times of a table; finds tables that can never finish
build        every schedule by its name
csv_table    reads torch's tables
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actions import Action as Action
    from .actions import DeadlockError as DeadlockError
    from .actions import Op as Op
    from .actions import Placement as Placement
    from .actions import ScheduleError as ScheduleError
    from .actions import Table as Table
    from .build import SCHEDULES as SCHEDULES
    from .build import build_forward_table as build_forward_table
    from .build import build_table as build_table
    from .build import choose as choose
    from .csv_table import load_table as load_table
    from .csv_table import read_table as read_table
    from .lowering import with_messages as with_messages
    from .lowering import with_states as with_states
    from .simulation import Costs as Costs
    from .simulation import Simulation as Simulation
    from .simulation import simulate as simulate

_MODULES = {
    **dict.fromkeys(
        ("Action", "DeadlockError", "Op", "Placement", "ScheduleError", "Table"), ".actions"
    ),
    **dict.fromkeys(("SCHEDULES", "build_forward_table", "build_table", "choose"), ".build"),
    **dict.fromkeys(("load_table", "read_table"), ".csv_table"),
    **dict.fromkeys(("with_messages", "with_states"), ".lowering"),
    **dict.fromkeys(("Costs", "Simulation", "simulate"), ".simulation"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
