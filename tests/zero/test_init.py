"""Construction in slices: the values of plain construction, no leftovers, models on the meta device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from runs import config
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds import zero


class Fancy(nn.Module):
    """Everything constructors do: deep copies, ties, `apply`, `.data`, in-place products, raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, 24)
        self.position = nn.Parameter(torch.randn(7, 24))
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True, dropout=0)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(3)]
        )
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 51)
        self.head.weight = self.embed.weight
        self.apply(self._init)
        for number, block in enumerate(self.blocks):
            with torch.no_grad():
                block[2].weight.div_((2 * (number + 1)) ** 0.5)
        nn.init.trunc_normal_(self.position, std=0.02)
        self.position.data[0] = 0
        self.gain = nn.Parameter(torch.tensor([1.5]))  # fewer elements than ranks

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
            module.weight.data[3].zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x * self.gain).flatten(0, 1), tokens.flatten())


def hooks_left() -> int:
    from torch.nn.modules import module
    from torch.overrides import _get_current_function_mode_stack

    return sum(
        len(kept)
        for kept in (
            module._global_parameter_registration_hooks,
            module._global_module_registration_hooks,
            _get_current_function_mode_stack(),
        )
    )


def built_in_slices(stage: int, seeds_differ: bool, dtype: torch.dtype | None) -> float:
    before = hooks_left()
    torch.manual_seed(5)
    plain = Fancy()
    state = torch.get_rng_state()
    given = config(stage, "bf16" if dtype else "fp32")
    rank = dist.get_rank()
    torch.manual_seed(5 + rank * seeds_differ)
    with zero.Init(given, dtype=dtype):
        model = Fancy()
    assert hooks_left() == before
    assert seeds_differ or torch.get_rng_state().equal(state)
    assert model.head.weight is model.embed.weight
    if stage == 3 and dist.get_world_size() > 1:
        assert model.head.weight.isnan().all() and model.head.weight.shape == (51, 24)
        with zero.GatheredParameters(model.norm.weight, modifier_rank=0):
            assert model.norm.weight.equal(plain.norm.weight)
            model.norm.weight.data.fill_(1.0)
        whole = zero.get_full_param(model.position)
        assert whole.equal(plain.position.detach().to(whole.dtype))
    engine = xds.initialize(model, given)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        want = other.detach().to(dtype).float() if dtype else other.detach()
        if dtype and name.endswith("2.weight"):  # divided in place when it was rounded already
            torch.testing.assert_close(zero.get_full_param(param), want, rtol=8e-3, atol=0)
        else:
            assert zero.get_full_param(param).equal(want), name
    loss = engine(torch.arange(14).view(2, 7))
    engine.backward(loss)
    engine.step()
    value = float(loss.detach())
    engine.destroy()
    return value


@pytest.mark.contract
@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_are_those_of_plain_construction(world: int) -> None:
    losses = [
        run_processes(built_in_slices, world, *case)
        for case in ((3, False, None), (3, True, None), (2, False, None))[: 1 if world == 3 else 3]
    ]
    assert len({loss for case in losses for loss in case}) == 1


def test_slices_may_be_kept_in_the_dtype_of_training() -> None:
    run_processes(built_in_slices, 2, 3, False, torch.bfloat16)


def interrupted() -> None:
    before = hooks_left()
    with pytest.raises(ZeroDivisionError), zero.Init(config(3)):
        nn.Linear(1 // 0, 2)
    assert hooks_left() == before
    outside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = [param.detach().clone() for param in outside.parameters()]
    zero.Init(config(3), module=outside)  # a model that exists already
    assert outside[0].weight.isnan().all()
    with zero.GatheredParameters(outside.parameters()):
        assert all(p.equal(v) for p, v in zip(outside.parameters(), values, strict=True))
    with pytest.raises(xds.UsageError, match="has no gradient: no engine trains it yet"):
        zero.get_full_grad(outside[0].weight)
    with zero.Init(config(3), enabled=False):
        assert not nn.Linear(4, 4).weight.isnan().any()


def test_nothing_is_left_after_the_context() -> None:
    run_processes(interrupted, 2)


def torch_modules() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 30),
        nn.Sequential(nn.Linear(30, 30), nn.LayerNorm(30)),
        nn.Embedding(4, 5),
        nn.MultiheadAttention(8, 2),
        nn.BatchNorm1d(4),
        nn.Conv1d(3, 4, 2),
    )


def from_meta() -> str:
    torch.manual_seed(3)
    plain = torch_modules()
    with torch.device("meta"):
        model = torch_modules()
    weight = model[0].weight
    torch.manual_seed(3)
    engine = xds.initialize(model, config(3))
    assert model[0].weight is weight
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert zero.get_full_param(param).equal(other), name
    assert model[4].running_var.equal(plain[4].running_var)
    engine.destroy()
    with torch.device("meta"):
        model = Fancy()
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(model, config(3))
    return str(caught.value)


def test_a_model_on_meta_gets_the_values_of_plain_construction() -> None:
    for said in run_processes(from_meta, 2):
        assert "Fancy (Fancy) on the meta device: no reset_parameters()" in said


class Edited(nn.Module):
    """Edits its parameters while it is built, as DeepSpeed's documentation shows: one rank writes."""

    def __init__(self, modifier: int, writes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        for number, layer in enumerate(self.layers):  # all but the last are slices by now
            with zero.GatheredParameters(layer.weight, modifier_rank=modifier), torch.no_grad():
                if writes:
                    layer.weight.fill_(number + 1.0)
                    layer.weight[0].mul_(2.0)
        self.scale = nn.Parameter(torch.ones(7))
        with zero.GatheredParameters([self.scale, self.layers[0].bias], modifier_rank=modifier):
            if writes:
                nn.init.constant_(self.scale, 4.0)
                self.layers[0].bias.data.zero_()
        with zero.GatheredParameters(self.layers[1].weight):
            self.read = float(self.layers[1].weight.sum())
        with torch.no_grad():
            self.layers[2].bias.copy_(self.layers[1].weight[0])  # every rank, outside of a context
        with zero.GatheredParameters(self.parameters(), modifier_rank=modifier), torch.no_grad():
            if writes:
                self.layers[2].weight.add_(self.scale[0])


def edited_in_a_constructor() -> None:
    before = hooks_left()
    rank, world = dist.get_rank(), dist.get_world_size()
    for modifier in range(world):
        torch.manual_seed(0)
        want = Edited(modifier, writes=True)
        torch.manual_seed(0)
        with zero.Init(config(3)):
            model = Edited(modifier, writes=rank == modifier)
        assert model.read == want.read == 60.0
        assert_same(model, want)
    torch.manual_seed(0)
    with pytest.raises(xds.UsageError, match="without modifier_rank"), zero.Init(config(3)):
        layer = nn.Linear(4, 4)
        with zero.GatheredParameters(layer.weight), torch.no_grad():
            layer.weight.zero_()
    assert hooks_left() == before


def assert_same(model: nn.Module, want: nn.Module) -> None:
    plain = dict(want.named_parameters())
    for name, param in model.named_parameters():
        with zero.GatheredParameters(param):
            assert param.equal(plain[name]), name


def test_parameters_can_be_gathered_and_edited_in_a_constructor() -> None:
    run_processes(edited_in_a_constructor, 3)
