"""What a script writes to parameters between steps counts, or raises: also on some ranks only, and by freezing.

Writes inside of a forward, and training with frozen parameters, are compared with plain PyTorch in tests/fuzz.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from helpers import SMALL_NUMEL, run_ranks
from torch import Tensor, nn

import xds
from xds.utils.errors import UsageError

WIDTH = 12
assert WIDTH < SMALL_NUMEL < WIDTH**2  # gradients are copied in both ways


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.zeros(1, 1))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return ((self.last(x) * self.scale + self.bias).float() ** 2).mean()


def build() -> Net:
    torch.manual_seed(0)
    return Net(WIDTH)


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def config_of(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    params = {"eps": 1e-4, "weight_decay": 0.1}
    return runs.config(
        stage, precision, samples=3, params=params, zero={"stage3_max_reuse_distance": 0}, **more
    )


def step_of(engine: xds.Engine, step: int) -> float:
    x = samples(step, engine.global_rank)
    loss = engine(x.bfloat16() if engine.config.bf16.enabled else x)
    engine.backward(loss)
    engine.step()
    return runs.mean_over_ranks(loss)


# -- between steps ------------------------------------------------------------------------------------------


EDITS = ("in place", "through data", "assigned", "transposed", "gathered", "loaded")


@torch.no_grad()
def make_zero(model: nn.Module, how: str) -> None:
    if how == "loaded":
        model.load_state_dict({key: value * 0 for key, value in model.state_dict().items()})
        return
    for param in model.parameters():
        if how == "in place":
            param.mul_(0)
        elif how == "through data":
            param.data.zero_()
        elif how == "transposed":
            turned = tuple(range(param.dim()))[::-1]
            param.data = torch.zeros(param.shape[::-1], dtype=param.dtype).permute(turned)
        else:
            param.data = torch.zeros_like(param.data)
    if how == "gathered":  # a context that reads parameters must not lose an earlier assignment
        with xds.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for param in model.parameters():
                param.data.mul_(0.5)


def state_at_last(engine: xds.Engine) -> dict[str, Tensor]:
    """Every unit raises once for an assignment to its parameters."""
    for _ in range(10):
        try:
            return engine.full_state_dict(rank0_only=False)
        except UsageError:
            pass
    raise AssertionError("it goes on raising")


def write(stage: int, precision: str, how: str, folder: str) -> None:
    engine = xds.initialize(build(), config_of(stage, precision))
    step_of(engine, 0)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    before = engine.full_state_dict(rank0_only=False)
    if stage < 3:
        make_zero(engine.module, how)
        engine.save_checkpoint(folder, "zeros")  # a save takes the script's values
        step_of(engine, 1)
        assert not any(value.any() for value in engine.full_state_dict().values())
        engine.load_checkpoint(folder, "zeros")
        assert not any(value.any() for value in engine.full_state_dict().values())
    else:  # torch refuses some of them itself
        names = "GatheredParameters|engine.load_state_dict|engine.state_dict|single memory location"
        with pytest.raises((UsageError, RuntimeError), match=names):
            make_zero(engine.module, how)
            engine.full_state_dict()
        same = state_at_last(engine)
        for name, value in before.items():
            # one element is never dropped, so such a write counts at stage 3 too
            assert value.numel() == 1 or torch.equal(same[name], value), name
    engine.destroy()


def write_in_every_way(folder: str) -> None:
    for stage, precision in ((0, "bf16"), (2, "fp32"), (3, "bf16")):
        for number, how in enumerate(EDITS):
            write(stage, precision, how, f"{folder}/{stage}{number}")


def test_writes_between_steps_count_or_raise(tmp_path: Path) -> None:
    run_ranks(write_in_every_way, 2, str(tmp_path))


def refusals(stage: int, precision: str) -> None:
    """What raises loses nothing: the engine trains on as the one beside it."""
    models = [build(), build()]
    for model in models:
        model.blocks[1].requires_grad_(False)
    model, frozen = models[0], models[0].blocks[1].linear
    engine, other = (xds.initialize(model, config_of(stage, precision)) for model in models)
    x = samples(1, engine.global_rank)
    assert step_of(engine, 0) == step_of(other, 0)
    model.double() if precision == "fp32" else model.float()
    with pytest.raises(UsageError, match=r"changed their dtype after(.|\n)*bf16 or torch_autocast"):
        engine(x)
    assert step_of(engine, 1) == step_of(other, 1)
    frozen.requires_grad_(True)
    with pytest.raises(UsageError, match=r"blocks\.1\.linear\.weight\.requires_grad_\(True\)"):
        engine(x)
    frozen.requires_grad_(False)
    assert step_of(engine, 2) == step_of(other, 2)
    if stage < 3:
        engine.backward(engine(x.to(model.first.weight.dtype)))
        model.first.weight.data = torch.zeros(3, WIDTH)
        with pytest.raises(UsageError, match="first.weight.*unchanged; assign a tensor of that"):
            engine.step()
        assert model.first.weight.any()
    engine.destroy()
    other.destroy()


def test_another_dtype_or_shape_and_late_unfreezing_raise_and_lose_nothing() -> None:
    for case in ((0, "bf16"), (2, "fp32"), (3, "fp32")):
        run_ranks(refusals, 2, *case)


def swap(stage: int, swaps: bool, zero: dict[str, Any]) -> dict[str, Tensor]:
    """Two steps in bf16; before each one other values serve a forward, and the old ones are put back."""
    settings = config_of(stage, "bf16")
    settings["zero_optimization"].update(zero)
    engine = xds.initialize(build(), settings)
    params = list(engine.module.parameters())
    for step in range(2):
        if swaps:
            with xds.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
                kept = [param.detach().clone() for param in params]
                for param in params:
                    param.mul_(0.5)
            with torch.no_grad():
                engine(samples(step, 0).bfloat16())
            with xds.zero.GatheredParameters(params, modifier_rank=1), torch.no_grad():
                for param, value in zip(params, kept, strict=True):
                    param.copy_(value)
        step_of(engine, step)
    found = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return found


def swap_at_every_stage(folder: str) -> None:
    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": folder}
    for stage, zero in (
        *((stage, {}) for stage in (0, 2, 3)),
        (2, {"offload_optimizer": host}),
        (3, {"offload_optimizer": host, "offload_param": host}),
        (3, {"offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0}}),
    ):
        wanted, found = swap(stage, False, zero), swap(stage, True, zero)
        for name, value in wanted.items():
            assert found[name].equal(value), (stage, zero, name)


def test_values_that_are_swapped_for_an_evaluation_and_put_back_leave_the_masters(
    tmp_path: Path,
) -> None:
    run_ranks(swap_at_every_stage, 2, str(tmp_path))


# -- on some ranks only --------------------------------------------------------------------------------------

WRITTEN = r"^0\.weight was written on some ranks only: rank 0 and rank 1 have different values; "
OLD, OWN = WRITTEN + "it has its old values again", WRITTEN + "each rank still has its own values"


def two_layers(stage: int, precision: str = "fp32") -> xds.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    zero = {"stage3_param_persistence_threshold": 10**6}  # weights stay gathered
    settings = runs.config(stage, precision, optimizer="SGD", params={"lr": 0.1}, zero=zero)
    return xds.initialize(model, settings)


def a_step(engine: xds.Engine) -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(engine.global_rank))
    engine.backward(engine(x.to(engine.module[0].weight.dtype)).float().square().mean())
    engine.step()


def fill(weight: Tensor) -> None:
    weight.fill_(2.0)


def assign(weight: Tensor) -> None:
    weight.data = torch.full_like(weight, 2.0)


def one_element(weight: Tensor) -> None:
    weight[-1, -1] = 2.0


def many_times(weight: Tensor) -> None:
    for _ in range(128):
        weight.fill_(2.0)


def values(engine: xds.Engine) -> Tensor:
    return engine.full_state_dict(rank0_only=False)["0.weight"]


def on_one_rank(stage: int, edit: Callable[[Tensor], None], precision: str, of: int) -> None:
    engine = two_layers(stage, precision)
    weight = engine.module[0].weight
    a_step(engine)
    before = values(engine)
    with torch.no_grad():
        if engine.global_rank == of:
            edit(weight)
    with pytest.raises(xds.UsageError, match=OLD if stage == 3 else OWN):
        a_step(engine)
    if stage == 3:
        assert torch.equal(values(engine), before) and torch.equal(weight.float(), before.float())
    else:  # it is refused until the ranks have the same values
        with pytest.raises(xds.UsageError, match=OWN):
            a_step(engine)
        xds.zero.set_full_param(weight, before)
    assert engine.global_steps == 1
    a_step(engine)
    assert not torch.equal(values(engine), before)
    engine.destroy()


def each_edit_on_one_rank(stage: int) -> None:
    for edit in (fill, assign, many_times):
        on_one_rank(stage, edit, "fp32", 0)
    on_one_rank(stage, one_element, "bf16", 1)


def test_a_write_on_one_rank_only_is_refused_on_all() -> None:
    for stage in (0, 1, 3):
        run_ranks(each_edit_on_one_rank, 2, stage)


def on_every_rank(stage: int) -> None:
    engine = two_layers(stage)
    weight = engine.module[0].weight
    for edit in (fill, assign, one_element):
        with torch.no_grad():
            edit(weight)
            wanted = weight.detach().clone()
        a_step(engine)
        assert torch.allclose(values(engine), wanted, atol=0.1)
    with torch.no_grad():  # one rank writes more often than the other, but the same values
        for _ in range(1 + engine.global_rank):
            fill(weight)
    a_step(engine)
    with xds.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        if engine.global_rank == 1:
            weight.fill_(5.0)
    a_step(engine)
    assert torch.allclose(values(engine), torch.tensor(5.0), atol=0.5)
    engine.destroy()


def test_the_same_values_on_every_rank_count() -> None:
    for stage in (2, 3):
        run_ranks(on_every_rank, 2, stage)


# -- freezing -----------------------------------------------------------------------------------------------


def frozen_for_a_step(stage: int, zero: dict[str, Any]) -> None:
    """Values and states of frozen parameters stay, also of the second of two groups in one buffer."""
    model = build()
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if (p.dim() == 2) == square]} for square in (True, False)
    ]
    config = config_of(stage)
    config["zero_optimization"] |= zero
    engine = xds.initialize(model, config, model_parameters=groups)
    step_of(engine, 0)
    frozen = [*model.blocks[1].parameters(), model.first.bias]
    for param in frozen:
        param.requires_grad_(False)

    def held() -> list[Tensor]:
        states = [xds.zero.get_full_optimizer_state(p, "exp_avg_sq") for p in frozen]
        return [*states, *(xds.zero.get_full_param(p) for p in frozen)]

    before = held()
    step_of(engine, 1)
    assert all(map(torch.equal, before, held()))
    engine.destroy()


def test_states_of_frozen_parameters_stay_in_groups_and_replicas() -> None:
    for stage in (0, 3):
        run_ranks(frozen_for_a_step, 2, stage, {})
    for stage in (1, 3):
        run_ranks(frozen_for_a_step, 4, stage, {"mics_shard_size": 2})


def frozen_at_first(stage: int, kind: str, zero: dict[str, Any]) -> None:
    """A parameter that is frozen in the first step gets neither momentum nor decay of that step."""
    params = {"lr": 0.1, "weight_decay": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    model, plain = build(), build()
    optimizer = getattr(torch.optim, kind)(plain.parameters(), **params)
    config = config_of(stage) | {"optimizer": {"type": kind, "params": params}}
    config["zero_optimization"] |= zero
    engine = xds.initialize(model, config)
    for step in range(3):
        for one in (model, plain):
            one.blocks[1].linear.bias.requires_grad_(step > 0)
        step_of(engine, step)
        optimizer.zero_grad()
        torch.stack([plain(samples(step, rank)) for rank in (0, 1)]).mean().backward()
        optimizer.step()
    for name, value in engine.full_state_dict(rank0_only=False).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_parameter_frozen_in_the_first_step_is_as_in_torch_later(kind: str) -> None:
    for stage, zero in ((0, {}), (3, {}), (2, {"offload_optimizer": {"device": "cpu"}})):
        run_ranks(frozen_at_first, 2, stage, kind, zero)


def read_states_of_several_dtypes() -> float:
    """Ranks that hold nothing of a parameter read its states in the dtype of another."""
    worst = 0.0
    for stage in (1, 3):
        model = build()
        model.last.double()
        model.last.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        engine = xds.initialize(model, config_of(stage))
        step_of(engine, 0)
        for param in model.parameters():
            state = xds.zero.get_full_optimizer_state(param, "exp_avg_sq")
            grown = xds.zero.get_full_optimizer_state(param, "exp_avg")
            assert state.dtype == grown.dtype == param.dtype
            # after one step: m = 0.1 g, v = 0.001 g^2
            wrong = (state - 0.001 * (grown / 0.1).square()).abs().max()
            worst = max(worst, float(wrong / state.abs().max().clamp_min(1e-12)))
        engine.destroy()
    return worst


def test_optimizer_states_of_several_dtypes_are_read_as_they_are() -> None:
    assert max(run_ranks(read_states_of_several_dtypes, 3)) < 1e-4
