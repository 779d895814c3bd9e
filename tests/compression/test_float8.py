"""float8: linear layers that multiply in 8 bits, against torchao alone on one process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from torch import Tensor, nn
from torch.nn import functional as F

import xds

pytest.importorskip("torchao", reason="pip install -e '.[test]'")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS, SAMPLES, VOCAB, LAYERS = 3, 4, 61, ["up", "down"]
RATE = 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 80)
        self.down = nn.Linear(80, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.router = nn.Linear(48, 4)
        self.head = nn.Linear(48, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        x = x * self.router(x).softmax(-1).amax(-1, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def build() -> Model:
    torch.manual_seed(1)
    return Model()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCAB, (SAMPLES, 9), generator=generator)


class Run(NamedTuple):
    steps: list[tuple[float, float]]  # loss and norm
    params: dict[str, Tensor]


def trained(engine: xds.Engine) -> Run:
    steps = []
    for step in range(STEPS):
        loss = engine(batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        steps.append((loss.item(), engine.get_global_grad_norm()))
    params = engine.module.named_parameters()
    return Run(steps, {name: xds.zero.get_full_param(p).clone() for name, p in params})


def on_ranks(stage: int, recipe: str, precision: str, more: dict[str, Any]) -> Run:
    section = {"enabled": True, "recipe": recipe, "filter": LAYERS}
    made = config(stage, precision, samples=SAMPLES, optimizer="SGD", params={"lr": RATE})
    return trained(xds.initialize(build(), {**made, "float8": section, **more}))


def alone(world_size: int, recipe: str) -> tuple[list[tuple[list[float], float]], Model]:
    """torchao's own conversion in a plain loop: the losses of each rank's samples, and the norm."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = build()
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda _, name: name.endswith(("up", "down")),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps = []
    for step in range(STEPS):
        losses = [model(batch(step, rank)) for rank in range(world_size)]
        for loss in losses:
            loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad *= 1 / world_size
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(([loss.item() for loss in losses], norm.item()))
    return steps, model


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.quick("rowwise")
def test_each_stage_has_the_bits_of_torchao_alone(recipe: str) -> None:
    """On three ranks, of which no size is a multiple."""
    stages = [run_ranks(on_ranks, 3, stage, recipe, "fp32", {}) for stage in range(4)]
    expected, model = alone(3, recipe)
    for runs in stages:
        for rank, run in enumerate(runs):
            assert [loss for loss, _ in run.steps] == [losses[rank] for losses, _ in expected]
            assert run.steps == stages[0][rank].steps
            norms = [norm for _, norm in run.steps]
            assert norms == pytest.approx([norm for _, norm in expected], rel=1e-6)
            for name, param in model.named_parameters():
                assert torch.equal(run.params[name], param), name


