"""Tests of the number of messages in a step of tensor ranks, and of the thread that sends small ones."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from helpers import run_ranks
from test_tensor_training import PLAN, Mlps

import xds
from xds.ops.comm import light_thread
from xds.ops.comm.light_thread import LightThread


def messages_of_a_step(config: dict[str, Any]) -> tuple[list[str], list[torch.Tensor], float]:
    """Collectives that a step starts after the first ones, the parameters after it, and the norm."""
    torch.set_num_threads(1)
    engine = xds.initialize(Mlps(), config)
    found: list[str] = []
    for step in range(4):  # the first three compare their batches
        ring = engine._sharded.collectives._watch.ring
        ring.clear()
        loss = engine(torch.randn(4, 10, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        found = [mark.kind for mark in ring]
    values = [param.detach().clone() for param in engine.module.parameters()]
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return found, values, norm


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.01,  # the norm counts
        "tensor_parallel": {"tp_size": 2, "plan": PLAN},
    }


def test_a_step_of_two_blocks_has_four_sums_one_reduction_and_one_norm() -> None:
    ranks = run_ranks(messages_of_a_step, 2, config_of(0))
    for kinds, _, _ in ranks:
        assert sorted(kinds) == ["exchange", "reduce_scatter"] + ["tensor sums"] * 4
        assert kinds[-1] == "exchange"
    sharded = run_ranks(messages_of_a_step, 2, config_of(1))
    for (_, values, norm), (_, others, other_norm) in zip(ranks, sharded, strict=True):
        assert norm == other_norm == ranks[0][2]
        assert all(one.equal(other) for one, other in zip(values, others, strict=True))


def test_the_thread_runs_jobs_and_raises_their_errors() -> None:
    thread, names = LightThread(), []

    def nested() -> None:
        names.append(threading.current_thread().name)
        thread.run(lambda: names.append(threading.current_thread().name))  # taken: it runs here

    def fails() -> None:
        raise RuntimeError("no peer")

    thread.run(nested)
    with pytest.raises(RuntimeError, match="no peer"):
        thread.run(fails)
    thread.run(nested)
    assert names == ["xds-messages"] * 4


def test_a_forked_process_gets_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, seen = LightThread(), []
    thread.run(lambda: seen.append(threading.get_ident()))
    monkeypatch.setattr(os, "getpid", lambda: -2)  # as in a copy of this process without the thread
    thread.run(lambda: seen.append(threading.get_ident()))
    assert len({*seen, threading.get_ident()}) == 3


def test_the_thread_ends_without_a_process_group_and_the_next_job_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(light_thread, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    thread, seen = LightThread(), []
    for _ in range(2):
        thread.run(lambda: seen.append(threading.current_thread()))
        seen[-1].join(60)
        assert not seen[-1].is_alive()
    assert seen[0] is not seen[1]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(2):
        thread.run(lambda: seen.append(threading.current_thread()))
    assert seen[2] is seen[3] and seen[3].is_alive()
    seen[3].stop()
    assert not seen[3].is_alive()
