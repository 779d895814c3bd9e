"""Checkpoints, `xds.zero.Init`, and accesses to single parameters on a CUDA device that is host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks  # the next module of this folder goes on with them, and ends them
from helpers import run_processes
from test_features import engine_of, inputs_of, micro_batch, train
from test_rehearsal import build, config_of, waits
from torch import Tensor, nn

pytestmark = pytest.mark.slow  # by default test_rehearsal, _offload, _decisions and _models run


def whole(engine: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = engine.full_state_dict(rank0_only=False, full_precision=True)
    assert all(value.device.type == "cpu" for value in found.values())
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


# -- checkpoints --------------------------------------------------------------------------------------------


def saved(folder: str, stage: int, precision: str, background: bool) -> tuple[Any, list[float]]:
    """The states that were saved, and the losses of two steps after it."""
    engine = engine_of(stage, precision, checkpoint={"async_save": background})
    train(engine, 0, 2)
    states = whole(engine)
    before = waits().get("copy_to_host", 0)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    if background:
        # the tensors are copied with one wait, for their stream; these are agreements of the ranks
        assert waits().get("copy_to_host", 0) - before <= 2
    losses = train(engine, 2, 4)
    engine.wait_for_checkpoint()
    engine.destroy()
    return states, losses


def resumed(folder: str, stage: int, precision: str) -> tuple[Any, list[float]]:
    """The states that an engine has after a load, and the losses of two steps after it."""
    engine = engine_of(stage, precision)
    with torch.no_grad(), _whole(engine.module):
        for param in engine.module.parameters():
            param.fill_(0.5)
    micro_batch(
        engine, inputs_of(engine, 9)
    )  # its gradients and its gathered weights must not stay
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {"epoch": 3} and engine.global_steps == 2
    states = whole(engine)
    losses = train(engine, 2, 4)
    engine.destroy()
    return states, losses


def _whole(module: nn.Module) -> Any:
    import xds

    return xds.zero.GatheredParameters(module, modifier_rank=0)


@pytest.mark.parametrize(
    ("stage", "precision", "background", "other"),
    [
        pytest.param(3, "bf16", True, 0, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_the_device_is_that_of_the_cpu(
    stage: int, precision: str, background: bool, other: int, tmp_path: Path
) -> None:
    """It is loaded by the same ranks, by one rank at another stage, and by ranks of the CPU."""
    import xds

    folder = str(tmp_path)
    found = ranks(2).run(saved, folder, stage, precision, background)
    states = found[0][0]
    assert ranks(2).run(resumed, folder, stage, precision)[1][1] == found[1][1]
    again, losses = ranks(1).run(resumed, folder, other, precision)[0]
    elsewhere, plain = run_processes(resumed, 1, folder, other, precision)[0]
    exact = xds.get_fp32_state_dict(folder)
    assert all(same(states, one) for one in (again, elsewhere, exact))
    assert losses == pytest.approx(plain, rel=1e-5 if precision == "fp32" else 3e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3)])
def test_another_number_of_ranks_resumes(before: int, after: int, tmp_path: Path) -> None:
    states = ranks(before).run(saved, str(tmp_path), 3, "bf16", True)[0][0]
    assert all(
        same(states, found) for found, _ in ranks(after).run(resumed, str(tmp_path), 2, "bf16")
    )


@pytest.mark.slow
def test_a_checkpoint_of_the_cpu_loads_on_the_device(tmp_path: Path) -> None:
    states = run_processes(saved, 1, str(tmp_path), 0, "bf16", False)[0][0]
    assert all(same(states, found) for found, _ in ranks(2).run(resumed, str(tmp_path), 3, "bf16"))


# -- one parameter ------------------------------------------------------------------------------------------


def accesses(stage: int, precision: str, given: str) -> list[list[float]]:
    """What all functions of xds.zero return. given: the device of values that are set; "": the engine's."""
    import xds
    from xds import zero

    engine = engine_of(stage, precision)
    first, second = engine.module[0].weight, engine.module[3].weight
    device = given or engine.device
    found: list[list[float]] = []

    def note(value: Tensor) -> None:
        assert value.device.type == engine.device.type
        found.append(value.float().flatten().tolist())

    def like(param: Tensor, low: float, high: float) -> Tensor:
        return torch.linspace(low, high, param.numel(), device=device).view(param.shape)

    note(zero.get_full_param(second))
    assert (
        zero.safe_get_full_grad(first) is zero.safe_get_full_optimizer_state(first, "step") is None
    )
    found.append([micro_batch(engine, inputs_of(engine, 0)).item()])
    note(zero.get_full_grad(second))
    zero.set_full_grad(first, like(first, -0.1, 0.1))
    note(zero.get_full_grad(first))
    engine.step()
    note(zero.get_full_optimizer_state(first, "exp_avg"))
    zero.set_full_optimizer_state(second, like(second, -1e-3, 1e-3), "exp_avg")
    zero.set_full_param(second, like(second, -0.3, 0.2))
    for value in (zero.get_full_optimizer_state(second, "exp_avg"), zero.get_full_param(second)):
        note(value)
    last = dist.get_world_size() - 1
    with zero.GatheredParameters(engine.module[5], modifier_rank=last):
        if dist.get_rank() == last:
            nn.init.constant_(engine.module[5].bias, 0.5)
        with zero.GatheredParameters(engine.module.parameters()):
            note(engine(inputs_of(engine, 1)).detach())
    note(zero.get_full_param(engine.module[5].bias))
    if stage == 3 and last:
        with pytest.raises(xds.UsageError, match="changed inside GatheredParameters without"):
            with zero.GatheredParameters(first), torch.no_grad():
                first.mul_(2)
    found.append(train(engine, 2, 4))
    engine.load_state_dict({name: 0.5 * value for name, value in engine.state_dict().items()})
    found.append(train(engine, 4, 6))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "given"),
    [
        (2, 3, "bf16", "cpu"),
        pytest.param(2, 1, "bf16", "cpu", marks=pytest.mark.slow),
    ],
)
def test_single_parameters_are_read_and_written(
    world_size: int, stage: int, precision: str, given: str
) -> None:
    plain = run_processes(accesses, world_size, stage, precision, given)
    for found, expected in zip(
        ranks(world_size).run(accesses, stage, precision, given), plain, strict=True
    ):
        _check_close(found, expected, 1e-4 if precision == "fp32" else 5e-2)


