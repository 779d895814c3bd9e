"""What is cut outside of blocks is proven too, and blocks of one class that are cut otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn
from torch.nn.functional import normalize

import xds
from xds.tensor.regions import layers_in, regions
from xds.tensor.words import Way, Word

WAYS = {
    "columns": Way(Word.COLWISE),
    "rows": Way(Word.ROWWISE),
    "gather": Way(Word.COLWISE_GATHER),
    "split": Way(Word.ROWWISE_SPLIT),
    "norm": Way(Word.PARTIAL),
    "embed": Way(Word.EMBEDDING),
}


@pytest.mark.parametrize(
    ("cut", "wanted"),
    [
        ({"blocks.0.up": "columns", "blocks.0.down": "rows"}, []),
        ({"embed": "embed", "head": "gather", "a.b": "split"}, []),
        ({"a.up": "columns", "a.down": "rows"}, ["a"]),
        (
            {"a.up": "columns", "a.down": "rows", "b.c.up": "columns", "b.d.down": "rows"},
            ["a", "b"],
        ),
        ({"a.up": "columns", "b.down": "rows"}, [""]),
        ({"a.up": "columns"}, ["a"]),
        ({"up": "columns", "a.up": "columns", "a.down": "rows"}, [""]),
        ({"blocks.0": "columns", "blocks.1": "rows"}, ["blocks"]),  # layers that are blocks
        ({"blocks.0.up": "columns", "norm": "norm"}, [""]),
        ({"a.b.up": "columns", "a.b.down": "rows", "a.c": "rows", "a.d": "columns"}, ["a"]),
    ],
)
def test_the_smallest_module_around_what_is_cut(cut: dict[str, str], wanted: list[str]) -> None:
    ways = {name: WAYS[word] for name, word in cut.items()}
    assert regions(ways, ["blocks.0", "blocks.1"]) == wanted


def test_names_in_a_block() -> None:
    ways = {"a.b": WAYS["rows"], "ab.c": WAYS["columns"], "a": WAYS["rows"]}
    assert layers_in("a", ways) == {"b": WAYS["rows"]}
    assert layers_in("", ways) == ways


class Projector(nn.Module):
    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.up, self.down, self.is_right = nn.Linear(8, 16), nn.Linear(16, 8), is_right

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x.tanh() if self.is_right else normalize(x, dim=-1))


class Model(nn.Module):
    """The normalisation needs all columns: a slice computes something else without an error."""

    def __init__(self, kind: str, is_right: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        if kind == "module":
            self.projector = Projector(is_right)
        self.blocks = nn.ModuleList(Projector(True) for _ in range(2))
        if kind in ("second block", "same cut"):
            self.blocks[1].is_right = is_right
        if kind == "root":
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.is_right = is_right

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "module":
            x = self.projector(x)
        if self.kind == "root":
            x = Projector.forward(self, x)  # type: ignore[arg-type]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


PLANS = {
    "module": {"projector.up": "colwise", "projector.down": "rowwise"},
    "root": {"up": "colwise", "down": "rowwise"},
    "same cut": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "second block": {
        "blocks.0.up": "colwise_gather_output",
        "blocks.1.up": "colwise",
        "blocks.1.down": "rowwise",
    },
}


def cut_head() -> str:
    from tensor_cases import Case, batches, build

    from xds.tensor.plan import plan_of_model

    model = build("llama")
    config = Case("llama", 1, 1, 1, 2, 1).config()
    config["tensor_parallel"]["plan"] = plan_of_model(model) | {"lm_head": "colwise"}
    engine = xds.initialize(model, config)
    with pytest.raises(xds.UsageError) as caught:
        engine.train_batch(batches("llama", 0, engine.dp_rank))
    return str(caught.value)


def test_logits_that_are_not_gathered_are_found() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    for text in run_ranks(cut_head, 2):
        assert "the model cannot run in 2 slices: Expected input batch_size" in text


def run(kind: str, is_right: bool, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"tp_size": 2, "plan": PLANS[kind]},
    }
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    wanted = Model(kind, is_right)(x).item()
    try:
        engine = xds.initialize(Model(kind, is_right), config)
        loss = engine(x)
    except xds.UsageError as error:
        return str(error)
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return loss.item() - wanted


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("module", 3), ("module", 1), ("root", 2), ("root", 3), ("second block", 3), ("same cut", 1)],
)
def test_a_right_plan_trains_and_a_wrong_one_is_refused(kind: str, stage: int) -> None:
    for found in run_ranks(run, 2, kind, True, stage):
        assert abs(found) <= 1e-6
    for text in run_ranks(run, 2, kind, False, stage):
        assert "something else in 2 slices than whole: the output of down differs" in text


class OfHeads(nn.Module):
    """`inner` works on what is cut. Before `down` is trained it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 16), nn.Linear(4, 4), nn.Linear(16, 8)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(self.up(x).view(len(x), -1, 4)).flatten(1))


