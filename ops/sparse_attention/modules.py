"""DeepSpeed's modules of sparse attention: for models that are built with them, and for Bert and RoBERTa.

Other than DeepSpeed's they take any dtype and device, fewer key heads than query heads, and sequences that are
no multiple of the block. A unidirectional layout is causal by elements; `block_causality=True` keeps what
DeepSpeed computes, where a token sees those after it in its own block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...utils.errors import UsageError
from .attention import element_mask, masked_attention, sparse_attention
from .layouts import UNIDIRECTIONAL, Fixed, SparsityConfig

MODES = "add", "mul"


@final
class SparseSelfAttention(nn.Module):
    """Self-attention over the blocks of a layout, without weights of its own.

    The layout is made here, for `max_seq_length` tokens. It is the buffer `master_layout`: it is saved, and the
    engine gives all ranks that of rank 0. Shorter sequences have its upper left corner.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
        *,
        block_causality: bool = False,
    ) -> None:
        """
        Args:
            sparsity_config: the rule of the layout; None: `Fixed(num_heads=4)`.
            key_padding_mask_mode: "add": key_padding_mask is added to scores. "mul": keys with 0 are left out.
            attn_mask_mode: the same for attn_mask.
            max_seq_length: tokens of the longest sequence, a multiple of the block.
            block_causality: a unidirectional layout is not cut inside its blocks.
        """
        super().__init__()
        for name, mode in (("key_padding", key_padding_mask_mode), ("attn", attn_mask_mode)):
            if mode not in MODES:
                raise UsageError(f'{name}_mask_mode = {mode!r}: must be "add" or "mul"')
        self.sparsity_config = Fixed(num_heads=4) if sparsity_config is None else sparsity_config
        if not isinstance(self.sparsity_config, SparsityConfig):
            raise UsageError(
                f"sparsity_config = {sparsity_config!r}: must be a rule, such as Fixed(num_heads=4)"
            )
        self.register_buffer("master_layout", self.sparsity_config.make_layout(max_seq_length))
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        attention = getattr(self.sparsity_config, "attention", None)
        self.is_causal = attention == UNIDIRECTIONAL and not block_causality

    def get_layout(self, L: int) -> Tensor:  # noqa: N803 (DeepSpeed's name)
        """The layout [heads, n, n] of L tokens, on the CPU."""
        n = -(-L // self.sparsity_config.block)
        if n > self.master_layout.shape[1]:
            most = self.master_layout.shape[1] * self.sparsity_config.block
            raise UsageError(
                f"SparseSelfAttention: a sequence of {L} tokens, and its layout is for {most}: set "
                "max_seq_length"
            )
        return self.master_layout[:, :n, :n].cpu()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """[B, H, L, D] of query, [B, Hkv, L, D] of key and value -> [B, H, L, D].

        Args:
            rpe: added to the scores; broadcasts to [B, H, L, L].
            key_padding_mask: [B, L], or [B, 1, 1, L].
            attn_mask: [L, L].

        With rpe, attn_mask or a mask that is added and is not 0 or below -9999, all scores are computed.
        """
        length, block = query.shape[2], self.sparsity_config.block
        if key.shape[2] != length and key.shape[3] == length:  # DeepSpeed takes it transposed
            key = key.transpose(2, 3)
        layout = self.get_layout(length)
        if key_padding_mask is not None:
            key_padding_mask = _shaped(key_padding_mask, "key_padding_mask", len(query), length)
        scores = len(query), query.shape[1], length, length
        sizes = () if rpe is None else zip(reversed(rpe.shape), reversed(scores), strict=False)
        if rpe is not None and (rpe.dim() > 4 or any(own not in (1, size) for own, size in sizes)):
            raise UsageError(
                f"SparseSelfAttention: rpe {list(rpe.shape)}: must broadcast to the scores, {list(scores)}"
            )
        padding = self._seen(key_padding_mask)
        whole = key_padding_mask is not None and padding is None
        if rpe is None and attn_mask is None and not whole:
            return sparse_attention(
                query, key, value, layout, block=block, padding=padding, is_causal=self.is_causal
            )
        rows = (0, length)
        mask = element_mask(layout.to(query.device), block, rows, length, is_causal=self.is_causal)
        bias = query.new_zeros(()) if rpe is None else rpe
        if padding is not None:
            mask = mask & padding[:, None, None]
        elif key_padding_mask is not None:
            bias = bias + key_padding_mask[:, None, None]
        if attn_mask is not None:
            attn_mask = _shaped(attn_mask, "attn_mask", length, length)
            if self.attn_mask_mode == "mul":
                mask = mask & (attn_mask != 0)
            else:
                bias = bias + attn_mask
        bias = torch.broadcast_to(bias, scores)
        return masked_attention(query, key, value, mask, scale=query.shape[3] ** -0.5, bias=bias)

    def _seen(self, mask: Tensor | None) -> Tensor | None:
        """The mask as keys that are seen, [B, L]; None: it is no such mask."""
        if mask is None:
            return None
        if self.key_padding_mask_mode == "mul":
            return mask != 0
        if mask.dtype == torch.bool:
            return mask
        hidden = mask <= HIDDEN
        return ~hidden if bool((hidden | (mask == 0)).all()) else None


def _shaped(mask: Tensor, name: str, *shape: int) -> Tensor:
    if mask.numel() != math.prod(shape):
        raise UsageError(f"SparseSelfAttention: {name} {list(mask.shape)}: needs {list(shape)}")
    return mask.reshape(shape)


HIDDEN = -9999.0  # a mask that is added hides a key with this or less: Bert's is -10000


@final
class BertSparseSelfAttention(nn.Module):
    """Bert's self-attention, with the names of its weights, over the blocks of a layout."""

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None) -> None:
        """
        Args:
            config: Bert's: hidden_size and num_attention_heads.
            sparsity_config: None: `Fixed`, for the heads of the model.
        """
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        if size % heads:
            raise UsageError(
                f"hidden_size = {size} is no multiple of num_attention_heads = {heads}"
            )
        self.num_attention_heads = heads
        self.attention_head_size = size // heads
        self.all_head_size = size
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        made = Fixed(num_heads=heads) if sparsity_config is None else sparsity_config
        longest = getattr(config, "max_position_embeddings", 2048)
        longest = max(2048, made.block * math.ceil(longest / made.block))
        longest -= longest % made.block
        self.sparse_self_attention = SparseSelfAttention(made, max_seq_length=longest)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, heads, L, D]."""
        heads, each = self.num_attention_heads, self.attention_head_size
        return x.view(*x.shape[:2], heads, each).transpose(1, 2)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Any:
        """[B, L, size] -> [B, L, size]; in a layer of transformers, the tuple that it expects.

        Args:
            attention_mask: [B, L] or [B, 1, 1, L]: 0 for keys that are seen, -10000 for others; or bool. A mask
                [B, 1, L, L] whose rows are equal is one as well.
        """
        q, k, v = (
            self.transpose_for_scores(each(hidden_states))
            for each in (self.query, self.key, self.value)
        )
        if attention_mask is not None and attention_mask.dim() == 4:
            first, attention_mask = attention_mask[:, 0, 0], attention_mask[:, 0, -1]
            if not torch.equal(first, attention_mask):
                raise UsageError(
                    "BertSparseSelfAttention: the rows of attention_mask differ, as in a decoder; set the "
                    "section sparse_attention of the config, which takes such masks"
                )
        out = self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask)
        out = out.transpose(1, 2).reshape(hidden_states.shape)
        return (out, None) if __ else out


@final
class SparseAttentionUtils:
    """DeepSpeed's functions that change a pretrained Bert or RoBERTa."""

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """Repeat the position embeddings of a Bert or RoBERTa up to `max_position`. Returns the model."""
        inner, reserved = _encoder(model, "extend_position_embedding")
        embedding = inner.embeddings.position_embeddings
        own = embedding.weight.data[reserved:]
        if max_position <= len(own):
            raise UsageError(
                f"max_position = {max_position}: the model has {len(own)} positions already"
            )
        times = -(-max_position // len(own))
        more = own.repeat(times, 1)[:max_position]
        whole = torch.cat([embedding.weight.data[:reserved], more])
        embedding.weight.data = whole
        embedding.num_embeddings = len(whole)
        for name, fill in (("position_ids", None), ("token_type_ids", 0)):
            if isinstance(getattr(inner.embeddings, name, None), Tensor):
                where = torch.arange(len(whole)) if fill is None else torch.zeros(len(whole))
                setattr(inner.embeddings, name, where.long().expand(1, -1).to(whole.device))
        model.config.max_position_embeddings = len(whole)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Let a tokenizer take `max_position` tokens. Returns it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """Replace the self-attention of each layer of a Bert or RoBERTa. Returns the model."""
        inner, reserved = _encoder(model, "replace_model_self_attention_with_sparse_self_attention")
        model.config.max_position_embeddings = max_position + reserved
        replace = SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer
        replace(model.config, inner.encoder.layer, sparsity_config)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[Any], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[Any]:
        """Replace the self-attention of `layers`, which keeps its weights. Returns the layers."""
        for layer in layers:
            own = layer.attention.self
            new = BertSparseSelfAttention(config, sparsity_config)
            new.query, new.key, new.value = own.query, own.key, own.value
            layer.attention.self = new.train(own.training)
        return layers

    @staticmethod
    def pad_to_block_size(  # noqa: PLR0913 (DeepSpeed's arguments)
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The number of tokens that are added for whole blocks, and the five inputs with them."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise UsageError("pad_to_block_size: needs input_ids or inputs_embeds")
        rest = -given.shape[1] % block_size
        pad = (0, rest)
        if rest and inputs_embeds is not None:
            ids = given.new_full((len(given), rest), pad_token_id, dtype=torch.long)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids)], 1)
        fills = (
            (input_ids, pad_token_id),
            (attention_mask, 0),
            (token_type_ids, 0),
            (position_ids, pad_token_id),
        )
        padded = [x if x is None else F.pad(x, pad, value=fill) for x, fill in fills]
        return rest, padded[0], padded[1], padded[2], padded[3], inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """The output [B, L, ...] without the last `pad_len` tokens."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


def _encoder(model: Any, what: str) -> tuple[Any, int]:
    """The encoder of a Bert or RoBERTa, and its reserved positions."""
    for name, reserved in (("bert", 0), ("roberta", 2)):
        if hasattr(model, name):
            return getattr(model, name), reserved
    raise UsageError(
        f"{what}: {type(model).__name__} has no part called bert or roberta; set the section sparse_attention "
        "of the config, which switches other models of transformers"
    )


__all__ = ["BertSparseSelfAttention", "SparseAttentionUtils", "SparseSelfAttention"]
