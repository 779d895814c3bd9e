"""Decides what a call of a module does on the stage that runs: itself, zeros, or the end of the stage.

stage 0            stage 1                     last stage                  or a last stage without blocks
embed  runs        embed   gives zeros         embed   gives zeros         embed      gives zeros
block 0 runs       block 0 gives zeros         block 0, 1 give zeros       block 0, 1, 2 give zeros
block 1 ends       block 1 gets what arrived   block 2 gets what arrived   head       gets what arrived
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
from .dtype_sync import DtypeSync
from .part import Flow
from .stage_run import StageEnd, StageRun
from .tracing import Trace
from .zeros import ZeroOutputs


@final
@dataclass(frozen=True)
class ModuleRole:
    """Where a module runs.

    Args:
        name: in the whole model.
        stages: the virtual stages that run it.
        is_block: a module of the block list.
        is_head: its call after the blocks begins the last stage, which has no blocks.
    """

    name: str
    stages: frozenset[int]
    is_block: bool
    is_head: bool = False


@final
@dataclass(frozen=True)
class OwnModule:
    """A module that this rank has. `zeros` are its outputs on other stages of this rank, if it has several."""

    module: nn.Module
    role: ModuleRole
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
            # what is written after the blocks alone, counts
            with self._buffers.again(copies or {}):
                yield


@final
class StageRunner:
    """Runs the stages of one rank, one at a time."""

    def __init__(self, num_stages: int, dtype_sync: DtypeSync) -> None:
        self.num_stages = num_stages
        self.dtype_sync = dtype_sync
        self.own_blocks: list[OwnModule] = []
        self.outside = Outside((), (0,))
        self._current: StageRun | None = None
        self._kept: dict[tuple[int, int], StageRun] = {}
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
        zeros = [zeros.value for zeros in self.dtype_sync.parameters]
        trace = None if (stage, way) in self._traced else Trace(stage, zeros)
        senders = self._senders.setdefault((stage, way), {})
        stage_run = self._current = StageRun(
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
        self._check_end(stage_run, has_ended)
        if stage_run.close():
            self._writing.add(stage)
        if torch.is_grad_enabled():
            self._kept[stage, micro_batch] = stage_run
        return result

    @contextmanager
    def recomputing(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Calls of blocks in this context are recomputations of that stage and micro-batch."""
        before = self._current
        stage_run = self._kept.get((stage, micro_batch))
        if stage_run is not None:
            stage_run.is_recomputing = True
        self._current = stage_run
        try:
            yield
        finally:
            self._current = before

    def release(self, stage: int, micro_batch: int) -> None:
        """Forget what arrived for this stage and micro-batch."""
        self._kept.pop((stage, micro_batch), None)

    def call_own(
        self, own_module: OwnModule, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A call of a module that this rank has; `call` is the module's own."""
        stage_run, role, zeros = self._current, own_module.role, own_module.zeros
        if stage_run is None:
            return call(*args, **kwargs)
        if self._runs_here(role, stage_run):
            return self._run_own(own_module, call, stage_run, args, kwargs)
        if zeros is not None:
            zeros.train(own_module.module.training)
        return self._stand_in(role, stage_run, zeros, args, kwargs)

    def call_stand_in(self, role: ModuleRole, zeros: ZeroOutputs, args: Any, kwargs: Any) -> Any:
        """A call of a module that another rank has."""
        if self._current is None:
            raise UsageError(
                f"{role.name} is on another pipeline rank; call engine.train_batch() or engine.eval_batch()"
            )
        return self._stand_in(role, self._current, zeros, args, kwargs)

    def tensor_of(self, role: ModuleRole, name: str, value: Tensor) -> Tensor:
        """What a model's forward gets when it reads a parameter of a module that another rank has."""
        stage_run = self._current
        if stage_run is None:
            return value
        if stage_run.has_begun or stage_run.stage == 0:
            raise self._wrong_side(role, stage_run, f"reads {role.name}.{name}")
        zero = torch.zeros((), dtype=value.dtype, device=self.dtype_sync.device)
        zeros = zero.expand(value.shape)
        if stage_run.trace is not None:
            stage_run.trace.mark(zeros)
        return zeros

    def _blocks_of(self, stage: int) -> list[nn.Module]:
        return [block.module for block in self.own_blocks if stage in block.role.stages]

    def _is_trained(self, stage: int) -> bool:
        blocks = self._blocks_of(stage)
        return any(param.requires_grad for block in blocks for param in block.parameters())

    def _ends_with_blocks(self, stage_run: StageRun) -> bool:
        """The last stage has no blocks, and those of this stage, the one before, have all run."""
        is_last_but_one = stage_run.stage == self.num_stages - 2
        return is_last_but_one and stage_run.has_run(self._blocks_of(stage_run.stage))

    def _runs_here(self, role: ModuleRole, stage_run: StageRun) -> bool:
        if stage_run.stage not in role.stages:
            return False
        # a module that runs on both sides: on the last stage, its call before the blocks is the first stage's
        begins = role.is_block or (role.is_head and stage_run.passes_blocks)
        return begins or stage_run.stage == 0 or stage_run.has_begun

    def _run_own(
        self,
        own_module: OwnModule,
        call: Callable[..., Any],
        stage_run: StageRun,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a module of this stage: a block, or what begins the stage, gets what has arrived."""
        role = own_module.role
        if not role.is_block and not (role.is_head and stage_run.begins_with(own_module.module)):
            return call(*args, **kwargs)
        args, kwargs = stage_run.enter(own_module.module, args, kwargs)
        if stage_run.trace is None or stage_run.is_recomputing:
            return call(*args, **kwargs)
        with stage_run.trace.paused():
            outputs = call(*args, **kwargs)
        stage_run.trace.mark(outputs)
        return outputs

    def _stand_in(
        self,
        role: ModuleRole,
        stage_run: StageRun,
        zeros: ZeroOutputs | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """A call of a module of another stage: zeros for its outputs; one of a later stage ends this run."""
        if role.is_block and min(role.stages) > stage_run.stage:
            stage_run.leave(args, kwargs)
        if role.is_head and self._ends_with_blocks(stage_run):
            stage_run.leave(args, kwargs)
        stage_run.passes_blocks |= role.is_block
        is_early = (role.is_block or 0 in role.stages) and stage_run.stage > 0
        has_begun = stage_run.has_begun and not stage_run.is_recomputing
        if not is_early or has_begun or zeros is None:
            raise self._wrong_side(role, stage_run, f"calls {role.name}")
        if stage_run.trace is None:
            return zeros(args, kwargs)
        with stage_run.trace.paused():
            outputs = zeros(args, kwargs)
        stage_run.trace.mark(outputs)
        return outputs

    def _wrong_side(self, role: ModuleRole, stage_run: StageRun, what: str) -> UsageError:
        if role.is_block:
            return UsageError(
                f"pipeline stage {stage_run.stage}: the model's forward {what} again after blocks of a later "
                "stage; blocks must run in their order; set pipeline.stages to 1"
            )
        if role.is_head:
            return UsageError(
                f"pipeline stage {stage_run.stage}: the model's forward {what} before all blocks have run, and "
                "the last stage, which begins there, has no block; give it one in pipeline.partition, or use "
                "fewer stages or chunks"
            )
        side, key = (
            ("after", "last") if stage_run.has_begun and stage_run.stage else ("before", "first")
        )
        return UsageError(
            f"pipeline stage {stage_run.stage}: the model's forward {what} {side} the blocks, where its "
            f'parameters are not; add "{role.name}" to pipeline.{key}_stage_modules'
        )

    def _check_end(self, stage_run: StageRun, has_ended: bool) -> None:
        is_last = stage_run.stage == self.num_stages - 1
        if not is_last and not has_ended:
            raise UsageError(
                f"pipeline stage {stage_run.stage}: the model's forward called no block of a later stage; it "
                "must call every block of its list once, or set pipeline.stages to 1"
            )
        if is_last and stage_run.stage and not stage_run.has_begun:
            raise UsageError(
                f"pipeline stage {stage_run.stage}: the model's forward called no block of the last stage; it "
                "must call every block of its list once, or set pipeline.stages to 1"
            )


__all__ = ["StageRunner", "Outside", "OwnModule", "ModuleRole"]
