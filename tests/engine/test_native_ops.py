"""An engine with kernels, without them, and where they cannot be built."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import run_new_ranks
from runs import config
from torch import nn

import xds
from xds.ops import libraries
from xds.utils.errors import BuildError

ROWS = 4


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 5))


def rows(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, 8, generator=generator).bfloat16()


def kernels_are_used(native: bool) -> list[torch.Tensor]:
    """The parameters after two steps, by kernels or by torch's ops."""
    settings = config(0, "bf16", samples=ROWS, ops={"native": native, "require": native})
    assert not libraries.is_loaded("cpu")
    engine = xds.initialize(net(), settings)
    for step in range(2):
        engine.backward(engine(rows(step, 0)).float().square().mean())
        engine.step()
    assert libraries.is_loaded("cpu") is native
    return list(engine.full_state_dict(full_precision=True).values())


def test_kernels_do_what_torchs_ops_do() -> None:
    one, other = (run_new_ranks(kernels_are_used, 1, native)[0] for native in (True, False))
    for found, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def without_compiler(folder: str, require: bool) -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("PATH", folder)
    patch.setenv("CXX", "")
    patch.setenv("XDS_CACHE_DIR", folder)
    settings = config(0, "bf16", samples=ROWS, optimizer="Lion", ops={"require": require})
    if require:
        with pytest.raises(BuildError, match="compiler"):
            xds.initialize(net(), settings)
        return
    with pytest.warns(libraries.NativeOpsWarning, match="are not used.*compiler"):
        engine = xds.initialize(net(), settings)
    engine.backward(engine(rows(0, 0)).float().square().mean())
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("require", [False, True])
def test_without_a_compiler_training_warns_and_goes_on_or_refuses(
    tmp_path: Any, require: bool
) -> None:
    run_new_ranks(without_compiler, 1, str(tmp_path), require)


# -- against torch's optimizers on fp32 masters ----------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "AdamW": ({"lr": 1e-2, "weight_decay": 0.1}, torch.optim.AdamW),
    "SGD": (
        {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        torch.optim.SGD,
    ),
    "Adagrad": ({"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1}, torch.optim.Adagrad),
}
STEPS, CLIP = 4, 0.05


def trained(name: str, stage: int, native: bool) -> list[torch.Tensor]:
    """The parameters after every step."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": name, "params": OPTIMIZERS[name][0]},
        "zero_optimization": {"stage": stage, "unit_min_numel": 0},
        "ops": {"native": native, "require": native},
    }
    engine = xds.initialize(net(), config)
    seen = []
    for step in range(STEPS):
        engine.backward(engine(rows(step, torch.distributed.get_rank())).float().square().mean())
        engine.step()
        with xds.zero.GatheredParameters(list(engine.module.parameters())):
            seen.append(torch.cat([p.detach().flatten() for p in engine.module.parameters()]))
    engine.destroy()
    return seen


def plain(name: str, world_size: int) -> list[torch.Tensor]:
    """The same with torch's optimizer on fp32 copies."""
    model = net().bfloat16()
    masters = [p.detach().float() for p in copy.deepcopy(net()).bfloat16().parameters()]
    params, kind = OPTIMIZERS[name]
    optimizer = kind([nn.Parameter(master) for master in masters], **params)
    held = optimizer.param_groups[0]["params"]
    seen = []
    for step in range(STEPS):
        totals = [torch.zeros_like(master) for master in masters]
        for rank in range(world_size):
            model.zero_grad()
            model(rows(step, rank)).float().square().mean().backward()
            for total, param in zip(totals, model.parameters(), strict=True):
                total += param.grad.float() / world_size
        for param, total in zip(held, totals, strict=True):
            param.grad = total
        nn.utils.clip_grad_norm_(held, CLIP)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), held, strict=True):
                param.copy_(master)
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return seen


def every_way(name: str, without: list[torch.Tensor]) -> None:
    runs = [trained(name, stage, native=True) for stage in (1, 2, 3)]
    assert libraries.is_loaded("cpu")
    want = plain(name, torch.distributed.get_world_size())
    for run in (*runs, without):
        for got, expected in zip(run, want, strict=True):
            error = (got.float() - expected.float()).norm() / expected.float().norm()
            assert error < 4e-3, (name, error)  # bf16 has three digits
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def each_optimizer() -> None:
    config = {"train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW"}}
    engine = xds.initialize(net(), config)  # in fp32 nothing is cast
    engine.backward(engine(rows(0, 0).float()).square().mean())
    engine.step()
    engine.destroy()
    without = {name: trained(name, 2, native=False) for name in OPTIMIZERS}
    assert not libraries.is_loaded("cpu")
    for name in OPTIMIZERS:
        every_way(name, without[name])


def test_one_pass_trains_as_torchs_optimizer_on_masters() -> None:
    run_new_ranks(each_optimizer, 2)
