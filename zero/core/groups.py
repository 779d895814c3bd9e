"""The group of each flat buffer: the ranks that hold it, how they communicate, what is sharded over them.

    data group     the data-parallel ranks of this rank's pipeline stage and slice: most flat buffers
    whole group    the data-parallel and tensor ranks of a stage: what no tensor rank cuts
    copied group   the data-parallel ranks and some tensor ranks: slices that these have in common
    shared group   the data-parallel ranks of several stages: weights that these stages tie; where they are
                   cut, the ranks with the same slice

A tied weight needs no code of its own: its flat buffer is reduced and updated over a larger group. At stage
3 it stays whole, as at stage 2: gathers of one stage would wait for another stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from torch import nn

from ...compression.reducer import GradientReducer
from ...ops.comm.collectives import Collectives
from ...utils.errors import UsageError
from .policy import Policy


@final
@dataclass(frozen=True, eq=False)
class FlatGroup:
    """The ranks of a flat buffer.

    number: 0 for the data group; the others by one order on all ranks.
    is_shared: ranks of several pipeline stages hold the buffer.
    """

    collectives: Collectives
    reducer: GradientReducer
    policy: Policy
    number: int = 0
    is_shared: bool = False


@final
@dataclass(frozen=True, eq=False)
class FlatGroups:
    """The groups of one engine.

    Attributes:
        world: all ranks: norms, losses, errors.
        data: the group of every parameter that is not in `shared`.
        shared: id(parameter) -> its group.
        names: id(parameter) -> its name in the whole model, where the module of this rank has another one.
        sliced: id of every parameter of which tensor ranks have different slices.
    """

    world: Collectives
    data: FlatGroup
    shared: Mapping[int, FlatGroup] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    sliced: frozenset[int] = frozenset()

    def refuse_slices(self, call: str) -> None:
        """Raises UsageError: `call` needs whole tensors, and this rank has slices."""
        if self.sliced:
            raise UsageError(
                f"{call} with tensor_parallel.tp_size > 1 is not supported yet: a rank has slices of the "
                "layers, and they are not put together again; set tensor_parallel.tp_size to 1"
            )

    def of(self, param: nn.Parameter) -> FlatGroup:
        """The group of the buffer that holds `param`."""
        return self.shared.get(id(param), self.data)

    def name_of(self, param: nn.Parameter, name: str) -> str:
        """The name of `param` in the whole model; `name` is the one in this rank's module."""
        return self.names.get(id(param), name)

    @property
    def in_several_stages(self) -> set[int]:
        """id of every parameter that several pipeline stages hold."""
        return {key for key, group in self.shared.items() if group.is_shared}

    @property
    def several(self) -> list[Collectives]:
        """The collectives of all groups of this rank, without `world`, by number."""
        found = {group.number: group for group in [self.data, *self.shared.values()]}
        return [found[number].collectives for number in sorted(found)]


__all__ = ["FlatGroup", "FlatGroups"]
