"""`deepspeed.utils.comms_logging`: the log of collectives that `deepspeed.comm` and the engines write.

Sizes are those of a rank's part for all_gather and reduce_scatter, else of the tensor. Latencies are in ms.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, final

import torch.distributed as dist

from ...ops.comm.bandwidth import ALIASES, TRIMMED, bus_factor, gbps
from ...ops.comm.message_log import Key, LogOptions, MessageLog, binary_size
from ...utils.errors import UsageError
from ..missing import placeholder
from .logging import log_dist
from .timer import trim_mean

_PARTS = ("all_gather", "reduce_scatter")  # whose size is that of one rank's part
_OPTIONS = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
_WIDTH = 20


def get_caller_func(frame: int = 3) -> str:
    """The name of the function so many frames above."""
    return sys._getframe(frame).f_code.co_name


def print_rank_0(message: str) -> None:
    """Print `message` on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message)


convert_size = binary_size


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """The algorithm bandwidth and the bus bandwidth in Gbps, over all ranks.

    As in DeepSpeed the algorithm bandwidth of all_reduce is twice its size over its time.

    Args:
        size: bytes; of a rank's part for all_gather and reduce_scatter. duration: in ms.
    """
    return _bandwidths(comm_op, size, duration, _world_size())


def _bandwidths(operation: str, size: int, duration: float, num_ranks: int) -> tuple[float, float]:
    operation = ALIASES.get(operation, operation)
    try:
        factor = bus_factor(operation, num_ranks)
    except KeyError:
        raise UsageError(
            f"comm_op = {operation!r}: has no bandwidth; use the name of a function of deepspeed.comm"
        ) from None
    speed = gbps(size * (num_ranks if operation in _PARTS else 1), duration)
    if operation in ("gather", "scatter"):
        factor = 1.0  # the size is that of one message
    return (2 * speed if operation == "all_reduce" else speed), speed * factor


