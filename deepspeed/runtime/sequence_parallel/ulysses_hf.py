"""`UlyssesSPAttentionHF` and `UlyssesSPDataLoaderAdapter` with DeepSpeed's arguments: the script cuts batches.

Differences. The engine of one model exchanges its heads; models without one call the function that
`register_with_transformers` enters, see replaced_attention.py. Gradients are those of the loss of all tokens.
Heads need not be a multiple of the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....engine.data.sharing import gather_batches
from ....ops.comm.opening import open_collectives
from ....utils.errors import UsageError
from ...errors import raises_theirs
from .replaced_attention import check_implementation, replace_attention

IGNORED = -100
WHAT = "batches of sequence ranks"


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
            self._refill()
        return self._ready.popleft()

    def _refill(self) -> None:
        """
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


__all__ = ["UlyssesGroups", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]
