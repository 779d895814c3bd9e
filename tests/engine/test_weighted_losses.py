"""`backward(loss, weight=n)`: the gradient is that of one process that has the whole batch."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from helpers import run_ranks
from torch import Tensor, nn

import xds
from xds.engine.means import StepMeans
from xds.pipe import PipelineModule
from xds.utils.errors import UsageError, XdsError

STEPS, WIDTH = 4, 8


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def batch(step: int, micro_step: int, rank: int, largest: int = 7) -> tuple[Tensor, Tensor, int]:
    """Inputs, targets, and the number of items, which may be 0: then the mean is NaN."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * micro_step + rank)
    n = int(torch.randint(0, largest, (1,), generator=draw))
    return torch.randn(n, WIDTH, generator=draw), torch.randn(n, 3, generator=draw), n


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def sums(model: nn.Module, step: int, accumulation: int, ranks: int) -> tuple[Tensor, int]:
    """The sum over all items in one process, and their number."""
    total, number = torch.zeros(()), 0
    for micro_step in range(accumulation):
        for rank in range(ranks):
            x, y, n = batch(step, micro_step, rank)
            if n:
                total, number = total + n * loss_of(model(x), y), number + n
    return total, number


def compare(config: dict[str, Any], is_tensor: bool = False, at_once: bool = False) -> float:
    """The worst difference to one process, of losses, norms and weights; and no more messages than without."""
    clip = config.get("gradient_clipping", math.inf)
    engine, plain = xds.initialize(build(), config), build()
    rate = config["optimizer"]["params"]["lr"]
    optimizer = torch.optim.SGD(plain.parameters(), lr=rate)
    worst, dtype = 0.0, next(engine.module.parameters()).dtype
    accumulation, ranks = engine.gradient_accumulation_steps(), engine.dp_world_size
    for step in range(STEPS):
        for micro_step in range(accumulation):
            x, y, n = batch(step, micro_step, engine.dp_rank)
            loss = loss_of(engine(x.to(dtype)), y)
            returned = engine.backward(loss, weight=torch.tensor(n) if is_tensor else n)
            assert returned.equal(loss.detach()) or n == 0
            if at_once and micro_step == accumulation - 1:
                engine.clip_grad_norm(clip)
            engine.step()
        optimizer.zero_grad()
        total, number = sums(plain, step, accumulation, ranks)
        (total / max(number, 1)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip).item()
        optimizer.step()
        if number:
            worst = max(worst, abs(engine.mean_loss() / (total.item() / number) - 1))
            worst = max(worst, abs(engine.get_global_grad_norm() / norm - 1))
    found = engine.full_state_dict(rank0_only=False, full_precision=True)
    for name, value in plain.state_dict().items():
        worst = max(worst, ((found[name] - value).norm() / value.norm()).item())
    engine.destroy()
    return worst


def config_of(stage: int, precision: str = "fp32", **changes: Any) -> dict[str, Any]:
    params = changes.pop("params", {"lr": 0.2})
    return runs.config(stage, precision, samples=1, optimizer="SGD", params=params, **changes)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.quick("0", "3")
def test_the_step_is_that_of_one_process_with_the_whole_batch(stage: int) -> None:
    cases: list[tuple[int, dict[str, Any], bool, bool]] = [
        (1, {"accumulation": 3}, False, False),
        (2, {"clip": 0.05}, True, False),
        (3, {"accumulation": 2, "clip": 0.05}, False, True),
        (2, {"accumulation": 2, "zero": {"offload_optimizer": {"device": "cpu"}}}, False, False),
    ]
    for ranks, changes, is_tensor, at_once in cases:
        found = run_ranks(compare, ranks, config_of(stage, **changes), is_tensor, at_once)
        assert max(found) < 1e-6, (stage, ranks, changes)


@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), (0, "fp16")])
def test_16_bits_and_their_loss_scale(stage: int, precision: str) -> None:
    config = config_of(stage, precision, accumulation=2, clip=0.05)
    assert max(run_ranks(compare, 2, config)) < 2e-2


def ways(stage: int) -> list[Any]:
    """Bytes and numbers of messages of three steps, with weights and without."""
    found = []
    for weight in (None, 4):
        engine = xds.initialize(build(), config_of(stage, comms_logger={"enabled": True}))
        for step in range(3):
            x, y = torch.ones(2, WIDTH), torch.full((2, 3), float(step))
            engine.backward(loss_of(engine(x), y), weight=weight)
            engine.step()
        log = engine.comms_summary()
        found.append(
            (engine.bytes_sent(), [(row.operation, row.size_bytes, row.count) for row in log.rows])
        )
        found.append((engine.get_global_grad_norm(), engine.mean_loss()))
        engine.destroy()
    return found


def test_weights_add_no_message_and_equal_ones_change_no_digit() -> None:
    for stage in (0, 2, 3):
        for sent, values, sent_with, values_with in run_ranks(ways, 2, stage):
            assert sent == sent_with
            assert values_with == pytest.approx(values, rel=1e-12)