@final
class CommsLogger:
    """Counts and times collectives by name and size; `deepspeed.comm.configure` turns it on.

    comms_dict: {name: {bytes: [count, [ms], [algorithm Gbps], [bus Gbps]]}}
    """

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.verbose = False
        self.debug = False
        self._followed: list[weakref.ref[MessageLog]] = []

    def configure(self, comms_config: Any) -> None:
        """Take over the section of a config, if it has one."""
        if comms_config.comms_logger_enabled:
            section = comms_config.comms_logger
            self.change({name: getattr(section, name) for name in _OPTIONS})

    def change(self, options: Mapping[str, Any]) -> None:
        """Set attributes, for the script's collectives and for those of the engines."""
        for name, value in options.items():
            setattr(self, name, list(value) if name == "prof_ops" else value)
        for log in self._logs():
            log.configure(self._engine_options(), enabled=self.enabled)

    def follow(self, log: MessageLog) -> None:
        """Record what an engine's `log` records as well; its options become those of this logger."""
        log.listener = partial(_from_engine, weakref.ref(self))
        self._followed.append(weakref.ref(log))
        log.configure(self._engine_options(), enabled=self.enabled)

    def start_profiling_comms(self) -> None:
        """Log all operations."""
        self.change({"prof_all": True})

    def stop_profiling_comms(self) -> None:
        """Log the operations in prof_ops alone."""
        self.change({"prof_all": False})

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Log these operations as well."""
        self.change({"prof_ops": sorted({*self.prof_ops, *op_name_list})})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Do not log these operations, unless all are."""
        left_out = set(op_name_list)
        self.change({"prof_ops": [name for name in self.prof_ops if name not in left_out]})

    def selects(self, log_name: str, *, always: bool = False) -> bool:
        """Operations of this name are logged."""
        return always or self.prof_all or log_name in self.prof_ops

    def name_of(self, log_name: str, caller: str) -> str:
        """The record of an operation; with `debug` each calling function has its own."""
        return f"{log_name} | [Caller Func: {caller}]" if self.debug else log_name

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Record one operation over all ranks. raw_name: the function of deepspeed.comm."""
        self.add(raw_name, record_name, latency, msg_size, _world_size())

    def add(
        self, raw_name: str, record_name: str, latency: float, msg_size: int, ranks: int
    ) -> None:
        """Record one operation over `ranks` ranks; with `verbose` log it on rank 0."""
        algorithm, bus = self.record(raw_name, record_name, latency, msg_size, ranks)
        if self.verbose:
            log_dist(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | "
                f"algbw (Gbps): {algorithm:.2f} | busbw (Gbps): {bus:.2f}",
                [0],
            )

    def record(
        self, raw_name: str, record_name: str, latency: float, msg_size: int, ranks: int
    ) -> tuple[float, float]:
        """Record one operation, and return its bandwidths."""
        speeds = _bandwidths(raw_name, msg_size, latency, ranks)
        values = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        values[0] += 1
        for kept, value in zip(values[1:], (latency, *speeds), strict=True):
            kept.append(value)
        return speeds

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """`comms_dict`, in a new dict."""
        self._collect()
        return self.comms_dict.copy()

    def has_data(self) -> bool:
        """Something was logged."""
        return bool(self.get_raw_data())

    def reset_data(self) -> None:
        """Forget what was logged."""
        self._collect()
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        """The names of the operations that were logged."""
        return list(self.get_raw_data())

    def get_total_operations(self) -> int:
        """How many operations were logged."""
        return sum(values[0] for sizes in self.get_raw_data().values() for values in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Count, latencies and bandwidths by size; None: the operation was not logged."""
        sizes = self.get_raw_data().get(operation_name)
        return None if sizes is None else {size: _summary(size, *sizes[size]) for size in sizes}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print a table of what was logged, or return it, or both.

        show_straggler: compare latencies with the shortest ones of all ranks; then a collective.
        """
        found = self.get_raw_data()
        summary = {
            name: {size: _summary(size, *sizes[size]) for size in sorted(sizes)}
            for name, sizes in found.items()
        }
        stragglers = _stragglers(found) if show_straggler else None
        if print_log:
            _print_table(_TITLES, _COLUMNS, summary)
            if stragglers is not None:
                print("Breakdown with straggler effect")
                _print_table(_STRAGGLER_TITLES, _STRAGGLER_COLUMNS, stragglers)
        if not return_dict:
            return None
        return {
            "summary": summary,
            "straggler_analysis": stragglers,
            "metadata": {
                "world_size": _world_size(),
                "rank": dist.get_rank() if dist.is_initialized() else 0,
                "timestamp": datetime.now().isoformat(),
            },
        }

    def _engine_options(self) -> LogOptions:
        return LogOptions(self.prof_all, tuple(self.prof_ops), self.verbose, self.debug)

    def _logs(self) -> list[MessageLog]:
        found = [log for log in (each() for each in self._followed) if log is not None]
        self._followed = [weakref.ref(log) for log in found]
        return found

    def _collect(self) -> None:
        """Take what engines have timed, but not read from the device yet."""
        for log in self._logs():
            log.rows()


def _from_engine(owner: weakref.ref[CommsLogger], key: Key, milliseconds: float) -> None:
    logger = owner()
    if logger is not None:
        ranks = len(key.members)
        size = key.size_bytes // (ranks if key.operation in _PARTS else 1)
        name = key.label.replace("receive", "recv", 1)
        logger.record(key.operation, name, milliseconds, size, ranks)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _summary(
    size: int, count: int, latencies: list[float], speeds: list[float], bus_speeds: list[float]
) -> dict[str, Any]:
    return {
        "count": count,
        "total_latency_ms": sum(latencies),
        "avg_latency_ms": trim_mean(latencies, TRIMMED),
        "tput_avg_gbps": trim_mean(speeds, TRIMMED),
        "busbw_avg_gbps": trim_mean(bus_speeds, TRIMMED),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def _stragglers(
    found: Mapping[str, Mapping[int, list[Any]]],
) -> dict[str, dict[int, dict[str, Any]]]:
    """For each record the shortest latency of each call over the ranks that made as many, and the rest."""
    mine = {name: {size: found[name][size][1] for size in found[name]} for name in found}
    table: list[Any] = [mine]
    if _world_size() > 1:
        table = [None] * _world_size()
        dist.all_gather_object(table, mine)
    result: dict[str, dict[int, dict[str, Any]]] = {}
    for name, sizes in mine.items():
        for size in sorted(sizes):
            own = sizes[size]
            every = [each.get(name, {}).get(size, []) for each in table]
            least = [min(of) for of in zip(*(e for e in every if len(e) == len(own)), strict=True)]
            lost = [a - b for a, b in zip(own, least, strict=True)]
            result.setdefault(name, {})[size] = {
                "count": len(own),
                "total_comm_lat_ms": sum(least),
                "total_straggler_ms": sum(lost),
                "avg_comm_lat_ms": trim_mean(least, TRIMMED),
                "avg_straggler_ms": trim_mean(lost, TRIMMED),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
    return result


_TITLES = (
    *("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)"),
    *("tput_avg (Gbps)", "busbw_avg (Gbps)"),
)
_COLUMNS = ("total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
_STRAGGLER_TITLES = (
    *("Comm. Op", "Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)"),
    *("Avg comm lat(ms)", "Avg straggler(ms)"),
)
_STRAGGLER_COLUMNS = (
    *("total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms"),
)


def _print_table(titles: Sequence[str], columns: Sequence[str], rows: Mapping[str, Any]) -> None:
    print(_cells(titles))
    for name, sizes in rows.items():
        print(name)
        for row in sizes.values():
            numbers = [f"{row[column]:.2f}" for column in columns]
            print(_cells(["", row["msg_size_str"], str(row["count"]), *numbers]))


def _cells(texts: Sequence[str]) -> str:
    return "".join(text.ljust(_WIDTH) for text in texts).rstrip()


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "get_caller_func", "print_rank_0"]
