"""The group of each flat buffer: the ranks that hold it, how they communicate, what is sharded over them.

    data group     the data-parallel ranks of this rank's pipeline stage and slice: most flat buffers
    whole group    the data-parallel and tensor ranks of a stage: what no tensor rank cuts
                   with replicas (MiCS): a block of these ranks, each of which has a copy in every other block
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

import torch
from torch import nn

from ...compression.scheme import Buffer, CommScheme
from ...ops.boxes import Box
from ...ops.coded import BLOCK_NUMEL
from ...ops.comm.collectives import Collectives
from ...ops.comm.mesh_groups import Levels
from ...ops.flat import ALIGN_NUMEL, numel_of
from ...ops.mesh import Mesh
from .layout import FlatLayout
from .slices import Slices

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Policy:
    """What is sharded, and the dtypes of what a flat buffer holds.

    shards_optimizer, shards_grads, shards_params: the stage (Rajbhandari et al., ZeRO, 2020, section 5).
    compute: dtype that floating parameters are cast to; None leaves them as they are.
    accumulate: dtype of gradient sums; None is that of the master weights.
    communicate: dtype in which gradients are sent; None is the parameter's own.
    masters: dtype of the master weights of 16-bit parameters; None is fp32. Others are their own masters.
    states: dtype of their optimizer states, and of those of fp32 training; None is that of the masters.
        int8: see ops/coded.py.
    splits_masters: the fp32 masters of bf16 parameters beside them are these and 16 bits more, and they are
        rounded as such everywhere: see ops/halves.py.
    rounding_seed: of stochastic rounding of masters and states; None: to nearest.
    holds_grads: several micro-batches are summed on the rank before the reduction.
    num_parts: buffers may be divided over other numbers of ranks later: a multiple of all of them. 0: they are
        not.
    """

    shards_optimizer: bool
    shards_grads: bool
    shards_params: bool
    compute: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    communicate: torch.dtype | None = None
    masters: torch.dtype | None = None
    states: torch.dtype | None = None
    splits_masters: bool = False
    rounding_seed: int | None = None
    holds_grads: bool = False
    num_parts: int = 0

    @classmethod
    def of_stage(
        cls,
        stage: int,
        *,
        world_size: int,
        accumulation_steps: int = 1,
        offloads: bool = False,
        offloads_params: bool = False,
        compute: torch.dtype | None = None,
        accumulate: torch.dtype | None = None,
        communicate: torch.dtype | None = None,
    ) -> Policy:
        """The policy of a ZeRO stage. With one rank nothing is sharded.

        offloads: the optimizer runs on the host. Then also one rank frees gradients after each backward.
        offloads_params: shards of stage 3 are on the host. Then also one rank drops its parameters.
        """
        effective = stage if world_size > 1 or offloads_params else 0
        frees = effective >= 2 or (offloads and world_size == 1)
        return cls(
            shards_optimizer=effective >= 1 and world_size > 1,
            shards_grads=frees,
            shards_params=effective >= 3,
            compute=compute,
            accumulate=accumulate,
            communicate=communicate,
            holds_grads=not frees and accumulation_steps > 1,
        )

    def param_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype a parameter of `original` dtype computes in."""
        if self.compute is not None and original.is_floating_point and original.itemsize > 1:
            return self.compute
        return original

    def _stays_wide(self, param_dtype: torch.dtype) -> bool:
        """Such a parameter is one of those that stay fp32 in 16-bit training: so do its gradients."""
        return self.compute in LOW_PRECISION and param_dtype == torch.float32

    def sum_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter are summed."""
        if self._stays_wide(param_dtype):
            return param_dtype
        return self.accumulate or self.master_dtype(param_dtype)

    def master_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the copy that the optimizer updates."""
        if param_dtype not in LOW_PRECISION:
            return param_dtype
        return self.masters or torch.float32

    def rounds_away(self, param_dtype: torch.dtype) -> bool:
        """Parameters of this dtype are the upper halves of their masters, or are rounded as if they were."""
        return self.splits_masters and param_dtype == torch.bfloat16

    def master_bytes(self, param_dtype: torch.dtype, *, is_beside: bool) -> int:
        """Bytes of the master of a parameter. is_beside: both are on the device."""
        if is_beside and self.rounds_away(param_dtype):
            return 2
        master = self.master_dtype(param_dtype)
        return 0 if master == param_dtype else master.itemsize

    def state_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """The dtype of optimizer states that have an element for each of a parameter.

        Parameters that stay fp32 in 16-bit training have fp32 states.
        """
        is_narrow = param_dtype in LOW_PRECISION
        takes_states = is_narrow or (self.compute is None and param_dtype == torch.float32)
        return self.states if self.states and takes_states else self.master_dtype(param_dtype)

    @property
    def align_numel(self) -> int:
        """Parameters and shards begin at multiples of so many elements."""
        return BLOCK_NUMEL if self.states == torch.int8 else ALIGN_NUMEL

    def sent_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter are sent."""
        return param_dtype if self._stays_wide(param_dtype) else self.communicate or param_dtype


@final
@dataclass(frozen=True, eq=False)
class FlatGroup:
    """The ranks of a flat buffer.

    collectives: of the ranks that it is sharded over.
    scheme: how gradients and parameters are sent.
    number: 0 for the data group; the others by one order on all ranks.
    is_shared: ranks of several pipeline stages hold the buffer.
    levels: `collectives` is a block of these ranks, and the other blocks have replicas; None: there are none.
    """

    collectives: Collectives
    scheme: CommScheme
    policy: Policy
    number: int = 0
    is_shared: bool = False
    levels: Levels | None = None

    @property
    def everyone(self) -> Collectives:
        """All ranks that hold the buffer, or a part of it."""
        return self.collectives if self.levels is None else self.levels.whole

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank's replica of the buffer, and how many there are."""
        if self.levels is None:
            return 0, 1
        return self.levels.across.rank, self.levels.across.world_size

    @property
    def is_first_replica(self) -> bool:
        """Each element counts once: on this rank, if it holds it."""
        return self.replica[0] == 0


