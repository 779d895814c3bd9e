"""The owner of each parameter's values: a registry, so that no attribute is set on the parameter.

    parameter ──> ParamOwner ──> ShardView: the flattened tensor [numel], split by `bounds` over the ranks
                                  rank 0 |-- [0, a) --|-- [a, b) rank 1 --|  rank 2: nothing  |

An engine owns its model's parameters from `initialize` to `destroy`; before that `zero.Init` may own them.
"""

from __future__ import annotations

import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...ops.coded import BLOCK_NUMEL, encode
from ...ops.comm.collectives import ACCESS_BUFFER, Bounds, Collectives
from ...ops.device import wide
from ...ops.flat import flattened, numel_of, shaped
from ...ops.halves import Halves
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ..layout.groups import FlatGroups
from ..layout.slices import Reader, Slices, reader_of_slice


def reader_of(value: Tensor) -> Reader:
    """A reader of a full tensor in memory."""
    flat = value.detach().reshape(-1)
    return lambda start, stop: flat[start:stop]


@dataclass(frozen=True, eq=False)
class ShardView:
    """One tensor of a parameter as the ranks hold it.

    Shapes:  `local` is 1-D and writable: elements [start, stop) of this rank's bounds, or all elements if
             `is_whole`, which means that every rank holds the full tensor.
    With `slices` all of this is about this rank's slice of the tensor, on the ranks that have the same slice.
    channels_last: the order of the elements in `local`, and of the result of `read`; a Reader is row-major.
    codes: `local` is a copy of a state of 8 bits, whose rows these are; a write encodes them as well.
    halves: `local` is a copy of a master of these halves; a write divides it into them as well.
    """

    shape: tuple[int, ...]
    local: Tensor
    bounds: Bounds
    is_whole: bool = False
    slices: Slices | None = None
    channels_last: bool = False
    codes: Tensor | None = None
    halves: Halves | None = None

    @property
    def is_full(self) -> bool:
        """This rank holds the full tensor."""
        return self.is_whole and self.slices is None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.shape if self.slices is None else self.slices.whole_shape

    def own(self, reader: Reader) -> Reader:
        """A reader of this rank's slice in the order of `local`, from a reader of the full tensor."""
        if self.channels_last:
            whole = reader(0, numel_of(self.shape)).view(self.shape)
            return reader_of(flattened(whole, channels_last=True))
        return reader if self.slices is None else reader_of_slice(reader, self.slices.box)

    def range_of(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the flattened tensor that `rank` holds."""
        return (0, numel_of(self.shape)) if self.is_whole else self.bounds[rank]

    def read(self, collectives: Collectives, target: int | None = None) -> Tensor | None:
        """A new full tensor; None on ranks other than `target`. Sends this rank's part.

        Slices are joined on all ranks, or on the first of `slices.together` for target 0.
        """
        part = self._read_own(collectives, target)
        if self.slices is None:
            return part
        return self.slices.join(part, for_all=target is None)

    def _read_own(self, collectives: Collectives, target: int | None) -> Tensor | None:
        wanted = target in (None, collectives.rank)
        if self.is_whole:
            return self._shaped(self.local.clone()) if wanted else None
        local = self.local.to(collectives.device)  # it may be on the host
        out = local.new_empty(numel_of(self.shape)) if wanted else None
        collectives.collect(out, local, self.bounds, target=target)
        return None if out is None else self._shaped(out)

    def _shaped(self, flat: Tensor) -> Tensor:
        return shaped(flat, self.shape, self.channels_last)

    def write(self, reader: Reader, rank: int) -> None:
        """Overwrite what this rank holds. `reader`: of the full tensor. Nothing is sent."""
        start, stop = self.range_of(rank)
        if stop > start:
            self.local.copy_(self.own(reader)(start, stop))
            if self.codes is not None:
                values = self.local.new_zeros(len(self.codes) * BLOCK_NUMEL)
                values[: stop - start] = self.local
                encode(self.codes, values)
            if self.halves is not None:
                self.halves.write(self.local)


IN_SHARDS = "sharded (stage 3)"
IN_SLICES = "cut into slices (tensor_parallel, expert_parallel)"


class ParamOwner(ABC):
    """Holds the values of parameters. All ranks call every method but `name_of` together."""

    collectives: Collectives
    flat_groups: FlatGroups | None = None  # None: no engine owns the parameters
    num_writes = 0  # how often whole values of parameters were written, without those of steps

    def group_of(self, param: nn.Parameter) -> Collectives:
        """The ranks that `param` is sharded over, or its slice on this rank."""
        return self.collectives

    def together(self, param: nn.Parameter) -> Collectives:
        """The ranks that call every method with `param` together: all that hold it or a slice of it."""
        return self.group_of(param)

    def is_first_replica(self, param: nn.Parameter) -> bool:
        """The ranks of `group_of` are the first ones that hold all of `param`, if there are several."""
        return True

    def full_shape(self, param: nn.Parameter) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return tuple(param.shape)

    @abstractmethod
    def name_of(self, param: nn.Parameter) -> str:
        """The parameter's global name."""

    @abstractmethod
    def value(self, param: nn.Parameter) -> ShardView:
        """The values in full precision: the master's if there is one."""

    @abstractmethod
    def compute(self, param: nn.Parameter) -> ShardView:
        """The values that forward computes with."""

    @abstractmethod
    def write(self, param: nn.Parameter, reader: Reader) -> None:
        """Set master and computed value from `reader`, which returns the same values on every rank."""

    def holds_full(self, param: nn.Parameter) -> bool:
        """This rank can read all values of `param` now. For one rank alone; nothing is sent."""
        return self.is_overridden(param)

    def stays_full(self, param: nn.Parameter) -> bool:
        """`param` is not dropped between its uses. For one rank alone; nothing is sent."""
        return False

    def settle_alone(self) -> None:
        """This rank alone is about to read parameters of the module: bring values that are on their way.

        Raises:
            UsageError: that needs the other ranks.
        """
        return

    def begin_edit(self, param: nn.Parameter) -> None:  # noqa: B027 (most compare with a master)
        """The script is about to write to `param`. For one rank alone; nothing is sent."""

    def edit(self, param: nn.Parameter, reader: Reader) -> None:
        """`write`, but a master keeps its full precision where the computed value does not change."""
        self.write(param, reader)

    def hold_all(self, params: Sequence[nn.Parameter]) -> bool:
        """Gather whole units for reading until `release_all`, if all that are in shards are in `params`.

        False: nothing has happened. Parameters that are held count as overridden.
        """
        return False

    def release_all(self, *, checks: bool) -> list[str]:
        """End `hold_all`. Writes of user code are lost; with `checks` the result has names of some of them."""
        raise AssertionError("hold_all is False here")

    @abstractmethod
    def is_overridden(self, param: nn.Parameter) -> bool:
        """`param.data` is a tensor given to `override`, or is held."""

    @abstractmethod
    def why_in_parts(self, param: nn.Parameter) -> str:
        """How the values are split over the ranks, for messages; "" if this rank has all of them.

        A context that has gathered them changes nothing. Looks at no value.
        """

    def is_read_only(self, param: nn.Parameter) -> bool:
        """Other ranks have the same memory of `param`: user code may not write to it."""
        return False

    @abstractmethod
    def override(self, param: nn.Parameter, full: Tensor) -> None:
        """Make `full` the parameter's `.data` until `clear_override`."""

    @abstractmethod
    def clear_override(self, param: nn.Parameter) -> None:
        """End `override`: `param.data` is the owner's own tensor again."""

    def grad(self, param: nn.Parameter) -> ShardView | None:
        """The reduced gradient; None: there is none now.

        Raises:
            UsageError: it is not available now, or not for this parameter.
        """
        raise UsageError(f"{self.name_of(param)} has no gradient: no engine trains it yet")

    def holds_grads(self, param: nn.Parameter) -> bool:
        """Each rank has its own gradient of `param`, which is not summed yet. For all ranks."""
        return False

    def own_grad(self, param: nn.Parameter) -> Tensor | None:
        """Where `holds_grads`: the gradient of this rank's losses alone; None: it has none."""
        return None

    def gradient_factor(self) -> float:
        """The factor that makes the reduced gradient that of the loss."""
        return 1.0

    def optimizer_state(self, param: nn.Parameter, key: str) -> ShardView | Tensor | None:
        """The optimizer's state `key`: a stored tensor, a scalar, or None where there is none yet.

        Raises:
            UsageError: there is no such state.
        """
        raise UsageError(f"{self.name_of(param)} has no optimizer state: no engine trains it yet")

    def trains(self, param: nn.Parameter) -> bool:
        """An engine updates `param`."""
        return False

    @abstractmethod
    def move_into(self, param: nn.Parameter, target: Tensor) -> None:
        """Write the full value into `target` (any dtype) and stop owning the parameter."""

    def register_use(self, param: nn.Parameter, module: nn.Module) -> bool:
        """Gather `param` for calls of `module` as well. False: `module` is not part of the model."""
        return True

    def agree(self, doing: str, param: nn.Parameter, value: Tensor | None = None) -> None:
        """Check that every rank makes the same call, with the same parameter and `value`.

        Sends 24 bytes to each rank.

        Raises:
            UsageError: the calls differ; every rank raises, and nothing was changed.
        """
        own_row = [zlib.crc32(doing.encode()), self.number_of(param), _fingerprint(value)]
        sent = torch.tensor(own_row, dtype=torch.int64, device=self.collectives.device)
        what = f"{doing}({self.name_of(param)})"
        together = self.together(param)
        table = together.gather_small(sent, ACCESS_BUFFER, what).tolist()
        others = [rank for rank, row in enumerate(table) if row[:2] != own_row[:2]]
        if others:
            raise UsageError(
                f"rank {together.rank} calls {doing}({self.name_of(param)}), but rank {others[0]} "
                "calls another access, or the same with another parameter: these calls are collective, so "
                "make the same ones in the same order on every rank"
            )
        if any(row != own_row for row in table):
            raise UsageError(
                f"{doing}({self.name_of(param)}): the ranks pass different values; compute the value on one "
                "rank and broadcast it, or use xds.zero.GatheredParameters(param, modifier_rank=0)"
            )

    @abstractmethod
    def number_of(self, param: nn.Parameter) -> int:
        """The same number for the same parameter on every rank."""


def _fingerprint(value: Tensor | None) -> int:
    """A number that is equal for equal values, and almost surely different for different ones."""
    if value is None:
        return 0
    total = wide(value.detach())
    total = total.sum() + total.abs().sum() * 3.0
    # NaN has many bit patterns: all count as equal
    return int(total.nan_to_num().view(torch.int64))


# Parameters belong to user code, and remain when an engine ends: the maps are weak
_owners = WeakTensorKeyDictionary()


def set_owner(param: nn.Parameter, owner: ParamOwner, *, keep: bool = False) -> None:
    """Register `owner` for `param`. With `keep` it lives as long as the parameter."""
    _owners[param] = (lambda: owner) if keep else weakref.ref(owner)


def clear_owner(param: nn.Parameter) -> None:
    """Remove the owner of `param`: it is an ordinary parameter again."""
    _owners.pop(param, None)  # type: ignore[no-untyped-call]


def find_owner(param: Tensor) -> ParamOwner | None:
    """The owner of `param`; None for an ordinary tensor."""
    reference = _owners.get(_tensor(param))  # type: ignore[no-untyped-call]
    owner: ParamOwner | None = None if reference is None else reference()
    return owner


def _tensor(param: object) -> Tensor:
    if not isinstance(param, Tensor):  # it comes from user code
        raise wrong("param", param, "a parameter of engine.module")
    return param


def is_trained(param: nn.Parameter) -> bool:
    """An engine trains `param`, or one did that was deleted without destroy()."""
    if param not in _owners:
        return False
    owner = find_owner(param)
    return param.requires_grad if owner is None else owner.trains(param)


_pending = WeakTensorKeyDictionary()


def set_pending_owner(param: nn.Parameter, keep: Callable[[nn.Parameter], None]) -> None:
    """`keep(param)` gives the parameter its owner: its module is being built, and it is full until then."""
    _pending[param] = keep


def clear_pending_owner(param: nn.Parameter) -> None:
    """The parameter has its owner, or will not get one."""
    _pending.pop(param, None)  # type: ignore[no-untyped-call]


def resolve_owner(param: nn.Parameter) -> ParamOwner | None:
    """`find_owner`; a parameter that is being built gets its owner first. For all ranks."""
    keep = _pending.get(_tensor(param))  # type: ignore[no-untyped-call]
    if keep is not None:
        keep(param)
    return find_owner(param)


def owner_of(param: Tensor, doing: str) -> ParamOwner:
    """The owner of `param`; `doing` is the caller's name for the message.

    Raises:
        UsageError: no live engine has this tensor as a parameter.
    """
    owner = find_owner(param)
    if owner is None:
        raise UsageError(
            f"{doing}: this tensor of shape {tuple(param.shape)} is not a parameter of a live xds engine; pass "
            "a parameter of engine.module itself, not a copy or a view, before engine.destroy()"
        )
    return owner
