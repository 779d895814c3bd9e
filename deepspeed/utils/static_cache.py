"""`deepspeed.utils.static_cache`: keys and values of attention in tensors that never move, for CUDA graphs.

The script says where the next tokens are written, in a tensor that all layers read: a graph that is replayed
reads its new value. One number is for all rows of the batch, or there is one for each row.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ..errors import methods_raise_theirs
from ..missing import placeholder


@final
@methods_raise_theirs
class DeepSpeedStaticLayer:
    """The cache of one layer: [rows, heads, `max_cache_len`, width], zeros at first."""

    is_compileable = True
    is_sliding = False

    def __init__(self, max_cache_len: int) -> None:
        self.max_cache_len = max_cache_len
        self.is_initialized = False
        self.max_batch_size = 0
        self.keys = self.values = torch.empty(0)
        self._position: Tensor | None = None

    def set_write_position(self, pos: Tensor) -> None:
        """Where the next token is written. `pos` is read at each update.

        Raises:
            UsageError: it is no tensor of whole numbers without or with one dimension.
        """
        is_right = isinstance(pos, Tensor) and pos.dim() < 2
        if not (is_right and pos.dtype in (torch.int32, torch.int64)):
            raise UsageError(
                "set_write_position: the write position must be a scalar or 1-D tensor of an integer dtype"
            )
        self._position = pos

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for as many rows and heads as these have."""
        rows, heads = key_states.shape[:2]
        sizes = [(rows, heads, self.max_cache_len, x.shape[3]) for x in (key_states, value_states)]
        self.keys, self.values = key_states.new_zeros(sizes[0]), value_states.new_zeros(sizes[1])
        for tensor in (self.keys, self.values):
            torch._dynamo.mark_static_address(tensor)
        self.max_batch_size, self.is_initialized = rows, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the tokens, and return the whole cache: of the rows that were passed, with one position each.

        Raises:
            UsageError: a position each, and too few of them, or several tokens, or one outside the cache.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._position is not None and self._position.dim() == 1:
            return self._update_rows(key_states, value_states, self._position)
        places = torch.arange(key_states.shape[2], device=self.keys.device)
        if self._position is not None:
            places = places + self._position
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values

    def _update_rows(
        self, keys: Tensor, values: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = len(keys)
        if len(positions) < rows:
            raise UsageError(
                f"per-row write positions must cover the active batch size: there are {len(positions)}, for "
                f"{rows} rows"
            )
        if keys.shape[2] != 1:
            raise UsageError("per-row write positions: pass one token at a time")
        places = positions[:rows].to(self.keys.device)
        if not (self.keys.is_cuda and torch.cuda.is_current_stream_capturing()):
            if bool(((places < 0) | (places >= self.max_cache_len)).any()):
                raise UsageError(
                    f"per-row write positions must be within the cache, 0 to {self.max_cache_len - 1}"
                )
        index = torch.arange(rows, device=self.keys.device)
        self.keys[index, :, places], self.values[index, :, places] = keys[:, :, 0], values[:, :, 0]
        return self.keys[:rows], self.values[:rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length of the keys, offset), as transformers asks."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> int | Tensor:
        """The tokens so far: a tensor like the position; 0 without one."""
        is_known = self.is_initialized and self._position is not None
        return self._position + 1 if is_known and self._position is not None else 0

    def get_max_cache_shape(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        """Zeros, in the same tensors."""
        self.keys.zero_()
        self.values.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, in new tensors."""
        if self.is_initialized:
            self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]
            if self._position is not None and self._position.dim() == 1:
                self._position = self._position[beam_idx.to(self._position.device)]

    def keep_rows(self, rows: Tensor) -> None:
        """These rows come first, in the same tensors; the others are zeros."""
        for tensor in (self.keys, self.values):
            kept = tensor[rows]
            tensor[: len(rows)] = kept
            tensor[len(rows) :] = 0

    def trim_left(self, count: int) -> None:
        """Drop the first tokens, in the same tensors."""
        for tensor in (self.keys, self.values):
            kept = tensor[:, :, count:].clone()
            tensor.zero_()[:, :, : kept.shape[2]] = kept


@final
@methods_raise_theirs
class DeepSpeedStaticCache:
    """A layer's cache for each layer of a model of transformers."""

    def __init__(
        self,
        config: Any,
        batch_size: int = 1,
        max_cache_len: int = 4096,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """It is allocated now where both `device` and `dtype` are given, else by the first update."""
        self.config = config
        text = getattr(config, "text_config", config)
        self._max_cache_len = max_cache_len
        number = getattr(text, "num_hidden_layers", 1)
        self._layers = [DeepSpeedStaticLayer(max_cache_len) for _ in range(number)]
        self._position: Tensor | None = None
        if device is not None and dtype is not None and batch_size > 0:
            heads = getattr(text, "num_attention_heads", 1)
            width = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 1) // heads
            kv_heads = getattr(text, "num_key_value_heads", heads)
            self.early_initialization(batch_size, kv_heads, width, dtype, device)

    @property
    def layers(self) -> list[DeepSpeedStaticLayer]:
        return self._layers

    def early_initialization(
        self, batch_size: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: Any
    ) -> None:
        like = torch.empty(batch_size, num_heads, 0, head_dim, dtype=dtype, device=device)
        for layer in self._layers:
            layer.lazy_initialization(like, like)

    def set_write_position(self, pos: Tensor) -> None:
        """For all layers; see `DeepSpeedStaticLayer.set_write_position`."""
        for layer in self._layers:
            layer.set_write_position(pos)
        self._position = pos

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return self._layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def compact(self, active_indices: Tensor) -> None:
        """Keep these rows, which come first then. Positions of each row follow; those of the others are -1.

        Raises:
            UsageError: they are no different rows of the cache.
        """
        rows = active_indices.to(torch.long)
        most = self._layers[0].max_batch_size
        is_right = rows.dim() == 1 and len(set(rows.tolist())) == len(rows)
        if not is_right or bool(((rows < 0) | (rows >= most)).any()):
            raise UsageError(
                f"compact: active_indices must be different rows from 0 to {most - 1}, in a 1-D tensor"
            )
        for layer in self._layers:
            layer.keep_rows(rows.to(layer.keys.device))
        if self._position is not None and self._position.dim() == 1:
            kept = self._position[rows.to(self._position.device)]
            self._position.fill_(-1)[: len(rows)] = kept

    def trim_left(self, count: int) -> None:
        """Drop the first tokens of all rows; positions stay as they are."""
        if not isinstance(count, int) or count < 0:
            raise UsageError(f"trim_left({count!r}): must be a number of tokens, at least 0")
        for layer in self._layers:
            layer.trim_left(count)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """The tokens of the longest row so far."""
        if layer_idx >= len(self._layers):
            return 0
        length = self._layers[layer_idx].get_seq_length()
        return length.max() if isinstance(length, Tensor) and length.dim() == 1 else length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self._max_cache_len

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._max_cache_len, 0

    def reset(self) -> None:
        for layer in self._layers:
            layer.reset()

    def __len__(self) -> int:
        return len(self._layers)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["DeepSpeedStaticCache", "DeepSpeedStaticLayer"]