def hidden_by_zeros(word: str) -> str:
    torch.manual_seed(0)
    plan = {"*.up": "colwise", "*.down": "rowwise", "*.inner": word}
    engine = xds.initialize(nn.Sequential(OfHeads(), OfHeads()), odd_config(plan))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    try:
        for _ in range(3):
            engine.backward(engine(x).square().mean())
            engine.step()
    except xds.UsageError as error:
        return f"{engine.global_steps}: {error}"
    return ""


def test_what_zeros_hide_is_found_in_the_first_forward() -> None:
    for text in run_ranks(hidden_by_zeros, 2, "replicate"):
        assert text.startswith("0: ") and "the gradient of inner.weight differs" in text
    assert run_ranks(hidden_by_zeros, 2, "replicated_with_grad_allreduce") == ["", ""]


class Odd(nn.Module):
    """A block with a buffer that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.down(self.up(x).view(len(x), 2, -1).tanh().flatten(1))


def odd_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Odd(), Odd())


def odd_config(plan: dict[str, str]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"tp_size": 2, "plan": plan},
    }


BY_NUMBER = {"*.up": "colwise", "*.down": "rowwise"}


def odd_batches() -> list[Any]:
    engine = xds.initialize(odd_model(), odd_config(BY_NUMBER))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    found: list[Any] = [engine(x * float("nan")).isnan().all().item()]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        engine(x[:, :5])
    found.append(isinstance(caught.value, xds.XdsError))
    wanted = odd_model()(x)
    found.append((engine(x) - wanted).abs().max().item() <= 1e-6)
    found.append(engine.module[0].count.item())
    engine.destroy()
    return found


def test_a_batch_at_fault_is_not_the_plans_fault_and_buffers_stay() -> None:
    # the second batch ends before the count
    for found in run_ranks(odd_batches, 2):
        assert found[:3] == [True, False, True] and found[3] in (2.0, 3.0)


def shared_weight() -> float:
    models = [odd_model(), odd_model()]
    for model in models:
        model[1].up.weight = model[0].up.weight  # type: ignore[union-attr]
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    wanted = models[0](x)
    plan = BY_NUMBER | {"0.down": "rowwise"}
    engine = xds.initialize(models[1], odd_config(plan))
    return (engine(x) - wanted).abs().max().item()


def test_layers_beside_a_shared_weight_stay_whole() -> None:
    assert max(run_ranks(shared_weight, 2)) <= 1e-6


def refused(kind: str) -> str:
    model = odd_model()
    if kind == "parametrized":
        nn.utils.parametrizations.weight_norm(model[0].up)
    if kind == "wrapped":
        model[0].up = nn.Sequential(model[0].up)
    optimizer = Normed if kind == "optimizer" else None
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(model, odd_config(BY_NUMBER), optimizer=optimizer)
    return str(caught.value)


class Normed(torch.optim.Optimizer):
    """It uses norms of whole parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("parametrized", "the weight of 0.up is computed from other parameters"),
        ("wrapped", "write a plan with 0.up.0 instead"),
        ("optimizer", "Normed: this optimizer may use norms or the shape of a whole parameter"),
    ],
)
def test_what_slices_cannot_do_is_refused(kind: str, part: str) -> None:
    assert all(part in text for text in run_ranks(refused, 2, kind))


def second_block() -> str:
    """The first block has filled the cache of keys and values when the second one is proven."""
    from tensor_cases import Case, batches, build

    from xds.tensor.plan import plan_of_model

    model = build("llama")
    model.config.use_cache = True  # type: ignore[union-attr,assignment]
    plan = plan_of_model(model)
    plan |= {"model.layers.1.input_layernorm": "replicated_with_grad_allreduce"}
    config = Case("llama", 1, 1, 1, 2, 1).config()
    config["tensor_parallel"]["plan"] = plan
    engine = xds.initialize(model, config)
    with pytest.raises(xds.UsageError) as caught:
        engine.train_batch(batches("llama", 0, engine.dp_rank))
    return str(caught.value)


def test_a_block_after_others_is_proven_with_a_cache() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    for text in run_ranks(second_block, 2):
        assert "model.layers.1 computes something else" in text
