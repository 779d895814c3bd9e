"""Test helper: one training script with every event that a step can have, run with and without offload."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import runs
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch

import xds
from xds.engine.steps.training_step import Forecast
from xds.offload import device_memory, host, interfaces, job_queues, slot_pool
from xds.offload.device_memory import DeviceMemory
from xds.offload.disk import transfers
from xds.ops.pool import BufferPool

SAMPLES, STEPS = 4, 7
ON_CPU = {"device": "cpu"}
CPU: dict[str, Any] = {"offload_optimizer": ON_CPU}
HALF: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
OVERLAP: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "overlap_step": True}}
PARAMS: dict[str, Any] = {"offload_param": ON_CPU}
GUESS: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "super_offload": True}}


AUTO: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}
EVERYTHING = 1 << 40


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder), **more}}


def params_on(folder: Path, keep: int = 0) -> dict[str, Any]:
    section = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": keep}
    return {"offload_param": section}


def config_of(
    stage: int, precision: str, accumulation: int, offload: dict[str, Any] | None, optimizer: str
) -> dict[str, Any]:
    config = runs.config(
        stage,
        precision,
        samples=SAMPLES // dist.get_world_size(),
        accumulation=accumulation,
        optimizer=optimizer,
        params={"lr": 3e-3, "weight_decay": 0.1},
        clip=1.1,  # about every second step is clipped
        zero=offload,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    )
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 19}  # the first steps overflow
    return config


class Fixed(DeviceMemory):
    """A device with `spare` bytes on rank 0, and as many more on the others as they have a rank."""

    def __init__(self, spare: int) -> None:
        self._spare = spare

    def begin(self) -> None:
        return

    def spare_bytes(self) -> int:
        return self._spare + dist.get_rank()


def device_with(spare_bytes: int) -> Any:
    """A patch: what the engine finds free on the device."""
    return mock.patch.object(device_memory, "memory_of", lambda device: Fixed(spare_bytes))


def every_update_is_guessed() -> Any:
    """A patch: with `super_offload` those of clipped and skipped steps are undone."""
    return mock.patch.object(Forecast, "is_plain", lambda forecast, limit: True)


def results(
    world_size: int,
    case: tuple[Any, ...],
    offload: dict[str, Any] | None,
    seed: int | None = None,
    spare_bytes: int = 100_000,
) -> list[dict[str, Any]]:
    """Of each rank. case: stage, precision, accumulation, optimizer, model. seed: of late queues."""
    stage, precision, accumulation, *rest = case
    late = nullcontext() if seed is None else late_queues(seed)
    with every_update_is_guessed(), device_with(spare_bytes), late:
        return run_ranks(train, world_size, stage, precision, accumulation, offload, *rest)


def check(
    world_size: int,
    case: tuple[Any, ...],
    offloads: list[dict[str, Any]],
    seed: int | None = None,
    spare_bytes: int = 100_000,
) -> None:
    """Each of `offloads` gives the bits of a run without."""
    plain = results(world_size, case, None)
    for offload in offloads:
        found = results(world_size, case, offload, seed, spare_bytes)
        for one, other in zip(plain, found, strict=True):
            check_equal(one, other, f"{offload}")


def train(
    stage: int,
    precision: str,
    accumulation: int,
    offload: dict[str, Any] | None,
    optimizer: str = "AdamW",
    feature: str = "plain",
) -> dict[str, Any]:
    """Steps that clip, overflow or are edited by the script; every number that results from them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = xds.initialize(
        build(feature), config_of(stage, precision, accumulation, offload, optimizer)
    )
    params = dict(engine.module.named_parameters())
    trained = {name for name, param in params.items() if param.requires_grad}
    numbers: list[Any] = []
    for step in range(STEPS):
        _edit(params, trained, step)
        for micro_step in range(accumulation):
            part = micro_batch(step, micro_step, SAMPLES).chunk(world_size)[rank]
            loss = engine(part, rank)
            if step == 5 and precision != "fp16":
                loss.backward()  # the script's own
            else:
                engine.backward(loss)
            engine.step()
            numbers.append(loss.item())
        numbers += [engine.get_global_grad_norm(), engine.was_step_applied(), engine.get_lr()]
    numbers.append(engine.memory_plan()["host"] > 0)
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    computed = engine.full_state_dict(rank0_only=False)
    states: dict[str, torch.Tensor] = {}
    if optimizer == "AdamW":
        first = next(p for p in params.values() if p.requires_grad and p.numel())
        states["exp_avg"] = xds.zero.get_full_optimizer_state(first, "exp_avg")
    engine.destroy()
    return {"numbers": numbers, "values": values, "computed": computed, "states": states}


