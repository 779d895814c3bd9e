"""The base class of optimizers for flat shards: they update contiguous 1-D tensors made of parameters' parts.

A torch optimizer whose arithmetic is per element (Adam, SGD, ...) gives the same result on a shard as on
whole parameters. One that uses whole tensors (LAMB's trust ratio, Muon's orthogonalisation) needs the
position of its elements in the parameters, and communication with the other ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ..coded import is_coded, new_codes
from ..comm.collectives import Collectives
from ..halves import Halves
from ..libraries import is_loaded, optimizer_library
from ..rounding import draw_rows
from .scale import Scale

ADDED_GROUP = (
    "optimizer.add_param_group after xds.initialize: the engine has fixed which parameters are trained. Give "
    "all of them to initialize(model_parameters=...), each in its group; a part that trains later starts with "
    "requires_grad_(False) after initialize"
)

VECTOR_NUMEL = (
    16  # of fp32 in the widest instruction; kernels for several threads cut at multiples of it
)


@dataclass(frozen=True)
class ParamPart:
    """Elements [start, stop) of a range that belong to one parameter of hyperparameter group `group`.

    param_start: their start in the flattened parameter. shape: of the whole parameter.
    channels_last: the order of its elements; else they are row-major.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    start: int
    stop: int
    param_start: int
    channels_last: bool = False


@dataclass(frozen=True)
class Flat:
    """One flat buffer, the same on every rank of its group: its number, its length, all parameters in it.

    is_sharded: items are this rank's shards; else every rank of the group holds and updates all elements.
    dtype: of the masters.
    """

    index: int
    numel: int
    parts: tuple[ParamPart, ...]
    collectives: Collectives
    is_sharded: bool
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class World:
    """The context for an optimizer that uses whole parameters, in addition to its own items.

    collectives: of all ranks of the engine.
    flats: every flat buffer of this rank, those of one group together, the same list on every rank of a group.
    """

    collectives: Collectives
    flats: tuple[Flat, ...]

    @property
    def is_sharded(self) -> bool:
        """Some flat buffer is sharded."""
        return any(flat.is_sharded for flat in self.flats)

    @property
    def is_alone(self) -> bool:
        """No other rank holds a part of these buffers."""
        return all(flat.collectives.world_size == 1 for flat in self.flats)

    def flat_of(self, item: Item) -> Flat:
        """The flat buffer that `item` is in."""
        return self._by_index[item.flat]

    @cached_property
    def _by_index(self) -> dict[int, Flat]:
        return {flat.index: flat for flat in self.flats}


@dataclass(frozen=True, eq=False)
class Item:
    """One contiguous range to update: one hyperparameter group's share of one flat buffer.

    master: [n] the master weights that the optimizer updates, and the key of its state.
    group: index into the optimizer's param_groups. parts: the parameters in it, in order.
    flat: number of its flat buffer; start: its start in this rank's part of that buffer.
    state_dtype: of the optimizer's states; int8: those of ops/coded.py.
    rounds_away: bf16 values of the master are rounded as `upper_half` of ops/rounding.py; the optimizer
        `rounds_masters`.
    rounding_seed: of stochastic rounding, for what has fewer bits than fp32; None: it is rounded to nearest.
    """

    master: Tensor
    group: int
    parts: tuple[ParamPart, ...]
    flat: int
    start: int
    state_dtype: torch.dtype
    rounding_seed: int | None = None
    rounds_away: bool = False

    @cached_property
    def draws(self) -> Tensor | None:
        """The keys of its random numbers, see ops/rounding.py; None: it is rounded to nearest."""
        widths = self.master.dtype.itemsize, self.state_dtype.itemsize
        if self.rounding_seed is None or min(widths) > 2:
            return None
        runs = [(part.start, part.stop, part.param_start, part.name) for part in self.parts]
        return draw_rows(runs, self.rounding_seed).to(self.master.device)

    def new_state(self, *, of_squares: bool = False) -> Tensor:
        """A state of zeros with an element for each of the master: [n], or rows of 8 bits.

        of_squares: no value is below 0.
        """
        if self.state_dtype == torch.int8:
            return new_codes(self.master.numel(), self.master.device, of_squares=of_squares)
        return torch.zeros_like(self.master, dtype=self.state_dtype)

    @cached_property
    def runs(self) -> tuple[slice, ...]:
        """Ranges with whole parameters, as few as give the bits of one call of a kernel for each parameter.

        torch's kernels for CPUs round the last elements of a tensor differently, those after a multiple of
        `VECTOR_NUMEL`. So a parameter with such elements ends a range. Elements between parameters are zeros.
        """
        found: list[slice] = []
        is_open = False
        for part in self.parts:
            start = found.pop().start if is_open else part.start
            found.append(slice(start, part.stop))
            is_open = part.stop % VECTOR_NUMEL == 0 and part.start % VECTOR_NUMEL == 0
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Old:
    """The values before a step of an item, which are not changed: its master [n], and its states by key."""

    master: Tensor
    states: dict[str, Tensor]

    def copy_to(self, master: Tensor, state: dict[str, Any]) -> None:
        """Copy them to the tensors that the step changes."""
        master.copy_(self.master)
        for key, value in self.states.items():
            state[key].copy_(value)


