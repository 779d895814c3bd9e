"""Decides what a call of a module does on the stage that runs: itself, zeros, or the end of the stage.

stage 0            stage 1                     last stage
embed  runs        embed   gives zeros         embed   gives zeros
block 0 runs       block 0 gives zeros         block 0, 1 give zeros
block 1 ends       block 1 gets what arrived   block 2 gets what arrived
                   block 2 ends                head    runs
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from ...utils.module_buffers import Buffers, Copies
from .crossing import Crossing, StageEnd
from .likeness import Likeness
from .part import Flow
from .tracing import Trace
from .zeros import ZeroOutputs


@final
@dataclass(frozen=True)
class Role:
    """Where a module runs.

    Args:
        name: in the whole model.
        stages: the virtual stages that run it.
        is_block: a module of the block list.
    """

    name: str
    stages: frozenset[int]
    is_block: bool


@final
@dataclass(frozen=True)
class OwnModule:
    """A module that this rank has. `zeros` are its outputs on other stages of this rank, if it has several."""

    module: nn.Module
    role: Role
    zeros: ZeroOutputs | None


@final
class Outside:
    """The buffers outside of the blocks. What a forward does before the blocks has one effect on them.

    Each stage runs that part of the forward. Where a rank has several stages, its first one counts. Later ones
    find the values that the first one found.
    """

    def __init__(self, modules: Iterable[nn.Module], stages: Sequence[int]) -> None:
        """stages: those of this rank, ascending."""
        self._buffers = Buffers(modules)
        self._stages = stages
        self._copies: dict[int, Copies] = {}  # by micro-batch

    @contextmanager
    def once(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Around the forward of a stage."""
        if len(self._stages) == 1:
            yield
        elif stage == self._stages[0]:
            before = self._buffers.before()
            try:
                yield
            finally:
                self._copies[micro_batch] = self._buffers.after(before)
        else:
            is_last = stage == self._stages[-1]
            copies = (self._copies.pop if is_last else self._copies.get)(micro_batch, {})
            with self._buffers.again(
                copies or {}
            ):  # what is written after the blocks alone, counts
                yield