def _edit(params: dict[str, Any], trained: set[str], step: int) -> None:
    """What a script may do between two steps."""
    up, norm = params["blocks.1.up.weight"], params["blocks.2.norm.weight"]
    if step == 2:
        with xds.zero.GatheredParameters([up], modifier_rank=0), torch.no_grad():
            up.mul_(0.9)
    if step == 3 and "blocks.2.norm.weight" in trained:
        norm.requires_grad_(False)
    if step == 4 and "blocks.2.norm.weight" in trained:
        norm.requires_grad_(True)
        xds.zero.set_full_param(norm, torch.full(norm.shape, 1.25))


def check_equal(one: dict[str, Any], other: dict[str, Any], message: str = "") -> None:
    """`other` ran with offload: the same bits everywhere, and states on the host."""
    # as text: norms that are nan are equal
    assert repr(one["numbers"][:-1]) == repr(other["numbers"][:-1]), message
    assert (one["numbers"][-1], other["numbers"][-1]) == (False, True), message
    for kind in ("values", "computed", "states"):
        assert not runs.differing(other[kind], one[kind]), (message, kind)


# -- queues that are late, and memory that is not ready ------------------------------------------------------


class LateHandle(interfaces.JobHandle):
    def __init__(self, queue: LateQueue, job: Callable[[], Any]) -> None:
        self._queue, self.job, self.error = queue, job, None
        self.ended = threading.Event()

    def wait(self) -> None:
        self._queue.allow(self)
        self.ended.wait()
        if self.error is not None:
            raise self.error

    wait_on_device = wait

    @property
    def is_done(self) -> bool:
        return self.ended.is_set()


class LateQueue(job_queues.JobQueue):
    """Runs its jobs in order in a thread, each at its first wait, or a little earlier by chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._jobs: list[LateHandle] = []
        self._changed = threading.Condition()
        self._allowed = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], Any], after: Any = None) -> interfaces.JobHandle:
        with self._changed:
            handle = LateHandle(self, job)
            self._jobs.append(handle)
            if self._random.random() < 0.3:
                self._allowed = len(self._jobs)
            self._changed.notify_all()
        return handle

    def mark(self) -> None:
        return None

    def allow(self, handle: LateHandle) -> None:
        with self._changed:
            self._allowed = max(self._allowed, self._jobs.index(handle) + 1)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._allowed, self._is_closed = len(self._jobs), True
            self._changed.notify_all()
        self._thread.join()

    def _serve(self) -> None:
        at = 0
        while True:
            with self._changed:
                while at >= self._allowed and not self._is_closed:
                    self._changed.wait()
                if at >= self._allowed:
                    return
                handle = self._jobs[at]
            time.sleep(self._random.random() * 0.002)
            try:
                with torch.no_grad():
                    handle.job()
            except Exception as error:
                handle.error = error
            handle.ended.set()
            at += 1


@contextmanager
def late_queues(seed: int) -> Iterator[None]:
    """Every copy and update is as late as it may be; memory without values is NaN."""

    def of(device: torch.device) -> job_queues.JobQueues:
        return job_queues.JobQueues(*(LateQueue(seed + queue) for queue in range(3)))

    def spoiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            return function(*args, **kwargs).fill_(torch.nan)

        return call

    def spoiled_slot(slots: slot_pool.SlotPool, index: int) -> torch.Tensor:
        return hand_out(slots, index).fill_(255)  # NaN in every dtype

    hand_out = slot_pool.SlotPool._hand_out
    give = BufferPool.give

    def give_spoiled(pool: BufferPool, buffer: torch.Tensor) -> None:
        buffer.fill_(torch.nan)
        give(pool, buffer)

    patches: list[tuple[Any, str, Any]] = [
        (job_queues.JobQueues, "of", of),
        (host.RotatingBuffers, "take", spoiled(host.RotatingBuffers.take)),
        (host.HostGradStore, "_allocate", spoiled(host.HostGradStore._allocate)),
        (BufferPool, "give", give_spoiled),
        (slot_pool.SlotPool, "_hand_out", spoiled_slot),
        (transfers, "ThreadQueue", lambda name: LateQueue(seed + 3)),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield
