"""Tests of DeepSpeed's layer of experts. tests/experts/test_gates.py compares its choices with DeepSpeed's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

import xds.deepspeed as deepspeed
from xds.deepspeed.moe import utils
from xds.deepspeed.moe.layer import MoE
from xds.deepspeed.moe.sharded_moe import TopKGate
from xds.deepspeed.pipe import PipelineModule


class Net(nn.Module):
    """As the classifier of DeepSpeed's examples: layers of experts that share their first expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, expert = nn.Linear(4, 8), nn.Linear(8, 8)
        options: dict[str, Any] = {
            "ep_size": 2,
            "use_rts": False,
            "top2_2nd_expert_sampling": False,
        }
        self.layers = nn.ModuleList(
            [
                MoE(8, expert, 4, k=1, min_capacity=0, **options),
                MoE(8, expert, 4, k=2, capacity_factor=0.5, use_residual=True, **options),
                MoE(8, nn.Sequential(expert, nn.Dropout(0.0)), 6, k=3, **options),
            ]
        )
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The loss: that of the outputs, and the balance of experts."""
        x, balance = self.first(x).relu(), torch.zeros(())
        for layer in self.layers:
            x, loss, counts = layer(x)
            balance = balance + loss
            assert counts.sum() == layer.deepspeed_moe.gate.k * x.numel() / 8
        output: Tensor = self.last(x)
        return output.square().mean() + 0.01 * balance


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    whole = {"params": list(model.parameters()), "name": "parameters"}
    groups: list[dict[str, Any]] = utils.split_params_into_different_moe_groups_for_optimizer(whole)
    return groups


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(
    stage: int, optimizer: str, size: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    rank = torch.distributed.get_rank()
    model = Net()
    # without the section ep_size = 2 of the layers says it
    sections = {"expert_parallel": {"enabled": False}} if size == 1 else {}
    section = config(stage, samples=5, optimizer=optimizer, **sections)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups_of(model), config=section
    )
    assert engine.has_moe_layers and engine.num_experts == [4, 4, 6]
    kept = [param.numel() for param in model.layers[0].deepspeed_moe.experts.parameters()]
    assert stage == 3 or sum(kept) == 4 * 72 // size
    losses, norms = [], []
    for step in range(4):
        loss = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, engine.full_state_dict()


@pytest.mark.parametrize(
    ("stage", "optimizer", "size"),
    [(0, "SGD", 1), (3, "Adam", 1), (0, "SGD", 2), (1, "Adam", 2), (2, "SGD", 2), (3, "SGD", 2)],
)
@pytest.mark.quick("0-SGD-2", "3-SGD-2")
def test_two_ranks_train_as_one_process(stage: int, optimizer: str, size: int) -> None:
    results = run_ranks(_train, 2, stage, optimizer, size)
    model = Net()
    kinds: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.AdamW}
    plain = kinds[optimizer](model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(4):
        losses = [model(batch(step, rank)) for rank in range(2)]
        (sum(losses) / 2).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        plain.step()
        plain.zero_grad()
        for rank, (found, norms, _) in enumerate(results):
            assert found[step] == pytest.approx(losses[rank].item(), rel=1e-5)
            assert norms[step] == pytest.approx(norm.item(), rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(results[0][2][name], value, rtol=1e-4, atol=1e-5)


class Layer(nn.Module):
    """A layer, and the balance loss of the layers so far. Its gate draws numbers where `options` do not say."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.moe = MoE(8, nn.Linear(8, 8), 4, ep_size=2, min_capacity=0, **options)

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, balance = given if isinstance(given, tuple) else (given, torch.zeros(()))
        y, loss, _ = self.moe(self.up(x))
        return x + y, balance + loss


def layers_of(**options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(k=1, capacity_factor=0.5, **options), Layer(k=2, **options)]


def loss_of(given: tuple[Tensor, Tensor], _: Any = None) -> Tensor:
    return given[0].square().mean() + 0.1 * given[1].sum()


def rows(step: int, rank: int) -> Tensor:
    return batch(step, rank).repeat(1, 1, 2)


