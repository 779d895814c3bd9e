"""Updates that run during backward give the bits of those after it, whatever a script does in between."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import on_busy_machines, run_ranks
from models import build, micro_batch
from offload_runs import GUESS, OVERLAP, PARAMS, SAMPLES, config_of, every_update_is_guessed
from runs import differing

import xds
from xds.engine.steps.training_step import NUM_NORMS, Forecast
from xds.offload import undo_pool
from xds.offload.host import HostGradStore
from xds.offload.job_queues import _ThreadHandle
from xds.offload.undo_pool import UndoPool
from xds.utils.errors import ConfigError


def run(
    stage: int, precision: str, accumulation: int, offload: dict[str, Any] | None
) -> dict[str, Any]:
    """Every number of one step for each event, and of a plain step after it."""
    config = config_of(stage, precision, accumulation, offload, "AdamW")
    config["gradient_clipping"] = 1e3
    engine = xds.initialize(build("plain"), config)
    numbers: list[Any] = []
    for at, event in enumerate(("nothing", *BETWEEN, "twice", "overflow")):
        numbers += [event, *_step(engine, 2 * at, event)]
        numbers += _step(engine, 2 * at + 1, "nothing")
    guesses = engine._parts.updater._super_offload
    used = guesses.num_used if guesses is not None else 0
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    computed = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return {"numbers": numbers, "values": values, "computed": computed, "used": used}


def _loss(engine: xds.Engine, step: int, micro_step: int) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss: torch.Tensor = engine(
        micro_batch(step, micro_step, SAMPLES).chunk(world_size)[rank], rank
    )
    return loss


def _step(engine: xds.Engine, step: int, event: str) -> list[Any]:
    accumulation = engine.gradient_accumulation_steps()
    for micro_step in range(accumulation):
        loss = _loss(engine, step, micro_step)
        if event == "twice":
            engine.backward(loss, retain_graph=True)
        if event == "overflow" and engine.config.fp16.enabled:
            loss = loss * torch.inf
        engine.backward(loss)
        if micro_step == accumulation - 1:
            weight = dict(engine.module.named_parameters())["blocks.1.up.weight"]
            found = [BETWEEN[event](engine, weight)] if event in BETWEEN else []
        engine.step()
    numbers = [loss.item(), engine.get_global_grad_norm(), engine.was_step_applied()]
    return [*numbers, *engine.get_lr(), *found]


def _write_grad(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    xds.zero.set_full_grad(weight, torch.full_like(xds.zero.get_full_grad(weight), 0.01))


def _write_param(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    with xds.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(0.9)


@torch.no_grad()
def _halve_states(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    for state in engine.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _halve_rate(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def _evaluate(engine: xds.Engine, weight: torch.nn.Parameter) -> float:
    with torch.no_grad():
        return _loss(engine, 100, 0).item()


def _start_again(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    engine.zero_grad()
    engine.backward(_loss(engine, 50, 0))


def _fail(engine: xds.Engine, weight: torch.nn.Parameter) -> str:
    try:
        engine.backward(_loss(engine, 70, 0) * torch.ones(3))
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _hold(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    loss = _loss(engine, 60, 0)
    with engine.no_sync():
        engine.backward(loss)


def _whole(engine: xds.Engine, weight: torch.nn.Parameter) -> list[float]:
    found = engine.full_state_dict(rank0_only=False, full_precision=True)
    return [value.double().sum().item() for value in found.values()]


def _sum(tensor: torch.Tensor) -> float:
    return tensor.double().sum().item()


BETWEEN: dict[str, Any] = {
    "rate": _halve_rate,
    "read_master": lambda engine, weight: _sum(xds.zero.get_full_param(weight)),
    "read_state": lambda engine, weight: _sum(
        xds.zero.get_full_optimizer_state(weight, "exp_avg_sq")
    ),
    "read_grad": lambda engine, weight: _sum(xds.zero.get_full_grad(weight)),
    "read_all": _whole,
    "halve_states": _halve_states,
    "clear_states": lambda engine, weight: engine.optimizer.state.clear(),
    "write_grad": _write_grad,
    "write_param": _write_param,
    "freeze": lambda engine, weight: weight.requires_grad_(False).shape,
    "evaluate": _evaluate,
    "clip": lambda engine, weight: engine.clip_grad_norm(0.01),
    "start_again": _start_again,
    "fail": _fail,
    "hold": _hold,
}


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "accumulation", "offload"),
    [
        (
            1,
            1,
            "fp16",
            1,
            {"offload_optimizer": {**OVERLAP["offload_optimizer"], "super_offload": True}},
        ),
        pytest.param(
            *(2, 2, "bf16", 2, {"offload_optimizer": {**GUESS["offload_optimizer"], "ratio": 0.5}}),
            marks=pytest.mark.slow,
        ),
        (2, 3, "bf16", 1, GUESS | PARAMS),
        (2, 1, "fp32", 1, GUESS),  # torch's kernel writes the unscaled gradient back
    ],
)
@pytest.mark.quick("1-1-fp16-1-offload0", "2-1-fp32-1-offload3")
def test_events_between_backward_and_step(
    world_size: int, stage: int, precision: str, accumulation: int, offload: dict[str, Any]
) -> None:
    case = (stage, precision, accumulation)
    with every_update_is_guessed():
        plain = run_ranks(run, world_size, *case, None)
        found = run_ranks(run, world_size, *case, offload)
    for one, other in zip(plain, found, strict=True):
        assert repr(one["numbers"]) == repr(other["numbers"])
        for kind in ("values", "computed"):
            assert not differing(other[kind], one[kind]), kind
        assert other["used"] > 0


def test_forecast() -> None:
    for norms, limit, is_plain in (
        ([], 1.0, False),
        ([0.5], 1.0, True),
        ([0.81], 1.0, False),
        ([9.0], 0.0, True),
        ([float("inf"), 0.1], 0.0, False),
        ([float("nan"), 0.1], 1.0, False),
        ([5.0, *[0.1] * (NUM_NORMS - 1)], 1.0, False),
        ([5.0, *[0.1] * NUM_NORMS], 1.0, True),
    ):
        forecast = Forecast()
        for norm in norms:
            forecast.observe(norm)
        assert forecast.is_plain(limit) == is_plain, (norms, limit)


def test_the_spare_memory_has_a_limit() -> None:
    pool = UndoPool(pin=False, limit_bytes=8192)
    small, large = pool.take([1000, 500], 24), pool.take([4000], 96)
    assert small is not None and large is not None
    assert [memory.shape for memory in small.memory] == [(1000,), (500,)]
    assert pool.take([4000], 96) is None
    assert pool.allocated_bytes == 5620
    pool.give(large)
    pool.give(small)
    assert pool.take([4000], 96) is large
    assert pool.take([1000, 500], 24) is small
    assert UndoPool(pin=False).take([1 << 60], 0) is None


@pytest.mark.parametrize(("num_ranks", "limit_bytes"), [(None, 1500), ("1", 1500), ("3", 500)])
def test_ranks_of_a_machine_share_half_of_its_free_memory(
    num_ranks: str | None, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo_pool, "free_host_bytes", lambda: 3000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if num_ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    assert UndoPool(pin=False).take([limit_bytes + 1], 0) is None
    pool = UndoPool(pin=False)
    assert pool.take([limit_bytes], 0) is not None
    pool.release()
    assert pool.take([1], 0) is None


def add_late(losses: list[float]) -> None:
    """The thread of updates, which adds gradients of a device, begins when two speculations wait for it."""
    config = config_of(2, "bf16", 2, GUESS, "AdamW") | {"gradient_clipping": 1e3}
    engine = xds.initialize(build("plain"), config)
    host, guesses = engine._parts.updater.stores.host, engine._parts.updater._super_offload
    assert host is not None and guesses is not None
    begin, gate = guesses.begin, threading.Event()

    def begin_and_open(master: Any) -> None:
        begin(master)
        if guesses._num_begun == 2:
            gate.set()

    guesses.begin = begin_and_open  # type: ignore[method-assign]
    for step in range(3):
        if step == 1:
            host.queues.updates.run(partial(gate.wait, on_busy_machines(60)))
        _step(engine, step, "nothing")
        losses.append(engine.get_global_grad_norm())
    assert guesses.num_used > 0
    engine.destroy()


def test_no_speculation_waits_for_a_sum_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[float]] = [[], []]
    run_ranks(add_late, 1, found[0])
    # as gradients of a device are added
    staged = HostGradStore._staged
    monkeypatch.setattr(
        HostGradStore, "_add", lambda self, to, value, done: staged(self, value, to.add_, done)
    )
    seconds = on_busy_machines(20)
    monkeypatch.setattr(_ThreadHandle, "wait", lambda handle: handle._future.result(seconds))
    run_ranks(add_late, 1, found[1])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("optimizer", "offload", "words"),
    [
        ("Lamb", {"device": "cpu"}, "Lamb uses norms or products of whole tensors"),
        ("Muon", {"device": "cpu"}, "Muon uses norms or products of whole tensors"),
        ("AdamW", {"device": "none"}, "needs updates on the host"),
    ],
)
def test_refused(optimizer: str, offload: dict[str, Any], words: str) -> None:
    zero = {"stage": 2, "offload_optimizer": offload | {"super_offload": True}}
    optimizer_section = {"type": optimizer, "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(ConfigError, match=words):
        xds.Config.load(config | {"optimizer": optimizer_section})
