"""Joins what the ranks of all parts of a model saved to one manifest: flats by name, ranges by number.

    part 0   ranks 0 1   0 embed   1 blocks.0               0 embed     held by 0 1 2 3
    part 1   ranks 2 3   0 blocks.1   1 embed        ->     1 blocks.0  held by 0 1
                                                            2 blocks.1  held by 2 3

A part is a pipeline stage, and a slice of its layers. Flats with the same names and boxes are one flat: a tied
weight, or what several slices have whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...ops.boxes import Box
from ...ops.mesh import Mesh
from ...utils.errors import XdsError
from ...zero.checkpoint.ranges import Catalogue, SavedFlat
from ...zero.layout.layout import Slot
from .manifest import (
    FileRecord,
    Manifest,
    RankPart,
    check_numbers,
    new_manifest,
    some_of,
)


@dataclass(frozen=True)
class JoinedFlats:
    """The flats of all parts.

    holders: tuples of ranks, of which each flat's `held_by` is the number. numbers: for each part, the number
    here of each of its flats.
    """

    flats: tuple[SavedFlat, ...]
    holders: tuple[tuple[int, ...], ...]
    numbers: tuple[tuple[int, ...], ...]


def parts_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks of each part, ascending. Parts are in the order of their first ranks.

    >>> parts_of(Mesh(pipe=1, data=2, tensor=2))
    [(0, 2), (1, 3)]
    """
    return mesh.parts()


def join_flats(mesh: Mesh, parts: Sequence[Sequence[SavedFlat]]) -> JoinedFlats:
    """One list of the flats of every part.

    Raises:
        XdsError: two parts have different flats with the same parameter.
    """
    ranks = parts_of(mesh)
    flats: list[SavedFlat] = []
    numbers: list[tuple[int, ...]] = []
    known: dict[_Key, int] = {}  # a slot -> its flat here
    parts_with: list[list[int]] = []  # for each flat here
    for part, part_flats in enumerate(parts):
        part_numbers = []
        for flat in part_flats:
            slots = [slot for slot in flat.slots if slot.numel or slot.box is None]
            number = known.get(_key(flat, slots[0]), len(flats))
            if number == len(flats):
                for slot in slots:
                    first = known.setdefault(_key(flat, slot), number)
                    if first != number:
                        raise _twice(slot.name, ranks[parts_with[first][0]], ranks[part])
                flats.append(flat)
                parts_with.append([part])
            else:
                first = parts_with[number][0]
                flats[number] = _merged(flats[number], flat, ranks[first], ranks[part])
                parts_with[number].append(part)
            part_numbers.append(number)
        numbers.append(tuple(part_numbers))
    held = [tuple(sorted(rank for part in same for rank in ranks[part])) for same in parts_with]
    holders = tuple(dict.fromkeys(held)) or (tuple(range(mesh.size)),)
    number_of = {holder: number for number, holder in enumerate(holders)}
    joined = (
        replace(flat, held_by=number_of[holder]) for flat, holder in zip(flats, held, strict=True)
    )
    return JoinedFlats(tuple(joined), holders, tuple(numbers))


_Key = tuple[bool, str, Box | None]  # is it a state, its name, its slice


def _key(flat: SavedFlat, slot: Slot) -> _Key:
    return flat.kind == "state", slot.name, slot.box


def _merged(
    earlier: SavedFlat, later: SavedFlat, first: tuple[int, ...], second: tuple[int, ...]
) -> SavedFlat:
    """The same flat of two parts, with the names that either of them has for its parameters."""
    if replace(earlier, tied=()) != replace(later, tied=()):
        raise _twice(earlier.slots[0].name, first, second)
    return replace(earlier, tied=tuple(dict.fromkeys((*earlier.tied, *later.tied))))


def _twice(name: str, first: tuple[int, ...], second: tuple[int, ...]) -> XdsError:
    return XdsError(
        f"ranks {first[0]} and {second[0]} both have {name}, in different flat buffers: a checkpoint holds "
        "each parameter once; tie it over the pipeline stages, or give one of them another name"
    )


def renumbered(record: FileRecord, numbers: Sequence[int]) -> FileRecord:
    """The record with the joined numbers of its flats."""
    if all(new == old for old, new in enumerate(numbers)):
        return record
    own: Mapping[str, Any] = record.own
    grads = {str(numbers[int(flat)]): grad for flat, grad in own.get("grads", {}).items()}
    return replace(
        record,
        ranges=tuple(replace(elements, flat=numbers[elements.flat]) for elements in record.ranges),
        constants=tuple(
            replace(elements, flat=numbers[elements.flat]) for elements in record.constants
        ),
        own={**own, "grads": grads} if "grads" in own else own,
    )


def joined_manifest(
    tag: str,
    stage: int,
    mesh: Mesh,
    flats: Sequence[SavedFlat],
    state: Any,
    parts: Sequence[RankPart],
) -> Manifest:
    """The manifest of what all ranks saved. flats, state: of rank 0.

    Raises:
        XdsError: the parts of the model do not fit, or elements are in no file.
    """
    ranks = parts_of(mesh)
    joined = join_flats(mesh, [flats, *(parts[members[0]].flats for members in ranks[1:])])
    numbers = {rank: joined.numbers[part] for part, members in enumerate(ranks) for rank in members}
    manifest = new_manifest(
        tag=tag,
        stage=stage,
        mesh=mesh,
        flats=joined.flats,
        files=tuple(renumbered(part.file, numbers[rank]) for rank, part in enumerate(parts)),
        holders=joined.holders,
        state=state,
    )
    if mesh.has_parts:
        _check_joined(manifest)
    return manifest


def _check_joined(manifest: Manifest) -> None:
    """Check that the files of all parts together hold every element of every flat once."""
    try:
        check_numbers(manifest)
        names = Catalogue(manifest.flats, manifest.ranges).uncovered()
    except ValueError as error:
        raise XdsError(f"the parts of a checkpoint do not fit: {error}") from None
    if names:
        raise XdsError(
            f"the checkpoint would be incomplete: no rank has saved all elements of {some_of(names)}"
        )


__all__ = ["JoinedFlats", "join_flats", "joined_manifest", "parts_of", "renumbered"]
