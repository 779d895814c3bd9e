"""What a script does to parameters after `initialize` counts as in plain PyTorch, or raises before a loss."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from helpers import SMALL_NUMEL, run_ranks
from torch import Tensor, nn

import xds
from xds.utils.errors import UsageError

WIDTH = 12
assert WIDTH < SMALL_NUMEL < WIDTH**2  # gradients are copied in both ways
STAGES = range(4)
CASES = ((1, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.zeros(1, 1))
        self.last = nn.Linear(width, 1)

    def before(self) -> None:
        """What a forward does to parameters."""

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return ((self.last(x) * self.scale + self.bias).float() ** 2).mean()


class Clamps(Net):
    """CLIP's logit scale; torch allows writes to a placeholder of one element."""

    def before(self) -> None:
        with torch.no_grad():
            self.scale.clamp_(-0.4, 0.4)
            self.bias.add_(0.01)


class Shrinks(Net):
    """Writes to weights of its own and of a block, in place and by assignment."""

    def before(self) -> None:
        self.first.weight.data.mul_(0.99)
        self.blocks[1].linear.weight.data = self.blocks[1].linear.weight.data * 0.99
        with torch.no_grad():
            self.blocks[2].norm.weight.mul_(0.9)


class Teacher(Net):
    """MoCo and BYOL: a frozen copy follows the weights inside of forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.teacher = nn.ModuleList([Block(width) for _ in range(3)])
        self.teacher.requires_grad_(False)

    def before(self) -> None:
        pairs = zip(self.blocks.parameters(), self.teacher.parameters(), strict=True)
        for own, other in pairs:
            other.data.mul_(0.5).add_(own.data, alpha=0.5)

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        with torch.no_grad():
            for block in self.teacher:
                x = block(x)
        return loss + (self.first(x) ** 2).float().mean()


class Renormed(Net):
    """An embedding that shortens its rows in forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.table = nn.Embedding(4 * width, width, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(len(self.table.weight), device=x.device)
        return super().forward(x + self.table(rows)[: len(x)])


def build(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind(WIDTH)


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def config_of(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    params = {"eps": 1e-4, "weight_decay": 0.1}
    return runs.config(
        stage, precision, samples=3, params=params, zero={"stage3_max_reuse_distance": 0}, **more
    )


def step_of(engine: xds.Engine, step: int) -> float:
    x = samples(step, engine.global_rank)
    loss = engine(x.bfloat16() if engine.config.bf16.enabled else x)
    engine.backward(loss)
    engine.step()
    return runs.mean_over_ranks(loss)


class Plain:
    """The same in plain PyTorch; in bf16 with fp32 masters that adopt the script's writes."""

    def __init__(self, model: Net, world_size: int, precision: str) -> None:
        self.model = model
        self.world_size = world_size
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model.to(self.dtype)
        self.masters = {
            param: param.detach().float().clone().requires_grad_()
            for param in model.parameters()
            if param.requires_grad
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=1e-2, eps=1e-4, weight_decay=0.1
        )

    def step(self, step: int) -> float:
        kept = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        total = 0.0
        for rank in range(self.world_size):
            with torch.no_grad():  # every rank's forward begins with the same values
                for name, param in self.model.named_parameters():
                    param.data.copy_(kept[name])
            loss = self.model(samples(step, rank).to(self.dtype)) / self.world_size
            loss.backward()
            total += float(loss.detach())
        with torch.no_grad():
            for param, master in self.masters.items():
                param.data = param.data.clone()
                master.copy_(torch.where(master.to(self.dtype) == param, master, param.float()))
                master.grad = None if param.grad is None else param.grad.float()
                param.grad = None
            self.optimizer.step()
            for param, master in self.masters.items():
                param.copy_(master)
                if not param.requires_grad:
                    assert master.grad is None
        return total


def train(kind: type[Net]) -> dict[tuple[int, str], list[float]]:
    found = {}
    for case in CASES:
        engine = xds.initialize(build(kind), config_of(*case))
        found[case] = [step_of(engine, step) for step in range(4)]
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "kind", [Clamps, Shrinks, Teacher, Renormed], ids=lambda kind: kind.__name__
)
def test_writes_inside_of_forward_count(kind: type[Net]) -> None:
    got = run_ranks(train, 2, kind)[0]
    wanted = {}
    for precision in ("fp32", "bf16"):
        plain = Plain(build(kind), 2, precision)
        wanted[precision] = [plain.step(step) for step in range(4)]
    for case, losses in got.items():
        bound = 1e-4 if case[1] == "fp32" else 2e-2  # a loss in bf16 has 8 bits
        assert losses == pytest.approx(wanted[case[1]], rel=bound), case


# -- between steps ------------------------------------------------------------------------------------------


def all_zero(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)


def gathered(model: nn.Module) -> None:
    """A context that reads parameters must not lose an earlier assignment."""
    for param in model.parameters():
        param.data = torch.zeros_like(param.data)
    with xds.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for param in model.parameters():
            param.data.mul_(0.5)


def through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.zero_()


def assigned(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = torch.zeros_like(param.data)


def turned(model: nn.Module) -> None:
    """Another view of the parameter's memory."""
    for param in model.parameters():
        if param.dim() == 2 and param.shape[0] == param.shape[1]:
            param.data = param.data.t()


def transposed(model: nn.Module) -> None:
    for param in model.parameters():
        shape = param.shape[::-1]
        param.data = torch.zeros(shape, dtype=param.dtype).permute(tuple(range(len(shape)))[::-1])


def loaded(model: nn.Module) -> None:
    model.load_state_dict({key: value * 0 for key, value in model.state_dict().items()})


EDITS: list[Callable[[nn.Module], None]] = [
    all_zero,
    gathered,
    through_data,
    assigned,
    transposed,
    loaded,
]


def state_at_last(engine: xds.Engine) -> dict[str, Tensor]:
    """Every unit raises once for an assignment to its parameters."""
    for _ in range(10):
        try:
            return engine.full_state_dict()
        except UsageError:
            pass
    raise AssertionError("it goes on raising")


def edit(folder: str) -> list[Any]:
    results = []
    for stage, precision in ((0, "bf16"), (2, "fp32"), (3, "bf16")):
        for number, change in enumerate(EDITS):
            model = build(Net)
            engine = xds.initialize(model, config_of(stage, precision))
            step_of(engine, 0)
            before = engine.full_state_dict()
            try:
                change(model)
                engine.optimizer.param_groups[0]["lr"] = 0.0
                told = sum(float(v.abs().sum()) for v in engine.full_state_dict().values())
                path = f"{folder}/{stage}{precision}{number}"
                engine.save_checkpoint(path)
                step_of(engine, 1)
                after = engine.full_state_dict()
                engine.load_checkpoint(path)
                again = engine.full_state_dict()
                total = [float(sum(v.abs().sum() for v in s.values())) for s in (after, again)]
                results.append((stage, precision, change.__name__, told, *total))
            except (UsageError, RuntimeError) as error:
                same = state_at_last(engine)
                # one element: never dropped, so such a write counts at stage 3 too
                large = [key for key in before if before[key].numel() > 1]
                kept = all(torch.equal(same[key], before[key]) for key in large)
                results.append((stage, precision, change.__name__, str(error), kept))
            engine.destroy()
    return results


def test_writes_between_steps_count_or_raise(tmp_path: Path) -> None:
    for result in run_ranks(edit, 2, str(tmp_path))[0]:
        if result[0] < 3:
            assert result[3:] == (0.0, 0.0, 0.0), result
        else:  # torch refuses some of them itself
            names = (
                "GatheredParameters|engine.load_state_dict|engine.state_dict|single memory location"
            )
            assert re.search(names, result[3]), result
            assert result[4], result


def other_dtype() -> list[str]:
    told = []
    for stage, precision in ((0, "bf16"), (2, "fp32"), (3, "fp32")):
        model = build(Net)
        plain = xds.initialize(build(Net), config_of(stage, precision))
        engine = xds.initialize(model, config_of(stage, precision))
        assert step_of(engine, 0) == step_of(plain, 0)
        model.double() if precision == "fp32" else model.float()
        with pytest.raises(UsageError, match="changed their dtype after") as caught:
            engine(samples(1, 0))
        told.append(str(caught.value))
        # nothing is lost, and gradients arrive as before
        for step in range(1, 4):
            assert step_of(engine, step) == step_of(plain, step)
        engine.destroy()
        plain.destroy()
    return told


def test_another_dtype_raises_and_training_continues() -> None:
    for told in run_ranks(other_dtype, 2):
        assert all("bf16 or torch_autocast in the config" in text for text in told)


def turn() -> list[list[float]]:
    found = []
    for stage in range(3):
        model = build(Net)
        engine = xds.initialize(model, config_of(stage))
        losses = [step_of(engine, 0)]
        turned(model)
        losses += [step_of(engine, step) for step in range(1, 4)]
        found.append(losses)
        engine.destroy()
    return found


def test_another_view_of_its_own_memory_counts() -> None:
    plain = Plain(build(Net), 2, "fp32")
    want = [plain.step(0)]
    with torch.no_grad():
        for param in plain.model.parameters():
            if param.dim() == 2 and param.shape[0] == param.shape[1]:
                param.copy_(param.t().clone())
    want += [plain.step(step) for step in range(1, 4)]
    for got in run_ranks(turn, 2)[0]:
        assert got == pytest.approx(want, rel=1e-4)


def other_shape() -> list[str]:
    told = []
    for stage in range(3):
        model = build(Net)
        engine = xds.initialize(model, config_of(stage))
        step_of(engine, 0)
        engine.backward(engine(samples(1, engine.global_rank)))
        model.first.weight.data = torch.zeros(3, WIDTH)
        with pytest.raises(
            UsageError, match="and is unchanged; assign a tensor of that shape"
        ) as caught:
            engine.step()
        assert model.first.weight.shape == (WIDTH, WIDTH) and model.first.weight.abs().sum() > 0
        told.append(str(caught.value))
        engine.destroy()
    return told


def test_another_shape_raises_before_the_update() -> None:
    for told in run_ranks(other_shape, 2):
        assert all("first.weight" in text for text in told)


# -- freezing -----------------------------------------------------------------------------------------------


MOMENTUM = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}}


def freeze(optimizer: dict[str, Any]) -> list[list[float]]:
    found = []
    for stage in STAGES:
        model = build(Net)
        engine = xds.initialize(model, {**config_of(stage), **optimizer})
        losses = []
        for step in range(8):
            set_frozen(model, step)
            losses.append(step_of(engine, step))
        found.append(losses)
        engine.destroy()
    return found


def set_frozen(model: Net, step: int) -> None:
    model.blocks[1].requires_grad_(not 2 <= step < 5)
    model.first.bias.requires_grad_(not 2 <= step < 5)


def test_frozen_parameters_do_not_change_and_train_again() -> None:
    """Momentum and decay would change them. AdamW counts the steps of a range, so it is compared until then."""
    for kind, steps in (("SGD", 8), ("AdamW", 6)):
        got = run_ranks(freeze, 2, {"optimizer": MOMENTUM} if kind == "SGD" else {})[0]
        model = build(Net)
        plain: torch.optim.Optimizer
        if kind == "SGD":
            plain = torch.optim.SGD(model.parameters(), **MOMENTUM["params"])
        else:
            plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
        want = []
        for step in range(steps):
            set_frozen(model, step)
            plain.zero_grad()
            losses = [model(samples(step, rank)) / 2 for rank in range(2)]
            sum(losses).backward()
            plain.step()
            want.append(float(sum(losses).detach()))
        for stage in STAGES:
            assert got[stage][:steps] == pytest.approx(want, rel=1e-4), (kind, stage)


def frozen_for_a_step(stage: int, zero: dict[str, Any]) -> None:
    """Values and states of frozen parameters stay, also of the second of two groups in one buffer."""
    model = build(Net)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if (p.dim() == 2) == square]} for square in (True, False)
    ]
    config = config_of(stage)
    config["zero_optimization"] |= zero
    engine = xds.initialize(model, config, model_parameters=groups)
    step_of(engine, 0)
    frozen = [*model.blocks[1].parameters(), model.first.bias]
    for param in frozen:
        param.requires_grad_(False)

    def held() -> list[Tensor]:
        states = [xds.zero.get_full_optimizer_state(p, "exp_avg_sq") for p in frozen]
        return [*states, *(xds.zero.get_full_param(p) for p in frozen)]

    before = held()
    step_of(engine, 1)
    assert all(map(torch.equal, before, held()))
    engine.destroy()


