"""Process groups of expert parallelism, for scripts with experts of their own.

xds's engine does not use them. Expert ranks hold different experts; expert-data ranks hold copies of the same.
With 8 ranks, 2 of them for tensors and an expert size of 2:

    expert ranks        [0, 2] [4, 6] [1, 3] [5, 7]      they exchange tokens
    expert-data ranks   [0, 4] [2, 6] [1, 5] [3, 7]      they average the gradients of their experts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch.distributed as dist

from ...utils.errors import UsageError
from ..errors import in_their_form
from .bwc import bwc_pipeline_parallel_world_size, bwc_tensor_model_parallel_world_size

Ranks = list[int]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises a UsageError, also a ValueError and an AssertionError, where there is a remainder."""
    if denominator == 0 or numerator % denominator:
        need = "denominator must be non-zero" if denominator == 0 else "choose sizes that divide"
        with in_their_form():
            raise UsageError(f"{numerator} is not divisible by {denominator}: {need}")


def expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[Ranks], list[Ranks]]:
    """The ranks of each expert group, and of each expert-data group.

    Args:
        use_data_before_expert_parallel_: neighbouring data ranks hold the same experts, not different ones.
    Raises:
        UsageError: the sizes do not divide the number of ranks.
    """
    per_stage_sizes = tensor_parallel_size_ * pipeline_parallel_size_
    ensure_divisibility(world_size, per_stage_sizes)
    num_data = world_size // per_stage_sizes
    ensure_divisibility(num_data, expert_parallel_size_)
    stage = world_size // pipeline_parallel_size_
    experts: list[Ranks] = []
    copies: list[Ranks] = []
    for begin in range(0, world_size, stage):
        for slice_rank in range(tensor_parallel_size_):
            data = list(range(begin + slice_rank, begin + stage, tensor_parallel_size_))
            if use_data_before_expert_parallel_:
                step = num_data // expert_parallel_size_
                data = [rank for first in range(step) for rank in data[first::step]]
            mine = [
                data[i : i + expert_parallel_size_]
                for i in range(0, num_data, expert_parallel_size_)
            ]
            experts += mine
            copies += [list(ranks) for ranks in zip(*mine, strict=True)]
    return experts, copies


@final
class _Groups:
    """The groups of this process, by DeepSpeed's name for their size: "ep_size_2"."""

    def __init__(self) -> None:
        self.experts: dict[str, dist.ProcessGroup] = {}
        self.expert_ranks: dict[str, Ranks] = {}
        self.copies: dict[str, dist.ProcessGroup] = {}
        self.copy_ranks: dict[str, Ranks] = {}
        self.num_slices = 1

    def create(self, size: int, experts: Sequence[Ranks], copies: Sequence[Ranks]) -> None:
        """Create those that do not exist. A collective."""
        name = f"ep_size_{size}"
        if name not in self.copies:
            self.copies[name], self.copy_ranks[name] = _mine(copies)
        if name not in self.experts:
            self.experts[name], self.expert_ranks[name] = _mine(experts)


_groups = _Groups()


def _mine(all_ranks: Iterable[Ranks]) -> tuple[dist.ProcessGroup, Ranks]:
    """Create each group; return that of this rank."""
    made = [(dist.new_group(ranks), ranks) for ranks in all_ranks]
    return next((group, ranks) for group, ranks in made if dist.get_rank() in ranks)


def _running(what: str) -> int:
    """The number of ranks."""
    if not dist.is_initialized():
        with in_their_form():
            raise UsageError(
                f"{what}: there is no process group; call deepspeed.init_distributed() first"
            )
    return dist.get_world_size()


