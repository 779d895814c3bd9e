"""`deepspeed.runtime.data_pipeline.data_sampling`: indexed files, the analyzer, and batches by tokens.

DeepSpeed's names over engine/data: indexed.py, analyzer.py, dynamic_batches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from torch.utils.data import DataLoader, Dataset, default_collate

from ....utils.errors import UsageError
from ....utils.quoting import printable, quoted
from ...data.analyzer import Metric, analyze
from ...data.dynamic_batches import SEQLEN, JoinedBatches, TokenBatches, lengths_of
from ...data.indexed import IndexedDataset, IndexedWriter
from ...data.loaders import InOrder, build_loader
from ...optim.variable_batch import VariableBatchSizeLR
from ..errors import methods_raise_theirs, raises_theirs
from .comm import wait_for_all
from .log import logger

# -- indexed_dataset, utils -------------------------------------------------------------------------------


@final
@methods_raise_theirs
class MMapIndexedDataset(Dataset[Any]):
    """The rows of PATH.bin and PATH.idx as read-only arrays.

    Args:
        path: without .bin and .idx.
        skip_warmup: without effect: the system reads what is asked for.
    """

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        self._rows = IndexedDataset(path)
        self.doc_idx: Any = self._rows.documents

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, idx: Any) -> Any:
        return self._rows[idx]

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """A part of a row."""
        return self._rows.read(idx, offset, None if length is None else offset + length)

    @property
    def sizes(self) -> Any:
        return self._rows.lengths

    @property
    def lengths(self) -> Any:
        """For the engine's loaders."""
        return self._rows.lengths

    def size(self, index: int) -> Any:
        return self._rows.lengths[index]

    def get_doc_idx(self) -> Any:
        return self.doc_idx

    def set_doc_idx(self, doc_idx_: Any) -> None:
        self.doc_idx = doc_idx_

    @property
    def supports_prefetch(self) -> bool:
        return False

    @property
    def dtype(self) -> Any:
        return self._rows.dtype.type

    @staticmethod
    def exists(path: str) -> bool:
        return all(Path(f"{path}{suffix}").exists() for suffix in (".bin", ".idx"))


@final
@methods_raise_theirs
class MMapIndexedDatasetBuilder:
    """Writes the two files; they appear at `finalize`."""

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        self._path = str(out_file).removesuffix(".bin")
        self._writer = IndexedWriter(self._path, dtype)

    def add_item(self, tensor: Any) -> None:
        self._writer.add(np.asarray(tensor).astype(self._writer.dtype))

    def add_items(self, arr_list: Iterable[Any]) -> None:
        for one in arr_list:
            self.add_item(one)

    add_item_numpy = add_item

    def end_document(self) -> None:
        self._writer.end_document()

    def merge_file_(self, another_file: str) -> None:
        """Append the rows and documents of another file."""
        other = IndexedDataset(another_file)
        starts = {int(one) for one in other.documents[1:]}
        for row in range(len(other)):
            self._writer.add(other[row])
            if row + 1 in starts:
                self._writer.end_document()

    def finalize(self, index_file: str) -> None:
        """Close the files. `index_file` is that of `out_file`."""
        if str(index_file).removesuffix(".idx") != self._path:
            raise UsageError(
                f"finalize({quoted(index_file)}): the two files need one name: pass {printable(self._path)}.idx"
            )
        self._writer.__exit__(None, None, None)


def create_mmap_dataset_builder(fname: str, dtype: Any) -> MMapIndexedDatasetBuilder:
    return MMapIndexedDatasetBuilder(f"{fname}.bin", dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: str) -> None:
    builder.end_document()
    builder.finalize(f"{fname}.idx")


def find_fit_int_dtype(min_value: int, max_value: int) -> Any:
    """The smallest dtype, unsigned from 0 on."""
    from ...data.indexed import smallest_dtype

    return smallest_dtype(min_value, max_value).type


# -- data_analyzer ----------------------------------------------------------------------------------------

TYPES = {"single_value_per_sample": False, "accumulate_value_over_samples": True}