def test_states_of_frozen_parameters_stay_in_groups_and_replicas() -> None:
    for stage in (0, 1, 3):
        run_ranks(frozen_for_a_step, 2, stage, {})
        if stage:
            run_ranks(frozen_for_a_step, 4, stage, {"mics_shard_size": 2})


def unfreeze() -> list[str]:
    told = []
    for stage in STAGES:
        model = build(Net)
        model.blocks[1].requires_grad_(False)
        engine = xds.initialize(model, config_of(stage))
        step_of(engine, 0)
        model.blocks[1].linear.requires_grad_(True)
        with pytest.raises(UsageError) as caught:
            engine(samples(1, engine.global_rank))
        told.append(str(caught.value))
        model.blocks[1].linear.requires_grad_(False)
        step_of(engine, 1)
        engine.destroy()
    return told


def test_unfreezing_what_was_frozen_at_the_start_raises() -> None:
    for told in run_ranks(unfreeze, 2):
        assert all("blocks.1.linear.weight.requires_grad_(True)" in text for text in told)


def read_states_of_several_dtypes() -> float:
    """Ranks that hold nothing of a parameter read its states in the dtype of another."""
    worst = 0.0
    for stage in (0, 1, 3):
        model = build(Net)
        model.last.double()
        model.last.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        engine = xds.initialize(model, config_of(stage))
        step_of(engine, 0)
        for param in model.parameters():
            state = xds.zero.get_full_optimizer_state(param, "exp_avg_sq")
            grown = xds.zero.get_full_optimizer_state(param, "exp_avg")
            assert state.dtype == grown.dtype == param.dtype
            # after one step: m = 0.1 g, v = 0.001 g^2
            wrong = (state - 0.001 * (grown / 0.1).square()).abs().max()
            worst = max(worst, float(wrong / state.abs().max().clamp_min(1e-12)))
        engine.destroy()
    return worst


