"""How the inputs of one kind of model are cut over sequence ranks, and how its loss becomes a part of a sum.

                inputs                                  attention                      loss of own tokens
TransformersCuts  by name; labels are shifted first     their table of functions       divided by all labels
PlainCuts         tensors with tokens in dimension 1    `DistributedAttention` in it   weighed by own labels
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...tensor.sequence.attention import ARGUMENT, SequenceAttention, choose, unchoose
from ...tensor.sequence.batches import cut_batch, skips_padding
from ...tensor.sequence.distributed import DistributedAttention
from ...tensor.sequence.plain_batches import LABELS, POSITIONS, cut_plain_batch, first_of
from ...utils.errors import UsageError


class TokenCuts(ABC):
    """Cuts the inputs of one model. Every method is for all ranks of the group."""

    labels: str  # the argument without which a batch is not cut

    @abstractmethod
    def cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of this rank, from those of all. A forward with them has to follow.

        Raises:
            UsageError: these inputs cannot be cut.
        """

    @abstractmethod
    def stay_whole(self) -> None:
        """The next forward computes all tokens on each rank."""

    @abstractmethod
    def part(self, loss: Tensor) -> Tensor:
        """The part of the loss of all tokens, from the loss of the last forward with cut inputs.

        Raises:
            UsageError: heads were not exchanged in that forward.
        """

    @abstractmethod
    def undo(self) -> None:
        """Give the model its attention back."""


@final
class TransformersCuts(TokenCuts):
    """For causal language models of transformers."""

    labels = "labels"

    def __init__(self, model: nn.Module, group: Collectives, dtype: torch.dtype | None) -> None:
        """dtype: in which heads are sent; None: their own."""
        self._name = type(model).__name__
        self._group = group
        self._dtype = dtype
        self._current: SequenceAttention | None = None
        self._was_used = False  # all blocks of a later forward may be dropped
        self._without_padding = skips_padding(model)
        self._config: Any = model.config
        self._chosen = choose(model)

    def cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self._check_documents(inputs)
        found, whole = cut_batch(
            inputs,
            self._group.rank,
            self._group.world_size,
            without_padding=self._without_padding,
        )
        self._current = SequenceAttention(self._group, whole, self._dtype)
        return found | {ARGUMENT: self._current}

    def _check_documents(self, inputs: dict[str, Any]) -> None:
        """
        Raises:
            UsageError: without sequence ranks the model would not tell the documents apart.
        """
        uses_cache = inputs.get("use_cache")
        if uses_cache is None:
            uses_cache = getattr(self._config, "use_cache", False)
        positions = inputs.get("position_ids")
        has_own = any("flash" in former for _, former in self._chosen)  # finds documents itself
        if not uses_cache or has_own or inputs.get("attention_mask") is not None:
            return
        if isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any()):
            raise UsageError(
                f"sequence_parallel_size = {self._group.world_size}: position_ids are those of packed "
                f"documents, and {self._name} has use_cache = true: without sequence ranks its documents would "
                "see those before them; set model.config.use_cache to false"
            )

    def stay_whole(self) -> None:
        self._current = None

    def part(self, loss: Tensor) -> Tensor:
        current, self._current = self._current, None
        if current is not None:
            self._was_used = self._was_used or current.whole.is_used
        if current is not None and not self._was_used:
            raise UsageError(
                f"sequence_parallel_size = {self._group.world_size}: {self._name} does not hand its "
                "arguments down to attention, so heads cannot be exchanged; set it to 1"
            )
        return loss

    def undo(self) -> None:
        unchoose(self._chosen)


@final
class PlainCuts(TokenCuts):
    """For models whose attention is `DistributedAttention`, and whose forward takes positions and labels."""

    def __init__(self, model: nn.Module, group: Collectives, dtype: torch.dtype | None) -> None:
        names = list(inspect.signature(model.forward).parameters)
        self.labels = first_of(LABELS, names)
        self._positions = first_of(POSITIONS, names)
        self._group = group
        self._attentions = attentions_of(model)
        self._weight: Tensor | None = None
        for attention in self._attentions:
            attention.use(group, dtype)

    def cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        places = (self._group.rank, self._group.world_size)
        found, self._weight = cut_plain_batch(inputs, self.labels, self._positions, *places)
        self._set(cuts=True)
        return found

    def stay_whole(self) -> None:
        self._set(cuts=False)

    def part(self, loss: Tensor) -> Tensor:
        assert self._weight is not None
        # the mean of no labels is nan
        return torch.where(self._weight > 0, loss * self._weight, torch.zeros_like(loss))

    def undo(self) -> None:
        for attention in self._attentions:
            attention.use(None)

    def _set(self, *, cuts: bool) -> None:
        for attention in self._attentions:
            attention.set_cuts(cuts)


def attentions_of(model: nn.Module) -> list[DistributedAttention]:
    """The attentions of a plain model that wait for the group of the engine."""
    found = [module for module in model.modules() if isinstance(module, DistributedAttention)]
    return [module for module in found if not module.has_own_group]


def check_plain(model: nn.Module, setting: str) -> None:
    """
    Raises:
        UsageError: the sequences of this plain model cannot be cut.
    """
    name, names = type(model).__name__, list(inspect.signature(model.forward).parameters)
    if not attentions_of(model):
        raise UsageError(
            f"{setting}: {name} is not a causal language model of transformers, and has no "
            "xds.tensor.DistributedAttention, so its sequences cannot be cut; use that module for its "
            "attention, or set it to 1"
        )
    for wanted, what in ((POSITIONS, "positions of its tokens"), (LABELS, "labels")):
        if not first_of(wanted, names):
            raise UsageError(
                f"{setting}: the forward of {name} takes no {what}, which each rank needs for its own tokens; "
                f"add an argument called {' or '.join(wanted)}, or set it to 1"
            )


__all__ = ["PlainCuts", "TokenCuts", "TransformersCuts", "attentions_of", "check_plain"]
