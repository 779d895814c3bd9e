"""train_batch and eval_batch of a pipeline: whole steps that the executor runs from a table.

batches ──> Executor.run(table) ──> gradients, reduced ──> TrainingStep: norm, clip, update
                               └──> losses on the last stage ──> their mean on every rank
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.device import wide_place
from ...ops.flat import moved
from ...pipe.channel import Channel
from ...pipe.cut.part import Part, WeightedLoss
from ...pipe.executor import Executor, PipelineOutputs, StageStates
from ...pipe.inputs import look_at, signature
from ...pipe.schedules.actions import Placement, Table
from ...pipe.schedules.build import build_forward_table
from ...pipe.schedules.lowering import with_states
from ...pipe.weight_grads import WeightGrads
from ...utils.arguments import whole
from ...utils.errors import UsageError
from ...utils.module_buffers import untouched_buffers
from ...zero.model.stage_units import StageUnits
from ..counters import Counters
from ..data.batches import as_batch, as_inputs, loss_of, move
from ..data.loaders import RepeatingLoader
from ..data.sharing import share_batches
from ..means import UNIT, Weight, weighted
from ..parts import ModelSchedules, Parts
from .batch_loop import NO_ITERATOR, Loop, PipelinePosition, Trained
from .training_step import TrainingStep

CALL_TRAIN_BATCH = (
    "a model in {} pipeline stages runs whole steps: call engine.train_batch() or "
    "engine.eval_batch(data_iter), not {}()"
)


class TableOf(Protocol):
    """The table of a training step with `count` micro-batches.

    gathers_each: the parameters of a stage are gathered for each run of its actions, not once a step.
    """

    def __call__(self, count: int, *, gathers_each: bool) -> Table: ...


class LossProof(Protocol):
    """Compares the losses of a few tokens that one rank has computed, and several."""

    def compare(self, found: Tensor, wanted: Tensor) -> None: ...


class Sequences(Protocol):
    """Cuts the inputs of the model over sequence ranks; see `engine/parallel/sequences.py`."""

    @property
    def proof(self) -> LossProof: ...
    def short(self, batch: Any) -> dict[str, Any] | None: ...
    def whole(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What `initialize` chose for a pipeline.

    rank: of this process in the pipeline. pipe: its ranks, for batches.
    """

    part: Part
    placement: Placement
    rank: int
    channel: Channel
    pipe: Collectives
    weight_grads: WeightGrads
    table_of: TableOf
    sequences: Sequences | None = None


@final
class PipelineStates(StageStates):
    """The model states of this rank's stages, as the executor asks for them."""

    def __init__(self, step: TrainingStep, units: StageUnits, schedules: ModelSchedules) -> None:
        self._step = step
        self._units = units
        self._schedules = schedules

    def begin(self, batches: Sequence[Any]) -> None:
        """The micro-batches of the next run."""
        self._batches = batches

    def forward(self, micro_batch: int) -> AbstractContextManager[Any]:
        self._schedules.enter(micro_batch)
        return self._step.stage_forward(self._batches[micro_batch])

    def backward(
        self, stage: int, micro_batch: int, *, reduces: bool
    ) -> AbstractContextManager[Any]:
        self._schedules.enter(micro_batch)  # a recomputation drops what the forward did
        return self._step.stage_backward(self._units.scope(stage, reduces=reduces))

    def weights(self) -> AbstractContextManager[Any]:
        return self._step.stage_weights()

    def hold(self, stage: int) -> None:
        self._units.hold(stage)

    def release(self, stage: int) -> None:
        self._units.release(stage)

    def reduce(self, stage: int) -> None:
        self._units.reduce(stage)

    def release_all(self) -> None:
        self._units.release_all()