def test_optimizer_states_of_several_dtypes_are_read_as_they_are() -> None:
    assert max(run_ranks(read_states_of_several_dtypes, 3)) < 1e-4


class TwoDtypes(nn.Module):
    """fp64 beside fp32: two flat buffers in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(40, 40).double()
        self.narrow = nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x).double()).square().mean()


def places_of(kind: str) -> None:
    engine = xds.initialize(TwoDtypes(), config_of(0) | {"optimizer": {"type": kind}})
    updater = engine._parts.updater
    for group in engine.optimizer.param_groups:
        for tensor in group["params"]:
            master, start = updater.places.of(tensor)
            assert tensor.data_ptr() == master.tensor[start:].data_ptr()
            assert tensor.dtype == master.tensor.dtype
            assert updater.places.of(tensor.clone()) is None
            assert updater.places.of(tensor[1:]) is None
    engine.destroy()


def test_an_optimizers_tensors_are_known_by_identity_not_by_address() -> None:
    for kind in ("AdamW", "Muon"):
        run_ranks(places_of, 2, kind)


class WideScale(nn.Module):
    """An fp64 number beside fp32: with two ranks one of them has only padding of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).double() * self.scale).square().mean()


def load_wide_scale(folder: str) -> None:
    torch.manual_seed(0)
    x = torch.ones(2, 40)
    for saved, loaded in ((0, 1), (1, 2), (2, 3)):
        values = []
        for stage in (saved, loaded):
            model = WideScale()
            engine = xds.initialize(model, runs.config(stage, samples=1))
            where = f"{folder}/{saved}{loaded}"
            if stage == loaded and values:
                engine.load_checkpoint(where)
            else:
                engine.backward(engine(x))
                engine.step()
                engine.save_checkpoint(where)
            engine.backward(engine(x))
            engine.step()
            state = xds.zero.get_full_optimizer_state(model.scale, "exp_avg")
            assert state.dtype == torch.float64
            values.append((xds.zero.get_full_param(model.scale).item(), state.item()))
            engine.destroy()
        assert values[0] == values[1], (saved, loaded)


def test_states_of_several_dtypes_load_where_a_rank_has_only_padding(tmp_path: Path) -> None:
    run_ranks(load_wide_scale, 2, str(tmp_path))
