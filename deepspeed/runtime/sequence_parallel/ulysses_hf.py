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
from torch import Tensor, nn

from ....engine.data.sharing import gather_batches
from ....ops.comm.opening import open_collectives
from ....utils.errors import UsageError
from ...errors import raises_theirs
from . import parallel_state_sp
from .replaced_attention import check_implementation, replace_attention
from .ulysses_groups import UlyssesGroups

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
        parallel_state_sp.remember(mpu)
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


__all__ = ["UlyssesGroups", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]
