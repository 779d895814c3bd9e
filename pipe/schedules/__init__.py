"""The order in which each pipeline rank computes, sends and receives. Nothing here imports torch."""

from .actions import Action, DeadlockError, Op, Placement, ScheduleError, Table
from .build import SCHEDULES, build_forward_table, build_table, choose
from .csv_table import load_table, read_table
from .lowering import with_messages, with_states
from .simulation import Costs, Simulation, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "DeadlockError",
    "Op",
    "Placement",
    "ScheduleError",
    "Simulation",
    "Table",
    "build_forward_table",
    "build_table",
    "choose",
    "load_table",
    "read_table",
    "simulate",
    "with_messages",
    "with_states",
]
