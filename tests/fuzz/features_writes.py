"""Features that change parameters past the optimizer: inside of forward, between steps, frozen and not."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from .case import Case
from .feature import Call, Feature
from .model import Net, build
from .optimizers import OPTIMIZERS
from .side import Side


def trained(net: Net) -> list[tuple[str, nn.Parameter]]:
    """Floating parameters that train, with elements."""
    return [(n, p) for n, p in net.named_parameters() if p.requires_grad and p.numel()]


def _ramp(param: nn.Parameter) -> Tensor:
    """Other values, no two alike: the gradients of equal ones cancel out, and rounding is left."""
    return torch.linspace(-0.2, 0.3, param.numel()).view(param.shape).to(param.dtype)


class Teacher(Feature):
    """MoCo, BYOL: a frozen copy of a layer follows the trained one, in forward."""

    share = 0.08

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.by_data = draw.random() < 0.5
        self.in_container = draw.random() < 0.5

    def build(self, net: Net) -> None:
        width = self.case.width
        layers = [nn.Linear(width, width) for _ in range(2)]
        net.students = nn.ModuleList(layers)
        net.teachers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        net.teachers.requires_grad_(False)

    def enter(self, net: Net, x: Tensor, call: Call) -> Tensor:
        if call.is_training:
            with torch.no_grad():
                for one, two in zip(
                    net.students.parameters(), net.teachers.parameters(), strict=True
                ):
                    target, source = (two.data, one.data) if self.by_data else (two, one)
                    target.mul_(0.5).add_(source, alpha=0.5)
        with torch.no_grad():
            told = x
            for layer in net.teachers:
                told = torch.tanh(layer(told))
        for layer in net.students:
            x = torch.tanh(layer(x))
        return x - 0.5 * told

    excludes = ("OneReentrant",)


class ClampedInForward(Feature):
    """CLIP: a scale of no dimension is clamped in forward before it is used."""

    share = 0.08

    def build(self, net: Net) -> None:
        net.scale = nn.Parameter(torch.tensor(0.5))

    def enter(self, net: Net, x: Tensor, call: Call) -> Tensor:
        with torch.no_grad():
            net.scale.clamp_(-0.25, 0.25)
        return x * (1 + net.scale)


class WrittenInForward(Feature):
    """A trained weight is scaled in forward before it is used."""

    share = 0.05
    excludes = ("TwoForwards",)  # torch refuses: the first forward's graph needs the old value

    def enter(self, net: Net, x: Tensor, call: Call) -> Tensor:
        if call.is_training:
            with torch.no_grad():
                net.inp.weight.mul_(0.99)
        return x


class _Written(Feature):
    """Parameters are written between steps."""

    def after_step(self, side: Side, step: int) -> None:
        if step == 0:
            chosen = [
                entry for n, entry in enumerate(trained(side.net)) if n % 2 == self.case.seed % 2
            ]
            self.write(side, [param for _, param in chosen])

    def write(self, side: Side, params: list[nn.Parameter]) -> None:
        raise NotImplementedError


class WrittenBetweenSteps(_Written):
    """WGAN: weights are clipped in place."""

    def write(self, side: Side, params: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for param in params:
                param.clamp_(-0.05, 0.05)


class ScaledBetweenSteps(_Written):
    """Through `.data`, as older scripts do."""

    share = 0.05

    def write(self, side: Side, params: list[nn.Parameter]) -> None:
        for param in params:
            param.data.mul_(0.5)


class DataAssigned(_Written):
    """`param.data = tensor`."""

    share = 0.05

    def write(self, side: Side, params: list[nn.Parameter]) -> None:
        for param in params:
            param.data = _ramp(param)


class WrittenGathered(_Written):
    """Inside of GatheredParameters."""

    share = 0.1

    def write(self, side: Side, params: list[nn.Parameter]) -> None:
        with side.gathered(params), torch.no_grad():
            for param in params:
                param.mul_(0.5)


class WrittenByName(_Written):
    """By set_full_param."""

    share = 0.06

    def write(self, side: Side, params: list[nn.Parameter]) -> None:
        for param in params:
            side.write(param, side.value_of(param) * 0.5 + 0.01)


class GradientsWritten(Feature):
    """The script changes gradients between backward and step."""

    share = 0.06
    reads_gradients = True

    def before_update(self, side: Side, step: int) -> None:
        for name, param in trained(side.net):
            if name.startswith(("out", "inp")) and side.is_trained(param):
                side.write_grad(param, side.grad_of(param) * 0.5)


class ModuleMoved(Feature):
    """module.to(device, dtype) where everything is there already."""

    share = 0.05
    excludes = ("DoubleBlock",)

    def before_step(self, side: Side, step: int) -> None:
        side.net.to(next(side.net.parameters()).device, side.dtype)


class FrozenAroundEvaluation(Feature):
    """Nothing requires a gradient while something else is computed: adversarial examples, GANs."""

    share = 0.06

    def before_step(self, side: Side, step: int) -> None:
        params = [param for param in side.net.parameters() if param.requires_grad]
        for param in params:
            param.requires_grad_(False)
        call = side.call(step, 4, is_training=False)
        x = side.batch(call)
        side.see("evaluation", side.forward(x, call).float().square().mean())
        for param in params:
            param.requires_grad_(True)


class AssignedAndRead(_Written):
    """`param.data = tensor`, and right after it the script asks for values: by name, or as a state dict."""

    share = 0.05

    def write(self, side: Side, params: list[nn.Parameter]) -> None:
        for number, param in enumerate(params):
            param.data = _ramp(param)
            if number % 2 == self.case.seed // 2 % 2:
                side.see("read", side.value_of(param).cpu().double().norm())
        if self.case.seed // 2 % 2:
            state = side.state()
            side.see("state", sum(state[n].cpu().double().norm() for n, _ in trained(side.net)))


class Loaded(Feature):
    """A state dict is loaded between steps, by the module or by the engine."""

    share = 0.08

    def after_step(self, side: Side, step: int) -> None:
        if step == 0:
            side.load(self.state(side), by_module=self.case.seed % 2 == 0)

    def state(self, side: Side) -> dict[str, Tensor]:
        """Other values for everything but running statistics; one for each tensor, which may have two names."""
        generator = torch.Generator().manual_seed(self.case.seed)
        values: dict[int, Tensor] = {}
        found = {}
        for name, value in build(self.case).state_dict(keep_vars=True).items():
            if value.is_floating_point() and "running" not in name and id(value) not in values:
                drawn = torch.randn(value.shape, generator=generator) * 0.1
                values[id(value)] = drawn.to(side.dtype)
            found[name] = values.get(id(value), value.detach())
        return found


class FrozenLater(Feature):
    """Parameters are frozen after a step."""

    share = 0.08

    def after_step(self, side: Side, step: int) -> None:
        if step == 0:
            for number, (name, param) in enumerate(trained(side.net)):
                if number % 2 and not name.startswith("out"):
                    param.requires_grad_(False)


class UnfrozenLater(Feature):
    """Parameters that were frozen train from the second step on."""

    share = 0.05
    excludes = (
        "Reentrant",
        "OneReentrant",
        "InnerCheckpointBlock",
    )  # these ask for a gradient to hand on

    @classmethod
    def fits(cls, case: Case) -> bool:
        return not OPTIMIZERS[case.optimizer].counts

    def build(self, net: Net) -> None:
        net.inp.requires_grad_(False)
        for param in net.blocks[0].parameters():
            param.requires_grad_(False)

    def after_step(self, side: Side, step: int) -> None:
        if step == 0:
            for module in (side.net.inp, side.net.blocks[0]):
                for param in module.parameters():
                    if param.is_floating_point():
                        param.requires_grad_(True)


class FrozenForAStep(Feature):
    """GANs: parameters are frozen for one step and train again after it."""

    share = 0.04

    @classmethod
    def fits(cls, case: Case) -> bool:
        return not OPTIMIZERS[case.optimizer].counts

    def before_step(self, side: Side, step: int) -> None:
        side.net.inp.requires_grad_(step != 1)
