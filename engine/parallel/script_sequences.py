"""Attention over all tokens for batches that the script has cut over the sequence ranks.

`sequence.cut_by = "script"`: each rank passes its tokens with their global positions, and combines the losses.
A forward first gathers the positions and the padding, a few bytes for each token.
"""

from __future__ import annotations

import inspect
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...tensor.sequence.attention import ARGUMENT, SequenceAttention, choose, unchoose
from ...tensor.sequence.batches import WholeBatch
from ...utils.errors import UsageError
from .token_cuts import attentions_of

KIND = "sequence positions"


@final
class ScriptSequences:
    """Hands what attention needs of the whole batch down to each attention of a model of transformers.

    Attentions of plain models (`xds.tensor.DistributedAttention`) get the group.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Collectives,
        dtype: torch.dtype | None,
        *,
        is_cut_in_eval: bool = True,
    ) -> None:
        """
        Args:
            dtype: in which heads are sent; None: their own.
            is_cut_in_eval: batches are cut after `eval()` as well; else they are whole then.
        """
        self._group = group
        self._dtype = dtype
        self._is_cut_in_eval = is_cut_in_eval
        self._name = type(model).__name__
        self._attentions = attentions_of(model)
        for attention in self._attentions:
            attention.use(group, dtype)
        self._chosen = choose(model)
        self._names = inspect.signature(model.forward)
        self._hooks = []
        if self._chosen:
            self._hooks.append(model.register_forward_pre_hook(self._gather, with_kwargs=True))

    @torch.no_grad()
    def _gather(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not (model.training or self._is_cut_in_eval):
            return args, kwargs
        inputs = dict(self._names.bind_partial(*args).arguments) | kwargs
        setting = f"sequence_parallel_size = {self._group.world_size}"
        positions = inputs.get("position_ids")
        if not isinstance(positions, Tensor) or positions.dim() != 2:
            raise UsageError(
                f'{setting} with sequence.cut_by = "script": {self._name} needs position_ids of the shape '
                "[samples, own tokens], with the positions in the whole sequence"
            )
        mask = inputs.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            raise UsageError(f"{setting}: attention_mask must have the shape [samples, own tokens]")
        ids = inputs.get("input_ids")
        size = (inputs["inputs_embeds"] if ids is None else ids).shape[0]
        own = torch.tensor([positions.shape[1]], device=self._group.device)
        counts = self._group.gather_small(own, what="tokens of a batch").view(-1).tolist()
        ends = torch.tensor(counts).cumsum(0).tolist()
        tokens = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
        whole = self._joined(positions, counts)
        padding = None if mask is None else self._joined(mask, counts)
        batch = WholeBatch(tokens, size, padding, whole)
        return (), inputs | {
            "use_cache": False,
            ARGUMENT: SequenceAttention(self._group, batch, self._dtype),
        }

    def _joined(self, part: Tensor, counts: list[int]) -> Tensor:
        """The tokens of all ranks, [B, N]."""
        outs = [part.new_empty(part.shape[0], count) for count in counts]
        parts = [part.contiguous()] * len(outs)
        self._group.all_to_all(outs, parts, what="positions of tokens", kind=KIND).wait()
        return torch.cat(outs, 1)

    def undo(self) -> None:
        """Take the hooks off, and give the model its attention back."""
        for hook in self._hooks:
            hook.remove()
        for attention in self._attentions:
            attention.use(None)
        unchoose(self._chosen)


def check_script_sequences(model: nn.Module, setting: str) -> None:
    """
    Raises:
        UsageError: no attention of the model can be exchanged.
    """
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if chosen == "eager":
        raise UsageError(
            f'{setting}: {type(model).__name__} computes attention with attn_implementation = "eager", which '
            'cannot be replaced; build the model with "sdpa" or "flash_attention_2"'
        )


__all__ = ["ScriptSequences", "check_script_sequences"]
