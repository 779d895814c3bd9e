"""Forward outside of training: evaluation, unequal counts, direct calls, parameters used elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import xds
from xds import zero
from xds.zero.core.flat_params import FlatParams


def config(stage: int = 3, **zero: Any) -> dict[str, Any]:
    zero = {"stage3_max_reuse_distance": 0, **zero}
    return runs.config(stage, optimizer="SGD", params={"lr": 0.1}, zero=zero)


def forgotten(engine: xds.Engine) -> bool:
    """Only persistent units are gathered."""
    units = engine._sharded.units
    return not any(flat.is_unsharded for unit in units for flat in unit.params)


def evaluated() -> None:
    model, plain = build("plain"), build("plain")
    engine = xds.initialize(model, config())
    batch = micro_batch(0, 0)
    with torch.no_grad():
        assert float(engine.eval()(batch)) == float(plain(batch))
    assert forgotten(engine)
    with torch.inference_mode():
        assert float(engine(batch)) == float(plain(batch))
    assert float(engine.eval_batch(iter([batch]), 1)) == pytest.approx(float(plain(batch)))
    engine.train()
    loss = engine(batch)  # a forward without a backward
    del loss
    with torch.no_grad():
        assert float(engine(batch)) == float(plain(batch))
    assert forgotten(engine)


def test_evaluation_needs_no_backward_and_leaves_nothing_gathered() -> None:
    run_ranks(evaluated, 2)


class Borrower(nn.Module):
    """Uses the weights of its blocks in its own code, after and before the blocks have run."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        self.recomputed = recomputed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + F.linear(x, self.blocks[3][0].weight)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
            if number == 2:
                x = x @ self.blocks[0][0].weight
        x = x * self.blocks[1][0].bias
        return F.cross_entropy(self.embed.weight.matmul(x.flatten(0, 1).T).T, tokens.flatten())