def create_expert_and_data_parallel(
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
    folding_spec: Any = None,
) -> None:
    """Create the groups of an expert size, unless they exist. A collective.

    Args:
        mp_size: ranks that share a model's tensors ("tp") or sequences ("sp").
        mp_mode: "tp": expert groups are made of ranks with the same slice; "sp": of neighbouring ranks.
    Raises:
        UsageError: the sizes do not divide the number of ranks; or folding_spec is given.
    """
    world_size = _running("_create_expert_and_data_parallel()")
    if folding_spec is not None:
        with in_their_form():
            raise UsageError(
                "_create_expert_and_data_parallel(folding_spec=...): experts that are folded over tensor ranks "
                "are not supported; leave folding_spec out"
            )
    num_slices = (mp_size or 1) if mp_mode == "tp" else 1
    if use_data_before_expert_parallel_ and (mp_size or 1) > 1:
        raise NotImplementedError(
            "use_data_before_expert_parallel_ = True with mp_size > 1: leave one of them out"
        )
    ensure_divisibility(world_size // (pp_size or 1), expert_parallel_size_)
    lists = expert_parallel_ranks(
        world_size,
        num_slices,
        expert_parallel_size_,
        pp_size or 1,
        use_data_before_expert_parallel_,
    )
    _groups.create(expert_parallel_size_, *lists)


def create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """The same beside the tensor ranks and the pipeline of an `mpu`. A collective."""
    world_size = _running("_create_expert_data_and_model_parallel()")
    _groups.num_slices = bwc_tensor_model_parallel_world_size(mpu)
    lists = expert_parallel_ranks(
        world_size,
        _groups.num_slices,
        expert_parallel_size_,
        bwc_pipeline_parallel_world_size(mpu),
        use_data_before_expert_parallel_,
    )
    _groups.create(expert_parallel_size_, *lists)


def _named(groups: dict[str, Any], group_name: str) -> Any:
    if group_name not in groups:
        with in_their_form():
            raise UsageError(
                f"there are no expert groups {group_name!r}: call _create_expert_and_data_parallel first; "
                f"created: {sorted(groups) or 'none'}"
            )
    return groups[group_name]


def expert_parallel_group(group_name: str) -> dist.ProcessGroup:
    found: dist.ProcessGroup = _named(_groups.experts, group_name)
    return found


def expert_parallel_group_ranks(group_name: str) -> Ranks:
    return list(_named(_groups.expert_ranks, group_name))


def expert_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    return _groups.experts


def expert_data_parallel_group(group_name: str) -> dist.ProcessGroup:
    found: dist.ProcessGroup = _named(_groups.copies, group_name)
    return found


def expert_data_parallel_group_ranks(group_name: str) -> Ranks:
    return list(_named(_groups.copy_ranks, group_name))


def expert_data_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    return _groups.copies


def max_expert_size() -> int | None:
    """The greatest size for which groups exist; None without any."""
    return max((int(name.rpartition("_")[2]) for name in _groups.experts), default=None)


def max_expert_size_name() -> str:
    return f"ep_size_{max_expert_size()}"


def max_expert_parallel_group() -> dist.ProcessGroup:
    return expert_parallel_group(max_expert_size_name())


def expert_parallel_world_size(group_name: str) -> int:
    return expert_parallel_group(group_name).size()


def expert_parallel_rank(group_name: str) -> int:
    return expert_parallel_group(group_name).rank()


def expert_parallel_src_rank(group_name: str) -> int:
    """The global rank of the first of a block of as many ranks as the group has."""
    size = expert_parallel_world_size(group_name)
    return dist.get_rank() // size * size


def expert_data_parallel_world_size(group_name: str) -> int:
    return expert_data_parallel_group(group_name).size()


def expert_data_parallel_rank(group_name: str) -> int:
    return expert_data_parallel_group(group_name).rank()


def expert_broadcast_src_rank(group_name: str) -> int:
    """The global rank of the first of those with the same experts."""
    return expert_data_parallel_group_ranks(group_name)[0]


def expert_model_parallel_world_size() -> int:
    """The tensor ranks of the `mpu` that expert groups were created beside."""
    return _groups.num_slices


_WITHOUT_UNDERSCORE = (
    *("ensure_divisibility", "create_expert_and_data_parallel"),
    "create_expert_data_and_model_parallel",
)

# the names of `deepspeed.utils.groups`
NAMES: dict[str, Any] = {
    **{f"_{name}": globals()[name] for name in _WITHOUT_UNDERSCORE},
    **{
        f"_get_{name}": value
        for name, value in list(globals().items())
        if name.startswith(("expert_", "max_expert_"))
    },
}

__all__ = ["NAMES"]
