"""Features that say which forwards and backwards a micro-batch has, and of what its loss is made."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from .case import Case
from .feature import Call
from .model import DOUBLE_BACKWARD, SIMPLE
from .script import Passes
from .side import Side

PASSES = (
    *(
        "TwoForwards",
        "TwoBackwards",
        "RetainedGraph",
        "BareBackward",
        "GradientPenalty",
        "InnerLoss",
    ),
    *("AuxiliaryBackward", "InputGradient", "Scaled", "PenaltyOutside"),
    *("ReferenceModel", "UnevenBatches", "WeightedLosses"),
)


class _OtherPasses(Passes):
    share = 0.07
    excludes = PASSES

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.excludes = tuple(set(cls.excludes) | set(PASSES) - {cls.__name__})


class TwoForwards(_OtherPasses):
    """Two forwards, one backward: pairs, contrastive losses."""

    def run(self, side: Side, call: Call) -> None:
        one = self.loss(side, call)
        two = self.loss(side, side.call(call.step, call.micro_step, 1))
        side.see("loss", one + two)
        side.backward(one + 0.5 * two)


class TwoBackwards(_OtherPasses):
    """Two forwards, two backwards, before the micro-batch is counted."""

    def run(self, side: Side, call: Call) -> None:
        for part in (0, 1):
            loss = self.loss(side, side.call(call.step, call.micro_step, part))
            side.see("loss", loss)
            side.backward(loss)


class WeightedLosses(_OtherPasses):
    """Micro-batches count for different numbers of items, and some for none."""

    share = 0.07
    # before the step gradients have no mean yet, and hooks see them with a part of the weight
    excludes = ("GradientsRead", "GradientsWritten", "GradientHooks")

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.precision != "fp16"  # whose range the weights would leave here

    def run(self, side: Side, call: Call) -> None:
        loss = self.loss(side, call)
        side.see("loss", loss)
        first = call.rank == call.micro_step == 0  # some weight of a step is not 0
        side.backward(
            loss, weight=call.random(self.case, by_rank=True).choice((0, 1, 2.5, 5)) + first
        )


class RetainedGraph(_OtherPasses):
    """Two losses of one graph, each with a backward of its own."""

    def run(self, side: Side, call: Call) -> None:
        out = side.forward(side.batch(call), call).float()
        one, two = (out - 0.3).square().mean(), out.mean()
        side.see("loss", one + two)
        side.backward(one, retain_graph=True)
        side.backward(two)


class BareBackward(_OtherPasses):
    """`loss.backward()` instead of `engine.backward(loss)`."""

    def run(self, side: Side, call: Call) -> None:
        loss = self.loss(side, call)
        side.see("loss", loss)
        side.backward(loss, bare=True)


class GradientPenalty(_OtherPasses):
    """The loss has a gradient in it: WGAN-GP, physics."""

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.precision == "fp32" and all(b.kind in DOUBLE_BACKWARD for b in case.blocks)

    def loss(self, side: Side, call: Call) -> Tensor:
        x = side.batch(call).requires_grad_()
        out = side.forward(x, call)
        (grad,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        return (out.float() - 0.3).square().mean() + (grad.float().norm(dim=-1) - 1).square().mean()


class InnerLoss(_OtherPasses):
    """The loss is of an inner activation alone: the head has no part in it."""

    share = 0.05

    def loss(self, side: Side, call: Call) -> Tensor:
        loss = super().loss(side, call)
        return side.net.inner_loss if side.net.inner_loss.requires_grad else loss


class AuxiliaryBackward(_OtherPasses):
    """An auxiliary loss that was left on the module has a backward of its own, before the main one."""

    share = 0.05

    def run(self, side: Side, call: Call) -> None:
        loss = self.loss(side, call)
        side.see("loss", loss)
        side.see("loss", side.net.inner_loss)
        if side.net.inner_loss.requires_grad:  # not where all before it is frozen
            side.backward(side.net.inner_loss, retain_graph=True)
        side.backward(loss)


class InputGradient(_OtherPasses):
    """The script wants the gradient of its input as well."""

    share = 0.04

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.precision != "fp16"  # there it is scaled

    def run(self, side: Side, call: Call) -> None:
        x = side.batch(call).requires_grad_()
        loss = (side.forward(x, call).float() - 0.3).square().mean()
        side.see("loss", loss)
        side.backward(loss)
        side.see("gradient of the input", x.grad)


class Scaled(_OtherPasses):
    """The loss, and so every gradient, is very large or very small."""

    share = 0.05

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.precision == "fp32"

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        large = (
            () if case.optimizer.startswith("SGD") else (1e18, 1e20)
        )  # there weights would explode
        self.factor = draw.choice((1e-22, 1e-25, *large))

    def loss(self, side: Side, call: Call) -> Tensor:
        return super().loss(side, call) * self.factor


class PenaltyOutside(_OtherPasses):
    """The loss has the weights' own norm in it, taken outside of forward."""

    share = 0.04

    @classmethod
    def fits(cls, case: Case) -> bool:
        return not case.is_sharded  # there parameters are away outside of forward

    def loss(self, side: Side, call: Call) -> Tensor:
        params = [p for p in side.net.parameters() if p.requires_grad and p.numel()]
        return super().loss(side, call) + 0.01 * sum(p.float().square().mean() for p in params)


class ReferenceModel(_OtherPasses):
    """A second, frozen model in an engine of its own says what to learn: distillation, DPO."""

    share = 0.05
    excludes = ("DropoutBlock", "SpectralNormBlock", "NormBlock", "Reentrant", "OneReentrant")

    def initialized(self, side: Side) -> None:
        if not hasattr(
            side, "reference"
        ):  # it stays where the engine is made anew from a checkpoint
            side.make_reference()

    def loss(self, side: Side, call: Call) -> Tensor:
        x = side.batch(call)
        with torch.no_grad():
            told = side.reference(x, call).float()
        return (side.forward(x, call).float() - told - 0.3).square().mean()


class UnevenBatches(_OtherPasses):
    """Ranks have other numbers of samples, and some none."""

    share = 0.05

    @classmethod
    def fits(cls, case: Case) -> bool:
        return all(b.kind in SIMPLE - {"NormBlock", "AttentionBlock"} for b in case.blocks)

    excludes = ("RecurrentBlock", "InputKept", "AuxiliaryLoss", "Reentrant", "ForgottenForward")

    def loss(self, side: Side, call: Call) -> Tensor:
        x = side.batch(call)[: (call.rank + call.micro_step + call.step) % 3]
        return (side.forward(x, call).float() - 0.3).square().sum() / 3