@final
class PipelineLoop(Loop):
    """Runs the micro-batches of a step over all stages."""

    def __init__(
        self, parts: Parts, pipeline: Pipeline, step: TrainingStep, counters: Counters
    ) -> None:
        self._parts = parts
        self._pipeline = pipeline
        self._step = step
        self._counters = counters
        self._units = StageUnits(
            parts.sharded,
            {block.module: block.stage for block in pipeline.part.blocks},
            parts.config.zero_optimization.max_live_parameters,
        )
        self._states = PipelineStates(step, self._units, parts.schedules)
        self._executor = Executor(
            pipeline.part, pipeline.channel, self._states, self._loss_of, pipeline.weight_grads
        )
        self._tables: dict[int, Table] = {}
        self._repeated: Iterator[Any] | None = None
        self._num_pipelines = parts.sharded.flat_groups.mesh.data  # at the start
        self._generation = parts.recovery.generation  # of the groups
        placement = pipeline.placement
        stages = placement.stages_of(pipeline.rank)
        self.place = PipelinePosition(
            rank=pipeline.rank,
            num_ranks=placement.num_ranks,
            is_first=0 in stages,
            is_last=placement.num_stages - 1 in stages,
        )

    def refuse(self, call: str, remedy: str = "") -> None:
        text = CALL_TRAIN_BATCH.format(self._pipeline.placement.num_stages, call)
        raise UsageError(f"{text}; {remedy}" if remedy else text)

    def train(self, engine: Trained, data_iter: Iterator[Any] | None) -> Tensor:
        recovery = self._parts.recovery
        if not recovery.is_on:
            return self._train(engine, data_iter)
        if data_iter is not None:
            raise UsageError(NO_ITERATOR)
        done = engine.global_steps
        while (
            engine.global_steps <= done
        ):  # one that is dropped, and one before it, are taken again
            with recovery:
                recovery.begin_step()
                if self._generation != recovery.generation:
                    self._pipeline.channel.forget()
                    self._generation = recovery.generation
                self._train(engine, None)
            if recovery.has_lost:
                recovery.recover()
        return torch.tensor(self._step.means.loss)  # of all ranks, without another message

    def _train(self, engine: Trained, data_iter: Iterator[Any] | None) -> Tensor:
        accumulation = self._counters.accumulation
        steps = accumulation.steps_now
        count = steps + accumulation.extra  # with the micro-batches of lost pipelines
        batches = self._take(engine, data_iter, count, "train_batch")
        self._prove_packing(engine.module, batches)
        self._prove_sequences(engine.module, batches)
        engine.module.train()
        if count not in self._tables:
            gathers_each = not self._units.holds_all
            self._tables[count] = self._pipeline.table_of(count, gathers_each=gathers_each)
        with self._on_all_stages("train_batch"):
            self._states.begin(batches)
            outcome = self._executor.run(
                self._tables[count],
                self._pipeline.rank,
                batches,
                factor=self._parts.loss_scale.value / steps,
                weight_factor=self._parts.loss_scale.value / UNIT,
            )
            self._step.means.add_all(outcome.losses, outcome.weights, steps)
        self._parts.report.name_actions(self._tables[count].rows[self._pipeline.rank])
        self._units.reduce_root()
        loss = self._mean(outcome, steps)
        num_left = self._parts.sharded.flat_groups.mesh.data
        if num_left != self._num_pipelines:  # these have run the micro-batches of all
            loss *= num_left / self._num_pipelines
        if not self._step.means.is_weighted:  # else the step reports it
            self._parts.report.add_loss(loss)
        for _ in range(count - 1):
            self._counters.count_micro_batches()
        engine.end_step()
        return loss

    def _prove_packing(self, module: nn.Module, batches: Sequence[Any]) -> None:
        """Before the first step: the samples of packed rows are apart."""
        packing, batch = self._parts.packing, batches[0]
        trial = packing.trial(*as_inputs(batch))
        if trial is None:
            return
        with (
            self._on_all_stages("the proof of packed rows"),
            trial.observing(module),
        ):
            for number, inputs in enumerate(trial.runs):
                run = as_batch(batch, *inputs)
                self._pipeline.channel.begin([(f"packed rows, {number}", signature(run))])
                self._forward([run], computes_loss=False)
                trial.end_run()
        packing.judge(trial)
        self._pipeline.channel.begin(_inputs("train_batch", batches))

    @torch.no_grad()
    def _prove_sequences(self, module: nn.Module, batches: Sequence[Any]) -> None:
        """Before the first step: the loss of a few tokens, computed whole and cut over sequence ranks."""
        sequences = self._pipeline.sequences
        short = None if sequences is None else sequences.short(batches[0])
        if sequences is None or short is None:
            return
        module.eval()
        shapes = signature(short)
        with (
            self._on_all_stages("the proof of sequences"),
            untouched_buffers(module.modules()),
        ):
            with sequences.whole():
                self._pipeline.channel.begin([("proof, whole", shapes)])
                whole = self._mean(self._forward([short]), 1)
            self._pipeline.channel.begin([("proof, cut", shapes)])
            in_cuts = self._mean(self._forward([short]), 1)
        sequences.proof.compare(in_cuts, whole)
        self._pipeline.channel.begin(_inputs("train_batch", batches))

    @contextmanager
    def _on_all_stages(self, where: str) -> Iterator[None]:
        """Around what stages compute from one another's messages: an error of one raises on all at once.

        The others would wait for its messages. They raise a `PeerError` that has the error.
        """
        try:
            with self._parts.sharded.collectives.publishing_errors(where):
                yield
        except Exception:
            for opened in self._parts.opened:
                opened.leave()
            raise

    def _loss_of(self, result: Any) -> tuple[Tensor, Weight | None]:
        """The loss in the result of the last stage, and its weight if there is one."""
        if isinstance(result, WeightedLoss):
            return loss_of(result.loss), self._step.means.checked(result.weight)
        return loss_of(result), None

    def _forward(self, batches: Sequence[Any], **how: Any) -> PipelineOutputs:
        """The forwards of `batches` over all stages."""
        table, rank = self._forward_table(len(batches)), self._pipeline.rank
        self._states.begin(batches)
        return self._executor.run(table, rank, batches, factor=None, **how)

    @torch.no_grad()
    def evaluate(
        self,
        engine: Trained,
        data_iter: Iterator[Any],
        count: int | None,
        *,
        return_logits: bool = False,
        reduces: bool = True,
        computes_loss: bool = True,
    ) -> Any:
        steps = self._counters.accumulation.steps
        count = steps if count is None else whole("eval_batch: num_micro_batches", count, 1)
        batches = self._take(engine, data_iter, count, "eval_batch")
        was_training = engine.module.training
        engine.module.eval()
        with self._on_all_stages("eval_batch"):
            outcome = self._forward(
                batches, keeps_outputs=return_logits, computes_loss=computes_loss
            )
        engine.module.train(was_training)
        loss: Any = self._mean(outcome, count) if computes_loss else None
        if not reduces:
            loss = outcome.losses or loss
        return (loss, outcome.outputs or None) if return_logits else loss

    def forget(self) -> None:
        self._repeated = None

    def close(self) -> None:
        self._pipeline.weight_grads.restore()
        self._pipeline.part.restore()

    def _forward_table(self, count: int) -> Table:
        table = build_forward_table(self._pipeline.placement, count)
        return with_states(table, gathers_each=not self._units.holds_all, reduces_each=False)

    # -- batches ----------------------------------------------------------------------------------------

    def _take(
        self, engine: Trained, data_iter: Iterator[Any] | None, count: int, call: str
    ) -> list[Any]:
        """The next micro-batches, the same on all stages. Tells the channel their shapes.

        Raises:
            UsageError: on all ranks: the batches of a rank cannot be used.
        """
        batches: list[Any] = []
        problem: UsageError | None = None
        try:
            self._step.begin_stages()
            with self._parts.report.spending("data" if call == "train_batch" else "evaluation"):
                batches = self._read(engine, data_iter, count, call)
        except UsageError as error:
            problem = error
        inputs = _inputs(call, batches)
        self._agree(inputs, problem, call)
        self._pipeline.channel.begin(inputs)
        self._units.publish_shared()
        return batches

    def _read(
        self, engine: Trained, data_iter: Iterator[Any] | None, count: int, call: str
    ) -> list[Any]:
        device = self._parts.device
        if data_iter is None and engine.training_dataloader is not None and call == "train_batch":
            if self._repeated is None:
                self._repeated = RepeatingLoader(engine.training_dataloader)
            repeated = self._repeated
            with self._parts.sharded.collectives.publishing_errors("the data loader"):
                converted = self._converted(repeated)
                batches = [next(converted) for _ in range(count)]
        else:
            converted = self._converted(data_iter)
            batches = share_batches(self._pipeline.pipe, converted, count, device, call)
        return [self._packed(move(batch, device)) for batch in batches]

    def _packed(self, batch: Any) -> Any:
        """The batch with what packed rows need."""
        args, kwargs = as_inputs(batch)
        return as_batch(batch, args, self._parts.packing.inputs(args, kwargs))

    def _agree(self, inputs: Sequence[Hashable], problem: UsageError | None, call: str) -> None:
        """Raise on all ranks what is wrong with the batches of one. Sends 8 bytes to each rank.

        The host waits once, before it starts the step.
        """
        number = -1 if problem else _number_of(inputs)
        own_number = torch.full((1,), number, dtype=torch.int64, device=self._parts.device)
        collectives = self._parts.sharded.collectives
        table = collectives.gather_small(own_number, what="shapes of the batches").view(-1).tolist()
        if problem is not None:
            raise problem
        rows = len(table) // self._pipeline.pipe.world_size
        columns = [table[place::rows] for place in range(rows)]  # each is one pipeline
        differs = [place for place, column in enumerate(columns) if len({*column}) > 1]
        if self._parts.sharded.flat_groups.data.everyone.rank in differs:
            raise self._other_shapes(inputs)
        ranks = [rank for rank, number in enumerate(table) if number < 0] or differs
        if ranks:
            raise UsageError(
                f"{call}: rank {ranks[0]} could not use its batches, so no rank has run the step; its own "
                "message says why"
            )

    def _other_shapes(self, inputs: Sequence[Hashable]) -> UsageError:
        """For all stages of one pipeline, where loaders of stages give batches of different shapes."""
        seen = moved(torch.tensor([_number_of(shapes) for shapes in inputs]), self._parts.device)
        table = self._pipeline.pipe.gather_small(seen, what="shapes of each batch").tolist()
        number = next(
            batch for batch, numbers in enumerate(zip(*table, strict=True)) if len({*numbers}) > 1
        )
        return UsageError(
            f"micro-batch {number} has other shapes on the first stage than on another: every stage "
            "reads training_data itself, so its loader must give the same batches on all stages; seed its "
            "shuffling, or pass an iterator to train_batch, which the first stage alone reads"
        )

    def _mean(self, outcome: PipelineOutputs, count: int) -> Tensor:
        """The mean over micro-batches, or over their items, and data ranks, on every rank, [] fp32."""
        total = torch.zeros(2, dtype=torch.float64, device=wide_place(self._parts.device))
        if outcome.losses:
            pairs = zip(outcome.losses, outcome.weights, strict=True)
            losses = sum(weighted(loss, weight) for loss, weight in pairs)
            weights = [weight for weight in outcome.weights if weight is not None]
            total[:1] += losses if weights else losses / count
            total[1:] += sum(weights) if weights else 1
        table = self._parts.sharded.collectives.gather_small(total).sum(0)
        return (table[0] / table[1]).float().to(self._parts.device)


def _inputs(call: str, batches: Sequence[Any]) -> list[Hashable]:
    """What the channel knows of the micro-batches of a call."""
    look_at(batches)
    return [(call, signature(batch)) for batch in batches]


def _number_of(shapes: Any) -> int:
    """A number that differs for different shapes; the same in every process."""
    return zlib.crc32(repr(shapes).encode())


__all__ = ["Pipeline", "PipelineLoop", "PipelineStates", "Sequences"]
