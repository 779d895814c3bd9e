"""`UlyssesSPAttentionHF` and `UlyssesSPDataLoaderAdapter` with DeepSpeed's arguments: the script cuts batches.

Differences. The engine of one model exchanges its heads; models without one call the function that
`register_with_transformers` enters, see replaced_attention.py. Gradients are those of the loss of all tokens.
Heads need not be a multiple of the ranks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ....ops.comm.collectives import Collectives
from ....ops.comm.opening import open_collectives
from ....tensor.sequence import distributed
from ....tensor.sequence.attention import OWN, Attention, Former, SequenceAttention
from ....tensor.sequence.batches import WholeBatch
from ....tensor.sequence.masks import build_mask
from ....utils.errors import UsageError
from ...data.sharing import gather_batches
from ..errors import raises_theirs


@final
class DistributedAttention(nn.Module):
    """`xds.tensor.DistributedAttention`, where each call says which dimension is that of the batch."""

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        """
        Args:
            scatter_idx: the dimension of the heads.
            gather_idx, sp_stream: no effect; `batch_dim_idx` of a call tells the dimension of the tokens.
        """
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._by_batch_dim = nn.ModuleDict()
        # a compiled block has a graph before this module and one after it
        self._attend = torch.compiler.disable(self._exchanged)  # type: ignore[no-untyped-call]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Own tokens of all heads -> the same; batch_dim_idx 0: [B, N, H, D], 1: [N, B, H, D]."""
        found: Tensor = self._attend(query, key, value, batch_dim_idx, *args, **kwargs)
        return found

    def _exchanged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        name = str(batch_dim_idx)
        if name not in self._by_batch_dim:
            self._by_batch_dim[name] = distributed.DistributedAttention(
                self.local_attn,
                self.spg,
                heads_dim=self.scatter_idx,
                tokens_dim=3 - self.scatter_idx - batch_dim_idx,
            )
        found: Tensor = self._by_batch_dim[name](query, key, value, *args, **kwargs)
        return found


@final
class UlyssesGroups:
    """What DeepSpeed calls an mpu: the groups of ranks that share a sequence, and of all ranks."""

    def __init__(self, sequence_parallel_size: int, *, cuts_in_eval: bool = True) -> None:
        """A collective of all ranks.

        Args:
            cuts_in_eval: each rank passes a part of the batch after `eval()` as well; else whole batches.
        Raises:
            UsageError: the number of ranks is no multiple of it.
        """
        num_ranks = dist.get_world_size()
        if sequence_parallel_size < 1 or num_ranks % sequence_parallel_size:
            raise UsageError(
                f"sequence_parallel_size = {sequence_parallel_size}: {num_ranks} ranks are no multiple of it; "
                "start another number of ranks"
            )
        self._size = sequence_parallel_size
        self.cuts_in_eval = cuts_in_eval
        rank = dist.get_rank()
        first = rank - rank % sequence_parallel_size
        self._group: Any = None
        for start in range(0, num_ranks, sequence_parallel_size):
            group = dist.new_group(list(range(start, start + sequence_parallel_size)))
            self._group = group if start == first else self._group
        self._data: Any = None
        for place in range(sequence_parallel_size):
            group = dist.new_group(list(range(place, num_ranks, sequence_parallel_size)))
            self._data = group if place == rank % sequence_parallel_size else self._data

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup = self._group
        return found

    def get_sequence_parallel_world_size(self) -> int:
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank() % self._size

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return dist.group.WORLD

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks with the same tokens of other batches."""
        found: dist.ProcessGroup = self._data
        return found

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self._size

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self._size

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


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


IGNORED = -100
WHAT = "batches of sequence ranks"


class UlyssesSPAttentionHF(nn.Module):
    """Registers the number of sequence ranks. It is no module that runs: the engine exchanges heads."""

    @classmethod
    @raises_theirs
    def register_with_transformers(  # noqa: PLR0913 (the arguments are DeepSpeed's)
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> UlyssesGroups | None:
        """The mpu for `deepspeed.initialize`; None with one sequence rank. A collective of all ranks.

        Args:
            model_name_or_path: a loaded model must use this attention; a name or path is not read.
            core_attn_implementation: what computes the attention of all tokens; not "eager".
            micro_batch_size, seq_length, seq_length_is_variable, max_length: no effect; each forward tells
                them.
            disable_in_eval: after `eval()` each rank passes whole batches of its own; accelerate sets it.
        Raises:
            UsageError: transformers has no such attention, it cannot be replaced, or the model uses another.
        """
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and seq_length is None and max_length is None:
            raise UsageError(
                "seq_length_is_variable = False needs the length of all sequences: pass seq_length, or leave "
                "it True"
            )
        check_implementation(model_name_or_path, core_attn_implementation)
        mpu = UlyssesGroups(sequence_parallel_size, cuts_in_eval=not disable_in_eval)
        group = mpu.get_sequence_parallel_group()
        replace_attention(core_attn_implementation, group, in_eval=mpu.cuts_in_eval)
        return mpu


@final
class UlyssesSPDataLoaderAdapter:
    """Gives each sequence rank its tokens of the batches of all ranks of the group, one batch after the other.

    rank 0 reads batch 0, rank 1 batch 1   ->   all have their tokens of batch 0, then all of batch 1

    A batch is a dict with input_ids, position_ids and labels. Its tensors [B, N, ...] are cut in dimension 1;
    other values are passed on. `labels` become `shift_labels`: the label that each token predicts.
    """

    def __init__(
        self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any
    ) -> None:
        """dl: this rank's loader, which may differ between ranks. device: of the messages."""
        self.dl = dl
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.device = torch.device(device)
        self._collectives = open_collectives(sp_group, self.device)
        self._batches: Iterator[Any] | None = None
        self._ready: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self._ready:
            self.refill()
        return self._ready.popleft()

    def refill(self) -> None:
        """Read a batch of each rank. A collective.

        Raises:
            StopIteration: the loader has ended; the next call begins it again.
            UsageError: a batch lacks position_ids, or its length is no multiple of the ranks.
        """
        if self._batches is None:
            self._batches = iter(self.dl)
        own = next(self._batches, None)
        group = self._collectives
        is_there = torch.tensor([own is not None], dtype=torch.int64, device=self.device)
        are_there = bool(group.gather_small(is_there, what=WHAT).all())
        if own is None or not are_there:
            self._batches = None  # a rank has no more: nobody can go on
            raise StopIteration
        rows = gather_batches(group, _plain(own), WHAT)
        for batch in rows:
            self._ready.append(self._cut(batch))

    def _cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in ("input_ids", "position_ids", "labels") if name not in batch]
        if missing:
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter: a batch has no {' and no '.join(missing)}; position_ids are the "
                "positions in the whole sequence, and begin at 0 for each document"
            )
        length = batch["input_ids"].shape[1]
        if length % self.sp_world_size:
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter: a batch has {length} tokens, which {self.sp_world_size} ranks "
                "cannot share evenly; pad the batches"
            )
        found = dict(batch)
        labels = nn.functional.pad(found.pop("labels"), (0, 1), value=IGNORED)
        found["shift_labels"] = labels[..., 1:]
        own = length // self.sp_world_size
        for name, value in found.items():
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
                found[name] = value[:, self.sp_rank * own : (self.sp_rank + 1) * own].contiguous()
        return found


def _plain(batch: Any) -> dict[str, Any]:
    if not hasattr(batch, "items"):
        raise UsageError(
            f"UlyssesSPDataLoaderAdapter: a batch is a {type(batch).__name__}; it must be a dict with "
            "input_ids, position_ids and labels"
        )
    return dict(batch)
