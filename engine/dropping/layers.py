"""Progressive layer drop around a model's blocks: no model has to be changed.

    y = x                          the block is dropped
    y = x + (f(x) - x) / p         the block is kept, which has the probability p
    p = 1 - l / L * (1 - theta)    l = 1 ... L is the number of the block in its list

Source: Zhang and He, Accelerating Training of Transformer-Based Language Models with Progressive Layer
Dropping, 2020, https://arxiv.org/abs/2010.13369. The numbers l are those of the paper. DeepSpeed's example
counts from 0, so that it drops each layer a little less often.

A dropped block is not called at all: its hooks do not run, so stage 3 does not gather it. With p = 1 nothing
is computed but f(x), so a run with theta = 1 has the bits of one without the section.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.device import keeping_draws
from ...ops.torch_internals import tree_leaves
from ...utils.errors import UsageError
from ...utils.module_buffers import untouched_buffers
from ..data.schedules import LayerDrop
from ..model.caches import without_caches
from ..model.forwards import Forward, replace_calls
from .arguments import hidden_of
from .choices import LAYERS, uniform

KEY = "progressive_layer_drop"
# block -> its name, the number of its list, its number l in it, and the length L of it
Places = Mapping[nn.Module, tuple[str, int, int, int]]


@final
class LayerDropping:
    """Skips blocks of one model, between `begin` and the call of what it returns."""

    def __init__(self, places: Places, schedule: LayerDrop, seed: int) -> None:
        self._places = dict(places)
        self._schedule, self._seed = schedule, seed
        self._kept: dict[nn.Module, float] = {}  # the probability of each block that is kept now
        # class -> results of its tuple; None: it returns a tensor
        self._forms: dict[type, int | None] = {}

    def begin(self) -> Callable[[], None]:
        """Wrap the calls of the blocks; the returned function restores them."""
        self.enter(0, 0)
        return replace_calls(self._places, self._around)

    def theta(self, step: int) -> float:
        """What `engine.get_pld_theta` returns."""
        return self._schedule.at(step) if step else 1.0

    def enter(self, step: int, micro_batch: int) -> list[nn.Module]:
        """Choose for the forwards that follow. Returns the blocks that are dropped."""
        theta = self.theta(step)
        draws: dict[int, Any] = {}
        self._kept, dropped = {}, []
        for block, (_, stack, number, length) in self._places.items():
            if stack not in draws:
                draws[stack] = uniform(LAYERS, self._seed, step, micro_batch, stack, length)
            keep = 1.0 - number / length * (1.0 - theta)
            if draws[stack][number - 1] < keep:
                self._kept[block] = keep
            else:
                dropped.append(block)
        return dropped

    def _around(self, call: Forward) -> Forward:
        @functools.wraps(call)
        def wrapped(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not block.training or block not in self._places:  # or it is a copy of one
                return call(block, *args, **kwargs)
            keep = self._kept.get(block)
            if keep is None:
                return self._skipped(call, block, args, kwargs)
            if keep == 1.0 and type(block) in self._forms:
                return call(block, *args, **kwargs)
            hidden = self._hidden(block, args, kwargs)
            before = hidden._version
            result = call(block, *args, **kwargs)
            output = self._checked(block, hidden, args, result)
            if hidden._version != before:
                raise self._refusal(block, "changes its input in place, so f(x) - x is not known")
            if keep == 1.0:
                return result
            return _with_first(result, torch.add(hidden, output - hidden, alpha=1.0 / keep))

        return wrapped

    def _hidden(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        found = hidden_of(args, kwargs)
        if found is None:
            raise self._refusal(block, "gets no tensor, so it is no residual block")
        return found

    def _checked(
        self, block: nn.Module, hidden: Tensor, args: tuple[Any, ...], result: Any
    ) -> Tensor:
        """The hidden states in `result`, which has a form that can be given without a call."""
        if isinstance(result, Tensor):
            self._forms[type(block)] = None
            output = result
        elif isinstance(result, tuple | list) and result and isinstance(result[0], Tensor):
            output = result[0]
            passes_on = bool(args) and isinstance(args[0], tuple | list)
            more = [] if passes_on else tree_leaves(list(result[1:]))
            if any(isinstance(one, Tensor) for one in more):
                raise self._refusal(
                    block,
                    "returns tensors beside its hidden states, such as attention weights or a position bias, "
                    "which nobody computes where it is dropped",
                )
            self._forms[type(block)] = len(result)
        else:
            raise self._refusal(
                block,
                f"returns {type(result).__name__}, and a block must return its hidden states or a tuple that "
                "begins with them",
            )
        if output.shape != hidden.shape:
            raise self._refusal(
                block,
                f"turns {list(hidden.shape)} into {list(output.shape)}, so it is no residual block",
            )
        return output

    def _skipped(
        self, call: Forward, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if type(block) not in self._forms:
            self._look_at(call, block, args, kwargs)
        hidden = self._hidden(block, args, kwargs)
        if args and isinstance(args[0], tuple | list):
            return args[0]
        length = self._forms[type(block)]
        return hidden if length is None else (hidden, *[None] * (length - 1))

    def _look_at(
        self, call: Forward, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Learn the form of a result where no block of this class has run yet, as after a resume.

        It leaves no trace: neither in a graph, nor in buffers, caches or random numbers.
        """
        hidden = self._hidden(block, args, kwargs)
        given, named = without_caches(args, kwargs)
        with torch.no_grad(), keeping_draws(hidden.device), untouched_buffers(block.modules()):
            self._checked(block, hidden, args, call(block, *given, **named))

    def _refusal(self, block: nn.Module, what: str) -> UsageError:
        name = f"{self._places[block][0]} ({type(block).__name__})"
        return UsageError(
            f"{KEY}: {name} {what}; name residual blocks in {KEY}.blocks, or remove the section"
        )


def _with_first(result: Any, first: Tensor) -> Any:
    """`result` with other hidden states."""
    if isinstance(result, Tensor):
        return first
    items = [first, *result[1:]]
    if isinstance(result, list):
        return items
    return type(result)(*items) if hasattr(result, "_fields") else tuple(items)


def places_of(blocks: Sequence[tuple[str, nn.Module]]) -> Places:
    """What `LayerDropping` takes. Blocks with one parent are one list."""
    lists: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in blocks:
        lists.setdefault(name.rpartition(".")[0], []).append((name, block))
    return {
        block: (name, at, number, len(members))
        for at, members in enumerate(lists.values())
        for number, (name, block) in enumerate(members, 1)
    }


__all__ = ["KEY", "LayerDropping", "Places", "places_of"]
