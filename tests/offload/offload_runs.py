"""Test helper: one training script with every event that a step can have, run with and without offload."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import build, micro_batch

import xds
from xds.engine.steps.forecast import Forecast
from xds.offload import host_sums, lanes, ring, rotation
from xds.offload.disk import transfers
from xds.ops.comm.pool import BufferPool

SAMPLES, STEPS = 4, 8
ON_CPU = {"device": "cpu"}
CPU: dict[str, Any] = {"offload_optimizer": ON_CPU}
HALF: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
OVERLAP: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "overlap_step": True}}
PARAMS: dict[str, Any] = {"offload_param": ON_CPU}
GUESS: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "super_offload": True}}


def config_of(
    stage: int, precision: str, accumulation: int, offload: dict[str, Any] | None, optimizer: str
) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.1,  # about every second step is clipped
        "optimizer": {"type": optimizer, "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 19  # the first steps overflow
    if offload is not None:
        config["zero_optimization"] |= offload
    return config


def train(
    stage: int,
    precision: str,
    accumulation: int,
    offload: dict[str, Any] | None,
    optimizer: str = "AdamW",
    feature: str = "plain",
) -> dict[str, Any]:
    """Steps that clip, overflow or are edited by the script; every number that results from them.

    With `super_offload` every update is guessed, so that those of clipped and skipped steps are undone.
    """
    with mock.patch.object(Forecast, "is_plain", lambda forecast, limit: True):
        return _train(stage, precision, accumulation, offload, optimizer, feature)


def _train(
    stage: int,
    precision: str,
    accumulation: int,
    offload: dict[str, Any] | None,
    optimizer: str,
    feature: str,
) -> dict[str, Any]:
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


def check_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """`other` ran with offload: the same bits everywhere, and states on the host."""
    # as text: norms that are nan are equal
    assert repr(one["numbers"][:-1]) == repr(other["numbers"][:-1])
    assert (one["numbers"][-1], other["numbers"][-1]) == (False, True)
    for kind in ("values", "computed", "states"):
        for name, value in one[kind].items():
            assert torch.equal(value, other[kind][name]), name


# -- lanes that are late, and memory that is not ready ------------------------------------------------------


class LateTicket(lanes.Ticket):
    def __init__(self, lane: LateLane, job: Callable[[], Any]) -> None:
        self._lane, self.job, self.error = lane, job, None
        self.ended = threading.Event()

    def wait(self) -> None:
        self._lane.allow(self)
        self.ended.wait()
        if self.error is not None:
            raise self.error

    order = wait

    @property
    def is_done(self) -> bool:
        return self.ended.is_set()


class LateLane(lanes.Lane):
    """Runs its jobs in order in a thread, each at its first wait, or a little earlier by chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._jobs: list[LateTicket] = []
        self._changed = threading.Condition()
        self._allowed = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], Any], after: Any = None) -> lanes.Ticket:
        with self._changed:
            ticket = LateTicket(self, job)
            self._jobs.append(ticket)
            if self._random.random() < 0.3:
                self._allowed = len(self._jobs)
            self._changed.notify_all()
        return ticket

    def mark(self) -> None:
        return None

    def allow(self, ticket: LateTicket) -> None:
        with self._changed:
            self._allowed = max(self._allowed, self._jobs.index(ticket) + 1)
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
                ticket = self._jobs[at]
            time.sleep(self._random.random() * 0.002)
            try:
                with torch.no_grad():
                    ticket.job()
            except Exception as error:
                ticket.error = error
            ticket.ended.set()
            at += 1


@contextmanager
def late_lanes(seed: int) -> Iterator[None]:
    """Every copy and update is as late as it may be; memory without values is NaN."""

    def of(device: torch.device) -> lanes.Lanes:
        return lanes.Lanes(*(LateLane(seed + lane) for lane in range(3)))

    def spoiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            return function(*args, **kwargs).fill_(torch.nan)

        return call

    def spoiled_slot(slots: ring.Ring, index: int) -> torch.Tensor:
        return hand_out(slots, index).fill_(255)  # NaN in every dtype

    hand_out = ring.Ring._hand_out
    give = BufferPool.give

    def give_spoiled(pool: BufferPool, buffer: torch.Tensor) -> None:
        buffer.fill_(torch.nan)
        give(pool, buffer)

    with (
        mock.patch.object(lanes.Lanes, "of", of),
        mock.patch.object(rotation.Rotation, "take", spoiled(rotation.Rotation.take)),
        mock.patch.object(host_sums.OnHost, "_allocate", spoiled(host_sums.OnHost._allocate)),
        mock.patch.object(BufferPool, "give", give_spoiled),
        mock.patch.object(ring.Ring, "_hand_out", spoiled_slot),
        mock.patch.object(transfers, "ThreadLane", lambda name: LateLane(seed + 3)),
    ):
        yield


def train_late(seed: int, *case: Any) -> dict[str, Any]:
    with late_lanes(seed):
        return train(*case)
