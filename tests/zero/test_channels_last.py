"""Weights of convolutions in the memory format `channels_last` of torch, which flat buffers keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from torch import Tensor, nn

import xds

SAMPLES, STEPS = 12, 3
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
HOST = {"offload_optimizer": {"device": "cpu"}}
ADAFACTOR = {"optimizer": lambda groups: torch.optim.Adafactor(groups, lr=1e-2)}


class Net(nn.Module):
    """Convolutions over pictures and one over clips, of sizes that no shard divides; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3)
        self.body = nn.Conv2d(7, 5, (3, 1), bias=False)
        self.point = nn.Conv2d(5, 6, 1)
        self.clip = nn.Conv3d(2, 3, 2)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(self.body(self.stem(x).relu()).relu())
        x = self.clip(x.unflatten(1, (2, 3)))
        return self.head(x.mean((2, 3, 4))).square().mean()


def net(*, last: bool, frozen: bool = False) -> Net:
    torch.manual_seed(3)
    model = Net()
    for module in model.children() if last else ():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.to(memory_format=FORMATS[module.weight.dim()])
    model.body.requires_grad_(not frozen)
    return model


def batch(step: int, micro_step: int = 0) -> Tensor:
    """This rank's part."""
    generator = torch.Generator().manual_seed(10 * step + micro_step)
    whole = torch.randn(SAMPLES, 3, 7, 6, generator=generator)
    return runs.of_rank(whole).contiguous(memory_format=torch.channels_last)