def _check_close(found: list[list[float]], expected: list[list[float]], tolerance: float) -> None:
    """Within `tolerance` of the largest number of each list."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        largest = max(map(abs, other))
        assert one == pytest.approx(other, abs=tolerance * largest, rel=0)


# -- construction in shards ---------------------------------------------------------------------------------


def constructed(precision: str, where: str) -> tuple[list[list[float]], list[float]]:
    """The first weights and the losses of a model that is built in shards, on `where`, or on meta."""
    import xds

    config = config_of(3, precision, 1)
    if where == "meta":
        with torch.device("meta"):
            model = build()
    else:
        with (
            xds.zero.Init(config),
            torch.device("cuda" if where == "device" and _has_device() else "cpu"),
        ):
            model = build()
        with xds.zero.GatheredParameters(model[3], modifier_rank=0):
            if dist.get_rank() == 0:
                nn.init.constant_(model[3].bias, 0.25)
        with xds.zero.GatheredParameters(model[3]):
            assert (model[3].bias == 0.25).all()
    engine = xds.initialize(model, config)
    weights = [value.flatten().tolist() for value in whole(engine).values()]
    losses = train(engine, 0, 3)
    engine.destroy()
    return weights, losses


def _has_device() -> bool:
    return torch.cuda.is_available()


@pytest.mark.parametrize(
    ("world_size", "precision", "where"),
    [
        (2, "bf16", "host"),
        pytest.param(2, "fp16", "meta", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_built_in_shards(world_size: int, precision: str, where: str) -> None:
    plain = run_processes(constructed, world_size, precision, where)
    for found, expected in zip(
        ranks(world_size).run(constructed, precision, where), plain, strict=True
    ):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], rel=1e-5 if precision == "fp32" else 3e-2)
