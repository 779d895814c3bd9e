"""`deepspeed.checkpoint.reshape_meg_2d`: which old model ranks make a new one, over pipeline x tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from ...utils.errors import UsageError
from ..errors import methods_raise_theirs, raises_theirs
from ..missing import placeholder
from .reshape_utils import partition_data


@final
@methods_raise_theirs
class meg_2d_parallel_map:  # noqa: N801 (DeepSpeed's name)
    """A list of old ranks for each place (pipeline stage, tensor rank)."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[tuple[int, int], list[Any]] = {}

    def simple_init(self) -> None:
        """Each place has its own rank; ranks count tensor ranks first."""
        for pp_index in range(self.pp_degree):
            for tp_index in range(self.tp_degree):
                self.map[pp_index, tp_index] = [pp_index * self.tp_degree + tp_index]

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append `data` at a place."""
        place = next(iter(self._places(pp_index, tp_index)))
        self.map.setdefault(place, []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """What is at a place; None takes all indices."""
        return [one for place in self._places(pp_index, tp_index) for one in self.map[place]]

    def print_data(self, tag: str) -> None:
        print(tag)
        for (pp_index, tp_index), data in self.map.items():
            print(f"{pp_index},{tp_index} = {data}")

    def _places(self, pp_index: int | None, tp_index: int | None) -> Iterator[tuple[int, int]]:
        for index, degree, what in (
            (pp_index, self.pp_degree, "pp_index"),
            (tp_index, self.tp_degree, "tp_index"),
        ):
            if index is not None and not 0 <= index < degree:
                raise UsageError(f"{what} = {index}: must be below {degree}")
        rows = range(self.pp_degree) if pp_index is None else (pp_index,)
        columns = range(self.tp_degree) if tp_index is None else (tp_index,)
        return ((row, column) for row in rows for column in columns)


@raises_theirs
def reshape_meg_2d_parallel(
    old_pp_degree: int,
    old_tp_degree: int,
    new_pp_degree: int,
    new_tp_degree: int,
    verbose: bool = False,
) -> meg_2d_parallel_map:
    """The old ranks that each new place joins; degrees can only become smaller.

    Raises:
        UsageError: a degree grows, or does not divide.
    """
    for what, old, new in (
        ("pp", old_pp_degree, new_pp_degree),
        ("tp", old_tp_degree, new_tp_degree),
    ):
        if new > old:
            raise UsageError(f"{what}_degree grows from {old} to {new}: it can only become smaller")
    old_map = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old_map.simple_init()
    narrow = meg_2d_parallel_map(old_pp_degree, new_tp_degree)
    for stage in range(old_pp_degree):
        for rank, data in enumerate(
            partition_data(old_map.get_data(pp_index=stage), new_tp_degree)
        ):
            narrow.add_data(stage, rank, data)
    made = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    for rank in range(new_tp_degree):
        for stage, data in enumerate(partition_data(narrow.get_data(tp_index=rank), new_pp_degree)):
            made.add_data(stage, rank, data)
    if verbose:
        made.print_data("final_2d_map:")
    return made


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
