"""Attention of models of transformers over all tokens, with some of the heads on each rank.

An entry of `ALL_ATTENTION_FUNCTIONS` named after the model's own function. It acts only where a forward
hands down a `SequenceAttention`, which only the engine does. Elsewhere it calls the model's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.device import autocast_dtype
from ...utils.errors import UsageError
from ...utils.transformers_version import need_transformers
from ..compiled import number_of
from .batches import WholeBatch
from .blocks import Visibility
from .exchange import HeadExchange
from .layout import Layout, layout_of, num_exchanging
from .masks import build_mask
from .ring import Ring
from .shares import key_head_of_each

PREFIX = "xds_sequence_"
ARGUMENT = "xds_whole_batch"
OWN = "xds_own_attention"  # attribute of a function that exchanges heads itself: what it calls
# arguments that change scores, their sum, or what is seen
NOT_IN_RING = (
    *("softcap", "s_aux", "sinks", "position_bias"),
    *("indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k"),
)
RING_REASON = (
    "a ring of sequence ranks; remove compile.fullgraph, or use at most as many ranks as heads"
)
Attention = Callable[..., tuple[Tensor, Any]]


@final
@dataclass(frozen=True)
class Former:
    """The function of the model that is wrapped, its name, and what builds masks for it."""

    name: str
    attend: Attention
    build_mask: Callable[..., None]


def register(former: str) -> str:
    """Enter the function that wraps `former` in the tables of transformers. Returns its name.

    Raises:
        UsageError: this transformers has other tables.
    """
    need_transformers("sequence_parallel_size")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own: Attention = ALL_ATTENTION_FUNCTIONS[former]
    own = getattr(own, OWN, own)  # one exchange is enough
    # a compiled block has a graph before such a call and one after it
    disable: Any = torch.compiler.disable
    attend_in_ring = disable(SequenceAttention.attend, reason=RING_REASON)
    functions = Former(former, own, disable(build_mask))

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        given = kwargs.pop(ARGUMENT, None)
        if given is None:
            return own(module, query, key, value, mask, **kwargs)
        # a pipeline looks for shapes alone, and a message needs memory; a plan has no process group
        if query.is_meta and given.group.group is not None:
            batch, heads, tokens, _ = query.shape
            return query.new_empty(batch, tokens, heads, value.shape[3]), None
        chosen = attend_in_ring if given.has_ring(query.shape[1]) else SequenceAttention.attend
        return chosen(given, functions, module, (query, key, value), kwargs)

    name = PREFIX + former
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    if former in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[former])
    return name


def choose(model: nn.Module) -> list[tuple[Any, str]]:
    """Let the modules of `model` call the wrapped functions: each config, and what it had chosen before."""
    changed: list[tuple[Any, str]] = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        if isinstance(chosen, str) and chosen != "eager" and not chosen.startswith(PREFIX):
            changed.append((config, chosen))
            config._attn_implementation = register(chosen)
    return changed


def unchoose(changed: list[tuple[Any, str]]) -> None:
    """The opposite of `choose`."""
    for config, chosen in changed:
        config._attn_implementation = chosen


@final
class SequenceAttention:
    """Attention over one whole batch. An argument of every attention of one forward."""

    def __init__(self, group: Collectives, whole: WholeBatch, dtype: torch.dtype | None) -> None:
        self.whole = whole
        self.group = group
        self._dtype = dtype
        self._number = number_of(group)

    def __deepcopy__(self, memo: Any) -> SequenceAttention:
        """Itself: copies of a block's inputs stay inputs of the same batch."""
        return self

    def has_ring(self, heads: int) -> bool:
        """There are not enough heads for the ranks of the group."""
        return num_exchanging(heads, self.group.world_size) < self.group.world_size

    def attend(
        self,
        functions: Former,
        module: Any,
        tensors: tuple[Tensor, Tensor, Tensor],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, None]:
        """[B, heads, own tokens, D] for queries, keys and values -> [B, own tokens, heads, D].

        Raises:
            UsageError: there are fewer heads than ranks, and a ring cannot compute this attention.
        """
        query, key, value = tensors
        heads, kv_heads = query.shape[1], key.shape[1]
        if not torch.compiler.is_compiling():
            self.whole.is_used = True
        layout = layout_of(self.whole.tokens, heads, kv_heads, self.group.rank)
        sent = (self._dtype, self._number)
        of_queries = HeadExchange(self.group, layout.tokens, layout.heads, *sent)
        of_keys = HeadExchange(self.group, layout.tokens, layout.key_heads, *sent)
        if layout.size > 1:
            query, key, value = (
                of_queries.to_heads(query),
                of_keys.to_heads(key),
                of_keys.to_heads(value),
            )
        if kv_heads % layout.size:  # groups are cut: one head of keys for each head of queries
            own_heads = layout.heads[self.group.rank]
            index = key_head_of_each(heads, kv_heads, own_heads, key.device)
            key, value = key.index_select(1, index), value.index_select(1, index)
            module = _Ungrouped(module)
        if len(layout.ring) > 1:
            output = self._in_ring(layout, module, (query, key, value), kwargs)
        else:
            if "position_ids" in kwargs:
                kwargs["position_ids"] = self.whole.position_ids
            window = kwargs.get("sliding_window")
            if window not in self.whole.masks:
                functions.build_mask(self.whole, module.config, functions.name, query, window)
            mask = self.whole.masks[window]
            output = functions.attend(module, query, key, value, mask, **kwargs)[0].transpose(1, 2)
        if layout.size > 1:
            output = of_queries.to_tokens(output)
        return output.transpose(1, 2).contiguous(), None

    def _in_ring(
        self, layout: Layout, module: Any, tensors: tuple[Tensor, Tensor, Tensor], kwargs: Any
    ) -> Tensor:
        """[B, own heads, tokens of the block, D] -> the same."""
        self._check_ring(layout, module, kwargs)
        query = tensors[0]
        dtype = autocast_dtype(query.device.type)
        if dtype is not None:  # as attention of torch does
            tensors = (query.to(dtype), tensors[1].to(dtype), tensors[2].to(dtype))
        scale = kwargs.get("scaling")
        seen = Visibility(kwargs.get("sliding_window"), *self.whole.kept_and_documents())
        scale = query.shape[3] ** -0.5 if scale is None else float(scale)
        return Ring(self.group, layout, seen, scale, self._dtype).attend(*tensors)

    def _check_ring(self, layout: Layout, module: Any, kwargs: dict[str, Any]) -> None:
        """
        Raises:
            UsageError: the module wants what a ring does not compute.
        """
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        wanted = [f"{name} = {kwargs[name]}" for name in ("dropout",) if kwargs.get(name)]
        wanted += [name for name in NOT_IN_RING if kwargs.get(name) is not None]
        wanted += [] if is_causal else ["is_causal = False"]
        if wanted:
            heads = max(end for _, end in layout.heads)
            raise UsageError(
                f"sequence_parallel_size = {self.group.world_size}: attention has {heads} heads, so its ranks "
                f"form a ring, which does not support {wanted[0]}; set sequence_parallel_size to at most "
                f"{heads}"
            )

    def prepare(self, block: nn.Module) -> None:
        """Before the graph of `block` runs: build the masks of its attentions, which a graph cannot."""
        self.whole.is_used = True
        for module in block.modules():
            config: Any = getattr(module, "config", None)
            chosen = getattr(config, "_attn_implementation", None)
            is_attention = hasattr(module, "is_causal")
            if is_attention and isinstance(chosen, str) and chosen.startswith(PREFIX):
                everywhere = getattr(config, "sliding_window", None)
                window = getattr(module, "sliding_window", everywhere)
                if window not in self.whole.masks:
                    former = chosen.removeprefix(PREFIX)
                    build_mask(self.whole, config, former, next(block.parameters()), window)


@final
class _Ungrouped:
    """An attention module whose keys have as many heads as its queries."""

    num_key_value_groups = 1

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


__all__ = ["ARGUMENT", "OWN", "Attention", "Former", "SequenceAttention", "choose", "unchoose"]
