"""Whole batches: the loops of train_batch and eval_batch over micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from ...ops.device import wide, wide_place
from ...utils.arguments import whole, wrong
from ...utils.errors import UsageError
from ..counters import Accumulation, Counters
from ..data.batches import call_with, loss_of, move
from ..parts import Parts
from .training_step import TrainingStep

NO_ITERATOR = (
    "train_batch(data_iter) with recovery.enabled: a step that is dropped needs its batches again, so they "
    "come from training_data: call train_batch() without an iterator"
)


class Trained(Protocol):
    """What the loops call on an engine."""

    module: nn.Module
    training_dataloader: Any
    global_steps: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: Tensor) -> Tensor: ...
    def step(self) -> None: ...
    def end_step(self) -> None: ...


@final
@dataclass(frozen=True)
class PipelinePosition:
    """Where a rank is in its pipeline of `num_ranks` ranks.

    rank: from 0. is_first, is_last: it has the first stage of the model, and the last one, which has the loss;
    where a rank has several stages, one rank may have both.
    """

    rank: int
    num_ranks: int
    is_first: bool
    is_last: bool


WHOLE_MODEL = PipelinePosition(0, 1, is_first=True, is_last=True)


class Loop(ABC):
    """Whole batches: `train_batch` and `eval_batch` of an engine."""

    place: PipelinePosition
    _batch_fn: Callable[[Any], Any] | None = None

    def set_batch_fn(self, function: Callable[[Any], Any] | None) -> None:
        """Every micro-batch is what `function` returns for it; None: what was read."""
        if function is not None and not callable(function):
            raise wrong("set_batch_fn: fn", function, "a function of a micro-batch, or None")
        self._batch_fn = function

    def _converted(self, batches: Any) -> Any:
        """`batches`, each as the function returns it; what is no iterator stays as it is."""
        if self._batch_fn is None or not hasattr(batches, "__next__"):
            return batches
        return map(self._batch_fn, batches)

    def refuse(self, call: str, remedy: str = "") -> None:
        """Raise UsageError if a script may not call `call` of the engine itself."""
        return

    @abstractmethod
    def train(self, engine: Trained, data_iter: Iterator[Any] | None) -> Tensor:
        """One optimizer step; the loss, averaged over micro-batches and ranks, [] fp32."""

    @abstractmethod
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
        """The loss of `count` micro-batches (default: as many as a step takes), averaged as in `train`.

        Args:
            return_logits: return (loss, what the module returned for each micro-batch).
            reduces: False returns the losses of this rank's micro-batches.
            computes_loss: False returns None for the loss.
        """

    @abstractmethod
    def forget(self) -> None:
        """The next batches come from where the loader is now."""

    def close(self) -> None:
        """The engine is destroyed: take everything off the model."""
        return


@final
class BatchLoop(Loop):
    """Runs the micro-batches of a step. Owns the iterator over the engine's own loader."""

    place = WHOLE_MODEL

    def __init__(self, parts: Parts, accumulation: Accumulation) -> None:
        self._device = parts.device
        self._collectives = parts.sharded.collectives
        self._accumulation = accumulation
        self._means, self._recovery = parts.means, parts.recovery
        self._report = parts.report
        self._repeated: Iterator[Any] | None = None

    def train(self, engine: Trained, data_iter: Iterator[Any] | None) -> Tensor:
        if not self._recovery.is_on:
            return self._train(engine, data_iter)
        if data_iter is not None:
            raise UsageError(NO_ITERATOR)
        engine.module.train()
        done = engine.global_steps
        while (
            engine.global_steps <= done
        ):  # a step that is dropped, and one before it, are taken again
            with self._recovery:
                self._micro_batch(engine, self._next_batches(engine, None))
            if self._recovery.has_lost:
                self._recovery.recover()
        return torch.tensor(self._means.loss)  # of all ranks, without another message

    def _micro_batch(self, engine: Trained, batches: Iterator[Any]) -> Tensor:
        """Forward, backward and step; the loss."""
        with (
            self._report.spending("data"),
            self._collectives.publishing_errors("the data iterator of train_batch"),
        ):
            batch = next(batches)
        loss = loss_of(call_with(engine, move(batch, self._device)))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def _train(self, engine: Trained, data_iter: Iterator[Any] | None) -> Tensor:
        batches = self._next_batches(engine, data_iter)
        engine.module.train()
        total = torch.zeros((), dtype=torch.float64, device=wide_place(self._device))
        steps = self._accumulation.steps_now
        for _ in range(steps):
            total += wide(self._micro_batch(engine, batches))
        return self.average(total / steps)

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
        batches = self._converted(_checked(data_iter, "eval_batch"))
        count = (
            self._accumulation.steps
            if count is None
            else whole("eval_batch: num_micro_batches", count, 1)
        )
        was_training = engine.module.training
        engine.module.eval()
        outputs, losses = [], []
        for _ in range(count):
            output = call_with(engine, move(next(batches), self._device))
            losses += [loss_of(output)] if computes_loss else []
            outputs += [output] if return_logits else []
        engine.module.train(was_training)
        loss: Any = losses if computes_loss else None
        if computes_loss and reduces:
            loss = self.average(torch.stack([wide(one) for one in losses]).sum() / count)
        return (loss, outputs) if return_logits else loss

    def average(self, value: Tensor) -> Tensor:
        """The mean of `value`, [] over the ranks."""
        return self._collectives.gather_small(value.view(1)).mean().float().to(self._device)

    def forget(self) -> None:
        self._repeated = None

    def _next_batches(self, engine: Trained, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            checked: Iterator[Any] = self._converted(_checked(data_iter, "train_batch"))
            return checked
        if engine.training_dataloader is None:
            raise UsageError(
                "train_batch() without data_iter: pass an iterator of batches, or training_data to "
                "xds.initialize"
            )
        if self._repeated is None:
            from ..data.loaders import RepeatingLoader

            self._repeated = RepeatingLoader(engine.training_dataloader)
        repeated: Iterator[Any] = self._converted(self._repeated)
        return repeated


def batch_loop(parts: Parts, step: TrainingStep, counters: Counters) -> Loop:
    """The loop of a model that is not cut: forward, backward and step of the engine."""
    return BatchLoop(parts, counters.accumulation)


def _checked(data_iter: Iterator[Any], call: str) -> Iterator[Any]:
    if not hasattr(data_iter, "__next__"):
        raise wrong(f"{call}: data_iter", data_iter, "an iterator of batches, such as iter(loader)")
    return data_iter


__all__ = [
    "NO_ITERATOR",
    "WHOLE_MODEL",
    "BatchLoop",
    "Loop",
    "PipelinePosition",
    "Trained",
    "batch_loop",
]
