"""No op of a training with offload mixes host and device memory, in any thread.

On a CPU the two are told apart here, and an op that mixes them raises.

Memory that offload allocates is the host's; parameters, gradients and pooled buffers are the device's. Results
of ops are where their inputs are. Other new tensors have no place until an op uses them with one that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import offload_runs
import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from models import build, micro_batch
from offload_runs import (
    AUTO,
    CPU,
    GUESS,
    HALF,
    OVERLAP,
    PARAMS,
    config_of,
    device_with,
    every_update_is_guessed,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import xds
from xds.offload import host, host_pool, interfaces, job_queues
from xds.ops.pool import BufferPool
from xds.zero.core import reduction
from xds.zero.core.local_sum import LocalSum
from xds.zero.core.master import Master
from xds.zero.core.param_bucket import ParamBucket

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
    sums: host.HostGradStore, target: Tensor, source: Tensor, give_back: Callable[[], None]
) -> None:
    """The way of a GPU: on a CPU the queue adds device memory to host memory directly."""
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
    """Inside, ops of this thread and of all queues raise `Mixed` where a GPU would, or would be slow."""
    job_of_queue, init = job_queues._without_grad, ParamBucket.__init__

    def run(job: Callable[[], Any]) -> None:
        with _Functions(), _Dispatch():
            job_of_queue(job)

    def build(flat: ParamBucket, *args: Any, **kwargs: Any) -> None:
        init(flat, *args, **kwargs)
        put(flat.raw, DEVICE)
        put(flat._placeholder, HOST)  # on a GPU it is not read

    READ.clear()
    with ExitStack() as stack:
        for module in (host_pool, host):
            stack.enter_context(_marked(module, "host_memory", HOST))
        stack.enter_context(_marked(host.HostStore, "copy_in", HOST))
        stack.enter_context(_marked(interfaces.DeviceStore, "copy_in", DEVICE))
        stack.enter_context(_marked(interfaces.DeviceShardStore, "add", DEVICE))
        stack.enter_context(_marked(BufferPool, "take", DEVICE))
        stack.enter_context(_marked(LocalSum, "allocate", DEVICE))
        stack.enter_context(mock.patch.object(host.HostGradStore, "_add", _add_staged))
        stack.enter_context(mock.patch.object(reduction, "_on_device", _on_device))
        stack.enter_context(mock.patch.object(ParamBucket, "__init__", build))
        stack.enter_context(mock.patch.object(job_queues, "_without_grad", run))
        stack.enter_context(_Functions())
        stack.enter_context(_Dispatch())
        yield


# -- tests --------------------------------------------------------------------------------------------------


def train(*case: Any) -> list[str]:
    with two_places(), device_with(60_000), every_update_is_guessed():
        return list(map(repr, offload_runs.train(*case)["numbers"]))


@pytest.mark.parametrize(
    ("world_size", "offload", "case"),
    [
        (1, OVERLAP | GUESS, (2, "fp32", 1)),
        (2, AUTO, (2, "bf16", 2, "Lion")),
        (2, GUESS | PARAMS, (3, "bf16", 1)),
    ],
)
@pytest.mark.quick("1-offload0-case0")
def test_ops_stay_in_one_place(
    world_size: int, offload: dict[str, Any], case: tuple[Any, ...]
) -> None:
    stage, precision, accumulation, *rest = case
    plain = offload_runs.results(world_size, case, None)
    found = run_processes(train, world_size, stage, precision, accumulation, offload, *rest)
    for one, other in zip(plain, found, strict=True):
        assert list(map(repr, one["numbers"][:-1])) == other[:-1]


def mixes() -> str:
    """A master on the host that is compared with parameters on the device, where both are."""

    def wrong(master: Master) -> None:
        master.raw.equal(master.compute)
        remember(master)

    remember = Master.remember
    assert dist.is_initialized()
    with mock.patch.object(Master, "remember", wrong), two_places():
        try:
            offload_runs.train(2, "fp32", 1, CPU)
        except Mixed as error:
            return str(error)
    return ""


def num_reads(stage: int, precision: str, accumulation: int, offload: dict[str, Any]) -> list[int]:
    """Reads of the device's values in each of five steps without events."""
    counts = []
    config = config_of(stage, precision, accumulation, offload, "AdamW")
    with two_places():
        engine = xds.initialize(build("plain"), config)
        for step in range(5):
            READ.clear()
            for _ in range(accumulation):
                engine.backward(engine(micro_batch(step, 0)))
                engine.step()
            counts.append(len(READ))
        engine.destroy()
    return counts


def test_one_read_a_step_waits_for_the_device() -> None:
    for world_size, accumulation, stage, offload in (
        (1, 2, 2, {}),
        (2, 1, 2, HALF),
        (2, 2, 3, CPU | PARAMS),
    ):
        for found in run_processes(num_reads, world_size, stage, "bf16", accumulation, offload):
            assert found[3:] == [1, 1], (world_size, offload, found)


def host_bytes(stage: int, offload: dict[str, Any]) -> tuple[float, list[str]]:
    """Bytes of its memory that the host touches in a step with clipping, for each element; by which ops."""
    config = config_of(stage, "bf16", 1, offload, "AdamW")
    config["ops"] = {"require": True}
    with two_places():
        engine = xds.initialize(build("plain"), config)
        for step in range(4):
            TOUCHED.clear()
            engine.backward(engine(micro_batch(step, 0)))
            engine.step()
            engine._parts.updater.wait()
        numel = sum(master.raw.numel() for master in engine._parts.updater.masters)
        found = list(TOUCHED)
        engine.destroy()
    return sum(count for _, count in found) / numel, sorted({op for op, _ in found})


def test_an_update_is_one_pass_over_host_memory() -> None:
    for stage, offload in ((2, CPU), (3, CPU), (3, CPU | PARAMS), (2, OVERLAP)):
        for found, ops in run_processes(host_bytes, 1, stage, offload):
            # a gradient and a new value of 2 bytes, and the master and two moments, read and written
            assert (found, ops) == (28, ["xds.adam_.default"]), offload


def test_a_mistake_is_found() -> None:
    (found,) = run_processes(mixes, 1)
    assert "equal" in found
