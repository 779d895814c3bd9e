"""`deepspeed.checkpoint.zero_checkpoint`: optimizer states of a checkpoint of DeepSpeed, for other degrees."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from torch import Tensor

from ...engine.checkpoint.imports.safe_pickle import read_pickle
from ...utils.errors import UsageError
from ..errors import methods_raise_theirs
from ..missing import placeholder
from .reshape_3d_utils import get_model_3d_descriptor, model_3d_desc
from .reshape_utils import basic_folder_validation, get_zero_files, merge_state

_STATES, _BASE = "optimizer_state_dict", "base_optimizer_state"
_PADDINGS, _COUNTS = "group_paddings", "partition_count"


@final
@methods_raise_theirs
class ZeROCheckpoint:
    """The files of one tag that DeepSpeed wrote; `reshape` says for which degrees they are read.

    Raises:
        UsageError: `dir` is no folder, or has no such files; a checkpoint of xds loads without this.
    """

    def __init__(self, dir: str, source_3d: model_3d_desc | None = None) -> None:
        basic_folder_validation(dir)
        self.dir = dir
        self.file_list = get_zero_files(dir)
        self.num_files = len(self.file_list)
        if not self.file_list:
            raise UsageError(
                f"{dir} has no *_optim_states.pt of DeepSpeed: give the folder of one tag"
            )
        self.src_3d = get_model_3d_descriptor(dir) if source_3d is None else source_3d
        self.reshape(self.src_3d)

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """From now on ranks are those of `target_3d_desc`. Raises UsageError: a degree grows."""
        self.target_3d = target_3d_desc
        self._places = self.src_3d.reshape(target_3d_desc)

    def get_src_world_size(self) -> int:
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """The numbers of the files that the rank at this place joins."""
        if dp_index >= len(self._places):
            raise UsageError(f"dp_index = {dp_index}: there are {len(self._places)} data ranks")
        found: list[int] = self._places[dp_index].get_data(pp_index, tp_index)
        return found

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The paths of these files."""
        places = self.get_file_indices_for_rank(pp_index, tp_index, dp_index)
        return [self.file_list[place] for place in places]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Iterable[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any] | None:
        """The states of these files as one. Runs no code from them.

        Args:
            keys_to_ignore: keys of a file that are left out.
            strip_tensor_paddings: leave out the elements that only fill a rank's part.
        """
        merged = None
        for path in self.get_files_for_rank(pp_index, tp_index, dp_index):
            ignored = set(keys_to_ignore)
            state = {key: one for key, one in read_pickle(Path(path)).items() if key not in ignored}
            if strip_tensor_paddings:
                _strip(state)
            merged = state if merged is None else merge_state(merged, state)
        inner = (merged or {}).get(_STATES)
        if isinstance(inner, dict):
            if inner.get(_COUNTS):
                inner[_COUNTS] = [self.target_3d.dp_degree] * len(inner[_COUNTS])
            if strip_tensor_paddings and inner.get(_PADDINGS):
                inner[_PADDINGS] = [0] * len(inner[_PADDINGS])
        return merged

    def print_3d_index_map(self, tag: str | None = None) -> None:
        """Print the numbers of the files for each place."""
        self._print("index", tag, lambda place: place)

    def print_3d_file_map(self, tag: str | None = None) -> None:
        """Print the files for each place."""
        self._print("file", tag, lambda place: self.file_list[place])

    def _print(self, what: str, tag: str | None, shown: Any) -> None:
        if tag:
            print(f"3D {what} map: {tag}")
        for data, places in enumerate(self._places):
            for (stage, rank), held in sorted(places.map.items()):
                print(f"{stage}, {rank}, {data} => {[shown(place) for place in held]}")


def _strip(state: dict[str, Any]) -> None:
    """Shorten the tensors of each group by its padding."""
    inner = state.get(_STATES) or {}
    paddings, base = inner.get(_PADDINGS), inner.get(_BASE)
    groups = base.get("state") if isinstance(base, dict) else None
    if not paddings or not groups:
        return
    for number, group in groups.items():
        for name, value in group.items() if paddings[number] else ():
            if name != "step" and isinstance(value, Tensor):
                group[name] = value[: value.numel() - paddings[number]].clone()


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
