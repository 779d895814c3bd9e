"""Experts that are the children of an nn.ModuleList: found, proven, and trained as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from runs import config
from torch import Tensor, nn

import xds
from xds.experts.config import ExpertParallel
from xds.experts.conventions import find_convention
from xds.experts.cut import find_experts

WIDTH, EXPERTS, STEPS = 16, 4, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 24, bias=False)
        self.w2 = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)))


class MixtralBlock(nn.Module):
    """As transformers had it before version 5."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, hidden_states: Tensor) -> Any:
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        logits = self.gate(hidden_states)
        weights = nn.functional.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(hidden_states.dtype)
        final = torch.zeros_like(hidden_states)
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            idx, top = torch.where(mask[number])
            if len(top):
                final.index_add_(0, top, expert(hidden_states[top]) * weights[top, idx, None])
        return final.view(shape), logits


class Layer(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self.mlp(self.norm(x))
        output, logits = output if isinstance(output, tuple) else (output, None)
        return x + output, logits


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = MixtralBlock) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList([Layer(block) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x, balance = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            x, logits = layer(x)
            if logits is not None:
                balance = balance + logits.logsumexp(-1).square().mean()
        loss = nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss + 0.01 * balance


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 31, (2, 9), generator=generator)


def plain(model: nn.Module, world_size: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses, norms and parameters of one process with the batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(STEPS):
        loss = 0.0
        for rank in range(world_size):
            one = model(batch(step, rank)) / world_size
            one.backward()
            loss += one.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss, norm))
    return steps, model.state_dict()


def given(stage: int, size: int, **keys: Any) -> dict[str, Any]:
    section = {"enabled": True, "autoep_size": size, **keys}
    return config(stage, optimizer="SGD", params={"lr": 0.1}, expert_parallel=section)