def converted_by_script(stage: int) -> Run:
    """As accelerate's `mixed_precision: fp8` does it: for gathers of FSDP2, after the optimizer was made."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = build()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=RATE)
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=True),
        module_filter_fn=lambda _, name: name.endswith(("up", "down")),
    )
    made = config(stage, samples=SAMPLES)
    del made["optimizer"]
    engine = xds.initialize(model, made, optimizer=optimizer)
    assert all(one is two for one, two in zip(model.parameters(), params, strict=True))
    return trained(engine)


def test_layers_that_accelerate_has_converted_train_as_those_of_the_section() -> None:
    own = run_ranks(on_ranks, 2, 3, "tensorwise", "fp32", {})
    for run, expected in zip(run_ranks(converted_by_script, 2, 3), own, strict=True):
        assert [loss for loss, _ in run.steps] == [loss for loss, _ in expected.steps]


class Observed(NamedTuple):
    steps: list[tuple[float, float]]
    read: Tensor  # what the script reads of a weight
    sent: dict[str, int]  # bytes of one step


def edited(stage: int, folder: str) -> Observed:
    """Training in bf16 with what changes weights beside the optimizer: writes, and loads."""
    section = {"enabled": True, "filter": LAYERS}
    made = config(stage, "bf16", samples=SAMPLES, accumulation=2, params={"lr": 1e-3})
    engine = xds.initialize(build(), {**made, "float8": section})
    up = engine.module.blocks[0].up.weight
    steps, before, read = [], engine.bytes_sent(), None
    for step in range(6):
        for micro_step in range(2):
            loss = engine(batch(10 * step + micro_step, dist.get_rank()))
            engine.backward(loss)
            if step == 2 and micro_step == 0:  # no update comes before the next forward
                with xds.zero.GatheredParameters([up], modifier_rank=0):
                    up.data.mul_(3)
            engine.step()
            steps.append((loss.item(), engine.get_global_grad_norm()))
        if step == 1:
            engine.save_checkpoint(folder)
        if step == 3:
            read = xds.zero.get_full_param(up).clone()
            engine.load_checkpoint(folder)
        if step == 4:
            before = engine.bytes_sent()
    sent = {kind: size - before.get(kind, 0) for kind, size in engine.bytes_sent().items()}
    assert read is not None
    return Observed(steps, read, sent)


def test_gathers_in_8_bits_change_no_bit(tmp_path: Path) -> None:
    (exact, _), (coded, _) = (
        run_ranks(edited, 2, stage, str(tmp_path / str(stage))) for stage in (2, 3)
    )
    assert coded.steps == exact.steps
    assert torch.equal(coded.read, exact.read)
    num_elements = 2 * 2 * 48 * 80  # of four weights; each rank sends its half, once a micro-batch
    assert coded.sent["float8 parameters"] == 2 * num_elements // 2
    # maxima: four bytes a weight in one message
    assert coded.sent["control"] - exact.sent["control"] == 4 * 4


def test_a_layer_stays_the_object_that_the_script_has(caplog: pytest.LogCaptureFixture) -> None:
    def on_rank() -> None:
        model = build()
        up, seen = model.blocks[0].up, []
        up.register_forward_hook(lambda *_: seen.append(1))
        attributes = set(vars(up))
        section = {"enabled": True, "filter": [r"blocks\.\d+\.(up|down)", "router"]}
        engine = xds.initialize(model, {**config(3, samples=SAMPLES), "float8": section})
        assert type(up).__name__ == "Float8Linear"
        engine(batch(0, 0)).backward()
        assert seen and up.weight.grad is None
        engine.destroy()
        assert type(up) is nn.Linear and set(vars(up)) == attributes

    with caplog.at_level(logging.INFO, "xds"):
        run_ranks(on_rank, 2)
    (line,) = [text for text in caplog.messages if text.startswith("float8")]
    assert line == (
        "float8 (tensorwise): 4 of 6 linear layers multiply in 8 bits; in high precision: "
        "router (its sizes are no multiples of 16); head (filter)"
    )


def evaluated(stage: int) -> Tensor:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    section = {"enabled": True, "filter": ["linear"]}
    engine = xds.initialize(layer, {**config(stage), "float8": section})
    engine.eval()
    with torch.no_grad():
        return engine(torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3)))


def test_an_encoder_of_torch_calls_its_layers_in_evaluation_too() -> None:
    whole, sharded = (run_ranks(evaluated, 2, stage)[0] for stage in (0, 3))
    torch.testing.assert_close(whole, sharded, rtol=0, atol=1e-5)  # codes of 8 bits: 1e-2


def test_auto_leaves_out_the_head_and_what_is_too_small_to_gain() -> None:
    from xds.compression.float8.layers import linear_layers

    sizes = {"q": (4096, 4096), "k": (4096, 1024), "up": (4096, 14336), "lm_head": (4096, 32000)}
    sizes["tied"] = (4096, 32000)
    with torch.device("meta"):
        model = nn.Module()
        for name, size in sizes.items():
            model.add_module(name, nn.Linear(*size))
        model.embed = nn.Embedding(32000, 4096)
    model.tied.weight = model.embed.weight
    found = {
        recipe: [
            each.name
            for each in linear_layers(model, recipe, "auto", lambda _, n: n, ())
            if not each.reason
        ]
        for recipe in RECIPES
    }
    assert found["tensorwise"] == ["q", "up"]
    assert found["rowwise"] == found["rowwise_with_gw_hp"] == ["q", "up"]


def refused(more: dict[str, Any]) -> None:
    made = {**config(3, samples=SAMPLES), **more}
    xds.initialize(build(), made)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"float8": {"enabled": True}},
            "0 of 6 linear layers .*too small to gain.*no multiples of 16",
        ),
        ({"float8": {"enabled": True, "filter": ["up", "donw"]}}, "no linear layer .* 'donw'"),
        ({"float8": {"enabled": True, "filter": ["router"]}}, "0 of 6 .*no multiples of 16"),
        (
            {
                "float8": {"enabled": True, "recipe": "rowwise_with_gw_hp", "filter": LAYERS},
                "torch_autocast": {"enabled": True},
            },
            "with torch_autocast on a CPU",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)UsageError: float8.*{text}"):
        run_ranks(refused, 2, more)


def test_torchao_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xds.engine.integrations.optional.find_spec", lambda name: None)
    with pytest.raises(
        AssertionError, match=r"float8.enabled = true needs the package torchao.*\[torchao\]"
    ):
        run_ranks(refused, 1, {"float8": {"enabled": True}})