def compare(model: nn.Module, plain: nn.Module, steps: int = 4, **zero_: Any) -> None:
    engine = xds.initialize(model, config(**zero_))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(steps):
        tokens = micro_batch(step, 0) % 31
        loss = plain(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mine = engine(runs.of_rank(tokens))
        engine.backward(mine)
        engine.step()
        mean = engine._batches.average(mine.detach().double())
        torch.testing.assert_close(mean, loss.detach(), rtol=1e-5, atol=1e-6)
        if step % 2:
            with torch.no_grad():
                torch.testing.assert_close(engine.eval()(tokens), plain(tokens))
            engine.train()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(zero.get_full_param(param), other.detach())
    assert forgotten(engine)


def borrowed() -> None:
    for recomputed in (False, True):
        torch.manual_seed(2)
        model = Borrower(recomputed)
        torch.manual_seed(2)
        compare(model, Borrower())


def test_parameters_are_used_outside_of_their_unit() -> None:
    run_ranks(borrowed, 2)


class Calling(nn.Module):
    """Calls another unit, which uses this one's weight, between two uses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        return other(x @ self.weight, self) @ self.weight


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, caller: Calling) -> Tensor:
        return torch.tanh(self.linear(x) @ caller.weight)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.calling = nn.ModuleList([Calling() for _ in range(3)])
        self.called = nn.ModuleList([Called() for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for one, other in zip(self.calling, self.called, strict=True):
            x = x + other(
                x, one
            )  # uses the weight of `one`, which is dropped: from now on both are gathered
            x = x + one(x, other)
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def nested() -> None:
    torch.manual_seed(2)
    model = Nested()
    torch.manual_seed(2)
    compare(model, Nested(), units=["Calling", "Called"])


def test_a_unit_that_runs_is_kept_when_one_that_it_calls_has_used_its_weight() -> None:
    run_ranks(nested, 2)


class Late(nn.Module):
    """Uses a block's weight from the sixth step on, after the forwards that are checked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return (x @ self.blocks[0].weight if self.calls > 5 else x).square().mean()


def registered() -> None:
    torch.manual_seed(2)
    model = Late()
    zero.register_external_parameter(model, model.blocks[0].weight)  # no engine owns it yet
    torch.manual_seed(2)
    plain = Late()
    engine = xds.initialize(model, config())
    zero.register_external_parameter(model, model.blocks[0].weight)
    with pytest.raises(xds.UsageError, match="the module is not part of the engine's model"):
        zero.register_external_parameter(plain, model.blocks[0].weight)
    for _ in range(8):
        x = torch.ones(2, 8)
        loss = engine(x)
        assert float(loss) == pytest.approx(float(plain(x)), rel=1e-6)
        engine.backward(loss)
        engine.zero_grad()


def test_a_late_use_can_be_registered() -> None:
    run_ranks(registered, 2)


class Direct(nn.Module):
    """Never called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(8, 4)


def called_in_parts(model: Direct, x: Tensor) -> Tensor:
    x = model.encoder[0](x)  # a unit
    x = model.encoder[1][0](x)  # a layer inside of one
    x = torch.tanh(model.encoder[2][0](x) + model.encoder[1][0](x))
    return model.head(x).square().mean()


def parts_equal_plain() -> None:
    torch.manual_seed(4)
    model = Direct()
    torch.manual_seed(4)
    plain = Direct()
    engine = xds.initialize(model, config())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(2 * dist.get_world_size(), 8, generator=torch.Generator().manual_seed(step))
        loss = called_in_parts(plain, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mine = called_in_parts(engine.module, runs.of_rank(x))
        engine.backward(mine)
        engine.step()
        mean = engine._batches.average(mine.detach().double())
        torch.testing.assert_close(mean, loss.detach(), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        layer, other = model.encoder[1][0], plain.encoder[1][0]
        torch.testing.assert_close(layer(x), other(x))


def test_parts_of_the_model_are_called_directly() -> None:
    run_ranks(parts_equal_plain, 2)


def unequal(stage: int) -> int:
    model, plain = build("plain"), build("plain")
    engine = xds.initialize(model, config(stage))
    rank = dist.get_rank()
    batch = micro_batch(0, 0)
    want = float(plain(batch))
    with engine.uneven_forwards(), torch.no_grad():
        for _ in range(3 * rank + 1):
            assert float(engine(batch)) == want
        if rank == 0:
            assert model.blocks[2](torch.ones(1, 24)).isfinite().all()
    if stage == 3:
        assert forgotten(engine)
        with pytest.raises(xds.UsageError, match=r"backward inside uneven_forwards\(\)"):
            with engine.uneven_forwards():
                engine.backward(engine(batch))
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    assert float(loss) == want
    if rank == 1:
        with pytest.raises(ZeroDivisionError), engine.uneven_forwards():
            engine(batch)
            _ = 1 // 0
    else:
        with engine.uneven_forwards():
            for _ in range(4):
                engine(batch)
    return 3 * rank + 1


def test_ranks_run_unequal_numbers_of_forwards() -> None:
    for world, stage in ((2, 1), (3, 3)):
        assert run_ranks(unequal, world, stage) == [3 * rank + 1 for rank in range(world)]


def generated() -> tuple[list[int], list[int]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        settings = transformers.LlamaConfig(**sizes, **heads, **tokens)
        models.append(transformers.LlamaForCausalLM(settings))
    engine = xds.initialize(models[0], config())
    prompt = torch.tensor([[5, 6, 7]])
    length = 4 + 9 * dist.get_rank()
    outputs = [
        one.generate(prompt, max_new_tokens=length, do_sample=False)[0].tolist()
        for one in (engine.eval(), models[1].eval())
    ]
    loss = engine.train()(input_ids=prompt, labels=prompt).loss
    engine.backward(loss)
    engine.step()
    return outputs[0], outputs[1]


def test_generation_stops_at_different_lengths() -> None:
    results = run_ranks(generated, 2)
    assert all(mine == plain for mine, plain in results)
    assert [len(mine) for mine, _ in results] == [7, 16]


class Skips(nn.Module):
    """Blocks, of which some steps leave out one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.left_out = -1

    def forward(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            if at != self.left_out:
                x = torch.relu(block(x))
        return x.square().mean()


def gathers_started_on_some_ranks(offload: bool) -> list[float]:
    torch.manual_seed(0)
    more = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = xds.initialize(Skips(), config(3, **more))
    waits = pytest.MonkeyPatch()
    if offload and dist.get_rank():  # its update on the host is never done in time
        waits.setattr(FlatParams, "may_start", property(lambda _: False))
    losses = []
    for step in range(5):
        engine.module.left_out = 2 if step % 2 else -1
        loss = engine(torch.ones(2, 16))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    waits.undo()
    engine.destroy()
    return losses


def test_a_unit_that_some_ranks_gather_early_and_none_uses_is_gathered_by_all() -> None:
    wanted = run_ranks(gathers_started_on_some_ranks, 2, False)
    assert run_ranks(gathers_started_on_some_ranks, 2, True) == wanted
