"""The values of a metric from all data ranks, in the order of the dataset.

    5 samples, 3 ranks     rank 0: 0 3     rank 1: 1 4     rank 2: 2 (0), which fills up
    gathered               0 1 2 3 4

Ranks that share the samples of a data rank (pipeline, sequence and tensor ranks) send no values. One rank of
them does, and those that have the values too send a checksum, which has to be the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.flat import bytes_of
from ...ops.mesh import Mesh
from ...utils.arguments import shown, whole
from ...utils.errors import UsageError
from .sharing import as_bytes, gather_batches

CALL = "gather_for_metrics"
NEED = "must be a tensor with a row for each sample, or a dict or tuple of such tensors"


def gather_rows(
    collectives: Collectives, mesh: Mesh, values: Any, num_samples: int | None, *, has_values: bool
) -> Any:
    """`values` of all data ranks, on every rank of `mesh`: see `Engine.gather_for_metrics`.

    has_values: this rank has the outputs of the model. Otherwise `values` is not read.
    """
    own = mesh.coordinates(collectives.rank)
    mine: dict[str, Any]
    try:
        mine = {"samples": None if num_samples is None else whole("num_samples", num_samples, 0)}
        if has_values:
            leaves: dict[str, Tensor] = {}
            _collect(values, "values", leaves)
            mine["rows"] = _num_rows(leaves)
            mine["form"] = _form(values)
            if mesh.size > mesh.pipe * mesh.data:
                mine["sum"] = _checksum(leaves)
            if own.sequence == own.tensor == 0:
                mine["values"] = values
    except UsageError as problem:
        mine = {"error": str(problem)}
    found = gather_batches(collectives, mine, CALL)
    _check_ranks(mesh, found)
    parts = [
        next(item for rank, item in enumerate(found) if _sends(mesh, rank, at, item))
        for at in range(mesh.data)
    ]
    _check_parts(mesh, parts)
    # row i of each data rank in turn
    turns = torch.cat(
        [torch.arange(part["rows"]) * mesh.data + at for at, part in enumerate(parts)]
    )
    order = turns.argsort()[:num_samples].to(collectives.device)
    return _joined([part["values"] for part in parts], order)


def _collect(values: Any, name: str, leaves: dict[str, Tensor]) -> None:
    """The tensors of `values` by name. Raises UsageError where there are other things, or no rows."""
    if isinstance(values, Tensor):
        if values.dim() == 0:
            raise UsageError(
                f"{name} is a tensor without dimensions: {NEED}; for a mean over samples pass the value of "
                'each sample, e.g. a loss with reduction="none"'
            )
        if values.layout != torch.strided:
            raise UsageError(f"{name} is a {values.layout} tensor: pass {name}.to_dense()")
        leaves[name] = values
    elif isinstance(values, Mapping) and all(isinstance(key, str) for key in values):
        for key, item in values.items():
            _collect(item, f"{name}[{key!r}]", leaves)
    elif isinstance(values, tuple):
        for at, item in enumerate(values):
            _collect(item, f"{name}[{at}]", leaves)
    else:
        remedy = "; join batches by torch.cat" if isinstance(values, list) else ""
        raise UsageError(f"{name} = {shown(values)}: {NEED}{remedy}")


def _num_rows(leaves: Mapping[str, Tensor]) -> int:
    """The number of rows, which all tensors have."""
    if not leaves:
        raise UsageError(f"values without a tensor: {NEED}")
    rows = {name: len(tensor) for name, tensor in leaves.items()}
    if len({*rows.values()}) > 1:
        text = ", ".join(f"{name}: {number}" for name, number in rows.items())
        raise UsageError(
            f"the tensors have different numbers of rows ({text}): each needs one row for each sample; join "
            "batches by torch.cat first"
        )
    return next(iter(rows.values()))


def _form(values: Any) -> Any:
    """The names, dtypes and shapes of the tensors, without the number of rows, as JSON has them."""
    if isinstance(values, Tensor):
        return f"{str(values.dtype).removeprefix('torch.')} {['rows', *values.shape[1:]]}"
    if isinstance(values, Mapping):
        return {key: _form(item) for key, item in values.items()}
    return tuple(_form(item) for item in values)


def _checksum(leaves: Mapping[str, Tensor]) -> int:
    number = 0
    for tensor in leaves.values():
        number = zlib.crc32(bytes_of(as_bytes(tensor.detach())), number)
    return number


def _sends(mesh: Mesh, rank: int, data: int, item: Mapping[str, Any]) -> bool:
    return mesh.coordinates(rank).data == data and "values" in item


def _check_ranks(mesh: Mesh, found: list[dict[str, Any]]) -> None:
    """The same error on every rank, where a rank or the ranks of one data rank have no right values."""
    for rank, item in enumerate(found):
        if "error" in item:
            raise UsageError(f"{CALL} on rank {rank}: {item['error']}")
    wanted = [item["samples"] for item in found]
    if len({*wanted}) > 1:
        raise UsageError(f"{CALL}: num_samples differs by rank: {wanted}; pass the same everywhere")
    for at in range(mesh.data):
        sums = {
            rank: item["sum"]
            for rank, item in enumerate(found)
            if mesh.coordinates(rank).data == at and "sum" in item
        }
        if len({*sums.values()}) > 1:
            raise UsageError(
                f"{CALL}: ranks {sorted(sums)} share samples, but have other values. Give the sampler "
                "engine.dp_rank and engine.dp_world_size. Where labels are in the batch of a sequence- or "
                "vocabulary-parallel model, the logits are a part: call it without labels"
            )


def _check_parts(mesh: Mesh, parts: list[dict[str, Any]]) -> None:
    """The same error on every rank, where the parts of the data ranks do not fit one another."""
    for at, part in enumerate(parts):
        if part["form"] != parts[0]["form"]:
            raise UsageError(
                f"{CALL}: data rank 0 has {parts[0]['form']}, data rank {at} has {part['form']}: all but the "
                "number of rows must be the same; pad to one length, or pass a number for each sample"
            )
    rows, wanted = [part["rows"] for part in parts], parts[0]["samples"]
    if wanted is not None and sum(rows) - wanted >= mesh.data:
        raise UsageError(
            f"{CALL}: {mesh.data} data ranks have {rows} rows for num_samples = {wanted}. A sampler repeats "
            "fewer samples than there are ranks, so samples came twice: give each rank its own part, by "
            "DistributedSampler(dataset, engine.dp_world_size, engine.dp_rank, shuffle=False)"
        )


def _joined(parts: list[Any], order: Tensor) -> Any:
    """Rows `order` of the tensors of `parts`, one after another."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[order]
    if isinstance(parts[0], Mapping):
        return {key: _joined([part[key] for part in parts], order) for key in parts[0]}
    return tuple(_joined(list(items), order) for items in zip(*parts, strict=True))


__all__ = ["gather_rows"]