@methods_raise_theirs
class DataAnalyzer:
    """Writes the files of metrics. Worker 0 reads the data set in its `run_reduce`, once and as a whole.

    Args:
        num_workers, num_threads, num_threads_reduce, specific_threads: without effect; `xds data analyze
            --num-workers` reads with several processes.
        metric_functions: called with a batch of samples as `collate_fn` makes it; whole numbers, or a tensor.
        metric_types: "single_value_per_sample" or "accumulate_value_over_samples".
        metric_dtypes: without effect, as in DeepSpeed's files: the smallest one that fits.
        custom_map_init, custom_map_update, custom_map_finalize, custom_reduce: refused.
    """

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        for name, given in (
            ("custom_map_init", custom_map_init),
            ("custom_map_update", custom_map_update),
            ("custom_map_finalize", custom_map_finalize),
            ("custom_reduce", custom_reduce),
        ):
            if given is not None:
                raise UsageError(
                    f"DataAnalyzer({name}=...): xds writes DeepSpeed's files itself; leave it out, and compute "
                    "the metric in metric_functions"
                )
        if not len(metric_names) == len(metric_functions) == len(metric_types):
            raise UsageError(
                f"DataAnalyzer: {len(metric_names)} metric_names, {len(metric_functions)} metric_functions and "
                f"{len(metric_types)} metric_types: give one of each for every metric"
            )
        unknown = [kind for kind in metric_types if kind not in TYPES]
        if unknown:
            raise UsageError(
                f"DataAnalyzer: metric_types has {quoted(unknown[0])}: must be {' or '.join(TYPES)}"
            )
        self.dataset, self.worker_id, self.batch_size = dataset, worker_id, batch_size
        self.save_path, self.sample_indices = save_path, sample_indices
        self.collate_fn = default_collate if collate_fn is None else collate_fn
        triples = zip(metric_names, metric_functions, metric_types, strict=True)
        self._metrics = [Metric(name, function, TYPES[kind]) for name, function, kind in triples]

    def run_map(self) -> None:
        """Nothing: `run_reduce` reads the data set."""

    def run_reduce(self) -> None:
        """Write all files."""
        analyze(
            self.dataset,
            self._metrics,
            self.save_path,
            batch_size=self.batch_size,
            collate_fn=self.collate_fn,
            sample_indices=self.sample_indices,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """On all workers; worker 0 writes, the others wait. A collective, if torch.distributed runs."""
        if self.worker_id == 0:
            self.run_reduce()
        wait_for_all(comm_group)


@final
@methods_raise_theirs
class DistributedDataAnalyzer:
    """The same with the arguments of DeepSpeed's class; the rank in the group is the worker."""

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = "cuda",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        self._group = comm_group
        self._inner = DataAnalyzer(
            dataset,
            worker_id=worker_id if comm_group is None else comm_group.rank(),
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self) -> None:
        """Write the files; a collective."""
        self._inner.run_map_reduce(self._group)


# -- variable_batch_size_and_lr ---------------------------------------------------------------------------


@raises_theirs
def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """A loader of batches by tokens and a schedule that follows them, from `dynamic_batching` of the config.

    For an engine that was made without training_data. Set `engine.lr_scheduler` to the schedule afterwards.

    Args:
        dataset_seqlens: tokens of each sample. None: from metrics_path of the config, or the attribute
            `lengths`; where neither is there, rank 0 writes them with `batch_seqlens_fn`. A collective then.
        dataset_filter_ids: only these samples.
        dataloader_collate_fn: makes a batch of a list of samples; None: the list.
        sample_padding_fn: called with a sample and a number of tokens. With pipeline stages and it, batches of
            a step have one shape; without it they may have different ones.
    Returns:
        the loader, the schedule, and the arguments of `engine.deepspeed_io`.
    Raises:
        UsageError: dynamic_batching is not enabled, or lengths are not there or do not fit.
    """
    section = engine.config.data_efficiency
    batching = section.data_sampling.dynamic_batching
    if not batching.enabled:
        raise UsageError(
            "data_efficiency.data_sampling.dynamic_batching.enabled = false: set it to true for this call"
        )
    lengths: Any = dataset_seqlens
    if lengths is None:
        _write_lengths(
            dataset, engine, batching.metrics_path, dataloader_collate_fn, batch_seqlens_fn
        )
        lengths = lengths_of(dataset, batching.metrics_path)
    batches = TokenBatches(
        dataset,
        lengths,
        batching,
        step_batches=engine.train_batch_size(),
        seed=section.seed,
        sample_ids=dataset_filter_ids,
        pad=sample_padding_fn if engine.num_stages > 1 else None,
    )
    collate = JoinedBatches(list if dataloader_collate_fn is None else dataloader_collate_fn)
    workers = section.data_sampling.num_workers or 0
    loader = build_loader(
        InOrder(batches),
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        rank=engine.dp_rank,
        world_size=engine.dp_world_size,
        collate_fn=collate,
        num_workers=workers,
        step_samples=engine.train_batch_size(),
    )
    schedule = VariableBatchSizeLR(
        engine.lr_scheduler,
        getattr(engine, "basic_optimizer", engine.optimizer),
        batches.sizes,
        engine.train_batch_size(),
        batching.lr_scaling_method,
    )
    arguments = {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "pin_memory": False,
        "data_sampler": loader.sampler,
        "collate_fn": collate,
        "num_local_io_workers": workers,
    }
    return loader, schedule, arguments


def _write_lengths(
    dataset: Any, engine: Any, metrics_path: str, collate_fn: Any, function: Any
) -> None:
    """The analyzer's file of lengths, where there is none and nothing else says them."""
    file = Path(metrics_path) / SEQLEN
    is_there = bool(metrics_path) and MMapIndexedDataset.exists(str(file))
    engine.internals.barrier()  # before rank 0 writes it
    if is_there or hasattr(dataset, "lengths") or function is None or not metrics_path:
        return
    logger.warning("there is no %s.idx: rank 0 writes it", file)
    if engine.global_rank == 0:
        names = {"metric_names": ["seqlen"], "metric_types": ["single_value_per_sample"]}
        DataAnalyzer(
            dataset,
            batch_size=1024,
            metric_functions=[function],
            save_path=metrics_path,
            collate_fn=collate_fn,
            **names,  # type: ignore[arg-type]
        ).run_reduce()
    engine.internals.barrier()


@raises_theirs
def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """A schedule, or the rates of an optimizer, scaled for the samples of each step."""
    given = lr_scheduler_or_optimizer
    has_groups = hasattr(given, "param_groups")
    return VariableBatchSizeLR(
        None if has_groups else given,
        given if has_groups else given.optimizer,
        batch_sizes,
        base_batch_size,
        lr_scaling_method,
    )
