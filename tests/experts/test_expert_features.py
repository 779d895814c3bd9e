"""Experts on several ranks with other features: LoRA on experts, Muon, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from peft import LoraConfig, get_peft_model
from runs import config
from test_shared_experts import batch, mixtral
from test_shared_experts import trained_with as trained
from torch import Tensor, nn

import xds

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # peft calls what transformers renames
STEPS = 3
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def with_adapters() -> Any:
    """A mixture with LoRA on both stacked parameters of its experts, and on a layer of its attention."""
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=targets)
    model = get_peft_model(mixtral(), lora)
    draw = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # PEFT's zeros would leave lora_A without gradients
            param.data.copy_(torch.randn(param.shape, generator=draw) * 0.02)
    return model


def trained_deterministically(build: Callable[[], nn.Module], given: dict[str, Any]) -> Any:
    torch.use_deterministic_algorithms(True)
    return trained(build, given)


def one_process(build: Callable[[], nn.Module], world_size: int) -> tuple[list[float], Any]:
    """Norms and parameters of plain PyTorch, with SGD."""
    model: Any = build()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1)
    norms = []
    for step in range(STEPS):
        for rank in range(world_size):
            ids = batch(step, rank)
            (model(input_ids=ids, labels=ids).loss / world_size).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def is_as_one_process(ranks: list[Any]) -> None:
    norms, params = one_process(with_adapters, len(ranks))
    found, values = ranks[-1]
    assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-5)
    for key, value in params.items():
        torch.testing.assert_close(values[key], value, rtol=1e-5, atol=1e-7)


@pytest.fixture
def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PEFT computes once a forward is kept for a process, and ranks are its threads."""
    monkeypatch.setattr(torch.nn.utils.parametrize, "cached", nullcontext)


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.quick("0")
def test_lora_on_stacked_experts_is_cut_with_them(stage: int) -> None:
    given = config(stage, optimizer="SGD", params={"lr": 0.1}, **EXPERTS)
    is_as_one_process(run_ranks(trained, 4, with_adapters, given))


@pytest.mark.usefixtures("without_cache")
def test_adapters_of_experts_under_deterministic_algorithms() -> None:
    given = config(2, optimizer="SGD", params={"lr": 0.1}, **EXPERTS)
    try:
        ranks = run_ranks(trained_deterministically, 2, with_adapters, given)
    finally:
        torch.use_deterministic_algorithms(False)
    is_as_one_process(ranks)


def test_the_proof_leaves_the_graph_of_adapters() -> None:
    section = {"enabled": True, "autoep_size": 1}
    given = config(0, optimizer="SGD", params={"lr": 0.1}, expert_parallel=section)
    is_as_one_process(run_ranks(trained, 1, with_adapters, given))


def saved_and_loaded(folder: str) -> list[str]:
    """The names of what differs after a load at other ranks of experts and another stage."""
    engine = xds.initialize(with_adapters(), config(2, **EXPERTS))
    engine.save_checkpoint(folder)
    wanted = engine.state_dict()
    engine.destroy()
    other = with_adapters()
    for param in other.parameters():
        param.data.zero_()
    section = {"enabled": True, "autoep_size": 4}
    engine = xds.initialize(other, config(3, expert_parallel=section))
    engine.load_checkpoint(folder)
    found = engine.state_dict()
    engine.destroy()
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def test_adapters_of_experts_load_at_other_ranks_of_experts(tmp_path: Path) -> None:
    assert run_ranks(saved_and_loaded, 4, str(tmp_path)) == [[]] * 4


# -- Muon -----------------------------------------------------------------------------------------------------


class Stacked(nn.Module):
    """Experts in a stack, or one after the other."""

    def __init__(self, is_stack: bool) -> None:
        super().__init__()
        values = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(values) if is_stack else None
        self.each = nn.ParameterList([] if is_stack else [value.clone() for value in values])
        self.bias = nn.Parameter(torch.zeros(3, 6)) if is_stack else None
        self.biases = nn.ParameterList([] if is_stack else [torch.zeros(6) for _ in range(3)])
        self.conv = nn.Conv1d(6, 2, 3)
        self.conv.weight.data.fill_(0.1)
        self.conv.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.each if self.weight is None else self.weight
        biases = self.biases if self.bias is None else self.bias
        y = torch.stack([x @ w.T + b for w, b in zip(weights, biases, strict=True)], 2)
        return self.conv(y).square().sum()


def updated(is_stack: bool, stage: int) -> list[Tensor]:
    engine = xds.initialize(Stacked(is_stack), config(stage, optimizer="Muon"))
    for step in range(2):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(2, 4, generator=draw)))
        engine.step()
    values = engine.state_dict()
    engine.destroy()
    if is_stack:
        return [values["weight"], values["bias"], values["conv.weight"]]
    each = [torch.stack([values[f"{name}.{i}"] for i in range(3)]) for name in ("each", "biases")]
    return [*each, values["conv.weight"]]


@pytest.mark.parametrize("stage", [0, 3])
def test_muon_takes_a_stack_for_matrices(stage: int) -> None:
    for value, wanted in zip(
        run_ranks(updated, 2, True, stage)[0], run_ranks(updated, 2, False, stage)[0], strict=True
    ):
        torch.testing.assert_close(value, wanted, rtol=0, atol=2e-4)  # bf16, and lr = 0.01