def trained(make: Any, stage: int, size: int) -> Any:
    engine = xds.initialize(make(), given(stage, size))
    steps = []
    for step in range(STEPS):
        loss = engine(batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        steps.append((loss.item(), engine.get_global_grad_norm()))
    values = engine.state_dict()
    engine.destroy()
    return steps, values


def check(ranks: Any, wanted: Any, params: dict[str, Tensor]) -> None:
    for step, (loss, norm) in enumerate(wanted):
        mean = sum(steps[step][0] for steps, _ in ranks) / len(ranks)
        assert mean == pytest.approx(loss, rel=1e-6)
        assert ranks[-1][0][step][1] == pytest.approx(norm, rel=1e-6)
    assert list(ranks[-1][1]) == list(params)
    for name, value in params.items():
        torch.testing.assert_close(ranks[-1][1][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("world_size", "size", "stage"),
    [(2, 1, 3), (2, 2, 0), (2, 2, 2), (2, 2, 3), (4, 2, 1), (4, 2, 3), (4, 4, 2)],
)
@pytest.mark.quick("2-1-3", "2-2-2", "4-2-3")
def test_equal_to_one_process(world_size: int, size: int, stage: int) -> None:
    check(run_ranks(trained, world_size, Model, stage, size), *plain(Model(), world_size))


class Other(nn.Module):
    """A block that chooses and weighs in another way: see the parameters of the tests."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = {"score": "softmax", "norm": False, "before": False, "groups": 0, **how}
        top_k, scale, groups = how.get("top_k", 2), how.get("scale", 1.0), self.how["groups"]
        self.num_experts_per_tok, self.routed_scaling_factor = top_k, scale
        self.n_group, self.topk_group = max(groups, 1), 1
        self.router = Chooser(top_k) if "chooses" in how else nn.Linear(WIDTH, EXPERTS)
        if groups:
            self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))
        self.mlps = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        nn.init.zeros_(self.mlps[0].w2.weight)
        self.shared = Expert() if "shared" in how else None
        self.shared_gate = nn.Linear(WIDTH, 1, bias=False) if "gate" in how else None

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = self.how["groups"]
        logits = self.router(x)
        scores = logits.softmax(-1) if self.how["score"] == "softmax" else logits.sigmoid()
        ranked = scores
        if groups:
            ranked = (scores + self.e_score_correction_bias).view(len(x), groups, -1)
            best = ranked.topk(2, -1).values.sum(-1).argmax(-1)
            mask = nn.functional.one_hot(best, groups).bool().unsqueeze(-1)
            ranked = ranked.masked_fill(~mask, -torch.inf).flatten(1)
        index = ranked.topk(self.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, index)
        if self.how["norm"]:
            weights = weights / weights.sum(-1, keepdim=True)
        return index, weights * self.routed_scaling_factor

    def forward(self, x: Tensor) -> Any:
        shape, x = x.shape, x.flatten(0, -2)
        if self.training and "jitter" in self.how:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        chosen = self.router(x) if isinstance(self.router, Chooser) else self.choose(x)
        index, weights = chosen[:2]
        outputs = []
        for token, numbers, scales in zip(x, index.tolist(), weights, strict=True):
            parts = [
                self.mlps[n](token[None] * w)
                if self.how["before"]
                else self.mlps[n](token[None]) * w
                for n, w in zip(numbers, scales, strict=True)
            ]
            outputs.append(torch.cat(parts).sum(0))
        output = torch.stack(outputs)
        if self.shared is not None:
            gate = 1.0 if self.shared_gate is None else self.shared_gate(x).sigmoid()
            output = output + gate * self.shared(x)
        if "keeps" in self.how:
            self.balance = weights.sum()
        return (output.view(shape), weights.sum()) if "loss" in self.how else output.view(shape)


class Chooser(nn.Module):
    """A router that returns the choice, as DeepSeek's own code."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, index = (x @ self.weight.T).softmax(-1).topk(self.top_k, -1)
        return index, weights, None


def other(**how: Any) -> nn.Module:
    return Model(lambda: Other(**how))


OTHERS: dict[str, dict[str, Any]] = {
    "sum of weights is free": {},
    "sigmoid, scale": {"score": "sigmoid", "norm": True, "scale": 2.5},
    "shared": {"shared": True, "top_k": 1},
    "shared, gate": {"shared": True, "gate": True, "top_k": 3},
    "weights before": {"before": True, "score": "sigmoid"},
    "groups": {"groups": 2, "score": "sigmoid", "norm": True},
    "router chooses": {"chooses": True},
}


@pytest.mark.parametrize("how", sorted(OTHERS))
@pytest.mark.quick("shared, gate", "sigmoid, scale")
def test_other_blocks(how: str) -> None:
    def make() -> nn.Module:
        return other(**OTHERS[how])

    check(run_ranks(trained, 2, make, 2, 2), *plain(make(), 2))


def test_no_bit_depends_on_the_ranks_of_experts() -> None:
    def deterministic(size: int) -> Any:
        torch.use_deterministic_algorithms(True)
        return trained(Model, 2, size)

    try:
        (one, params), (two, others) = (run_ranks(deterministic, 2, size)[0] for size in (1, 2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [loss for loss, _ in one] == [loss for loss, _ in two]
    assert all(torch.equal(params[name], others[name]) for name in params)


# -- an expert without tokens, checkpoints, single parameters -------------------------------------------------


def without_first() -> nn.Module:
    """No token chooses expert 0."""
    model = Model()
    for layer in model.layers:
        layer.norm.bias.data.fill_(3.0)
        layer.mlp.gate.weight.data[0].fill_(-9.0)
    return model


@pytest.mark.parametrize("stage", [0, 3])
def test_expert_without_tokens(stage: int) -> None:
    check(run_ranks(trained, 2, without_first, stage, 2), *plain(without_first(), 2))


def saved(folder: Path) -> Any:
    engine = xds.initialize(Model(), config(2, expert_parallel={"enabled": True, "autoep_size": 2}))
    values = _step(engine, 0, 2)
    engine.save_checkpoint(folder)
    values = _step(engine, 2, 3), engine.state_dict()
    engine.destroy()
    return values


def loaded(folder: Path, stage: int, size: int) -> Any:
    given = config(stage, expert_parallel={"enabled": True, "autoep_size": size})
    model = Model()
    for param in model.parameters():
        nn.init.zeros_(param)
    engine = xds.initialize(model, given)
    engine.load_checkpoint(folder)
    values = _step(engine, 2, 3), engine.state_dict()
    engine.destroy()
    return values


def _step(engine: Any, first: int, last: int) -> list[float]:
    for step in range(first, last):
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()
    return engine.get_global_grad_norm()


@pytest.mark.slow
def test_loads_at_other_sizes(tmp_path: Path) -> None:
    norm, values = run_ranks(saved, 4, tmp_path)[0]
    for stage, size in ((3, 1), (0, 4)):
        found, others = run_ranks(loaded, 4, tmp_path, stage, size)[3]
        assert found == pytest.approx(norm, rel=1e-6)
        for name, value in values.items():
            torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-6)


def single_params(size: int) -> dict[str, Tensor]:
    given = config(3, "bf16", expert_parallel={"enabled": True, "autoep_size": size})
    engine = xds.initialize(Model(), given)
    engine.backward(engine(batch(0, dist.get_rank())))
    found = {}
    named = list(engine.module.named_parameters())
    for name, param in named:
        found[f"{name} grad"] = xds.zero.get_full_grad(param)
    engine.step()
    for name, param in named:
        found[f"{name} state"] = xds.zero.get_full_optimizer_state(param, "exp_avg")
    with xds.zero.GatheredParameters([param for _, param in named], modifier_rank=1):
        for _, param in named:
            param.data.mul_(1 + dist.get_rank())
    for name, param in named:
        found[name] = xds.zero.get_full_param(param)
    engine.destroy()
    return found


def test_parameters_of_other_ranks() -> None:
    wanted = run_ranks(single_params, 2, 1)[0]
    for found in run_ranks(single_params, 2, 2):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.02)


class DrawnModel(Model):
    """Its initial values can be drawn module by module, as those of transformers."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight)


def built(stage: int) -> list[dict[str, Tensor]]:
    found = []
    for context in (torch.device("meta"), xds.zero.Init(given(stage, 1))):
        with context:
            model = DrawnModel()
        torch.manual_seed(7)
        engine = xds.initialize(model, given(stage, 2))
        found.append(engine.state_dict())
        engine.destroy()
    return found


@pytest.mark.slow
def test_built_on_meta_and_in_init() -> None:
    torch.manual_seed(7)
    plainly = DrawnModel()
    drawn = DrawnModel()
    torch.manual_seed(7)
    for module in (m for m in drawn.modules() if isinstance(m, nn.Linear | nn.Embedding)):
        module.reset_parameters()
        drawn._init_weights(module)
    for on_meta, in_init in run_processes(built, 2, 3):
        for name, value in plainly.state_dict().items():
            assert in_init[name].equal(value), name
            assert on_meta[name].equal(drawn.state_dict()[name]), name


class Contract(nn.Module):
    """Its experts have the contract, with a list of equal children, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = OwnExperts(nn.Sequential(Expert(), nn.Dropout(0.5)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2, -1)
        output: Tensor = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        return output.view_as(x)


class OwnExperts(nn.ModuleList):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            token, choice = torch.where(top_k_index == number)
            outputs = expert(hidden_states[token]) * top_k_weights[token, choice, None]
            output = output.index_add(0, token, outputs)
        return output


class NoMixture(nn.Module):
    """A list and a matrix with as many rows, which are no experts and no router."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.Sequential(*self.parts)(x))


def without_dropout() -> nn.Module:
    model = Model(Contract)
    model.other = NoMixture()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_module_with_a_list() -> None:
    check(run_ranks(trained, 2, without_dropout, 3, 2), *plain(without_dropout(), 2))
    run_ranks(trained, 2, lambda: Model(Contract), 3, 2)  # draws of dropout refuse no proof


# -- what is refused ------------------------------------------------------------------------------------------


def refused(make: Any, keys: dict[str, Any]) -> str:
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(make(), given(2, **{"size": 2, **keys}))
    return str(caught.value)


def unequal() -> nn.Module:
    model = Model()
    model.layers[0].mlp.experts[1].w1 = nn.Linear(WIDTH, 32, bias=False)
    return model


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        Model,
        {"moe_layer_pattern": "layers.*.moe"},
        "moe_layer_pattern = 'layers.*.moe': it matches none",
    ),
    (Model, {"expert_pattern": "*.ffns"}, "expert_pattern = '*.ffns': it matches none"),
    (
        Model,
        {"router_pattern": "wg", "moe_layer_pattern": r"layers\.\d+\.mlp"},
        "has no child with a matrix",
    ),
    (Model, {"top_k": 5}, "a token chooses 5 experts, and layers.0.mlp has 4"),
    (Model, {"top_k": 1}, "none of the known ways"),
    (Model, {"score_func": "sigmoid"}, "none of the known ways"),
    (unequal, {"moe_layer_pattern": "*.mlp"}, "0 and 1 have other classes, names or shapes"),
    (lambda: other(jitter=True), {}, "none of the known ways"),
    (lambda: other(loss=True), {}, "none of the known ways"),
    (lambda: other(keeps=True), {}, "it sets self.balance"),
    (lambda: nn.Linear(2, 2), {}, "no module of experts"),
]


@pytest.mark.parametrize(("make", "keys", "message"), REFUSED)
def test_refused(make: Any, keys: dict[str, Any], message: str) -> None:
    first, second = run_ranks(refused, 2, make, keys)
    assert message in first
    assert message in second


class Numbered(nn.Module):
    """A block of many experts. Number `special` counts twice."""

    def __init__(self, special: int) -> None:
        super().__init__()
        self.special = special
        self.gate = nn.Linear(WIDTH, 99)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(99))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = weights * (index == number) * (2 if number == self.special else 1)
            result = result + expert(x) * weight.unsqueeze(-1)
        return result


def test_one_of_many_experts_that_is_computed_otherwise() -> None:
    """Few tokens choose few experts: the proof takes tokens for each of them."""
    section = ExpertParallel()
    (found,) = find_experts(nn.Sequential(Numbered(-1)), section)
    assert found.block is not None
    assert find_convention(found.block, section, None).top_k == 1
    for special in (0, 60, 98):
        (found,) = find_experts(nn.Sequential(Numbered(special)), section)
        assert found.block is not None
        with pytest.raises(xds.UsageError, match=r"computes some|none of the known"):
            find_convention(found.block, section, None)


def test_size_that_does_not_divide() -> None:
    for text in run_ranks(refused, 3, Model, {"size": 3}):
        assert "layers.0.mlp has 4" in text


@pytest.mark.parametrize(
    "keys",
    [
        {
            "moe_layer_pattern": r"layers\.\d+\.mlp",
            "expert_pattern": "experts",
            "router_pattern": "gate",
        },
        {
            "expert_pattern": "*.mlp.experts",
            "top_k": 2,
            "score_func": "softmax",
            "route_norm": True,
        },
    ],
)
def test_named_parts(keys: dict[str, Any]) -> None:
    def built() -> list[str]:
        engine = xds.initialize(Model(), given(2, 2, **keys))
        numels = [
            param.numel()
            for param in engine.module.layers[0].mlp.experts[dist.get_rank()].parameters()
        ]
        engine.destroy()
        return numels

    assert run_ranks(built, 2)[1][0] == 0