@final
class Conductor:
    """Runs the stages of one rank, one at a time."""

    def __init__(self, num_stages: int, likeness: Likeness) -> None:
        self.num_stages = num_stages
        self.likeness = likeness
        self.own_blocks: list[OwnModule] = []
        self.outside = Outside((), (0,))
        self._current: Crossing | None = None
        self._kept: dict[tuple[int, int], Crossing] = {}
        self._senders: dict[tuple[int, Hashable], dict[str, tuple[int, ...]]] = {}
        self._writing: set[int] = set()  # stages whose blocks write to what arrives
        self._traced: set[tuple[int, Hashable]] = set()

    def run(
        self,
        stage: int,
        micro_batch: int,
        arrived: Flow | None,
        forward: Callable[[], Any],
        way: Hashable,
    ) -> Any:
        """Run `forward`, the whole model's: a Flow, or on the last stage what it returns.

        way: what decides, on every rank, which way `forward` takes. The first run of each is followed.
        """
        zeros = [zeros.value for zeros in self.likeness.parameters]
        trace = None if (stage, way) in self._traced else Trace(stage, zeros)
        senders = self._senders.setdefault((stage, way), {})
        crossing = self._current = Crossing(
            stage, arrived, senders, trace, self._is_trained(stage), stage in self._writing
        )
        result: Any = None
        has_ended = False
        try:
            with (
                self.outside.once(stage, micro_batch),
                nullcontext() if trace is None else trace.following(),
            ):
                result = forward()
        except StageEnd as end:
            result, has_ended = end.flow, True
        finally:
            self._current = None
        self._traced.add((stage, way))
        self._check_end(crossing, has_ended)
        if crossing.close():
            self._writing.add(stage)
        if torch.is_grad_enabled():
            self._kept[stage, micro_batch] = crossing
        return result

    @contextmanager
    def recomputing(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Calls of blocks in this context are recomputations of that stage and micro-batch."""
        before = self._current
        crossing = self._kept.get((stage, micro_batch))
        if crossing is not None:
            crossing.is_recomputing = True
        self._current = crossing
        try:
            yield
        finally:
            self._current = before

    def release(self, stage: int, micro_batch: int) -> None:
        """Forget what arrived for this stage and micro-batch."""
        self._kept.pop((stage, micro_batch), None)

    def call_own(self, own: OwnModule, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module that this rank has; `call` is the module's own."""
        crossing, role, zeros = self._current, own.role, own.zeros
        if crossing is None:
            return call(*args, **kwargs)
        if self._runs_here(role, crossing):
            return self._really(own, call, crossing, args, kwargs)
        if zeros is not None:
            zeros.train(own.module.training)
        return self._instead(role, crossing, zeros, args, kwargs)

    def call_stand_in(self, role: Role, zeros: ZeroOutputs, args: Any, kwargs: Any) -> Any:
        """A call of a module that another rank has."""
        if self._current is None:
            raise UsageError(
                f"{role.name} is on another pipeline rank; call engine.train_batch() or engine.eval_batch()"
            )
        return self._instead(role, self._current, zeros, args, kwargs)

    def tensor_of(self, role: Role, name: str, value: Tensor) -> Tensor:
        """What a model's forward gets when it reads a parameter of a module that another rank has."""
        crossing = self._current
        if crossing is None:
            return value
        if crossing.has_begun or crossing.stage == 0:
            raise self._wrong_side(role, crossing, f"reads {role.name}.{name}")
        one = torch.zeros((), dtype=value.dtype, device=self.likeness.device)
        zeros = one.expand(value.shape)
        if crossing.trace is not None:
            crossing.trace.mark(zeros)
        return zeros

    def _is_trained(self, stage: int) -> bool:
        return any(
            param.requires_grad
            for own in self.own_blocks
            if stage in own.role.stages
            for param in own.module.parameters()
        )

    def _runs_here(self, role: Role, crossing: Crossing) -> bool:
        if crossing.stage not in role.stages:
            return False
        # a module that runs on both sides: on the last stage, its call before the blocks is the first stage's
        return role.is_block or crossing.stage == 0 or crossing.has_begun

    def _really(
        self, own: OwnModule, call: Callable[..., Any], crossing: Crossing, args: Any, kwargs: Any
    ) -> Any:
        if not own.role.is_block:
            return call(*args, **kwargs)
        args, kwargs = crossing.enter(own.module, args, kwargs)
        if crossing.trace is None or crossing.is_recomputing:
            return call(*args, **kwargs)
        with crossing.trace.paused():
            outputs = call(*args, **kwargs)
        crossing.trace.mark(outputs)
        return outputs

    def _instead(
        self, role: Role, crossing: Crossing, zeros: ZeroOutputs | None, args: Any, kwargs: Any
    ) -> Any:
        if role.is_block and min(role.stages) > crossing.stage:
            crossing.leave(args, kwargs)
        is_early = (role.is_block or 0 in role.stages) and crossing.stage > 0
        has_begun = crossing.has_begun and not crossing.is_recomputing
        if not is_early or has_begun or zeros is None:
            raise self._wrong_side(role, crossing, f"calls {role.name}")
        if crossing.trace is None:
            return zeros(args, kwargs)
        with crossing.trace.paused():
            outputs = zeros(args, kwargs)
        crossing.trace.mark(outputs)
        return outputs

    def _wrong_side(self, role: Role, crossing: Crossing, what: str) -> UsageError:
        if role.is_block:
            return UsageError(
                f"pipeline stage {crossing.stage}: the model's forward {what} again after blocks of a later "
                "stage; blocks must run in their order; set pipeline.stages to 1"
            )
        side, key = (
            ("after", "last") if crossing.has_begun and crossing.stage else ("before", "first")
        )
        return UsageError(
            f"pipeline stage {crossing.stage}: the model's forward {what} {side} the blocks, where its "
            f'parameters are not; add "{role.name}" to pipeline.{key}_stage_modules'
        )

    def _check_end(self, crossing: Crossing, has_ended: bool) -> None:
        is_last = crossing.stage == self.num_stages - 1
        if not is_last and not has_ended:
            raise UsageError(
                f"pipeline stage {crossing.stage}: the model's forward called no block of a later stage; it "
                "must call every block of its list once, or set pipeline.stages to 1"
            )
        if is_last and crossing.stage and not crossing.has_begun:
            raise UsageError(
                f"pipeline stage {crossing.stage}: the model's forward called no block of the last stage; it "
                "must call every block of its list once, or set pipeline.stages to 1"
            )


__all__ = ["Conductor", "Outside", "OwnModule", "Role"]