@dataclass(frozen=True, eq=False)
class Update:
    """The input of one step for an item: `grad` [n] (may be overwritten), `out` [n] or None.

    `out` receives the new values in the compute dtype. None: forward uses the master weights themselves.
    group: the hyperparameters of this step. The update may run later, when a schedule has changed them.
    has_old: `out` holds the old values and a script's changes to them; else its contents are undefined.
    old: where the values before the step are, if master and states have memory that holds nothing yet.
        The gradient is not overwritten then.
    is_counted: `count_step` has counted this step.
    halves: the master, if it has no memory of its own: the optimizer `rounds_masters`, and `out` is None.
    """

    item: Item
    grad: Tensor
    out: Tensor | None
    group: dict[str, Any]
    has_old: bool = True
    old: Old | None = None
    is_counted: bool = False
    halves: Halves | None = None

    def old_values(self, state: dict[str, Any], *keys: str) -> tuple[Tensor | None, ...]:
        """The old master and states `keys`, as the ops of kernels/ take them. New states are their own."""
        if self.old is None:
            return (None,) * (1 + len(keys))
        return (self.old.master, *(self.old.states.get(key, state.get(key)) for key in keys))

    @property
    def takes_edits(self) -> bool:
        """Values in `out` that differ from the rounded master were written by a script: use them."""
        return self.has_old and self.out is not None


@final
class PartNumbers(dict[str, float]):
    """A state of an item: a number for each parameter in it, by name. A checkpoint keeps them by parameter."""


@final
class PartTensors(dict[str, Tensor]):
    """A state of an item: for each parameter in it, by name, a tensor that all ranks with a part have."""


def tensors_of(state: dict[str, Any]) -> Iterator[Tensor]:
    """All tensors in the states of an item."""
    for value in state.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, PartTensors):
            yield from value.values()


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name by which a checkpoint knows its states: of its class, or of the class that defines them."""
    named = optimizer.kind if isinstance(optimizer, ShardOptimizer) else ""
    return named or type(optimizer).__name__


def mark_written(update: Update) -> None:
    """Increment autograd's version counters: a backward that saved the old values must raise."""
    torch.autograd.graph.increment_version(update.item.master)
    if update.halves is not None:
        torch.autograd.graph.increment_version(update.halves.high)
    if update.out is not None:
        torch.autograd.graph.increment_version(update.out)


class ShardOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimizer (param_groups, state and LR schedulers work) that the engine steps with `update`.

    `TorchShardOptimizer` in zero/core makes one of any torch optimizer.
    """

    is_elementwise = True  # False: `update` must get all items of the model in one call
    takes_edits = False  # True: `update` itself compares `out` with the masters, see `take_edits`
    counts_together = (
        False  # True: a tensor "step" that states have is counted by `count_step`, for all items
    )
    rounds_masters = (
        False  # True: masters may have 16 bits, see `Item.draws`, or be `Update.halves`
    )
    num_states = 2  # tensors of a parameter's size that it keeps for each parameter, at most
    square_states: tuple[str, ...] = ()  # keys of states that have no values below 0
    part_states: tuple[str, ...] = ()  # keys of states that are `PartNumbers`
    is_bound = False  # True: an engine steps it, and its groups are complete
    kind = ""  # the class whose states it has, see `kind_of`
    world: World  # since `bind`
    _states: defaultdict[Tensor, Any]
    _before_access: Callable[[], None] | None = None

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """As in torch. Waits for updates that run in a thread, so a script may read and write it."""
        if self._before_access is not None:
            self._before_access()
        return self.states

    @state.setter
    def state(self, states: defaultdict[Tensor, Any]) -> None:
        self._states = states

    @property
    def states(self) -> defaultdict[Tensor, Any]:
        """The same without waiting: for the engine itself."""
        return self._states

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._states = state["state"]
        others = {key: value for key, value in state.items() if key != "state"}
        torch.optim.Optimizer.__setstate__(self, others)  # that of a class of torch adds keys

    def bind(self, before_access: Callable[[], None], world: World) -> None:
        """An engine steps it from now on. `before_access` is called before a script gets `state`."""
        self.is_bound = True
        self.world = world
        self._before_access = before_access

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, until an engine uses the optimizer.

        Raises:
            UsageError: the engine has fixed which parameters are trained.
        """
        if self.is_bound:
            raise UsageError(ADDED_GROUP)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but a state keeps its dtype. torch would cast it to its parameter's, of 16 bits.

        Raises:
            UsageError: only one side has states of 8 bits; nothing is changed.
        """
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        dtypes: list[tuple[Tensor, str, Tensor, torch.dtype]] = []
        for number, tensor in zip(saved, tensors, strict=False):  # torch says if there are more
            for key, value in state_dict["state"].get(number, {}).items():
                own = self.state.get(tensor, {}).get(key)
                if not isinstance(value, Tensor):
                    continue
                own = own if isinstance(own, Tensor) else value
                if is_coded(own) != is_coded(value):
                    raise UsageError(
                        f"optimizer.load_state_dict: {key} has another optimizer.params.state_dtype, and "
                        "one of the two has 8 bits; use engine.load_checkpoint, which converts them"
                    )
                dtypes.append((tensor, key, value, value.dtype if is_coded(value) else own.dtype))
        super().load_state_dict(state_dict)
        for tensor, key, value, dtype in dtypes:
            loaded = self.states[tensor][key]
            if loaded.dtype != dtype:
                self.states[tensor][key] = value.to(loaded.device, dtype, copy=True)

    @property
    def of_script(self) -> torch.optim.Optimizer:
        """The object that the script has."""
        return self

    def hyperparameters(self) -> Any:
        """Those of now, by the group of an item."""
        return self.param_groups

    def states_changed(self) -> None:  # noqa: B027 (most keep nothing beside their states)
        """A load has replaced states. For all ranks."""

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        """The states per element of a parameter of `group`; None: those of every other parameter."""
        return None

    def part_shapes(
        self, shape: tuple[int, ...], name: str, group: int
    ) -> dict[str, tuple[int, ...]]:
        """The states that are `PartTensors`: their shapes by key, for a parameter of `shape` and `name`.

        group: the index of its hyperparameters.
        """
        return {}

    def gains_from_kernels(self, *, casts: bool) -> bool:
        """Whether native kernels would be used. casts: something has fewer bits than fp32."""
        return True

    def states_before(self, item: Item) -> dict[str, Any]:
        """The states of `item` before its first step; empty: that step makes them."""
        return {}

    def state_of(self, item: Item) -> dict[str, Any]:
        """The states of `item`, see `states_before`."""
        state: dict[str, Any] = self._states[item.master]
        if not state:
            state.update(self.states_before(item))
        return state

    def make_states(self, item: Item) -> None:
        """Make the states that the first step would make before it computes."""
        self.state_of(item)

    def initial_states(self, tensor: Tensor) -> dict[str, Any]:
        """The states of `tensor` in a new optimizer that its first step does not make."""
        return {}

    def has_scalars_beside(self, tensor: Tensor) -> bool:
        """Whether states of one element, such as a step count, are on the device of `tensor`, or on the CPU."""
        return True

    @property
    def counts_in_tensors(self) -> bool:
        """The step count is a tensor."""
        return True

    def takes_decisions(self, device: torch.device, *, casts: bool) -> bool:
        """Whether `update` can be told the scale, and whether to step, by tensors of `device`."""
        return False

    def count_step(self, items: Sequence[Item], scale: Scale) -> bool:
        """Count a step of all `items` in one launch, before their updates. False: `update` counts each."""
        if not self.counts_together:
            return False
        states, taken = [self.state_of(item) for item in items], scale.steps_taken
        steps = [state["step"] for state in states if "step" in state]
        if isinstance(taken, Tensor) and steps:
            # without alpha torch takes it for a number, and reads it on the host
            torch._foreach_add_(steps, taken, alpha=1)
        elif steps:
            torch._foreach_add_(steps, taken)
        return True

    def check_step(self) -> None:  # noqa: B027 (most can always step)
        """Before a step. For all ranks.

        Raises:
            UsageError: the script has put the optimizer in a state in which it cannot step.
        """

    @abstractmethod
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        """Update every item's master with gradient `scale * grad`, and write `out`."""

    def count_update(self) -> None:
        """After an update: torch's schedules see that a step was taken."""
        self.step()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Only counts steps for torch's LR schedulers: the engine calls `update`.

        Raises:
            UsageError: the tensors have gradients, so no engine uses this optimizer, and nothing would train.
        """
        if any(
            tensor.grad is not None for group in self.param_groups for tensor in group["params"]
        ):
            raise UsageError(
                f"{type(self).__name__}.step(): this optimizer updates the shards of an engine and cannot be "
                "stepped alone; pass it to initialize(optimizer=...) and call engine.step(), or use torch.optim"
            )


class OnePassOptimizer(ShardOptimizer, ABC):
    """An optimizer whose step on an item is one op: it unscales, updates and casts in one pass over memory."""

    takes_edits = True
    can_skip = False  # True: where `found_inf` is set the op changes nothing, at the first step too

    def takes_decisions(self, device: torch.device, *, casts: bool) -> bool:
        return self.can_skip and is_loaded(optimizer_library(device))

    @abstractmethod
    def one_pass(
        self, update: Update, state: dict[str, Any], group: dict[str, Any], scale: Scale
    ) -> None:
        """Call the op for one item. `state`: see `states_before`; `group` has the hyperparameters."""

    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        for update in updates:
            self.one_pass(update, self.state_of(update.item), update.group, scale)
            mark_written(update)
