"""Masks of whole sequences, as a model of transformers builds them on one rank."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from .batches import WholeBatch


def build_mask(
    whole: WholeBatch, config: Any, former: str, like: Tensor, window: int | None
) -> None:
    """Add the mask of `window` to `whole.masks`.

    Args:
        config: of the attention.
        former: the attention function of the model, by its name.
        like: has the dtype and the device of the hidden states.
        window: the last tokens that a token sees; None: all before it.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    plain = copy.copy(config)
    plain._attn_implementation_internal = former  # the setter changes parts that are shared
    build = create_causal_mask if window is None else create_sliding_window_causal_mask
    # only its shape, dtype and device are read
    inputs = like.new_empty(()).expand(whole.batch_size, whole.length, 1)
    whole.masks[window] = build(
        config=plain,
        inputs_embeds=inputs,
        attention_mask=whole.attention_mask,
        past_key_values=None,
        # transformers looks for documents in them, and the host waits for what it finds
        position_ids=None if whole.is_one_document else whole.position_ids,
    )


__all__ = ["build_mask"]
