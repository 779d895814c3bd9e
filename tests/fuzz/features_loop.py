"""Features of the training loop: forwards and backwards in other numbers, groups, evaluation, checkpoints."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .feature import Call, Feature
from .model import Net
from .side import Side


class NoSync(Feature):
    """All micro-batches of a step but the last are inside no_sync()."""

    share = 0.3
    holds = True

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.accumulation > 1


class Groups(Feature):
    """Two groups of parameters; in some cases the second has another learning rate, decay, or is left out."""

    share = 0.25

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.second = draw.choice(({"lr": case.lr * 3}, {"weight_decay": 0.0}, {"lr": 0.0}, None))

    def split(self, net: Net) -> list[dict[str, Any]]:
        params = list(net.parameters())
        one, two = params[::2], params[1::2]
        if self.second is None:
            return [{"params": one}]
        return [{"params": one}, {"params": two, **self.second}]


class LearningRateChanges(Feature):
    """The script writes to the optimizer's groups between steps."""

    share = 0.12

    def before_step(self, side: Side, step: int) -> None:
        for number, group in enumerate(side.param_groups()):
            group["lr"] = self.case.lr * (1 + (step + number) % 3)


class Evaluations(Feature):
    """Forwards without gradients in between: before a step, or between its forward and its update."""

    share = 0.2

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.where = draw.choice(("before", "in between", "after"))
        self.mode = draw.choice((torch.no_grad, torch.inference_mode))
        self.is_eval = draw.random() < 0.6

    def before_step(self, side: Side, step: int) -> None:
        if self.where == "before":
            self._evaluate(side, step)

    def before_update(self, side: Side, step: int) -> None:
        if self.where == "in between":
            self._evaluate(side, step)

    def after_step(self, side: Side, step: int) -> None:
        if self.where == "after":
            self._evaluate(side, step)

    def _evaluate(self, side: Side, step: int) -> None:
        side.net.train(not self.is_eval)
        with self.mode():
            call = side.call(step, 7, is_training=False)
            side.see("evaluation", side.forward(side.batch(call), call).float().square().mean())
        side.net.train()


class ForgottenForward(Feature):
    """A forward in training mode whose result nobody uses."""

    share = 0.08

    def before_micro_step(self, side: Side, call: Call) -> None:
        other = side.call(call.step, call.micro_step, 2)
        side.see("unused", side.forward(side.batch(other), other).float().mean())


class FailingForward(Feature):
    """A forward that raises, is caught, and training goes on."""

    share = 0.05

    def before_step(self, side: Side, step: int) -> None:
        if step == 1:
            try:
                side.forward(side.batch(side.call(step, 0))[:, :-1], side.call(step, 0))
            except RuntimeError:
                side.see("raised", 1.0)


class ZeroGrad(Feature):
    """zero_grad() where scripts call it: first of all, before a step, after a backward that is not wanted."""

    share = 0.15

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.where = draw.choice(("before", "after", "unwanted"))

    def before_step(self, side: Side, step: int) -> None:
        if self.where == "before":
            side.zero_grad()
        if self.where == "unwanted" and step == 1:
            call = side.call(step, 5)
            side.backward((side.forward(side.batch(call), call).float() - 0.3).square().mean())
            side.zero_grad()

    def after_step(self, side: Side, step: int) -> None:
        if self.where == "after":
            side.zero_grad()


class OptimizerZeroGrad(Feature):
    """The script calls the optimizer's zero_grad, or the module's, before each step."""

    share = 0.1

    def before_step(self, side: Side, step: int) -> None:
        if self.draw_is_module():
            side.net.zero_grad()
        else:
            side.optimizer_zero_grad()

    def draw_is_module(self) -> bool:
        return self.case.seed % 2 == 0


class GradientsRead(Feature):
    """The script reads gradients between backward and step."""

    share = 0.1
    reads_gradients = True

    def before_update(self, side: Side, step: int) -> None:
        for name, param in side.net.named_parameters():
            if param.requires_grad and param.numel() and name.startswith(("out", "inp")):
                if side.is_trained(param):
                    side.see(f"gradient of {name}", side.grad_of(param))


