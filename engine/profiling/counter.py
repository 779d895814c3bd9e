"""A dispatch mode that adds up what the operations of torch cost while it is active.

Operations are seen below autograd, as torch runs them: `F.linear` is an addmm, a fused attention is one call.
A backward's operations are seen as well, and those of a forward that backward runs again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from .operations import NONE, Formula, Work, formula_of


@dataclass
class Tally:
    """A sum of work."""

    macs: int = 0
    flops: int = 0

    def add(self, work: Work) -> None:
        self.macs += work[0]
        self.flops += work[1]


class Sink(Protocol):
    """What the work of a call outside of a backward is added to."""

    def add(self, work: Work) -> None: ...


@final
@dataclass
class Backward:
    """The work of backward passes.

    gradients: what autograd computes. recomputed: forwards that ran again, for activation checkpointing.
    """

    gradients: Tally = field(default_factory=Tally)
    recomputed: Tally = field(default_factory=Tally)


@final
class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered. One at a time; it may be entered any number of times.

    Attributes:
        forward: the owner changes it, e.g. at the edges of modules.
        unknown: operations whose work is not known, with the number of calls.
    """

    supports_higher_order_operators = True

    def __init__(self, forward: Sink, backward: Backward) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = forward
        self.backward = backward
        self.in_backward = (
            False  # what runs outside of autograd's engine belongs to a backward, too
        )
        self.unknown: Counter[str] = Counter()
        # by the id of the operation, which lives as long as torch does: its own hash is a Python function
        self._formulas: dict[int, Formula | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would wrap each call to keep its compiler out, and the recorder has it switched off."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        try:
            formula = self._formulas[id(func)]
        except KeyError:
            formula = self._formulas[id(func)] = self._find(func)
        if formula is _IN_PARTS:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if formula is not None:
            work = formula(args, kwargs, out)
            if work[1]:
                self._sink().add(work)
        return out

    def _sink(self) -> Sink:
        if torch._C._current_graph_task_id() == -1:
            return self.backward.gradients if self.in_backward else self.forward
        # autograd computes gradients without grad mode; a checkpoint enables it to run its forward again
        again = torch.is_grad_enabled()
        return self.backward.recomputed if again else self.backward.gradients

    def _find(self, func: Any) -> Formula | None:
        """The formula of `func`; `_IN_PARTS` where torch composes it of others, as in inference mode."""
        if isinstance(func, HigherOrderOperator):
            return self._registered(func, str(func))
        try:
            return formula_of(func)
        except KeyError:
            if func._can_decompose():
                return _IN_PARTS
            return self._registered(func._overloadpacket, str(func))

    def _registered(self, key: Any, name: str) -> Formula:
        """What torch, or a library, has registered for an operation; else it is noted as unknown."""
        registry = _registry()
        found = registry.get(key)

        def registered(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
            assert found is not None
            flops = int(found(*args, **kwargs, out_val=out))
            return flops // 2, flops

        def noted(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
            if _has_numbers(args if out is None else out):
                self.unknown[name] += 1
            return NONE

        return noted if found is None else registered


def _has_numbers(value: Any) -> bool:
    """Whether a tensor in it holds floating-point numbers: others count nothing."""
    if isinstance(value, (tuple, list)):
        return any(_has_numbers(each) for each in value)
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _in_parts(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return NONE


_IN_PARTS: Formula = _in_parts


def _registry() -> Mapping[Any, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry  # only for operations without a formula here

    return flop_registry


__all__ = ["Backward", "OperationCounter", "Sink", "Tally"]
