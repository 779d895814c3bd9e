"""The collectives of `deepspeed.comm`: torch's, with DeepSpeed's argument names, and counted where a log is on.

The cost without a log is one test. With it a collective returns when it is complete, also one with async_op, so
that its time is right; messages (isend, irecv) do not wait, because their peer may come later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..utils.comms_logging import CommsLogger

# name: its arguments in order; "ours=theirs" where torch's name differs. The bytes of the argument with "*" are
# those of the message: of a rank's part for all_gather and reduce_scatter
COLLECTIVES: dict[str, str] = {
    "broadcast": "*tensor src group async_op",
    "broadcast_object_list": "object_list src group device",
    "all_gather": "tensor_list *tensor group async_op",
    "all_gather_object": "object_list obj group",
    "all_gather_into_tensor": "output_tensor *tensor=input_tensor group async_op",
    "allgather_fn": "output_tensor *input_tensor group async_op",
    "all_gather_coalesced": "output_tensors *input_tensors group async_op",
    "reduce_scatter": "*output input_list op group async_op",
    "reduce_scatter_tensor": "*output_tensor=output tensor=input op group async_op",
    "reduce_scatter_fn": "*output_tensor=output tensor=input op group async_op",
    "all_to_all_single": "output *tensor=input output_split_sizes input_split_sizes group async_op",
    "all_to_all": "output_tensor_list *input_tensor_list group async_op",
    "all_reduce": "*tensor op group async_op",
    "inference_all_reduce": "*tensor op group async_op",
    "all_reduce_coalesced": "*tensors op group async_op",
    "reduce": "*tensor dst op group async_op",
    "gather": "*tensor gather_list dst group async_op",
    "scatter": "*tensor scatter_list src group async_op",
    "send": "*tensor dst group tag",
    "recv": "*tensor src group tag",
    "isend": "*tensor dst group tag",
    "irecv": "*tensor src group tag",
    "batch_isend_irecv": "*p2p_op_list",
    "barrier": "group async_op device_ids",
    "monitored_barrier": "group timeout wait_all_ranks",
}
_LOG_NAMES = dict.fromkeys(("inference_all_reduce", "all_reduce_coalesced"), "all_reduce")
_MESSAGES = ("isend", "irecv", "batch_isend_irecv")


@final
class P2POp(dist.P2POp):
    """A message for `batch_isend_irecv`. op: isend or irecv, of this module or of torch."""

    def __new__(cls, op: Callable[..., Any], *args: Any, **options: Any) -> P2POp:
        made: P2POp = super().__new__(cls, _of_torch(op), *args, **options)
        return made

    def __init__(self, op: Callable[..., Any], *args: Any, **options: Any) -> None:
        super().__init__(_of_torch(op), *args, **options)


def _of_torch(op: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(op, "__name__", "")
    return getattr(dist, name) if name in ("isend", "irecv") else op


@final
class Works:
    """Several works of one call, to wait for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _each_reduced(
    tensors: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Works | None:
    return _together(
        [dist.all_reduce(each, op, group, async_op=True) for each in tensors], async_op
    )


def _each_gathered(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Works | None:
    pairs = zip(output_tensors, input_tensors, strict=True)
    gather = _function("all_gather_into_tensor")
    return _together([gather(out, each, group, True) for out, each in pairs], async_op)


def _together(works: Sequence[Any], async_op: bool) -> Works | None:
    together = Works([work for work in works if work is not None])
    if async_op:
        return together
    together.wait()
    return None


# torch 2.13 renamed two; the old names warn there and the new ones do not exist in 2.11
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor": _GATHER,
    "allgather_fn": _GATHER,
    "reduce_scatter_tensor": _SCATTER,
    "reduce_scatter_fn": _SCATTER,
    "inference_all_reduce": dist.all_reduce,
    "all_reduce_coalesced": _each_reduced,
    "all_gather_coalesced": _each_gathered,
}


def _function(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = _FUNCTIONS.get(name) or getattr(dist, name)
    return function


@final
class Arguments:
    """The arguments of a collective, as the table has them."""

    def __init__(self, name: str) -> None:
        pairs = [text.partition("=") for text in COLLECTIVES[name].split()]
        sized = next((ours for ours, *_ in pairs if ours.startswith("*")), "").removeprefix("*")
        self.names = [ours.removeprefix("*") for ours, *_ in pairs]
        self.in_torch = {ours.removeprefix("*"): other for ours, _, other in pairs if other}
        self._sized = sized, self.in_torch.get(sized, sized)

    def given(self, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a call, by name."""
        return {**dict(zip(self.names, args, strict=False)), **options}

    def size_bytes(self, given: Mapping[str, Any]) -> int:
        """The bytes of the message; 0 where there is no tensor."""
        return next((_bytes(given[name]) for name in self._sized if name in given), 0)


def make_collective(
    name: str, read_logger: Callable[[], CommsLogger], read_backend: Callable[[], Any]
) -> Callable[..., Any]:
    """The function `deepspeed.comm.<name>`.

    Args:
        read_logger: the log that counts.
        read_backend: has the functions that are called with keywords instead of torch's; None: torch's.
    """
    arguments = Arguments(name)

    def call(args: Sequence[Any], options: dict[str, Any]) -> Any:
        backend = read_backend()
        if backend is not None:
            return getattr(backend, name)(**arguments.given(args, options))
        for ours, theirs in arguments.in_torch.items():
            if ours in options:
                options[theirs] = options.pop(ours)
        return _function(name)(*args, **options)

    def run(
        *args: Any,
        prof: bool = False,
        log_name: str = _LOG_NAMES.get(name, name),
        debug: object = None,
        **options: Any,
    ) -> Any:
        logger = read_logger()
        if not logger.enabled or not logger.selects(log_name, always=prof):
            return call(args, options)
        given = arguments.given(args, options)
        record = logger.name_of(log_name, sys._getframe(1).f_code.co_name)
        begin = time.perf_counter()
        work = call(args, options)
        if name not in _MESSAGES and hasattr(work, "wait"):
            work.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        milliseconds = 1e3 * (time.perf_counter() - begin)
        num_ranks = max(dist.get_world_size(given.get("group")), 1)  # -1 outside of the group
        logger.add(name, record, milliseconds, arguments.size_bytes(given), num_ranks)
        return work

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"torch's {name}, with DeepSpeed's argument names; counted where the log is on."
    return run


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_bytes(each) for each in value)
    tensor = getattr(value, "tensor", value)  # of a P2POp
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


__all__ = ["COLLECTIVES", "P2POp", "Works", "make_collective"]
