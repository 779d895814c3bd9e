"""Reads the optimizer files of DeepSpeed's ZeRO stages 1 to 3: master weights and states, by name and range.

ZeRO 1, 2   a group's parameters in one row, the row divided into equal parts, one per rank
            row      |--- a ---|- b -|.|-------- c --------|..|       . = alignment
            ranks    |------- 0 -------|-------- 1 -----------|
ZeRO 3      every parameter divided into equal parts; a rank has its parts in one row over all sub-groups
            rank 0   | a0 | b0 | c0 |       rank 1   | a1 | b1 | c1.|
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from ....ops.flat import numel_of, overlap
from ....utils.errors import UsageError
from .safe_pickle import read_pickle

FP32_ROWS, FP32_PARTS = "single_partition_of_fp32_groups", "fp32_flat_groups"
STEP = "step"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Elements [start, stop) of a parameter are elements [at, ...) of flat tensor `part` of `rank`."""

    rank: int
    part: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, eq=False)
class Held:
    """Elements [start, start + numel) of a parameter: `master` [numel], and states: [numel] or one number."""

    start: int
    master: Tensor
    states: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter that the optimizer updates, in parameter group `group`; `held` covers all its elements."""

    name: str
    shape: tuple[int, ...]
    group: int
    held: Sequence[Held]


@dataclass(frozen=True, eq=False)
class Training:
    """The content of an optimizer. groups: hyperparameters. raw: DeepSpeed's other values."""

    stage: int
    trained: Sequence[Trained]
    groups: Sequence[Mapping[str, Any]]
    raw: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class _Flat:
    """One flat tensor of masters, with the states of the same elements."""

    master: Tensor
    states: Mapping[str, Any]
    group: int


@dataclass(frozen=True, eq=False)
class _Rank:
    """The content of one rank's optimizer file."""

    flats: Sequence[_Flat]
    groups: Sequence[Mapping[str, Any]]
    raw: Mapping[str, Any]


def read_shards(folder: Path, model: Mapping[str, Any], files: Sequence[Path]) -> Training:
    """All ranks' shards, by the names and shapes in rank 0's `model` states.

    Raises UsageError: a file is missing, damaged, of an unknown form, or contradicts the others.
    """
    ranks = [_read_rank(path) for path in files]
    first = ranks[0]
    shapes = _shapes(folder, model, ranks)
    stage = 3 if FP32_PARTS in first.raw else _stage(first, model)
    lengths = [
        # the last ranks' parts of ZeRO 1 and 2 are saved without padding
        max(rank.flats[part].master.numel() for rank in ranks)
        for part in range(len(shapes))
    ]
    if stage == 3:
        merged = {name: shape for group in shapes for name, shape in group.items()}
        places = places_in_parts(merged, lengths, len(ranks))
    else:
        paddings = first.raw.get("param_alignment_paddings")
        places = places_in_rows(shapes, paddings, lengths, len(ranks))
    trained = []
    for part, members in enumerate(shapes):
        for name, shape in members.items():
            held = [_held(folder, ranks, place) for place in places[name]]
            if sum(one.master.numel() for one in held) != numel_of(shape):
                raise UsageError(
                    f"{folder} contradicts itself: the shards do not hold all of {name}"
                )
            trained.append(Trained(name, shape, first.flats[part].group, held))
    return Training(stage, trained, first.groups, first.raw)


def places_in_rows(
    shapes: Sequence[Mapping[str, Shape]],
    paddings: Sequence[Sequence[int]] | None,
    part_numels: Sequence[int],
    world_size: int,
) -> dict[str, list[Place]]:
    """ZeRO 1 and 2.

    Args:
        shapes: of each group, in the order of its row. paddings: elements after each parameter of a row.
        part_numels: of each group, the length of a rank's part.
    """
    found: dict[str, list[Place]] = {}
    for group, members in enumerate(shapes):
        at, length = 0, part_numels[group]
        for number, (name, shape) in enumerate(members.items()):
            stop = at + numel_of(shape)
            found[name] = []
            for rank in range(world_size):
                low, high = overlap((rank * length, (rank + 1) * length), (at, stop))
                if low < high:
                    place = Place(rank, group, low - at, high - at, low - rank * length)
                    found[name].append(place)
            at = stop + (0 if paddings is None else paddings[group][number])
    return found


def places_in_parts(
    shapes: Mapping[str, Shape], part_numels: Sequence[int], world_size: int
) -> dict[str, list[Place]]:
    """ZeRO 3. `part_numels`: the length of each sub-group on a rank, the same on every rank."""
    begins = [0, *accumulate(part_numels)]
    found: dict[str, list[Place]] = {}
    row = 0
    for name, shape in shapes.items():
        numel = numel_of(shape)
        length = -(-numel // world_size)
        found[name] = []
        first_part = max(bisect_right(begins, row) - 1, 0)
        past_part = bisect_left(begins, row + length)
        for rank in range(world_size):
            first, last = min(rank * length, numel), min((rank + 1) * length, numel)
            for part in range(first_part, min(past_part, len(part_numels))):
                low = max(row, begins[part])
                high = min(row + last - first, begins[part + 1])
                if low < high:
                    start = first + low - row
                    at = low - begins[part]
                    found[name].append(Place(rank, part, start, start + high - low, at))
        row += length
    return found


def _read_rank(path: Path) -> _Rank:
    content = read_pickle(path)
    raw = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(raw, dict):
        raise UsageError(f"{path} is not an optimizer file of DeepSpeed")
    if raw.get("ds_zero_partition_groups") is not None:
        raise UsageError(
            f"{path} cannot be imported: it is sharded over groups of ranks (experts, MiCS), not over all ranks"
        )
    masters = raw.get(FP32_PARTS, raw.get(FP32_ROWS))
    base = raw.get("optimizer_state_dict" if FP32_PARTS in raw else "base_optimizer_state")
    if masters is None or not isinstance(base, dict) or "param_groups" not in base:
        raise UsageError(
            f"{path} cannot be imported: it does not have both masters ({FP32_ROWS} or {FP32_PARTS}) and the "
            "optimizer's state_dict; elastic checkpoints and optimizer states on NVMe are not read"
        )
    groups = base["param_groups"]
    keys = [(key, number) for number, group in enumerate(groups) for key in group["params"]]
    if len(keys) != len(masters):
        raise UsageError(
            f"{path} contradicts itself: {len(masters)} tensors of masters, and an optimizer of {len(keys)}"
        )
    flats = [
        _Flat(master.view(-1), _states_of(base["state"], key, groups[number]), number)
        for master, (key, number) in zip(masters, keys, strict=True)
    ]
    return _Rank(flats, groups, raw)


def _states_of(states: Mapping[Any, Any], key: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """The states of tensor `key`. DeepSpeed's Adam for GPUs keeps the step in the group; it is added here."""
    here = dict(states.get(key, {}))
    if here and STEP not in here and STEP in group:
        here[STEP] = group[STEP]
    return here


def _shapes(
    folder: Path, model: Mapping[str, Any], ranks: Sequence[_Rank]
) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of every flat tensor of masters, the same on every rank."""
    first = ranks[0]
    counts = first.raw.get("partition_count", len(ranks))
    count = max(counts) if isinstance(counts, list | tuple) else counts
    if count != len(ranks):
        raise UsageError(
            f"{folder} is not complete: {count} ranks wrote it, but it has optimizer states of {len(ranks)}"
        )
    groups = model.get("param_shapes")
    if not isinstance(groups, list) or any(len(r.flats) != len(groups) for r in ranks):
        raise UsageError(
            f"{folder} contradicts itself: param_shapes in the model states does not fit the shards"
        )
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _stage(first: _Rank, model: Mapping[str, Any]) -> int:
    config = model.get("ds_config")
    section = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = section.get("stage") if isinstance(section, dict) else None
    return 2 if stage == 2 else 1


def _held(folder: Path, ranks: Sequence[_Rank], place: Place) -> Held:
    flat = ranks[place.rank].flats[place.part]
    here = slice(place.at, place.at + place.stop - place.start)
    master = flat.master[here]
    if master.numel() != place.stop - place.start:
        raise UsageError(
            f"{folder} contradicts itself: the shard of rank {place.rank} is too short"
        )
    states = {
        key: value[here] if _is_per_element(value, here.stop) else value
        for key, value in flat.states.items()
    }
    return Held(place.start, master, states)


def _is_per_element(value: Any, stop: int) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and value.numel() >= stop
