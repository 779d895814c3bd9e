"""The engine's loader of batches by tokens: `data_efficiency.data_sampling.dynamic_batching`.

    lengths of the samples ──length_batches.py──> batches of at most max_tokens tokens
    step s     the batches s * train_batch_size and so on; batch i goes to data rank i % world_size
    forward    train_micro_batch_size_per_gpu of these batches, collated as one

The order of an epoch is that of the config and the seed, the same in each epoch, as in DeepSpeed. So the sizes
of all steps are known, which the learning rate follows (optim/variable_batch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...utils.errors import UsageError
from ...utils.quoting import printable, quoted
from .config import BATCHING, DynamicBatching
from .indexed import IndexedDataset
from .length_batches import batch_by_seqlens
from .loaders import InOrder, build_loader

SEQLEN = Path("seqlen", "seqlen_sample_to_metric")
PADS = {"labels": -100}  # other columns are padded with 0
Pad = Callable[[Any, int], Any]


@final
class TokenBatches(Dataset[Any]):
    """Item i has the samples of batch i. `sizes` [steps]: the samples of each step, over all ranks."""

    def __init__(
        self,
        dataset: Any,
        lengths: Sequence[int] | NDArray[Any],
        batching: DynamicBatching,
        *,
        step_batches: int,
        seed: int,
        sample_ids: Sequence[int] | None = None,
        pad: Pad | None = None,
    ) -> None:
        """
        Args:
            lengths: tokens of each sample [len(dataset)].
            sample_ids: only these samples, in this order; None: all.
            pad: pads a sample to a number of tokens. The batches of a step then have the same number of samples
                of the same length.

        Raises:
            UsageError: the samples do not fill a step.
        """
        self._dataset, self._pad = dataset, pad
        lengths = np.asarray(lengths, np.int64).reshape(-1)
        shortest = int(lengths.min(initial=np.iinfo(np.int64).max))
        if shortest > batching.max_tokens:
            raise UsageError(
                f"{BATCHING}.max_tokens = {batching.max_tokens}: the shortest sample has {shortest} "
                "tokens; raise it"
            )
        found, self.sizes, self._longest = batch_by_seqlens(
            lengths.tolist(),
            batching.max_tokens,
            sample_ids,
            batching.min_batch_size,
            batching.max_batch_size,
            batching.sequence_picking_order,
            effective_batch_size=step_batches,
            required_microbatches_of_same_size=pad is not None,
            verbose=batching.verbose,
            seed=seed,
        )
        self._batches = [samples for _, samples in found]
        self._step_batches = step_batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, at: int) -> list[Any]:
        samples = [self._dataset[index] for index in self._batches[at]]
        if self._pad is None:
            return samples
        longest = self._longest[at // self._step_batches]
        return [self._pad(sample, longest) for sample in samples]


@final
class JoinedBatches:
    """Makes a micro-batch of several batches of samples. Without a function tokens are padded, see `padded`."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = padded if collate_fn is None else collate_fn

    def __call__(self, batches: Sequence[list[Any]]) -> Any:
        return self._collate_fn([sample for batch in batches for sample in batch])


def padded(samples: list[Any]) -> dict[str, Tensor]:
    """Tensors [samples, tokens of the longest one] of samples of unequal lengths, and `attention_mask`.

    Args:
        samples: each a mapping from columns to sequences with a value for each token, or one sequence, which
            is `input_ids`. `labels` that are not there are `input_ids`, padded with -100; the rest with 0.
    """
    columns = [_columns_of(sample) for sample in samples]
    names = [name for name in columns[0] if all(name in one for one in columns)]
    batch = {}
    for name in names:
        rows = [torch.as_tensor(one[name]) for one in columns]
        if any(row.dim() != 1 for row in rows):
            raise UsageError(
                f"{BATCHING}: {quoted(name)} of a sample has no value for each token: pass collate_fn to "
                "xds.initialize, which makes a batch of a list of samples"
            )
        batch[name] = torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=PADS.get(name, 0)
        )
    if "attention_mask" not in batch:
        lengths = torch.tensor([len(one[names[0]]) for one in columns])
        width = batch[names[0]].shape[1]
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
    return batch


def _columns_of(sample: Any) -> dict[str, Any]:
    columns = dict(sample) if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" in columns:
        columns.setdefault("labels", columns["input_ids"])
    return columns


def lengths_of(dataset: Any, metrics_path: str) -> NDArray[Any]:
    """The tokens of each sample [len(dataset)], of the analyzer's folder or the data set's own `lengths`.

    Raises:
        UsageError: there are none, or they do not fit the data set.
    """
    is_indexed = all(hasattr(dataset, name) for name in ("__len__", "__getitem__"))
    if not is_indexed or isinstance(dataset, IterableDataset):
        raise UsageError(
            f"{BATCHING}: training_data is a {type(dataset).__name__}, and batches by tokens take samples by "
            "their numbers: pass a data set with __len__ and __getitem__"
        )
    file = Path(metrics_path) / SEQLEN
    own = getattr(dataset, "lengths", None)
    if metrics_path:
        if not file.with_name(f"{file.name}.idx").exists():
            raise UsageError(
                f"{BATCHING}.metrics_path: there is no {printable(file)}: run `xds data analyze` with "
                "--metrics seqlen, or remove the key, and `lengths` of training_data counts"
            )
        rows = IndexedDataset(file)
        found = rows.flat(0, len(rows))
        where = f"{BATCHING}.metrics_path: {printable(file)}"
    elif own is not None:
        found, where = np.asarray(own), "`lengths` of training_data"
    else:
        raise UsageError(
            f"{BATCHING}.metrics_path: it is not given, and training_data has no attribute `lengths`: run "
            "`xds data analyze` with --metrics seqlen, and name its folder"
        )
    if found.shape != (len(dataset),) or found.dtype.kind not in "iu":
        raise UsageError(
            f"{where} has {found.size} values of {found.dtype}, and training_data {len(dataset)} samples: "
            "analyze this data set"
        )
    if found.min(initial=0) < 0:
        raise UsageError(f"{where} has {found.min()}: a length must be at least 0")
    return found


def dynamic_loader(
    dataset: Any,
    batching: DynamicBatching,
    *,
    step_batches: int,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **rank: Any,
) -> DataLoader[Any]:
    """This data-parallel rank's loader of batches by tokens over `dataset`.

    Args:
        step_batches: batches of a step over all ranks.
        rank: the arguments of `build_loader`.

    Raises:
        UsageError: see `TokenBatches` and `lengths_of`.
    """
    lengths = lengths_of(dataset, batching.metrics_path)
    batches = TokenBatches(dataset, lengths, batching, step_batches=step_batches, seed=seed)
    return build_loader(
        InOrder(batches), collate_fn=JoinedBatches(collate_fn), step_samples=step_batches, **rank
    )


def sizes_of(loader: DataLoader[Any]) -> list[int]:
    """The samples of each step of a `dynamic_loader`."""
    assert isinstance(loader.dataset, InOrder)
    sizes: list[int] = loader.dataset.inner.sizes
    return sizes


__all__ = ["JoinedBatches", "TokenBatches", "dynamic_loader", "lengths_of", "padded", "sizes_of"]
