"""Tests of what `destroy` frees: the model keeps its own parameters, and nothing else stays alive."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from torch import Tensor
from warm_ranks import warm

import xds

WIDTH = 96
CPU: dict[str, Any] = {"device": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 3": {"stage": 3},
    "host, early": {"stage": 2, "offload_optimizer": {**CPU, "super_offload": True}},
    "all on the host": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    "ZeRO++": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
}


def living_bytes() -> int:
    """Bytes of the storages of all tensors that Python code can reach, each once."""
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if type(one) in (Tensor, torch.nn.Parameter) and one.device.type != "meta"
    }
    return sum(storages.values())


def kept(zero: dict[str, Any]) -> tuple[int, int]:
    """Bytes of living tensors that an engine leaves after `destroy`, though it is referenced; its model's."""
    before = living_bytes()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    engine = xds.initialize(model, config(zero["stage"], "bf16", zero=zero))
    for _ in range(3):
        x = torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype) * (1 + dist.get_rank())
        engine.backward(engine(x).float().square().mean())
        engine.step()
    del x
    engine.destroy()
    after = living_bytes() - before
    assert all(param.isfinite().all() for param in model.parameters())
    assert engine.optimizer is not None and not engine.optimizer.state
    return after, sum(param.nbytes for param in model.parameters())


def kept_in_each_case() -> dict[str, tuple[int, int]]:
    return {name: kept(zero) for name, zero in CASES.items()}


def test_destroy_frees_all_but_the_parameters() -> None:
    for found in warm(2).run(kept_in_each_case):
        for name, (after, own) in found.items():
            assert own <= after <= 1.05 * own + 4096, name  # gaps, scalars


def values_after_an_old_graph(zero: dict[str, Any]) -> bool:
    """Whether the parameters are as `destroy` left them after backward of a graph from before."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    engine = xds.initialize(model, config(zero["stage"], zero=zero))
    loss = engine(torch.ones(2, WIDTH)).square().mean()
    engine.destroy()
    left = [param.detach().clone() for param in model.parameters()]
    loss.backward()
    return all(map(torch.equal, model.parameters(), left))


def test_backward_of_a_graph_from_before_leaves_the_parameters() -> None:
    for name in ("host, early", "stage 3", "all on the host"):
        assert all(run_ranks(values_after_an_old_graph, 2, CASES[name])), name
