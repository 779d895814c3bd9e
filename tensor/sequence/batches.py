"""Cuts the inputs of a causal language model of transformers into the tokens of each rank."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from .shares import Range, shares

PROOF_SAMPLES, PROOF_TOKENS = 2, 64  # tokens a rank
IGNORED = -100  # the label of tokens without loss, as in transformers
COUNT_PADDING = ("biogpt",)  # models that have such an embedding, and do not use its rule


@final
@dataclass(eq=False)
class WholeBatch:
    """What attention needs of the whole batch. A forward hands it down to each attention as an argument.

    attention_mask: [B, N] or None. position_ids: [B or 1, N].
    masks: what was built of them; by length of the sliding window, or None for all tokens.
    is_used: by an attention.
    is_one_document: known without a look at the positions, for which the host would wait.
    seen: padding and documents, where a ring has asked for them.
    """

    tokens: tuple[Range, ...]
    batch_size: int
    attention_mask: Tensor | None
    position_ids: Tensor
    masks: dict[int | None, Any] = field(default_factory=dict)
    is_used: bool = False
    is_one_document: bool = False
    seen: tuple[Tensor | None, Tensor | None] | None = None

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""
        return self.tokens[-1][1]

    def kept_and_documents(self) -> tuple[Tensor | None, Tensor | None]:
        """[B or 1, N] each: which tokens are not padding, and the document of each token; None: all, and one.

        As in transformers, documents are found only without `attention_mask`. One begins where a position is
        not that of the token before, plus 1.
        """
        if self.seen is None:
            if self.attention_mask is not None:
                kept = self.attention_mask.bool()
                self.seen = (None if kept.all() else kept), None
            elif self.is_one_document:
                self.seen = None, None
            else:
                begins = self.position_ids.diff(dim=1) != 1
                documents = nn.functional.pad(begins.cumsum(1), (1, 0))
                self.seen = None, (documents if begins.any() else None)
        return self.seen


def short_batch(
    inputs: dict[str, Any], world_size: int, name_of_labels: str = "labels"
) -> dict[str, Any] | None:
    """The first tokens of the first samples of whole inputs; None: all of them are padding, or too few.

    Where none of these tokens has a label, all of them get label 0.
    """
    labels: Tensor = inputs[name_of_labels]
    if labels.dim() < 2:
        return None
    size, length = labels.shape[0], labels.shape[1]
    samples, tokens = min(size, PROOF_SAMPLES), min(length, PROOF_TOKENS * world_size)
    if length < world_size:
        return None
    if not (labels[:samples, 1:tokens] != IGNORED).any():
        mask = inputs.get("attention_mask")
        is_given = isinstance(mask, Tensor) and mask.shape == labels.shape
        kept = mask.bool() if is_given and mask is not None else torch.ones_like(labels).bool()
        labels = torch.where(kept, 0, IGNORED)
        if not (labels[:samples, 1:tokens] != IGNORED).any():
            return None
        inputs = {key: x for key, x in inputs.items() if key != "shift_labels"}
        inputs[name_of_labels] = labels
    short = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
            short[name] = value[: samples if len(value) == size else None, :tokens]
    short.pop("num_items_in_batch", None)
    if "use_cache" in short:
        short["use_cache"] = False
    return short


def shifted(labels: Tensor) -> Tensor:
    """The label that each token predicts: that of the next one; [B, N]."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def skips_padding(model: nn.Module) -> bool:
    """The positions of a model begin at the first token that is no padding, as those of OPT.

    Its embedding of positions takes the attention mask.
    """
    if getattr(getattr(model, "config", None), "model_type", None) in COUNT_PADDING:
        return False
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(
        "attention_mask" in inspect.signature(embedding.forward).parameters
        for embedding in embeddings
    )


def positions_of(mask: Tensor) -> Tensor:
    """The position of each token among those that are no padding, and -1 for padding; [B, N].

    >>> positions_of(torch.tensor([[0, 0, 1, 1]]))
    tensor([[-1, -1,  0,  1]])
    """
    ones = mask.long()
    return ones.cumsum(1) * ones - 1


def cut_batch(
    inputs: dict[str, Any], rank: int, world_size: int, *, without_padding: bool = False
) -> tuple[dict[str, Any], WholeBatch]:
    """The inputs of `rank`, and what attention needs of the whole ones.

    without_padding: where there are no position_ids, padding does not count.

    Raises:
        UsageError: the batch cannot be cut.
    """
    ids = inputs.get("input_ids")
    ids = inputs.get("inputs_embeds") if ids is None else ids
    assert ids is not None
    size, length = ids.shape[:2]
    setting = f"sequence_parallel_size = {world_size}"
    if length < world_size:
        raise UsageError(
            f"{setting}: a sequence of the batch has {length} tokens, and each rank needs at least one; pad "
            f"the batch to {world_size} tokens"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise UsageError(
            f"{setting}: attention_mask must have the shape [samples, tokens], because each rank builds the "
            "mask of its heads; pass such a mask, or position_ids that begin at 0 for each document"
        )
    own_inputs = dict(inputs)
    are_given = own_inputs.get("position_ids") is not None
    if not are_given:
        plain = torch.arange(length, device=ids.device).unsqueeze(0)
        own_inputs["position_ids"] = (
            plain if mask is None or not without_padding else positions_of(mask)
        )
    positions = own_inputs["position_ids"]
    if positions.dim() != 2:
        raise UsageError(
            f"{setting}: position_ids has {positions.dim()} dimensions; pass one position for each token"
        )
    if own_inputs.get("shift_labels") is None:
        own_inputs["shift_labels"] = shifted(inputs["labels"])
    if own_inputs.get("num_items_in_batch") is None:
        own_inputs["num_items_in_batch"] = (own_inputs["shift_labels"] != IGNORED).sum()
    tokens = shares(length, world_size)
    first, end = tokens[rank]
    for name, value in own_inputs.items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
            own_inputs[name] = value[:, first:end].contiguous()
    own_inputs["use_cache"] = False
    is_one_document = not are_given and mask is None
    return own_inputs, WholeBatch(tokens, size, mask, positions, is_one_document=is_one_document)


__all__ = ["WholeBatch", "cut_batch", "positions_of", "shifted", "short_batch", "skips_padding"]
