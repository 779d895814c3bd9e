"""What a parameter of stage 3 answers in this layer: `ds_id`, `ds_status`, `ds_tensor`, `all_gather()`, ...

The answers are descriptors of `torch.nn.Parameter`, set when this layer shards a model for the first time.
Nothing is stored on a parameter. One that this layer did not shard has no such attribute.

    param.ds_id ──> descriptor ──> owner of the values (xds.zero.access) ──> is it known here? ──> its answer
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ....zero.access.owners import Owner, find_owner, reader_of
from .handles import Gathered
from .parameter_offload import external_parameters
from .slices import OwnSlice, own_slice


class ZeroParamType(Enum):
    """DeepSpeed's values."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """AVAILABLE: this rank can read the whole parameter. INFLIGHT is never answered: it cannot be read then."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_BLOCK = 1 << 32  # ids of one engine
_blocks = itertools.count()
_known: WeakKeyDictionary[Owner, int] = WeakKeyDictionary()  # -> its first id
_second: WeakKeyDictionary[Owner, int] = (
    WeakKeyDictionary()
)  # -> the ranks of ZeRO++'s second shard
_built: Any = WeakTensorKeyDictionary()  # parameters of zero.Init on one rank -> their id


def answer_for(owners: Iterable[Owner | None]) -> None:
    """From now on the parameters of these owners answer. For all ranks, in the same order."""
    for owner in owners:
        if owner is not None and owner not in _known:
            _known[owner] = next(_blocks) * _BLOCK
            _install()


def answer_for_model(model: nn.Module) -> None:
    """From now on the parameters of a model answer whose engine is at stage 3."""
    answer_for(find_owner(param) for param in model.parameters())


def note_second_shard(model: nn.Module, num_ranks: int) -> None:
    """The engine of `model` keeps a second shard over `num_ranks` ranks (zero_hpz_partition_size)."""
    for param in model.parameters():
        owner = find_owner(param)
        if owner is not None and num_ranks > 1:
            _second[owner] = num_ranks


def answer_for_built(param: nn.Parameter) -> None:
    """`param` was built under zero.Init on one rank, so it is whole and has no owner yet."""
    if param not in _built:
        _built[param] = next(_blocks) * _BLOCK
        _install()


def is_zero_param(parameter: object) -> bool:
    """`parameter` belongs to a model that this layer shards at stage 3."""
    return isinstance(parameter, nn.Parameter) and _answers(parameter, find_owner(parameter))


def _answers(param: nn.Parameter, owner: Owner | None) -> bool:
    return owner in _known if owner is not None else param in _built


@final
class _Answer:
    """A descriptor: attribute `name` of the parameters that this layer shards."""

    def __init__(self, name: str, read: Callable[[nn.Parameter, Owner | None], Any]) -> None:
        self._name = name
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, param: nn.Parameter | None, kind: type | None = None) -> Any:
        if param is not None:
            owner = find_owner(param)
            if _answers(param, owner):
                return self._read(param, owner)
        raise AttributeError(
            f"{self._name}: parameters have it at stage 3, from deepspeed.zero.Init or initialize on"
        )


def _install() -> None:
    if "ds_id" not in vars(nn.Parameter):
        for name, read in _READERS.items():
            setattr(nn.Parameter, name, _Answer(name, read))
        nn.Module.ds_external_parameters = external_parameters  # type: ignore[attr-defined]
        nn.Parameter.__deepcopy__ = _deepcopy  # type: ignore[method-assign, assignment]


_torch_deepcopy = nn.Parameter.__deepcopy__


