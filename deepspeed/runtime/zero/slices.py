"""A rank's own slice of a parameter as DeepSpeed cuts it: equal parts of the flattened parameter, padded.

    flattened [numel]   |-- rank 0 --|-- rank 1 --|-- rank 2, zeros --|   each ceil(numel / ranks) elements

The shards of xds are parts of whole units, with other bounds. So a read gathers the whole parameter, and a
write gathers the slices of all ranks. Both are collectives: all ranks read or write the same parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ....utils.errors import UsageError
from ....zero.access.owners import Owner, reader_of


def chunk_of(numel: int, num_ranks: int) -> int:
    """The elements of each rank's slice, padding included."""
    return -(-numel // num_ranks)


def own_slice(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The slice of `rank` of a whole tensor: [chunk], with zeros at the end where the tensor ends."""
    flat = whole.detach().reshape(-1)
    chunk = chunk_of(flat.numel(), num_ranks)
    part = flat[rank * chunk : (rank + 1) * chunk]
    return torch.cat([part, part.new_zeros(chunk - part.numel())])


def read_slice(param: nn.Parameter, owner: Owner, whole: Tensor) -> Tensor:
    """This rank's slice of `whole`, a tensor of the parameter's shape."""
    ranks = owner.group_of(param)
    return own_slice(whole, ranks.rank, ranks.world_size)


def gather_slices(doing: str, param: nn.Parameter, owner: Owner, value: Tensor) -> Tensor:
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
    _owner: Owner
    _num_parts: int

    @classmethod
    def of(cls, param: nn.Parameter, owner: Owner, num_parts: int | None = None) -> OwnSlice:
        """num_parts: with the second shard of ZeRO++ its ranks, which divide the number of ranks."""
        ranks = owner.group_of(param)
        parts = num_parts or ranks.world_size
        chunk = chunk_of(torch.Size(owner.full_shape(param)).numel(), ranks.world_size)
        numel = chunk * (ranks.world_size // parts)
        made: OwnSlice = Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=param.dtype, device=ranks.device
        )
        made._param, made._owner, made._num_parts = param, owner, parts
        return made

    @property
    def ds_numel(self) -> int:
        return self.numel()

    def _read(self) -> Tensor:
        param, owner = self._param, self._owner
        owner.agree("ds_tensor", param)
        whole = owner.compute(param).read(owner.group_of(param))
        assert whole is not None
        ranks = owner.group_of(param)
        if self._num_parts == ranks.world_size:
            return read_slice(param, owner, whole)
        padded = nn.functional.pad(
            whole.reshape(-1), (0, self.numel() * self._num_parts - whole.numel())
        )
        return own_slice(padded, ranks.rank % self._num_parts, self._num_parts)

    def _write(self, value: Tensor) -> None:
        param, owner = self._param, self._owner
        if self._num_parts != owner.group_of(param).world_size:
            raise UsageError(
                f"ds_secondary_tensor of {owner.name_of(param)}: the second shard of ZeRO++ is a copy, for "
                "reading; write to param.ds_tensor, or inside GatheredParameters"
            )
        whole = gather_slices("ds_tensor", param, owner, value)
        owner.write(param, reader_of(whole))

    @property
    def data(self) -> Tensor:
        return self._read()

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


__all__ = ["OwnSlice", "chunk_of", "gather_slices", "own_slice", "read_slice"]
