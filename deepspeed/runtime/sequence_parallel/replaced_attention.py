"""Attention of transformers over the tokens of all sequence ranks, for models without an engine.

`register_with_transformers` enters it in place of the function that models call. An engine exchanges heads
itself, and calls what was there before. So models that no engine has compute the same.
"""

from __future__ import annotations

import re
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....ops.comm.collectives import Collectives
from ....ops.comm.opening import open_collectives
from ....tensor.sequence.attention import OWN, Attention, Former, SequenceAttention
from ....tensor.sequence.batches import WholeBatch
from ....tensor.sequence.masks import build_mask
from ....utils.errors import UsageError

_HUB_KERNEL = re.compile(r"[^/:]+/[^/:]+(@[^/:]+)?(:[^/:]+)?")  # owner/name@revision:function
_WHAT = "positions of tokens"


def check_implementation(model: Any, name: str) -> None:
    """
    Raises:
        UsageError: the attention `name` cannot be replaced, or `model`, if loaded, uses another one.
    """
    if name in ("eager", "paged|eager"):
        raise UsageError(
            f'core_attn_implementation = "{name}": it cannot be replaced; pass "sdpa" or "flash_attention_2"'
        )
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if chosen is not None and chosen != name:
        raise UsageError(
            f"core_attn_implementation = {name!r} does not match model config attn_implementation = "
            f"{chosen!r}: build the model with the same one"
        )


def replace_attention(name: str, group: dist.ProcessGroup, *, in_eval: bool) -> None:
    """Enter the exchange over `group` in transformers' table under `name`, over what is there.

    Args:
        in_eval: the batches of modules in eval() are cut as well.
    Raises:
        UsageError: transformers has no attention of that name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _HUB_KERNEL.fullmatch(name):  # transformers enters such a kernel when a model first needs it
        from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

        lazy_import_flash_attention(name)
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UsageError(
            f"core_attn_implementation = {name!r}: transformers has no such attention; pass one of "
            f"{', '.join(ALL_ATTENTION_FUNCTIONS.valid_keys())}"
        )
    own = ALL_ATTENTION_FUNCTIONS[name]
    own = getattr(own, OWN, own)
    ALL_ATTENTION_FUNCTIONS[name] = _Exchanged(name, own, group, in_eval=in_eval).function()


@final
class _Exchanged:
    """One entry of the table."""

    def __init__(
        self, name: str, own: Attention, group: dist.ProcessGroup, *, in_eval: bool
    ) -> None:
        self._former = Former(name, own, build_mask)
        self._group, self._in_eval = group, in_eval
        self._opened: Collectives | None = None
        # own positions -> the whole batch, for the attentions of one forward
        self._batches: Any = WeakTensorKeyDictionary()

    def function(self) -> Attention:
        """What transformers calls."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            if not (module.training or self._in_eval):
                return self._former.attend(module, query, key, value, mask, **kwargs)
            if key.shape[2] != query.shape[2]:
                raise UsageError(
                    "UlyssesSPAttentionHF: a forward has keys in a cache, which sequence ranks cannot share; "
                    "pass use_cache=False, or register with disable_in_eval=True and generate after eval()"
                )
            batch = self._whole(query, kwargs.get("position_ids"))
            attention = SequenceAttention(self._collectives(query.device), batch, None)
            return attention.attend(self._former, module, (query, key, value), kwargs)

        setattr(attend, OWN, self._former.attend)
        return attend  # type: ignore[no-any-return]

    def _collectives(self, device: torch.device) -> Collectives:
        if self._opened is None:
            self._opened = open_collectives(self._group, device)
        return self._opened

    def _whole(self, query: Tensor, positions: Any) -> WholeBatch:
        """A collective, once for each forward.

        Raises:
            UsageError: the forward passes no positions.
        """
        if not isinstance(positions, Tensor) or positions.dim() != 2:
            raise UsageError(
                "UlyssesSPAttentionHF: a forward has no position_ids of the shape [samples, own tokens]; pass "
                "the positions in the whole sequence"
            )
        found: WholeBatch | None = self._batches.get(positions)
        if found is None:
            group = self._collectives(query.device)
            parts = [torch.empty_like(positions) for _ in range(group.world_size)]
            sent = [positions.contiguous()] * len(parts)
            group.all_to_all(parts, sent, what=_WHAT, kind="sequence positions").wait()
            own = positions.shape[1]
            tokens = tuple((rank * own, (rank + 1) * own) for rank in range(len(parts)))
            found = WholeBatch(tokens, query.shape[0], None, torch.cat(parts, 1))
            self._batches[positions] = found
        return found


__all__ = ["check_implementation", "replace_attention"]