def _deepcopy(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """`copy.deepcopy`: the copy of a parameter in shards is whole, and no longer sharded. A collective then.

    PEFT copies modules (`modules_to_save`); its own gathering waits for parameters that have no elements.
    """
    owner = find_owner(param)
    if owner is None or owner.holds_full(param) or not _answers(param, owner):
        copied: nn.Parameter = _torch_deepcopy(param, memo)  # type: ignore[no-untyped-call]
        return copied
    if id(param) not in memo:
        owner.agree("copy.deepcopy", param)
        full = owner.compute(param).read(owner.group_of(param))
        assert full is not None
        memo[id(param)] = nn.Parameter(full, param.requires_grad)
    found: nn.Parameter = memo[id(param)]
    return found


# -- the answers ------------------------------------------------------------------------------------------


def _id(param: nn.Parameter, owner: Owner | None) -> int:
    """A number that no other parameter of the process has, equal on all ranks."""
    return int(_built[param]) if owner is None else _known[owner] + owner.number_of(param)


def _shape(param: nn.Parameter, owner: Owner | None) -> torch.Size:
    """The shape of the whole parameter, which is also `param.shape`."""
    return param.shape if owner is None else torch.Size(owner.full_shape(param))


def _numel(param: nn.Parameter, owner: Owner | None) -> int:
    """The elements of the whole parameter."""
    return _shape(param, owner).numel()


def _status(param: nn.Parameter, owner: Owner | None) -> ZeroParamStatus:
    """Whether this rank can read the whole parameter now. Nothing is sent."""
    is_full = owner is None or owner.holds_full(param)
    return ZeroParamStatus.AVAILABLE if is_full else ZeroParamStatus.NOT_AVAILABLE


def _persist(param: nn.Parameter, owner: Owner | None) -> bool:
    """The parameter stays gathered between its uses."""
    return owner is None or owner.stays_full(param)


def _tensor(param: nn.Parameter, owner: Owner | None) -> Tensor:
    """This rank's slice, see `OwnSlice`. Its values are read, by all ranks together, when they are used."""
    return own_slice(param, 0, 1) if owner is None else OwnSlice.of(param, owner)


def _tensor_numel(param: nn.Parameter, owner: Owner | None) -> Callable[[], int]:
    return _tensor(param, owner).numel


def _group(param: nn.Parameter, owner: Owner | None) -> dist.ProcessGroup | None:
    """The ranks that the parameter is sharded over."""
    return dist.group.WORLD if owner is None else owner.group_of(param).group


def _second_tensor(param: nn.Parameter, owner: Owner | None) -> Tensor | None:
    """This rank's slice of ZeRO++'s second shard, for reading, see `OwnSlice`; None without one."""
    parts = 1 if owner is None else _second.get(owner, 1)
    return None if owner is None or parts == 1 else OwnSlice.of(param, owner, parts)


def _second_group(param: nn.Parameter, owner: Owner | None) -> dist.ProcessGroup | None:
    """None without a second shard."""
    return _group(param, owner) if owner is not None and owner in _second else None


def _all_gather(param: nn.Parameter, owner: Owner | None) -> Callable[..., None]:
    def all_gather(
        param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> None:
        """Make the parameters whole until `partition()`. A collective. Sends as `GatheredParameters`."""
        for one in param_list or [param]:
            held_by = find_owner(one)
            if held_by is not None and not held_by.holds_full(one):
                held_by.agree("all_gather", one)
                full = held_by.compute(one).read(held_by.group_of(one))
                assert full is not None
                held_by.override(one, full)

    return all_gather


def _all_gather_coalesced(param: nn.Parameter, owner: Owner | None) -> Callable[..., Gathered]:
    def all_gather_coalesced(params: Iterable[nn.Parameter], **options: Any) -> Gathered:
        """`all_gather` of several. Options such as `safe_mode` have no effect."""
        _all_gather(param, owner)(list(params))
        return Gathered()

    return all_gather_coalesced


def _partition(param: nn.Parameter, owner: Owner | None) -> Callable[..., None]:
    def partition(
        param_list: Iterable[nn.Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Undo `all_gather`. A collective. `free_data` has no effect.

        has_been_updated: the values of the parameters, equal on all ranks, are kept.
        """
        for one in param_list or [param]:
            held_by = find_owner(one)
            if held_by is None or not held_by.is_overridden(one):
                continue
            if has_been_updated:
                held_by.agree("partition", one, one.data)
                held_by.edit(one, reader_of(one.data))
            held_by.clear_override(one)

    return partition


def _summary(param: nn.Parameter, owner: Owner | None) -> Callable[..., dict[str, Any]]:
    def ds_summary(slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
        """The other answers, as a dict. Nothing is sent."""
        return {
            "id": _id(param, owner),
            "status": _status(param, owner).name,
            "numel": _numel(param, owner),
            "ds_numel": _numel(param, owner),
            "shape": tuple(param.shape),
            "ds_shape": tuple(_shape(param, owner)),
            "requires_grad": param.requires_grad,
            "persist": _persist(param, owner),
        }

    return ds_summary


_READERS: dict[str, Callable[[nn.Parameter, Owner | None], Any]] = {
    "ds_id": _id,
    "ds_shape": _shape,
    "ds_numel": _numel,
    "ds_status": _status,
    "ds_persist": _persist,
    "ds_tensor": _tensor,
    "partition_numel": _tensor_numel,
    "ds_param_type": lambda param, owner: ZeroParamType.PARTITIONED,
    "ds_process_group": _group,
    "ds_zero_param_process_group": _second_group,
    "ds_secondary_tensor": _second_tensor,
    "ds_summary": _summary,
    "ds_active_sub_modules": lambda param, owner: set(),  # the engine's hooks know who uses it
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "partition": _partition,
}
