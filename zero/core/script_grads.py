"""Refuses gradients that a script puts into `.grad` between backward and step, where they would not count.

The engine takes every gradient out of `.grad`: as it arrives, or, of a small parameter, when its backward ends.
So each `.grad` is None then, and any other is the script's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from torch import Tensor, nn

from ...utils.errors import UsageError
from .grad_bucket import GradBucket


@final
class ScriptGrads:
    """Looks at the trained parameters. It costs about 0.1 us for each."""

    def __init__(self, order: Sequence[GradBucket]) -> None:
        self._params = tuple(param for grads in order for param in grads.params)
        self._names = tuple(slot.name for grads in order for slot in grads.layout.slots)
        self._shown: frozenset[int] = frozenset()

    def allow(self, shown: Iterable[Tensor]) -> None:
        """These may be in `.grad`. Who put them there takes them out before the next backward."""
        self._shown = frozenset(id(grad) for grad in shown)

    def take_out_allowed(self) -> None:
        """No `.grad` holds what `allow` named: another engine would add to it."""
        for param in self._params:
            if param.grad is not None and id(param.grad) in self._shown:
                param.grad = None
        self._shown = frozenset()

    def clear(self) -> None:
        """Drop what the script has put into `.grad`."""
        self._shown = frozenset()
        for param in self._params:
            param.grad = None

    def refuse(self, arrived: nn.Parameter | None = None) -> None:
        """Check that every `.grad` is None, except that of `arrived`. Call it where all gradients are taken.

        Raises:
            UsageError: some are not. They are None again, and the engine's gradients are untouched.
        """
        if arrived is not None and self._shown:
            raise UsageError(
                "loss.backward() after engine.backward(loss) in one step: gradients of the step are in .grad; "
                "call engine.backward for each loss of the step"
            )
        found = [
            at
            for at, param in enumerate(self._params)
            if param.grad is not None and id(param.grad) not in self._shown
        ]
        own = [at for at in found if self._params[at] is not arrived]
        if not own:
            return
        for at in own:
            self._params[at].grad = None
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        raise UsageError(
            f"{self._names[own[0]]}.grad{more} was set after backward, but the engine has taken the gradients: "
            "it would not count, and is None again; to change them call xds.zero.set_full_grad, "
            "engine.clip_grad_norm or engine.zero_grad"
        )


__all__ = ["ScriptGrads"]
