"""Test helper: on a CPU the host's and the device's memory are told apart, and an op that mixes them raises.

Memory that offload allocates is the host's; parameters, gradients and pooled buffers are the device's. Results
of ops are where their inputs are. Other new tensors have no place until an op uses them with one that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xds.offload import homes, host_sums, lanes, reused, rotation, shards
from xds.ops.comm.pool import BufferPool
from xds.zero.core import reduction
from xds.zero.core.flat_params import FlatParams
from xds.zero.core.local_sum import LocalSum

HOST, DEVICE = "host", "device"
aten = torch.ops.aten
READS = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__)
READ: list[str] = []  # values that may be on the device and were read: each read waits for a GPU
TOUCHED: list[
    tuple[str, int]
] = []  # ops of the host, and the bytes that it reads and writes in each
JOINS = {aten.stack, aten.cat}
COPIES = {aten.copy_, aten._foreach_copy_, aten.set_}


class Mixed(AssertionError):
    """An op uses host and device memory at once."""


def place_of(tensor: Tensor) -> str | None:
    """The place of a tensor's memory, None if it has none yet."""
    return getattr(tensor.untyped_storage(), "xds_place", None)


def put(tensor: Tensor, place: str) -> Tensor:
    """Declare the place of a tensor's memory."""
    tensor.untyped_storage().xds_place = place  # type: ignore[attr-defined]
    return tensor


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _count_bytes(func, args, kwargs)
        if func.overloadpacket in COPIES or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        every = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        inputs = [one for one in every if _counts(one, func)]
        places = _places(inputs)
        if len(places) > 1:
            listed = ", ".join(f"{tuple(t.shape)} {t.dtype} {place_of(t)}" for t in inputs)
            raise Mixed(f"{func} mixes host and device memory: {listed}")
        result = func(*args, **kwargs)
        places = places or _places(every)
        if len(places) == 1:
            (place,) = places
            for tensor in (*inputs, *tree_leaves(result)):
                if isinstance(tensor, Tensor) and tensor.numel() and place_of(tensor) is None:
                    put(tensor, place)
        return result


def _count_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count what the host reads and writes of its memory. Copies between the places are the device's work."""
    every = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    places = [place_of(one) for one in every]
    if func.is_view or func is aten.is_set_to.default or HOST not in places or DEVICE in places:
        return
    num_bytes = 0
    for argument, value in zip(func._schema.arguments, args, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (writes and (argument.name == "out" or func.overloadpacket is aten.copy_))
        for one in tree_leaves(value):
            if isinstance(one, Tensor) and one.dim() and place_of(one) == HOST:
                num_bytes += one.nbytes * (int(writes) + int(is_read))
    if num_bytes:
        TOUCHED.append((str(func), num_bytes))


def _places(tensors: list[Tensor]) -> set[str]:
    return {place for one in tensors if (place := place_of(one)) is not None}


def _counts(value: Tensor, func: Any) -> bool:
    """A GPU's pointwise ops take single elements of host memory; others do not."""
    if not value.numel():
        return False
    return value.dim() > 0 or func.namespace == "xds" or func.overloadpacket in JOINS


class _Functions(TorchFunctionMode):
    """`tensor.to(device)` and `tensor.cpu()` return new memory, as if the devices differed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in READS and place_of(args[0]) != HOST:
            READ.append(str(func))
        result = func(*args, **(kwargs or {}))
        if func not in (Tensor.to, Tensor.cpu) or not isinstance(result, Tensor):
            return result
        given = (*args[1:], *(kwargs or {}).values())
        moves = func is Tensor.cpu or any(isinstance(one, (str, torch.device)) for one in given)
        same = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        if not moves or not same:
            return result
        copy = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
        with torch.no_grad():
            return copy.copy_(result)


def _add_staged(
    sums: host_sums.OnHost, target: Tensor, source: Tensor, give_back: Callable[[], None]
) -> None:
    """The way of a GPU: on a CPU the lane adds device memory to host memory directly."""
    sums._staged(source, target.add_, give_back)


def _on_device(found: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The way of a GPU: norms of sums on the host are copied to the device."""
    return [put(one.clone(), DEVICE) if place_of(one) == HOST else one for one in found]


def _marked(owner: Any, name: str, place: str) -> Any:
    """A patch: what `owner.name` returns is at `place`; a shard's tensor is as well."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        put(found if isinstance(found, Tensor) else found.tensor, place)
        return found

    return mock.patch.object(owner, name, call)


@contextmanager
def two_places() -> Iterator[None]:
    """Inside, ops of this thread and of all lanes raise `Mixed` where a GPU would, or would be slow."""
    job_of_lane, init = lanes._without_grad, FlatParams.__init__

    def run(job: Callable[[], Any]) -> None:
        with _Functions(), _Dispatch():
            job_of_lane(job)

    def build(flat: FlatParams, *args: Any, **kwargs: Any) -> None:
        init(flat, *args, **kwargs)
        put(flat.raw, DEVICE)
        put(flat._placeholder, HOST)  # on a GPU it is not read

    READ.clear()
    with ExitStack() as stack:
        for module in (reused, host_sums, rotation, shards):
            stack.enter_context(_marked(module, "host_memory", HOST))
        stack.enter_context(_marked(homes.HostHome, "store", HOST))
        stack.enter_context(_marked(homes.DeviceHome, "store", DEVICE))
        stack.enter_context(_marked(shards.ShardsOnDevice, "store", DEVICE))
        stack.enter_context(_marked(BufferPool, "take", DEVICE))
        stack.enter_context(_marked(LocalSum, "allocate", DEVICE))
        stack.enter_context(mock.patch.object(host_sums.OnHost, "_add", _add_staged))
        stack.enter_context(mock.patch.object(reduction, "_on_device", _on_device))
        stack.enter_context(mock.patch.object(FlatParams, "__init__", build))
        stack.enter_context(mock.patch.object(lanes, "_without_grad", run))
        stack.enter_context(_Functions())
        stack.enter_context(_Dispatch())
        yield


__all__ = ["DEVICE", "HOST", "READ", "TOUCHED", "Mixed", "place_of", "put", "two_places"]
