"""The training loop of a case: the same lines for both sides, one step after another."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import nullcontext

from torch import Tensor

from .case import Case
from .feature import Call, Feature
from .side import Side


class Step(enum.Enum):
    """Where a loop stops for the ranks to do something together."""

    AVERAGE = "the gradients are asked for"
    UPDATE = "the step ends"


def script(side: Side) -> Iterator[Step]:
    """Train for as many steps as the case says; what is seen on the way is on `side`."""
    case = side.case
    for step in range(case.num_steps):
        for feature in case.features:
            feature.before_step(side, step)
        for micro_step in range(side.accumulation):
            call = side.call(step, micro_step)
            for feature in case.features:
                feature.before_micro_step(side, call)
            is_last = micro_step == side.accumulation - 1
            holds = not is_last and any(getattr(f, "holds", False) for f in case.features)
            with side.no_sync() if holds else nullcontext():
                passes(case).run(side, call)
                for feature in case.features:
                    feature.after_backward(side, call)
            if not is_last:
                side.count()
        if any(getattr(f, "reads_gradients", False) for f in case.features):
            yield Step.AVERAGE
        for feature in case.features:
            feature.before_update(side, step)
        yield Step.UPDATE
        for feature in case.features:
            feature.after_step(side, step)


class Passes(Feature):
    """How the forwards and backwards of a micro-batch belong together: one forward, one backward."""

    share = 0.0  # what every case without another one has

    def run(self, side: Side, call: Call) -> None:
        loss = self.loss(side, call)
        side.see("loss", loss)
        side.backward(loss)

    def loss(self, side: Side, call: Call) -> Tensor:
        return (side.forward(side.batch(call), call).float() - 0.3).square().mean()


def passes(case: Case) -> Passes:
    """The case's own."""
    for feature in case.features:
        if isinstance(feature, Passes):
            return feature
    return Passes(case, None)  # type: ignore[arg-type]