def misuse(stage: int) -> None:
    engine = xds.initialize(build(), config_of(stage, accumulation=2))
    x, y = torch.ones(2, WIDTH), torch.ones(2, 3)

    def backward(**how: Any) -> None:
        engine.backward(loss_of(engine(x), y), **how)
        engine.step()

    for wrong in (-1, math.nan, math.inf, 10**400, 1e-320, True, "3", torch.ones(2)):
        with pytest.raises(UsageError, match="weight"):
            engine.backward(loss_of(engine(x), y), weight=wrong)
    engine.zero_grad()
    # one micro-batch of a step has a weight, and another has none
    backward(weight=2)
    with pytest.raises(UsageError, match="weight=.* in one step"):
        backward()
    with pytest.raises(UsageError, match="weight=.* in one step"):
        loss_of(engine(x), y).backward()
    # gradients have no mean yet
    param = next(engine.module.parameters())
    if stage:
        with pytest.raises(UsageError, match="clip_grad_norm"):
            xds.zero.get_full_grad(param)
        engine.clip_grad_norm(math.inf)
        assert xds.zero.get_full_grad(param) is not None
        engine.backward(loss_of(engine(x), y), weight=3)  # nor with this one
        with pytest.raises(UsageError, match="clip_grad_norm"):
            xds.zero.get_full_grad(param)
    engine.zero_grad()
    backward()  # ends that step
    before = engine.full_state_dict(rank0_only=False)
    # one rank has weights, and another has none
    backward(weight=None if engine.global_rank else 2)
    with pytest.raises(UsageError, match="losses of rank 0 have a weight .* others have none"):
        backward(weight=None if engine.global_rank else 2)
    for name, value in engine.full_state_dict(rank0_only=False).items():
        assert value.equal(before[name])
    # no items at all: the step is skipped
    for _ in range(2):
        backward(weight=0)
    assert engine.get_global_grad_norm() == 0 == engine.mean_loss()
    assert not engine.was_step_applied() and engine.skipped_steps == 1
    for name, value in engine.full_state_dict(rank0_only=False).items():
        assert value.equal(before[name])
    for _ in range(2):
        backward()
    assert math.isfinite(engine.mean_loss()) and engine.get_global_grad_norm() > 0
    engine.destroy()


def test_a_step_with_weights_on_some_micro_batches_or_ranks_is_refused() -> None:
    for stage in (0, 2, 3):
        run_ranks(misuse, 2, stage)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 1}}},
            "OneBitAdam",
        ),
    ],
)
def test_what_keeps_errors_or_sums_is_refused(changes: dict[str, Any], says: str) -> None:
    engine = xds.initialize(build(), config_of(1) | changes)
    with pytest.raises(UsageError, match=says):
        engine.backward(loss_of(engine(torch.ones(2, WIDTH)), torch.ones(2, 3)), weight=2)
    engine.destroy()


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    def run(engine: Any, steps: range) -> None:
        for step in steps:
            x, y, n = batch(step, 0, 0)
            engine.backward(loss_of(engine(x), y), weight=n)
            engine.step()

    config = runs.config(3, "fp16", samples=1)
    config["fp16"] = {"enabled": True, "auto_cast": True, "initial_scale_power": 8}
    engine = xds.initialize(build(), config)
    run(engine, range(3))
    engine.save_checkpoint(tmp_path)
    run(engine, range(3, 6))
    again = xds.initialize(build(), config)
    again.load_checkpoint(tmp_path)
    run(again, range(3, 6))
    for name, value in engine.full_state_dict(full_precision=True).items():
        assert value.equal(again.full_state_dict(full_precision=True)[name])
    engine.destroy()
    again.destroy()


def goes_on(stage: int, bad: bool) -> dict[str, Tensor]:
    """Four steps; with `bad` one more between them, whose loss is NaN and raises."""
    engine = xds.initialize(build(), config_of(stage))
    for step in range(4):
        if bad and step == 2:
            loss = loss_of(engine(torch.ones(2, WIDTH)), torch.ones(2, 3)) * math.nan
            engine.backward(loss, weight=1000)
            with pytest.raises(XdsError, match="the gradient norm over all ranks is nan"):
                engine.step()
        x, y, n = batch(step, 0, engine.dp_rank)
        engine.backward(loss_of(engine(x), y), weight=n + 1 if n else 0)
        engine.step()
    found = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


def test_the_weights_of_a_step_that_raises_do_not_count_in_the_next() -> None:
    for stage in (0, 2, 3):
        wanted, found = (run_ranks(goes_on, 2, stage, bad) for bad in (False, True))
        for name, value in wanted[0].items():
            assert value.equal(found[0][name]), (stage, name)


def test_what_a_refused_load_restores_is_the_same_state() -> None:
    means = StepMeans(torch.device("cpu"), 1.0)
    means.resume(means.state())  # no step has begun: the next one may have weights
    means.begin(is_weighted=True)
    means.add(torch.tensor(2.0), 3.0)
    again = StepMeans(torch.device("cpu"), 1.0)
    again.resume(means.state())
    assert again.message().equal(means.message()) and again.state() == means.state()
    unseen = StepMeans(torch.device("cpu"), 1.0)
    unseen.begin_unseen()  # its loss is not known, and so is not that of the step
    again.resume(unseen.state())
    assert again.message().isnan().tolist() == [False, True] == unseen.message().isnan().tolist()


