"""What one rank of a pipeline has of a model, and how its stages are run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

from torch import Tensor, nn


class WeightedLoss(NamedTuple):
    """A loss that is the mean of `weight` items."""

    loss: Tensor
    weight: float | Tensor


@final
@dataclass(frozen=True)
class Flow:
    """What goes from one stage to the next.

    Args:
        leaves: the tensors in order, of any dtype; some may not require gradients.
        spec: JSON text with what else the next stage needs; equal for equal structures.
    """

    leaves: tuple[Tensor, ...]
    spec: str


@final
@dataclass(frozen=True)
class Block:
    """A block of the model that this rank has."""

    name: str
    module: nn.Module
    stage: int


class StagePlacement(Protocol):
    """Which rank of the pipeline holds which virtual stage."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    def rank_of(self, stage: int) -> int: ...
    def stages_of(self, rank: int) -> tuple[int, ...]: ...


@final
@dataclass(frozen=True)
class Names:
    """The parameters of the whole model, the same on every rank but for `own`.

    Args:
        own: id of a parameter of this rank -> its first name in the whole model.
        shared: name of a parameter that several pipeline ranks hold -> these ranks, sorted.
        whole: name -> shape, of every parameter of the whole model.
        aliases: every name, also the further ones of a tied parameter -> its first name.
    """

    own: Mapping[int, str] = field(repr=False)
    shared: Mapping[str, tuple[int, ...]]
    whole: Mapping[str, tuple[int, ...]] = field(repr=False)
    aliases: Mapping[str, str] = field(repr=False)


class Part(ABC):
    """What one rank of a pipeline has of a model.

    Attributes:
        module: holds the parameters of this rank, under their names in the whole model.
        blocks: the blocks of this rank in order; of a list of layers, those with parameters.
        names: id of a parameter of this rank -> its first name in the whole model.
        shared: first name of a parameter that several pipeline ranks hold -> these ranks, sorted. Their values
            must be made equal once, and their gradients summed; a rank that does not use it has no gradient.
        whole: first name -> shape, of every parameter of the whole model.
        aliases: every name -> first name; a tied parameter has several.

    Modules of a plain model end a stage by an exception: forward hooks of the model and of the modules around
    the blocks do not run on any stage but the last.

    A stage's inputs that require gradients are leaves of the graph: their gradients are in `.grad` after a
    backward. Reentrant activation checkpoints need `backward()`; `torch.autograd.grad` refuses them.
    """

    def __init__(self, module: nn.Module, blocks: tuple[Block, ...], names: Names) -> None:
        """
        Args:
            module: holds the parameters of this rank under their names in the whole model.
            blocks: the blocks of this rank in order.
        """
        self.module = module
        self.blocks = blocks
        self.names = names.own
        self.shared = names.shared
        self.whole = names.whole
        self.aliases = names.aliases

    @abstractmethod
    def run(self, stage: int, batch: Any, arrived: Flow | None, micro_batch: int) -> Any:
        """Run the virtual `stage` of this rank.

        Args:
            batch: the micro-batch from the loader, the same on every stage.
            arrived: what the stage before returned; None for the first stage.
            micro_batch: its number in the step.

        Returns:
            A Flow; of the last stage, what the model returns.
        """

    def result(self, outputs: Any, batch: Any) -> Any:
        """The loss, or what begins with it, from what the last stage returned for `batch`."""
        return outputs

    @abstractmethod
    def recomputing(self, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """The context of a backward of this stage and micro-batch: checkpointed blocks run again in it."""

    @abstractmethod
    def release(self, stage: int, micro_batch: int) -> None:
        """Forget what arrived for this stage and micro-batch: its backward is over."""

    @abstractmethod
    def restore(self) -> None:
        """Give modules their classes back. Modules of other stages do not come back."""


__all__ = ["Block", "Flow", "Names", "Part", "StagePlacement"]
