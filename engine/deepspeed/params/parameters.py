"""What a parameter of stage 3 answers in this layer: `ds_id`, `ds_status`, `ds_tensor`, `all_gather()`, ...

The answers are descriptors of `torch.nn.Parameter`, set when this layer shards a model for the first time.
Nothing is stored on a parameter. One that this layer did not shard has no such attribute.

    param.ds_id ──> descriptor ──> owner of the values (xds.zero.access) ──> is it known here? ──> its answer
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, ItemsView, Iterable
from enum import Enum
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ....ops.torch_internals import tree_map_only
from ....utils.errors import UsageError
from ....zero.core.gather import Gatherer
from ....zero.core.owners import ParamOwner, find_owner, reader_of


@final
class Gathered:
    """The result of `all_gather_coalesced`, which has ended already."""

    def wait(self, **options: Any) -> None:
        """Does nothing."""


def chunk_of(numel: int, num_ranks: int) -> int:
    """The elements of each rank's slice, padding included."""
    return -(-numel // num_ranks)


def own_slice(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The slice of `rank` of a whole tensor: [chunk], with zeros at the end where the tensor ends."""
    flat = whole.detach().reshape(-1)
    chunk = chunk_of(flat.numel(), num_ranks)
    part = flat[rank * chunk : (rank + 1) * chunk]
    return torch.cat([part, part.new_zeros(chunk - part.numel())])


def read_slice(param: nn.Parameter, owner: ParamOwner, whole: Tensor) -> Tensor:
    """This rank's slice of `whole`, a tensor of the parameter's shape."""
    ranks = owner.group_of(param)
    return own_slice(whole, ranks.rank, ranks.world_size)


def gather_slices(doing: str, param: nn.Parameter, owner: ParamOwner, value: Tensor) -> Tensor:
    """The whole tensor of the slices that all ranks pass. Each rank sends its slice to every other one.

    Shapes:  `value` [chunk], the result that of the parameter.
    Raises:
        UsageError: wrong number of elements.
    """
    ranks, shape = owner.group_of(param), torch.Size(owner.full_shape(param))
    chunk = chunk_of(shape.numel(), ranks.world_size)
    if not isinstance(value, Tensor) or value.numel() != chunk:
        had = f"{value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(
            f"{doing}({owner.name_of(param)}): value has {had}, and needs the {chunk} of a slice of "
            f"{tuple(shape)} over {ranks.world_size} ranks, padding included; param.ds_tensor.shape has it"
        )
    owner.agree(doing, param)
    own = value.detach().reshape(-1).to(ranks.device).contiguous()
    whole = own.new_empty(chunk * ranks.world_size)
    ranks.collect(whole, own, [(r * chunk, (r + 1) * chunk) for r in range(ranks.world_size)])
    return whole[: shape.numel()].view(shape)


@final
class OwnSlice(Tensor):
    """`param.ds_tensor`: shape and dtype are known at once; values are read when an operation needs them.

    - So one rank alone may print its shape. An operation on it is a collective of all ranks.
    - An in-place operation, and an assignment to `.data`, write to the parameter and its master.
    """

    _param: nn.Parameter
    _owner: ParamOwner

    @classmethod
    def of(cls, param: nn.Parameter, owner: ParamOwner) -> OwnSlice:
        ranks = owner.group_of(param)
        numel = chunk_of(torch.Size(owner.full_shape(param)).numel(), ranks.world_size)
        made: OwnSlice = Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=param.dtype, device=ranks.device
        )
        made._param, made._owner = param, owner
        return made

    @property
    def ds_numel(self) -> int:
        return self.numel()

    def _read(self) -> Tensor:
        param, owner = self._param, self._owner
        owner.agree("ds_tensor", param)
        whole = owner.compute(param).read(owner.group_of(param))
        assert whole is not None
        return read_slice(param, owner, whole)

    def _write(self, value: Tensor) -> None:
        param, owner = self._param, self._owner
        whole = gather_slices("ds_tensor", param, owner, value)
        owner.write(param, reader_of(whole))

    @property
    def data(self) -> Tensor:
        return self  # so `ds_tensor.data.copy_(...)` writes too

    @data.setter
    def data(self, value: Tensor) -> None:
        self._write(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OwnSlice({self.numel()} elements of {tuple(self._param.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read: dict[int, tuple[OwnSlice, Tensor]] = {}

        def values(one: OwnSlice) -> Tensor:
            return read.setdefault(id(one), (one, one._read()))[1]

        swap: Callable[[Any], Any] = lambda tree: tree_map_only(cls, values, tree)  # noqa: E731
        result = func(*swap(args), **swap(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], cls):
            args[0]._write(read[id(args[0])][1])
            return args[0]
        return result


@final
class Hook:
    """Stands for the engine's hooks."""

    def remove(self) -> None:
        """Does nothing: hooks leave whole parameters alone."""


@final
class ParamCoordinator:
    """The order of units in the last forward, from which the engine knows what to gather early."""

    def __init__(self, gatherer: Gatherer | None) -> None:
        self._gatherer = gatherer
        self._unknown: object = None  # the order of the forward that does not count

    def is_complete_trace(self) -> bool:
        """A forward has run since the start, and since hooks were put back."""
        order = None if self._gatherer is None else self._gatherer.order
        return bool(order) and order is not self._unknown

    def is_invalid_trace(self) -> bool:
        """The next forward finds the order anew."""
        return not self.is_complete_trace()

    def is_record_trace(self) -> bool:
        """Never between two calls of the engine."""
        return False

    def _invalidate_trace(self) -> None:
        self._unknown = None if self._gatherer is None else self._gatherer.order


@final
class DeepSpeedZeRoOffload:
    """The attributes that TRL and scripts with the same lines use, for the model of an engine at stage 3."""

    def __init__(self, module: nn.Module, gatherer: Gatherer | None = None) -> None:
        self.module = module
        self._coordinator = ParamCoordinator(gatherer)
        self.forward_hooks: list[Any] = [Hook()]
        self.backward_hooks: list[Any] = [Hook()]

    def _remove_module_hooks(self) -> None:
        """Empty the lists. The engine's hooks stay."""
        self.forward_hooks, self.backward_hooks = [], []

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Fill the lists again. The engine's hooks were never taken off."""
        self.forward_hooks, self.backward_hooks = [Hook()], [Hook()]
        self._coordinator._invalidate_trace()

    def get_param_coordinator(self) -> ParamCoordinator:
        """Says whether the order in which units are gathered is known."""
        return self._coordinator

    def empty_partition_cache(self) -> None:
        """Does nothing: units are released after each use."""


def external_parameters(module: nn.Module) -> ItemsView[str, nn.Parameter]:
    """`module.ds_external_parameters()`: none, because xds finds uses of another module's parameters itself."""
    none: dict[str, nn.Parameter] = {}
    return none.items()


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
# DeepSpeed's ids tell all parameters of a process apart. The maps are weak: what is dropped leaves them
_blocks = itertools.count()
_known: WeakKeyDictionary[ParamOwner, int] = WeakKeyDictionary()  # -> its first id
_built: Any = WeakTensorKeyDictionary()  # parameters of zero.Init on one rank -> their id


def answer_for(owners: Iterable[ParamOwner | None]) -> None:
    """From now on the parameters of these owners answer. For all ranks, in the same order."""
    for owner in owners:
        if owner is not None and owner not in _known:
            _known[owner] = next(_blocks) * _BLOCK
            _install()


def answer_for_model(model: nn.Module) -> None:
    """From now on the parameters of a model answer whose engine is at stage 3."""
    answer_for(find_owner(param) for param in model.parameters())


def answer_for_built(param: nn.Parameter) -> None:
    """`param` was built under zero.Init on one rank, so it is whole and has no owner yet."""
    if param not in _built:
        _built[param] = next(_blocks) * _BLOCK
        _install()


def is_zero_param(parameter: object) -> bool:
    """`parameter` belongs to a model that this layer shards at stage 3."""
    return isinstance(parameter, nn.Parameter) and _answers(parameter, find_owner(parameter))


def _answers(param: nn.Parameter, owner: ParamOwner | None) -> bool:
    return owner in _known if owner is not None else param in _built


@final
class _Answer:
    """A descriptor: attribute `name` of the parameters that this layer shards."""

    def __init__(self, name: str, read: Callable[[nn.Parameter, ParamOwner | None], Any]) -> None:
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


def _id(param: nn.Parameter, owner: ParamOwner | None) -> int:
    """A number that no other parameter of the process has, equal on all ranks."""
    return int(_built[param]) if owner is None else _known[owner] + owner.number_of(param)


def _shape(param: nn.Parameter, owner: ParamOwner | None) -> torch.Size:
    """The shape of the whole parameter, which is also `param.shape`."""
    return param.shape if owner is None else torch.Size(owner.full_shape(param))


def _numel(param: nn.Parameter, owner: ParamOwner | None) -> int:
    """The elements of the whole parameter."""
    return _shape(param, owner).numel()


def _status(param: nn.Parameter, owner: ParamOwner | None) -> ZeroParamStatus:
    """Whether this rank can read the whole parameter now. Nothing is sent."""
    is_full = owner is None or owner.holds_full(param)
    return ZeroParamStatus.AVAILABLE if is_full else ZeroParamStatus.NOT_AVAILABLE


def _persist(param: nn.Parameter, owner: ParamOwner | None) -> bool:
    """The parameter stays gathered between its uses."""
    return owner is None or owner.stays_full(param)


def _tensor(param: nn.Parameter, owner: ParamOwner | None) -> Tensor:
    """This rank's slice, see `OwnSlice`. Its values are read, by all ranks together, when they are used."""
    return own_slice(param, 0, 1) if owner is None else OwnSlice.of(param, owner)


def _tensor_numel(param: nn.Parameter, owner: ParamOwner | None) -> Callable[[], int]:
    return _tensor(param, owner).numel


def _group(param: nn.Parameter, owner: ParamOwner | None) -> dist.ProcessGroup | None:
    """The ranks that the parameter is sharded over."""
    return dist.group.WORLD if owner is None else owner.group_of(param).group


def _all_gather(param: nn.Parameter, owner: ParamOwner | None) -> Callable[..., None]:
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


def _all_gather_coalesced(param: nn.Parameter, owner: ParamOwner | None) -> Callable[..., Gathered]:
    def all_gather_coalesced(params: Iterable[nn.Parameter], **options: Any) -> Gathered:
        """`all_gather` of several. Options such as `safe_mode` have no effect."""
        _all_gather(param, owner)(list(params))
        return Gathered()

    return all_gather_coalesced


def _partition(param: nn.Parameter, owner: ParamOwner | None) -> Callable[..., None]:
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


_READERS: dict[str, Callable[[nn.Parameter, ParamOwner | None], Any]] = {
    "ds_id": _id,
    "ds_shape": _shape,
    "ds_numel": _numel,
    "ds_status": _status,
    "ds_persist": _persist,
    "ds_tensor": _tensor,
    "partition_numel": _tensor_numel,
    "ds_param_type": lambda param, owner: ZeroParamType.PARTITIONED,
    "ds_process_group": _group,
    "ds_active_sub_modules": lambda param, owner: set(),  # the engine's hooks know who uses it
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "partition": _partition,
}