def test_muon_with_experts_on_several_ranks_is_muon_without() -> None:
    params = {"optimizer": "Muon", "params": {"lr": 0.01}}
    wanted, values = run_ranks(trained, 2, mixtral, config(2, **params))[0]
    found, others = run_ranks(trained, 2, mixtral, config(2, **params, **EXPERTS))[0]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=1e-5)
    for key in [key for key in values if "experts" in key]:
        torch.testing.assert_close(others[key], values[key], rtol=0, atol=1e-3)


def test_muon_refuses_parts_of_matrices() -> None:
    given = config(2, optimizer="Muon", **EXPERTS)
    with pytest.raises(AssertionError, match=r"it needs whole matrices, and a rank has a part of"):
        run_ranks(trained, 2, with_adapters, given)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": "Lamb"}, "uses norms of whole tensors, and expert_parallel.autoep_size = 2"),
        ({"zero": {"divergent_graphs": True}}, "do not meet in the exchanges of tokens"),
        ({"sequence": {"tiled_mlp": True}}, "sequence.tiled_mlp = true: ranks may have unequal"),
    ],
)
def test_what_a_config_cannot_combine(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(xds.ConfigError, match=sentence):
        xds.Config.load(config(2, **changes, **EXPERTS))


# -- unequal numbers of forwards ------------------------------------------------------------------------------


def evaluated(stage: int, with_experts: bool) -> tuple[list[float], list[float]]:
    """Results of rollouts and evaluations, of which each rank runs as many as its number; a step afterwards."""
    given = config(stage, **(EXPERTS if with_experts else {}))
    engine = xds.initialize(mixtral(), given)
    rank = dist.get_rank()
    prompt = torch.arange(3, 9).view(1, 6) + rank
    tokens = engine.generate(prompt, max_new_tokens=1 + 2 * rank, do_sample=False)
    found = [float(token) for token in tokens.flatten()]
    with engine.generating() as module:
        for _ in range(rank):
            found.append(float(module(prompt).logits.sum()))
    if stage < 3:
        with engine.uneven_forwards(), torch.no_grad():
            for step in range(rank):
                found.append(
                    engine(input_ids=batch(step, rank), labels=batch(step, rank)).loss.item()
                )
    ids = batch(9, rank)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return found, [loss.item(), engine.get_global_grad_norm()]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.quick("2")
def test_ranks_run_unequal_numbers_of_forwards(stage: int) -> None:
    """Rank 0 runs none: it computes its experts for the others."""
    wanted = run_ranks(evaluated, 4, stage, False)
    for (found, after), (other, later) in zip(
        run_ranks(evaluated, 4, stage, True), wanted, strict=True
    ):
        assert found == pytest.approx(other, rel=1e-5)
        assert after == pytest.approx(later, rel=1e-5)


def streamed() -> None:
    engine = xds.initialize(mixtral(), config(3, **EXPERTS))
    for make in (lambda: engine.generating(memory_limit=0), engine.uneven_forwards):
        with pytest.raises(xds.UsageError, match="unequal numbers of forwards, with experts"):
            with make():
                pass


def test_streamed_parameters_and_experts_are_refused() -> None:
    run_ranks(streamed, 2)


def inferred(stage: int) -> tuple[float, bool, tuple[int, ...]]:
    """The largest difference of logits, whether tokens are equal, and the shape of a rank's experts."""
    model, plain = mixtral(), mixtral().eval()
    engine = xds.init_inference(model, dtype=torch.float32, ep_size=2, zero={"stage": stage})
    rank = dist.get_rank()
    prompt = torch.arange(3, 9).view(1, 6) + rank
    with torch.no_grad():
        difference = (engine(prompt).logits - plain(prompt).logits).abs().max()
    given: Any = {"max_new_tokens": 1 + 2 * rank, "do_sample": False}
    is_equal = torch.equal(engine.generate(prompt, **given), plain.generate(prompt, **given))
    shape = tuple(model.model.layers[0].mlp.experts.down_proj.shape)
    engine.destroy()
    return float(difference), is_equal, shape


@pytest.mark.parametrize("stage", [0, 3])
def test_inference_with_experts_on_several_ranks(stage: int) -> None:
    for difference, is_equal, shape in run_ranks(inferred, 4, stage):
        assert difference < 1e-6 and is_equal and shape[0] == 2


def offloaded() -> None:
    given: Any = {"zero": {"stage": 3, "offload_param": {"device": "cpu"}}}
    with pytest.raises(xds.UsageError, match=r"ep_size = 2 with zero.offload_param"):
        xds.init_inference(mixtral(), dtype=torch.float32, ep_size=2, **given)


def test_inference_with_experts_and_parameters_on_the_host_is_refused() -> None:
    run_ranks(offloaded, 2)


# -- a second engine ------------------------------------------------------------------------------------------


def twice() -> None:
    model = mixtral()
    xds.initialize(model, config(1, **EXPERTS)).destroy()
    for given in (config(1, **EXPERTS), config(1)):
        with pytest.raises(xds.UsageError, match="has left some experts of this model on each"):
            xds.initialize(model, given)


def test_a_model_whose_experts_are_cut_is_whole_no_more() -> None:
    run_ranks(twice, 2)