@final
@dataclass(eq=False)
class FlatGroups:
    """The groups of one engine. Only `mesh` changes, where the ranks of `world` do.

    Attributes:
        world: all ranks: norms, losses, errors.
        data: the group of every parameter that is not in `shared`.
        mesh: how the ranks of `world` are arranged.
        shared: id(parameter) -> its group.
        names: id(parameter) -> its name in the whole model, where the module of this rank has another one.
        slices: id(parameter) -> its slices, for every parameter that tensor ranks have cut.
        casts: id(parameter) -> the dtype to which its only reader casts it; of parameters of the data group.
            They have flat buffers of their own, which may be gathered in that dtype.
        fp32: id of the parameters that stay fp32 where others compute in 16 bits.
    """

    world: Collectives
    data: FlatGroup
    mesh: Mesh
    shared: Mapping[int, FlatGroup] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    slices: Mapping[int, Slices] = field(default_factory=dict)
    casts: Mapping[int, torch.dtype] = field(default_factory=dict)
    fp32: frozenset[int] = frozenset()

    @property
    def is_first(self) -> bool:
        """This is the first rank of its pipeline stage."""
        place = self.mesh.coordinates(self.world.rank)
        return not any(place[1:])

    def box_of(self, param: nn.Parameter) -> Box | None:
        """The slice of `param` that this rank has; None: it is whole."""
        found = self.slices.get(id(param))
        return None if found is None else found.box

    def all_shapes_of(self, param: nn.Parameter) -> list[tuple[int, ...]]:
        """The slices that ranks have of `param`, by their rank; of a whole parameter one shape."""
        found = self.slices.get(id(param))
        return [tuple(param.shape)] if found is None else [box.shape for box in found.boxes]

    def shapes_of(self, param: nn.Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The smallest and the largest slice that a rank has of `param`: equal on all ranks.

        What decides the structure that ranks share is taken from these, as slices may be uneven, or empty.
        """
        shapes = sorted(self.all_shapes_of(param), key=numel_of)
        return shapes[0], shapes[-1]

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """The dtype that `param` computes in."""
        return (
            torch.float32 if id(param) in self.fp32 else self.data.policy.param_dtype(param.dtype)
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
    def holders(self) -> list[Collectives]:
        """The ranks of each group, ordered by group number."""
        found = {group.number: group for group in [self.data, *self.shared.values()]}
        return [found[number].everyone for number in sorted(found)]

    @property
    def opened(self) -> list[Collectives]:
        """`several`, and the blocks of those that have replicas."""
        levels = self.data.levels
        return self.holders + ([] if levels is None else [levels.inside, levels.across])


def buffer_of(
    layout: FlatLayout,
    index: int,
    dtype: torch.dtype,
    group: FlatGroup,
    *,
    trains: bool = True,
    cast: torch.dtype | None = None,
) -> Buffer:
    """What the scheme of `group` know of flat buffer `index`, whose parameters have this dtype."""
    policy = group.policy
    return Buffer(
        index,
        layout.numel,
        tuple(layout.gaps()),
        dtype,
        is_sharded=policy.shards_optimizer,
        is_gathered=policy.shards_params,
        trains=trains,
        cast=cast,
        slots=tuple((slot.offset, slot.stop) for slot in layout.slots),
    )


__all__ = ["FlatGroup", "FlatGroups", "buffer_of"]
