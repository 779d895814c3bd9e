"""Full parameters, gradients and optimizer states of a sharded model: values, bytes, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from runs import config, of_rank
from torch import nn

import xds
from xds import zero


def engine_of(model: nn.Module, stage: int, precision: str = "fp32", steps: int = 1) -> xds.Engine:
    return xds.initialize(model, config(stage, precision, accumulation=steps))


def train(engine: xds.Engine, step: int) -> None:
    engine.backward(engine(of_rank(micro_batch(step, 0, 2 * dist.get_world_size()))))


def read_and_write(stage: int, precision: str) -> None:
    model = build("plain")
    plain = dict(build("plain").named_parameters())
    engine = engine_of(model, stage, precision)
    rounded = torch.bfloat16 if precision == "bf16" else torch.float32
    for name, param in model.named_parameters():
        assert zero.get_full_param(param).equal(plain[name].detach().to(rounded).float()), name
    up, down = model.blocks[1].up.weight, model.blocks[1].down.weight
    assert zero.safe_get_full_grad(up) is None
    assert zero.safe_get_full_optimizer_state(up, "exp_avg") is None

    train(engine, 0)
    for key in ("exp_avg", "exp_avg_sq"):  # made by the forward, on every device
        assert not zero.get_full_optimizer_state(up, key).any()
    whole = build("plain")
    whole(micro_batch(0, 0, 2 * dist.get_world_size())).backward()
    if precision == "fp32":
        for name, param in whole.named_parameters():
            own = model.get_parameter(name)
            torch.testing.assert_close(zero.get_full_grad(own), param.grad, rtol=1e-5, atol=1e-7)
    grads = {name: zero.get_full_grad(param) for name, param in model.named_parameters()}
    zero.set_full_grad(up, torch.full(up.shape, 2.0))
    assert (zero.get_full_grad(up) == 2.0).all()
    engine.step()
    torch.testing.assert_close(
        zero.get_full_optimizer_state(down, "exp_avg"),
        0.1 * grads["blocks.1.down.weight"],
        rtol=1e-5,
        atol=1e-9,
    )
    torch.testing.assert_close(
        zero.get_full_optimizer_state(up, "exp_avg"), torch.full(up.shape, 0.2)
    )
    assert zero.get_full_optimizer_state(down, "step") == 1
    zero.set_full_optimizer_state(down, torch.full(down.shape, 0.5), "exp_avg")
    assert (zero.get_full_optimizer_state(down, "exp_avg") == 0.5).all()
    zero.set_full_param(down, torch.full(down.shape, 0.25))
    assert (zero.get_full_param(down) == 0.25).all()
    with zero.GatheredParameters(down):
        assert (down == 0.25).all()
    norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
    plain_norm = engine.get_global_grad_norm()
    assert plain_norm is not None and plain_norm > norm  # `up` was made larger
    with pytest.raises(xds.UsageError, match="there is no gradient now; call it after backward"):
        zero.get_full_grad(up)
    engine.destroy()


def read_between_micro_batches() -> None:
    engine = engine_of(build("plain"), 1, steps=2)
    train(engine, 0)
    with pytest.raises(xds.UsageError, match="not reduced over the ranks yet"):
        zero.get_full_grad(engine.module.head.weight)
    engine.destroy()


def read_and_write_everywhere() -> None:
    read_between_micro_batches()
    for stage, precision in ((0, "bf16"), (1, "fp32"), (3, "bf16")):
        read_and_write(stage, precision)


def test_values_are_read_and_written_at_every_stage() -> None:
    run_ranks(read_and_write_everywhere, 3)


def edit_by_one_rank(stage: int, precision: str) -> list[float]:
    model = build("plain")
    engine = engine_of(model, stage, precision)
    last = dist.get_world_size() - 1
    rank = dist.get_rank()
    train(engine, 0)
    engine.step()
    bias = model.head.bias
    before = zero.get_full_param(bias)
    with zero.GatheredParameters(bias, modifier_rank=0), torch.no_grad():
        bias[0] = 0.5
    after = zero.get_full_param(bias)
    assert after[0] == 0.5 and after[1:].equal(before[1:])  # masters of other elements stay exact
    assert precision == "fp32" or not before.equal(before.bfloat16().float())
    with zero.GatheredParameters(model.head, modifier_rank=last):
        if rank == last:
            nn.init.constant_(model.head.weight, 0.5)
        with zero.GatheredParameters(model.parameters()):  # nested: reading everything
            engine(micro_batch(0, 0))
    assert (zero.get_full_param(model.head.weight) == 0.5).all()
    train(engine, 0)
    engine.step()
    # the master was edited too: the step started from the new value
    assert (zero.get_full_param(model.head.weight) - 0.5).abs().max() < 0.02
    losses = [float(engine(micro_batch(0, 0)).detach())]
    with torch.no_grad():
        losses.append(float(engine(micro_batch(0, 0))))
    engine.destroy()
    return losses


def edits(precision: str) -> list[list[float]]:
    return [edit_by_one_rank(stage, precision) for stage in (1, 3)]


def test_an_edit_by_one_rank_reaches_all_ranks_and_the_masters() -> None:
    for precision in ("fp32", "bf16"):
        for results in run_ranks(edits, 2, precision):
            assert all(result == results[0] for result in results)
            assert results[0][0] == results[0][1]


def read_what_was_written_through_data() -> None:
    """Parameters that stay gathered; `.data` has no version that counts the writes."""
    settings = config(3, zero={"stage3_param_persistence_threshold": 10**6})
    engine = xds.initialize(build("plain"), settings)
    train(engine, 0)
    engine.step()
    with torch.no_grad():
        engine(micro_batch(0, 0))
    for number, param in enumerate(engine.module.parameters()):
        param.data.fill_(0.5 + number)
        assert (zero.get_full_param(param) == 0.5 + number).all()
    engine.destroy()


def test_a_write_through_data_is_read_at_once() -> None:
    run_ranks(read_what_was_written_through_data, 2)


def refusals() -> list[str]:
    model, other = build("plain"), build("frozen")
    engine = engine_of(model, 3)
    second = engine_of(other, 3)
    down = model.blocks[1].down.weight
    before = zero.get_full_param(down)
    said = []

    def expect(call: Any) -> None:
        with pytest.raises(xds.UsageError) as caught:
            call()
        said.append(str(caught.value))

    def edited() -> None:
        with zero.GatheredParameters(down):
            down.data.mul_(2)

    def left_with_an_error() -> None:
        with zero.GatheredParameters(down, modifier_rank=0):
            down.data.mul_(2)
            raise xds.UsageError("my own")

    expect(edited)
    expect(left_with_an_error)
    expect(lambda: zero.get_full_param(down.detach()))
    expect(lambda: zero.set_full_param(down, torch.zeros(3, 3)))
    expect(lambda: zero.get_full_param([down, model.head.weight][dist.get_rank()]))
    expect(lambda: zero.set_full_param(down, torch.full(down.shape, float(dist.get_rank()))))
    expect(lambda: zero.get_full_grad(other.blocks[1].up.weight))  # frozen
    train(engine, 0)
    engine.step()
    expect(lambda: zero.get_full_optimizer_state(down, "momentum"))
    expect(lambda: zero.GatheredParameters(down, modifier_rank=7).__enter__())
    down_after = zero.get_full_param(down)
    assert not down_after.equal(before) and (down_after - before).abs().max() < 0.02
    down.data.fill_(3.0)  # outside of any context, while it is dropped
    expect(lambda: engine(micro_batch(0, 0)))
    assert zero.get_full_param(down).equal(down_after)
    engine.destroy()
    expect(lambda: zero.get_full_param(down))
    second.destroy()
    return said


def test_wrong_access_raises_and_changes_nothing() -> None:
    said = run_ranks(refusals, 2)
    for part, text in zip(
        [
            "changed inside GatheredParameters without modifier_rank",
            "my own",
            "is not a parameter of a live xds engine",
            "the value has shape (3, 3)",
            "another access, or the same with another parameter",
            "the ranks pass different values",
            "is frozen",
            "the optimizer has exp_avg, exp_avg_sq, step",
            "modifier_rank=7",
            "was written while it was dropped",
            "is not a parameter of a live xds engine",
        ],
        said[0],
        strict=True,
    ):
        assert part in text


def bytes_of_one_read() -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 256), nn.Linear(256, 256))
    engine = engine_of(model, 3)
    before = engine.bytes_sent()
    param = model[1].weight
    zero.get_full_param(param)
    after = engine.bytes_sent()
    engine.destroy()
    return sum(after.values()) - sum(before.values()), param.numel() * 4


def test_reading_one_parameter_sends_only_its_bytes() -> None:
    results = run_ranks(bytes_of_one_read, 3)
    sent = sum(sent for sent, _ in results)  # over all ranks: what each other rank receives
    assert sent <= 1.02 * 2 * results[0][1]


def read_muon() -> list[str]:
    """Keys that can be read, by parameter: an optimizer with other states for other groups."""
    model = nn.Sequential(nn.Embedding(29, 8), nn.LayerNorm(8), nn.Linear(8, 29))
    engine = xds.initialize(model, config(2, samples=4, optimizer="Muon"))
    engine.backward(engine(torch.randint(0, 29, (4,))).square().mean())
    engine.step()
    found = []
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "momentum_buffer"):
            try:
                found.append(
                    f"{name} {key} {tuple(xds.zero.get_full_optimizer_state(param, key).shape)}"
                )
            except xds.UsageError as error:
                found.append(f"{name} {key} {type(error).__name__}")
    engine.destroy()
    return found


def test_ranks_without_a_part_of_a_group_read_its_states_too() -> None:
    one, other = run_ranks(read_muon, 2)
    assert one == other
    assert "0.weight momentum_buffer (29, 8)" in one and "1.bias exp_avg (8,)" in one
    assert "0.weight exp_avg UsageError" in one


def written_after_a_failed_forward(folder: str) -> list[float]:
    """The loss after a forward failed, and values were written in several ways."""
    engine = engine_of(build("plain"), 3)
    batch = micro_batch(0, 0)
    wanted = engine(batch).item()
    param = engine.module.blocks[2].down.weight
    value = zero.get_full_param(param)
    engine.save_checkpoint(folder)
    whole = engine.full_state_dict(rank0_only=False)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    found = [wanted]
    for write in (
        lambda: zero.set_full_param(param, value),
        lambda: engine.load_state_dict(whole),
        lambda: engine.load_checkpoint(folder),
    ):
        zero.set_full_param(param, 3 * value)
        handle = engine.module.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine(batch)  # gathers of the next blocks are under way
        handle.remove()
        write()
        found.append(engine(batch).item())
    engine.destroy()
    return found


def test_values_written_after_a_failed_forward_are_used(tmp_path: Path) -> None:
    for found in run_ranks(written_after_a_failed_forward, 2, str(tmp_path)):
        assert found == [found[0]] * 4