# -- pipelines ------------------------------------------------------------------------------------------------


def pipelined(stage: int, is_fp16: bool = False) -> float:
    def loss_fn(output: Tensor, labels: tuple[Tensor, Tensor]) -> Any:
        loss = loss_of(output[: len(labels[0])], labels[0])
        return loss, labels[1]

    layers = build()
    plain = copy.deepcopy(layers)
    module = PipelineModule(list(layers), loss_fn=loss_fn, partition_method="uniform")
    fp16 = {"enabled": is_fp16, "auto_cast": is_fp16, "initial_scale_power": 8}
    config = config_of(stage, accumulation=4, clip=0.05, pipeline={"stages": 2}, fp16=fp16)
    engine = xds.initialize(module, config)
    dtype = next(engine.module.parameters()).dtype
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    worst = 0.0

    def batches(step: int) -> Any:
        for micro_step in range(4):
            draw = torch.Generator().manual_seed(100 * step + 10 * micro_step + engine.dp_rank)
            x, labels = numbered(draw)
            yield x.to(dtype), labels

    def numbered(draw: torch.Generator) -> Any:
        x, y = torch.randn(3, WIDTH, generator=draw), torch.randn(3, 3, generator=draw)
        return x, (y, torch.randint(0, 6, (), generator=draw))

    def whole(step: int) -> tuple[Tensor, int]:
        total, number = torch.zeros(()), 0
        for micro_step in range(4):
            for rank in range(engine.dp_world_size):
                draw = torch.Generator().manual_seed(100 * step + 10 * micro_step + rank)
                x, (y, n) = numbered(draw)
                total, number = total + n * loss_of(plain(x), y), number + int(n)
        return total / number, number

    for step in range(STEPS):
        loss = engine.train_batch(batches(step))
        optimizer.zero_grad()
        wanted, _ = whole(step)
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item()
        optimizer.step()
        for found in (loss.item(), engine.mean_loss()):
            worst = max(worst, abs(found / wanted.item() - 1))
        worst = max(worst, abs(engine.get_global_grad_norm() / norm - 1))
    with torch.no_grad():
        worst = max(worst, abs(engine.eval_batch(batches(9)).item() / whole(9)[0].item() - 1))
    engine.destroy()
    return worst


def test_the_loss_function_of_a_pipeline_returns_the_loss_and_its_number_of_items() -> None:
    for ranks, stage in ((2, 0), (4, 1), (4, 3)):
        assert max(run_ranks(pipelined, ranks, stage)) < 1e-6, (ranks, stage)
    assert max(run_ranks(pipelined, 2, 0, True)) < 2e-2


# -- sequence and tensor ranks --------------------------------------------------------------------------------


def of_llama(more: dict[str, Any]) -> tuple[float, float]:
    """The norm and loss of a Llama whose data ranks have different numbers of labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    engine = xds.initialize(model, config_of(2) | more)
    for step in range(2):
        draw = torch.Generator().manual_seed(7 * step + engine.dp_rank)
        ids = torch.randint(0, 61, (1, 16), generator=draw)
        labels = ids.clone()
        labels[:, : 2 + 6 * engine.dp_rank] = -100
        n = int((labels[:, 1:] != -100).sum())
        engine.backward(engine(input_ids=ids, labels=labels).loss, weight=n)
        engine.step()
    found = engine.get_global_grad_norm(), engine.mean_loss()
    engine.destroy()
    return found


@pytest.mark.parametrize(
    "more", [{"sequence_parallel_size": 2}, {"tensor_parallel": {"tp_size": 2}}]
)
def test_ranks_that_share_a_batch_count_it_once(more: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    (wanted, _) = run_ranks(of_llama, 2, {})
    for found in run_ranks(of_llama, 4, more):
        assert found == pytest.approx(wanted, rel=1e-5)


def resumed_within_a_step(stage: int, folder: Path) -> None:
    """Saved between two micro-batches of a step."""
    config = config_of(stage, accumulation=3)
    found = []
    for is_resumed in (False, True):
        engine = xds.initialize(build(), config)
        for micro_step in range(3):
            if is_resumed and micro_step == 2:
                engine.save_checkpoint(folder)
                engine.destroy()
                engine = xds.initialize(build(), config)
                engine.load_checkpoint(folder)
            draw = torch.Generator().manual_seed(10 * micro_step + engine.dp_rank)
            x, y = torch.randn(2, WIDTH, generator=draw), torch.randn(2, 3, generator=draw)
            engine.backward(loss_of(engine(x), y), weight=micro_step + engine.dp_rank)
            engine.step()
        found.append((engine.get_global_grad_norm(), engine.mean_loss()))
        engine.destroy()
    assert found[0] == found[1]


def test_a_checkpoint_within_a_step_keeps_its_weights(tmp_path: Path) -> None:
    for stage in (0, 2, 3):
        run_ranks(resumed_within_a_step, 2, stage, tmp_path / str(stage))