def engine_of(stage: int, *, last: bool, frozen: bool = False, **more: Any) -> Any:
    given = {key: more.pop(key) for key in ("optimizer",) if callable(more.get(key))}
    config = runs.config(stage, samples=SAMPLES // dist.get_world_size(), **more)
    if given:
        del config["optimizer"]
    return xds.initialize(net(last=last, frozen=frozen), config, **given)


def values_of(engine: Any, key: str = "exp_avg") -> dict[str, Tensor]:
    """Full values, and full states if the optimizer has them."""
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = xds.zero.get_full_param(param).clone(memory_format=torch.contiguous_format)
        if param.requires_grad and key:
            found[f"{name}/{key}"] = xds.zero.get_full_optimizer_state(param, key).contiguous()
    return found


def check_equal(one: dict[str, Tensor], two: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, two[name], msg=lambda text, at=name: f"{at}: {text}", **tolerance
        )


EXACT = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


# -- training -----------------------------------------------------------------------------------------------


def strides_of(module: nn.Module) -> tuple[int, ...]:
    """Of the weight, without dimensions of size 1, where any stride means the same."""
    pairs = zip(module.weight.shape, module.weight.stride(), strict=True)
    return tuple(stride for size, stride in pairs if size > 1)


def trained(stage: int, last: bool, key: str, more: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(stage, last=last, **more)
    strides: dict[str, tuple[int, ...]] = {}

    def look(module: nn.Module, _: Any) -> None:
        strides[str(module)] = strides_of(module)

    handles = [module.register_forward_pre_hook(look) for module in engine.module.children()]
    found = runs.train(engine, STEPS, batch)
    values = values_of(engine, key)
    whole = engine.full_state_dict()
    assert all(value.is_contiguous() for value in whole.values())
    for handle in handles:
        handle.remove()
    engine.destroy()
    ended = {str(module): strides_of(module) for module in engine.module.children()}
    return {"steps": found, "values": values, "strides": strides, "ended": ended, "whole": whole}


KINDS = {
    "adamw": ("exp_avg", {}),
    "bf16": ("exp_avg", {"torch_autocast": {"enabled": True, "dtype": "bf16"}}),
    "host": ("exp_avg", {"zero": HOST}),
    "muon": ("", {"optimizer": "Muon"}),
    "adafactor": ("", {"optimizer": "Adafactor"}),
    "lamb": ("exp_avg", {"optimizer": "Lamb"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("adamw", "bf16")
def test_training_equals_that_of_row_major_weights_at_every_stage(kind: str) -> None:
    key, more = KINDS[kind]
    stages = {"adamw": [0, 1, 2, 3], "host": [1, 3]}.get(kind, [0, 3])
    plain = run_ranks(trained, 2, stages[0], False, key, more)[0]
    wanted = {str(module): strides_of(module) for module in net(last=True).children()}
    assert wanted != plain["strides"]
    tolerance = {"rtol": 0.05, "atol": 0.01} if kind in ("muon", "bf16") else CLOSE
    first = None
    for stage in stages:
        found = run_ranks(trained, 2, stage, True, key, more)[0]
        assert found["strides"] == found["ended"] == wanted
        check_equal(found["values"], plain["values"], **tolerance)
        check_equal(found["whole"], plain["whole"], **tolerance)
        first = first or found
        check_equal(found["values"], first["values"], **EXACT)
        assert found["steps"] == first["steps"]


def from_init() -> tuple[dict[str, Tensor], tuple[int, ...]]:
    config = runs.config(3, samples=SAMPLES // 2)
    torch.manual_seed(3)
    with xds.zero.Init(config):
        model = Net()
    for module in (model.stem, model.body, model.point):
        module.to(memory_format=torch.channels_last)
    engine = xds.initialize(model, config)
    values = values_of(engine, "")
    with xds.zero.GatheredParameters(list(model.parameters())):
        strides = model.stem.weight.stride()
    engine.destroy()
    return values, strides


def test_a_model_of_zero_init_is_converted_before_initialize() -> None:
    for values, strides in run_processes(from_init, 2):
        assert strides == net(last=True).stem.weight.stride()
        for name, param in net(last=False).named_parameters():
            assert values[name].equal(param)


def accessed(stage: int) -> None:
    engine = engine_of(stage, last=True, accumulation=2)
    engine.backward(engine(batch(0, 0)))
    engine.step()
    engine.backward(engine(batch(0, 1)))
    plain = net(last=False)
    for micro_step in range(2):
        torch.manual_seed(0)
        whole = torch.cat([batch_of(0, micro_step, rank) for rank in range(2)])
        (plain(whole) / 2).backward()
    for param, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(xds.zero.get_full_grad(param), other.grad, **CLOSE)
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
        xds.zero.set_full_grad(param, grad)
        torch.testing.assert_close(xds.zero.get_full_grad(param), grad)
    engine.step()
    for param in engine.module.parameters():
        value = torch.randn(param.shape, generator=torch.Generator().manual_seed(2))
        xds.zero.set_full_param(param, value)
        xds.zero.set_full_optimizer_state(param, value + 1, "exp_avg")
        assert xds.zero.get_full_param(param).equal(value)
        assert xds.zero.get_full_optimizer_state(param, "exp_avg").equal(value + 1)
        with xds.zero.GatheredParameters(param, modifier_rank=0):
            assert param.equal(value)
            with torch.no_grad():
                param.flatten()[1:].zero_() if param.dim() == 1 else param[:, 0].zero_()
        changed = xds.zero.get_full_param(param)
        assert changed.dim() == 1 or (
            changed[:, 0].eq(0).all() and changed[:, 1:].equal(value[:, 1:])
        )
    engine.load_state_dict(net(last=False).state_dict())
    engine.eval()
    whole = engine(batch(4))
    torch.testing.assert_close(whole, net(last=False)(batch(4)), **CLOSE)
    engine.destroy()


def batch_of(step: int, micro_step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + micro_step)
    return torch.randn(SAMPLES, 3, 7, 6, generator=generator).chunk(2)[rank]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_values_gradients_and_states_are_those_of_the_shape(stage: int) -> None:
    run_ranks(accessed, 2, stage)


# -- optimizers that get whole parameters -------------------------------------------------------------------


def whole_params(last: bool, more: dict[str, Any]) -> dict[str, Tensor]:
    engine = engine_of(0, last=last, frozen=False, **more)
    runs.train(engine, STEPS, batch)
    values = values_of(engine, "")
    engine.destroy()
    return values


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_optimizer_that_uses_shapes_gets_those_of_the_parameters(num_ranks: int) -> None:
    (found, *_), (plain, *_) = (
        run_ranks(whole_params, num_ranks, last, ADAFACTOR) for last in (True, False)
    )
    check_equal(found, plain, rtol=2e-3, atol=1e-5)


def whole_saved(folder: str, last: bool, more: dict[str, Any], start: int) -> dict[str, Tensor]:
    """torch's Adam on one rank: its states have the parameters' shapes, perhaps in a file."""
    engine = engine_of(1 if more.get("zero") else 0, last=last, **more)
    if start:
        engine.load_checkpoint(folder)
    runs.train(engine, range(start, start + 2), batch)
    engine.save_checkpoint(folder)
    values = values_of(engine)
    engine.destroy()
    return values


TORCHS = {"optimizer": lambda groups: torch.optim.Adam(groups, lr=1e-2)}


@pytest.mark.parametrize("place", ["memory", "host", "disk"])
@pytest.mark.quick("memory")
def test_states_of_whole_parameters_are_saved_and_loaded(tmp_path: Path, place: str) -> None:
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "disk")}}
    more = {**TORCHS, "zero": {"memory": {}, "host": HOST, "disk": disk}[place]}
    found = {}
    for first, second in ((True, True), (False, False), (True, False), (False, True)):
        folder = str(tmp_path / f"{first}{second}")
        run_ranks(whole_saved, 1, folder, first, more, 0)
        found[first, second] = run_ranks(whole_saved, 1, folder, second, more, 2)[0]
    for values in found.values():
        check_equal(values, found[True, True], **CLOSE)


def frozen_between_steps(last: bool) -> dict[str, Tensor]:
    engine = engine_of(0, last=last, **TORCHS)
    runs.train(engine, 1, batch)
    before = values_of(engine)
    engine.module.body.weight.requires_grad_(False)
    runs.train(engine, range(1, 3), batch)
    engine.module.body.weight.requires_grad_(True)
    after = values_of(engine)
    for name in ("body.weight", "body.weight/exp_avg"):
        assert after[name].equal(before[name])
    engine.destroy()
    return after


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_frozen_between_steps_stays_as_it_is(num_ranks: int) -> None:
    found, plain = (run_ranks(frozen_between_steps, num_ranks, last)[0] for last in (True, False))
    check_equal(found, plain, **CLOSE)


# -- checkpoints --------------------------------------------------------------------------------------------


def saved(folder: str, stage: int, last: bool, frozen: bool) -> tuple[dict[str, Tensor], list[Any]]:
    engine = engine_of(stage, last=last, frozen=frozen)
    runs.train(engine, 2, batch)
    engine.save_checkpoint(folder)
    values = values_of(engine)
    steps = runs.train(engine, range(2, 4), batch)
    engine.destroy()
    return values, steps


def loaded(
    folder: str, stage: int, last: bool, frozen: bool
) -> tuple[dict[str, Tensor], list[Any]]:
    engine = engine_of(stage, last=last, frozen=frozen)
    engine.load_checkpoint(folder)
    values = values_of(engine)
    steps = runs.train(engine, range(2, 4), batch)
    engine.destroy()
    return values, steps


CASES = [(True, 2, 3, False), (False, 3, 1, True), (True, 0, 2, True)]


@pytest.mark.parametrize(("last", "stage", "other", "frozen"), CASES)
@pytest.mark.quick("True-2-3-False")
def test_checkpoints_load_into_the_same_and_the_other_format(
    tmp_path: Path, last: bool, stage: int, other: int, frozen: bool
) -> None:
    folder = str(tmp_path)
    values, steps = run_ranks(saved, 2, folder, stage, last, frozen)[0]
    manifest = (tmp_path / "global_step2" / "manifest.json").read_text()
    assert ("channels_last" in manifest) == last  # others are as before
    for num_ranks, to_last in ((2, last), (2, not last), (3, not last), (1, last)):
        found, more = run_ranks(loaded, num_ranks, folder, other, to_last, frozen)[0]
        check_equal(found, values, **EXACT)
        if num_ranks == 2:
            wanted = pytest.approx([step.norm for step in steps], rel=1e-4)
            assert [step.norm for step in more] == wanted
    whole = xds.get_fp32_state_dict(folder)
    assert all(value.is_contiguous() for value in whole.values())
    check_equal(whole, {name: values[name] for name in whole}, **EXACT)
    net(last=True).load_state_dict(whole)


def unfinished(folder: str, stage: int, last: bool, load: bool) -> Any:
    engine = engine_of(stage, last=last, accumulation=2)
    if load:
        engine.load_checkpoint(folder)
    else:
        engine.backward(engine(batch(0, 0)))
        engine.step()
        engine.save_checkpoint(folder)
    engine.backward(engine(batch(0, 1)))
    engine.step()
    values = values_of(engine)
    engine.destroy()
    return values


@pytest.mark.parametrize("stage", [1, 2])
def test_an_unfinished_step_goes_on_or_is_refused(tmp_path: Path, stage: int) -> None:
    folder = str(tmp_path)
    wanted = run_ranks(unfinished, 2, folder, stage, True, False)[0]
    check_equal(run_ranks(unfinished, 2, folder, stage, True, True)[0], wanted, **EXACT)
    if stage == 2:  # shards of sums are found by name
        check_equal(run_ranks(unfinished, 2, folder, stage, False, True)[0], wanted, **CLOSE)
        return
    with pytest.raises(AssertionError, match="was saved with other flat buffers"):
        run_ranks(unfinished, 2, folder, stage, False, True)


def one_rank_differs() -> str:
    with pytest.raises(xds.UsageError) as caught:
        engine_of(2, last=dist.get_rank() == 1)
    return str(caught.value)


def test_ranks_with_other_formats_are_told() -> None:
    for text in run_ranks(one_rank_differs, 2):
        assert "parameter stem.weight float32[7, 3, 3, 3] (channels_last) on rank 1" in text
