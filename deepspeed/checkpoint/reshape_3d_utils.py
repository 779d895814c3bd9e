"""`deepspeed.checkpoint.reshape_3d_utils`: degrees of parallelism of DeepSpeed's files, and smaller ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ...engine.checkpoint.imports.safe_pickle import read_pickle
from ...utils.errors import UsageError
from ..errors import in_their_form, raises_theirs
from ..missing import placeholder
from .reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from .reshape_utils import get_files, get_files_with_prefix, get_zero_files, partition_data

PP_DIM, TP_DIM, DP_DIM = "PP", "TP", "DP"
_DIMENSIONS = "checkpoint_parallel_dimensions"
_DEGREES = ("pp_degree", "tp_degree")


@final
@dataclass
class model_3d_desc:  # noqa: N801 (DeepSpeed's name)
    """Numbers of pipeline stages, tensor ranks and data ranks."""

    pp_degree: int = 1
    tp_degree: int = 1
    dp_degree: int = 1

    def _degrees(self) -> dict[str, int]:
        return {PP_DIM: self.pp_degree, TP_DIM: self.tp_degree, DP_DIM: self.dp_degree}

    def get_desc(self) -> str:
        return f"{PP_DIM},{TP_DIM},{DP_DIM} = {tuple(self._degrees().values())}"

    def world_size(self) -> int:
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether there is such a place, and what is wrong with it."""
        indices = {PP_DIM: pp_index, TP_DIM: tp_index, DP_DIM: dp_index}
        wrong = [
            f"{what} indexing error: index {indices[what]} >= degree {degree}"
            for what, degree in self._degrees().items()
            if indices[what] >= degree
        ]
        return not wrong, wrong

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Whether no degree grows, and which do."""
        new = target_3d_desc._degrees()
        wrong = [
            f"Expansion reshape not supported - {what}: {degree} ---> {new[what]}"
            for what, degree in self._degrees().items()
            if new[what] > degree
        ]
        return not wrong, wrong

    def reshape(
        self, target_3d_desc: model_3d_desc, verbose: bool = False
    ) -> list[meg_2d_parallel_map]:
        """For each new data rank: the old ranks that each of its places joins.

        Old ranks count tensor ranks first, then stages, then data ranks.

        Raises:
            UsageError: a degree grows, or does not divide.
        """
        fits, wrong = self.can_reshape(target_3d_desc)
        with in_their_form():
            if not fits:
                raise UsageError(", ".join(wrong))
        pp_degree, tp_degree = target_3d_desc.pp_degree, target_3d_desc.tp_degree
        places = reshape_meg_2d_parallel(
            self.pp_degree, self.tp_degree, pp_degree, tp_degree, verbose
        )
        count = target_3d_desc.dp_degree
        made = [meg_2d_parallel_map(pp_degree, tp_degree) for _ in range(count)]
        model_ranks = self.pp_degree * self.tp_degree
        for (stage, rank), first in places.map.items():
            all_ranks = [one + at * model_ranks for one in first for at in range(self.dp_degree)]
            for data, part in zip(made, partition_data(all_ranks, count), strict=True):
                data.add_data(stage, rank, part)
        return made


@raises_theirs
def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """The degrees of the checkpoint of DeepSpeed in the folder `dir` of one tag. Runs no code from its files.

    Raises:
        RuntimeError: its files contradict each other.
    """
    files = get_files(dir)
    model_files = get_files_with_prefix(files, "mp_rank_")
    num_zero = len(get_zero_files(dir))
    degrees = _written_degrees(model_files)
    if degrees is not None:
        stages, tensor = degrees
        if len(model_files) != stages * tensor or num_zero % (stages * tensor):
            raise RuntimeError(
                f"{dir} has {len(model_files)} files of weights and {num_zero} of optimizer states, which "
                f"contradicts its pp_degree = {stages} and tp_degree = {tensor}"
            )
    else:
        first_layers = len(get_files_with_prefix(files, "layer_01"))
        tensor = first_layers or len(model_files)
        stages = len(model_files) // tensor if first_layers else 1
    return model_3d_desc(stages, tensor, max(1, num_zero // max(1, stages * tensor)))


def _written_degrees(model_files: list[str]) -> tuple[int, int] | None:
    """The degrees that the files of weights name; None: none does, DeepSpeed before 0.19."""
    found: dict[str, tuple[int, int] | None] = {}
    for path in model_files:
        written = read_pickle(Path(path)).get(_DIMENSIONS)
        found[os.path.basename(path)] = None if written is None else _checked(written, path)
    named = {one for one in found.values() if one is not None}
    if named and None in found.values():
        without = [name for name, one in found.items() if one is None]
        raise RuntimeError(f"{_DIMENSIONS} is missing from model-state files: {without}")
    if len(named) > 1:
        raise RuntimeError(f"{_DIMENSIONS} disagrees across model-state files: {sorted(named)}")
    return next(iter(named), None)


def _checked(written: Any, path: str) -> tuple[int, int]:
    values: list[Any] = [
        written.get(key) if isinstance(written, dict) else None for key in _DEGREES
    ]
    if not all(type(value) is int and value > 0 for value in values):
        raise RuntimeError(f"{_DIMENSIONS} of {path} is {written!r}: needs two positive numbers")
    return values[0], values[1]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