def on_tensor_ranks() -> list[float]:
    section = {"tp_size": 2, "plan": {"*.up": "colwise_gather_output"}}
    given = config(1, samples=5, optimizer="SGD", clip=0.0, tensor_parallel=section)
    engine, *_ = deepspeed.initialize(model=nn.Sequential(*layers_of()), config=given)
    torch.manual_seed(7)
    losses = []
    for step in range(3):
        loss = loss_of(engine(rows(step, 0)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def in_a_pipeline() -> list[float]:
    model = PipelineModule(layers_of(**NO_DRAWS), num_stages=2, loss_fn=loss_of)
    given = config(1, samples=5, optimizer="SGD", clip=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=given)
    rank = torch.distributed.get_rank() % 2
    return [
        float(engine.train_batch(iter([(rows(step, rank), torch.zeros(5))]))) for step in range(3)
    ]


NO_DRAWS = {"use_rts": False, "top2_2nd_expert_sampling": False}


@pytest.mark.parametrize(
    ("train", "world_size", "num_data", "options"),
    [(on_tensor_ranks, 2, 1, {}), (in_a_pipeline, 4, 2, NO_DRAWS)],
)
@pytest.mark.quick("on_tensor_ranks-2-1-options0")
def test_layers_on_tensor_ranks_and_in_a_pipeline(
    train: Any, world_size: int, num_data: int, options: dict[str, Any]
) -> None:
    """Tensor ranks draw the numbers of one process, also while their slices are proven."""
    results = run_ranks(train, world_size)
    model = nn.Sequential(*layers_of(**options))
    plain = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    for step in range(3):
        loss = sum(loss_of(model(rows(step, rank))) for rank in range(num_data)) / num_data
        loss.backward()
        plain.step()
        plain.zero_grad()
        for losses in results:
            assert losses[step] == pytest.approx(loss.item(), rel=1e-6)


def test_names_and_groups_are_those_of_deepspeed() -> None:
    layer = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2, use_residual=True)
    inner = [f"experts.deepspeed_experts.{i}.{end}" for i in range(2) for end in ("weight", "bias")]
    names = ["deepspeed_moe.gate.wg.weight", *[f"deepspeed_moe.{name}" for name in inner]]
    ends = [f"{name}.{end}" for name in ("mlp", "coefficient") for end in ("weight", "bias")]
    assert list(layer.state_dict()) == [*names, *ends]
    assert utils.has_moe_layers(nn.Sequential(layer)) == (True, 2)
    assert utils.has_moe_layers(nn.Linear(1, 1)) == (False, 0)
    shared, experts = utils.split_params_into_shared_and_expert_params(layer.parameters())
    assert len(shared) == 5 and {param.group_name for param in experts} == {"ep_size_2"}
    given = {"params": list(layer.parameters()), "name": "all", "lr": 0.5}
    groups = utils.split_params_into_different_moe_groups_for_optimizer((given,), max_group_size=80)
    found = [(group["name"], group.get("moe"), len(group["params"])) for group in groups]
    assert found == [("all", None, 5), ("ep_size_2", True, 2), ("ep_size_2", True, 2)]
    assert [utils.is_moe_param_group(group) for group in groups] == [False, True, True]
    assert utils.configure_moe_param_groups(groups) is groups
    assert len(utils.configure_moe_param_groups(list(layer.parameters()))) == 2
    (alone,) = utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": nn.Linear(1, 1).parameters()}
    )
    assert len(alone["params"]) == 2


def test_a_gate_called_directly_returns_deepspeeds_dense_tensors() -> None:
    gate = TopKGate(4, 3, k=2, capacity_factor=0.5, min_capacity=0, top2_2nd_expert_sampling=False)
    tokens = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    index, weights, _, counts = gate(tokens, sparse_routes=True)
    _, combine, mask, _ = gate(tokens)
    assert combine.shape == (6, 3, 2) and int(mask.sum()) == int((index >= 0).sum())
    assert (mask.sum((0, 2)) == counts.clamp(max=2)).all()
    assert (mask.sum(0) <= 1).all()  # a place has one token
    torch.testing.assert_close(combine.sum((1, 2)), weights.sum(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 3}, "k = 3: a token goes to between 1 and num_experts = 2 experts"),
        ({"k": 0}, "k = 0: a token goes to between 1 and num_experts"),
        (
            {"ep_size": 3},
            "num_experts = 2 and ep_size = 3: both must be at least 1, and ep_size must",
        ),
        (
            {"noisy_gate_policy": "Loud"},
            "noisy_gate_policy = 'Loud': it must be None or one of None, J",
        ),
        ({"min_capacity": -1}, "min_capacity = -1: it must be a finite number of at least 0"),
    ],
)
def test_wrong_arguments_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):  # what DeepSpeed raises
        MoE(**{"hidden_size": 4, "expert": nn.Linear(4, 4), "num_experts": 2, **options})


def test_more_than_the_tokens_as_minimum_is_one_sentence() -> None:
    layer = MoE(4, nn.Linear(4, 4), num_experts=2)
    with pytest.raises(AssertionError, match="min_capacity = 4 is above the 3 tokens of this call"):
        layer(torch.zeros(1, 3, 4))
