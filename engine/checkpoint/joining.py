"""Joins what the ranks of all pipeline stages saved to one manifest: flats by name, ranges by number.

    stage 0   ranks 0 1   0 embed   1 blocks.0               0 embed     held by 0 1 2 3
    stage 1   ranks 2 3   0 blocks.1   1 embed        ->     1 blocks.0  held by 0 1
                                                             2 blocks.1  held by 2 3

Flats with the same names are one flat: a tied weight, or a buffer that several stages have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...ops.mesh import Mesh
from ...utils.errors import XdsError
from ...zero.checkpoint.ranges import Catalogue, SavedFlat
from .manifest import FileRecord, Manifest, RankPart
from .manifest_checks import check_numbers

MAX_NAMES = 20  # in one message


@dataclass(frozen=True)
class Joined:
    """The flats of all stages. numbers: for each stage, the number here of each of its flats."""

    flats: tuple[SavedFlat, ...]
    holders: tuple[tuple[int, ...], ...]
    numbers: tuple[tuple[int, ...], ...]


def ranks_of_stage(mesh: Mesh, stage: int) -> tuple[int, ...]:
    """The ranks of one pipeline stage, ascending."""
    return mesh.ranks_along(("data", "sequence", "tensor"), mesh.rank_at(pipe=stage))


def join_flats(mesh: Mesh, stages: Sequence[Sequence[SavedFlat]]) -> Joined:
    """One list of the flats of every stage.

    Raises:
        XdsError: two stages have different flats with the same parameter.
    """
    flats: list[SavedFlat] = []
    numbers: list[tuple[int, ...]] = []
    known: dict[tuple[bool, str], int] = {}  # (is a state, slot) -> its flat here
    stages_of: list[list[int]] = []  # for each flat here
    for stage, own in enumerate(stages):
        found = []
        for flat in own:
            number = known.get((flat.kind == "state", flat.slots[0].name), len(flats))
            if number == len(flats):
                for slot in flat.slots:
                    first = known.setdefault((flat.kind == "state", slot.name), number)
                    if first != number:
                        raise _twice(slot.name, stages_of[first][0], stage)
                flats.append(flat)
                stages_of.append([stage])
            else:
                flats[number] = _merged(flats[number], flat, stages_of[number][0], stage)
                stages_of[number].append(stage)
            found.append(number)
        numbers.append(tuple(found))
    held = [
        tuple(sorted(rank for stage in found for rank in ranks_of_stage(mesh, stage)))
        for found in stages_of
    ]
    holders = tuple(dict.fromkeys(held)) or (tuple(range(mesh.size)),)
    at = {ranks: number for number, ranks in enumerate(holders)}
    joined = (replace(flat, held_by=at[ranks]) for flat, ranks in zip(flats, held, strict=True))
    return Joined(tuple(joined), holders, tuple(numbers))


def _merged(one: SavedFlat, two: SavedFlat, first: int, second: int) -> SavedFlat:
    """The same flat of two stages, with the names that either of them has for its parameters."""
    if replace(one, tied=()) != replace(two, tied=()):
        raise _twice(one.slots[0].name, first, second)
    return replace(one, tied=tuple(dict.fromkeys((*one.tied, *two.tied))))


def _twice(name: str, first: int, second: int) -> XdsError:
    return XdsError(
        f"pipeline stages {first} and {second} both have {name}, in different flat buffers: a checkpoint holds "
        "each parameter once; tie it over the two stages, or give one of them another name"
    )


def renumbered(record: FileRecord, numbers: Sequence[int]) -> FileRecord:
    """The record with the joined numbers of its flats."""
    if all(new == old for old, new in enumerate(numbers)):
        return record
    return replace(
        record,
        ranges=tuple(replace(one, flat=numbers[one.flat]) for one in record.ranges),
        constants=tuple(replace(one, flat=numbers[one.flat]) for one in record.constants),
        own=_own(record.own, numbers),
    )


def _own(own: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    grads = {str(numbers[int(flat)]): grad for flat, grad in own.get("grads", {}).items()}
    return {key: grads if key == "grads" else value for key, value in own.items()}


def join_parts(
    mesh: Mesh, flats: Sequence[SavedFlat], parts: Sequence[RankPart]
) -> tuple[Joined, tuple[FileRecord, ...]]:
    """The flats of all stages and the records of all ranks. `flats`: of the first stage."""
    firsts = [ranks_of_stage(mesh, stage)[0] for stage in range(mesh.pipe)]
    joined = join_flats(mesh, [flats, *(parts[rank].flats for rank in firsts[1:])])
    records = tuple(
        renumbered(part.file, joined.numbers[mesh.coordinates(rank).pipe])
        for rank, part in enumerate(parts)
    )
    return joined, records


def check_joined(manifest: Manifest) -> None:
    """Check that the files of all stages together hold every element of every flat once.

    Raises:
        XdsError: they do not.
    """
    try:
        check_numbers(manifest)
        ranges = [one for record in manifest.files for one in record.ranges]
        names = Catalogue(manifest.flats, ranges).uncovered()
    except ValueError as error:
        raise XdsError(f"the stages' parts of a checkpoint do not fit: {error}") from None
    if names:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        raise XdsError(
            f"the checkpoint would be incomplete: no rank has saved all elements of "
            f"{', '.join(names[:MAX_NAMES])}{more}"
        )


__all__ = ["Joined", "check_joined", "join_flats", "join_parts", "ranks_of_stage", "renumbered"]