class Checkpoint(Feature):
    """Saved, forgotten and loaded after a step."""

    share = 0.1
    excludes = ("FrozenLater", "UnfrozenLater", "FrozenForAStep", "AccumulationChanges")

    def after_step(self, side: Side, step: int) -> None:
        if step == 0:
            side.save_and_go_on()


class CheckpointMidway(Feature):
    """Saved, forgotten and loaded between two micro-batches of a step."""

    share = 0.08
    excludes = (
        "Checkpoint",
        "CheckpointElsewhere",
        "NoSync",
        "FrozenLater",
        "UnfrozenLater",
        "FrozenForAStep",
    )

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.accumulation > 1

    def before_micro_step(self, side: Side, call: Call) -> None:
        if call.micro_step == 1 and call.step == 0:
            side.save_and_go_on()


class CheckpointElsewhere(Feature):
    """Loaded at another ZeRO stage than it was saved at."""

    share = 0.06
    excludes = ("Checkpoint", "CheckpointMidway", "FrozenLater", "UnfrozenLater", "FrozenForAStep")

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.stage = draw.choice((0, 1, 2, 3))

    def after_step(self, side: Side, step: int) -> None:
        if step == 0:
            wants_whole = side.case.has("Divergent", "OneReentrant", "PenaltyOutside")
            side.save_and_go_on(min(self.stage, 2) if wants_whole else self.stage)


class OffloadedStates(Feature):
    """States are sent away and brought back between steps."""

    share = 0.05

    def after_step(self, side: Side, step: int) -> None:
        side.go_elsewhere_and_back()


class StateRead(Feature):
    """The script takes the whole state dict between steps."""

    share = 0.06

    def after_step(self, side: Side, step: int) -> None:
        state = side.state()
        for name in sorted(state):
            if state[name].is_floating_point() and state[name].numel():
                side.see(f"state {name}", state[name].cpu().double().norm())


class ForwardGathered(Feature):
    """An evaluation inside of GatheredParameters."""

    share = 0.05

    def before_step(self, side: Side, step: int) -> None:
        call = side.call(step, 8, is_training=False)
        with side.gathered(list(side.net.parameters())[::2]), torch.no_grad():
            side.see("gathered", side.forward(side.batch(call), call).float().square().mean())


class FailingBackward(Feature):
    """A backward that raises, is caught, and training goes on."""

    share = 0.05

    def before_step(self, side: Side, step: int) -> None:
        if step != 1:
            return

        def refuse(grad: Tensor) -> None:
            raise ArithmeticError("on purpose")

        call = side.call(step, 9)
        out = side.forward(side.batch(call), call)
        loss = (out.float() - 0.3).square().mean()
        if side.net.inner_loss.requires_grad:
            loss = loss + side.net.inner_loss
            side.net.inner_loss.register_hook(refuse)
        else:
            out.register_hook(refuse)
        try:
            side.backward(loss)
        except ArithmeticError:
            side.see("raised", 1.0)
        side.zero_grad()


class OptimizerGiven(Feature):
    """The engine gets an optimizer, made or to be made, instead of a section of the config."""

    share = 0.12

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.optimizer != "Lion"


class AccumulationChanges(Feature):
    """The number of micro-batches in a step changes."""

    share = 0.06
    excludes = ("Checkpoint", "CheckpointMidway", "CheckpointElsewhere")

    def after_step(self, side: Side, step: int) -> None:
        if step == 0:
            side.set_accumulation(self.case.accumulation % 3 + 1)


class DirectCalls(Feature):
    """A block is called by the script itself, without the model."""

    share = 0.06

    def before_step(self, side: Side, step: int) -> None:
        call = side.call(step, 6, is_training=False)
        block = side.net.blocks[0]
        with torch.no_grad():
            x = side.batch(call)
            side.seed(call)
            side.see("direct", block.merge(x, block(x, call)).float().square().mean())
