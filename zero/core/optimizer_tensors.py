"""The tensors of an optimizer: which range of which master each one is, and which states have to stay.

Parameters that were frozen after `initialize` lie in flat ranges beside trainable parameters, and an optimizer
updates whole ranges. So their values and states are saved before the step and restored after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from torch import Tensor

from ...ops.coded import BLOCK_NUMEL, has_elements, is_coded, place_of
from ...ops.flat import flattened, is_channels_last, shaped
from ...ops.optim.shard_optimizer import Item, PartTensors, ShardOptimizer, World
from ...utils.errors import UsageError
from .master import Master


@final
class OptimizerTensors:
    """Makes the tensors for an optimizer's groups, and remembers their places."""

    def __init__(self, masters: Sequence[Master], world: World) -> None:
        self._world = world
        self._items: dict[int, list[tuple[Master, Item]]] = {}  # by group
        for master in masters:
            for item in master.items:
                self._items.setdefault(item.group, []).append((master, item))
        # id of an optimizer's tensor -> the tensor, its master, its first element in the master
        self._found: dict[int, tuple[Tensor, Master, int]] = {}
        self._sorted: dict[Master, list[tuple[Tensor, int]]] = {}  # the tensors of `_sorted_of`
        self._sorted_of: ShardOptimizer | None = None

    def tensors_of(self, group: int) -> list[Tensor]:
        """The tensors of the optimizer's group `group`: one 1-D tensor for each flat buffer."""
        return [
            self._add(item.master, master, item.start)
            for master, item in self._items.get(group, [])
        ]

    def whole_params(self, group: int) -> list[Tensor]:
        """The same as tensors of the parameters' own shapes, for optimizers that use shapes.

        Raises:
            UsageError: the optimizer state is sharded, so no rank has full parameters.
        """
        if self._world.is_sharded:
            raise UsageError("a shard does not keep the shapes of its parameters")
        return [
            self._add_view(
                shaped(item.master[part.start : part.stop], part.shape, part.channels_last),
                master,
                item.start + part.start,
            )
            for master, item in self._items.get(group, [])
            for part in item.parts
        ]

    def of(self, tensor: Tensor) -> tuple[Master, int] | None:
        """The master that contains an optimizer's `tensor`, and the tensor's first element in it; or None."""
        _, master, start = self._found.get(id(tensor), (None, None, 0))
        return None if master is None or not tensor.numel() else (master, start)

    def tensors_in(self, master: Master, optimizer: ShardOptimizer) -> Sequence[tuple[Tensor, int]]:
        """The tensors of `optimizer` that are ranges of `master`, and their first elements in it."""
        if self._sorted_of is not optimizer:  # its groups stay as they are: steps refuse others
            self._sorted, self._sorted_of = {}, optimizer
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    place = self.of(tensor)
                    if place is not None:
                        self._sorted.setdefault(place[0], []).append((tensor, place[1]))
        return self._sorted.get(master, [])

    def _add_view(self, tensor: Tensor, master: Master, start: int) -> Tensor:
        master.state_storage.add_view(tensor, start)
        return self._add(tensor, master, start)

    def _add(self, tensor: Tensor, master: Master, start: int) -> Tensor:
        self._found[id(tensor)] = (tensor, master, start)
        self._sorted_of = None
        return tensor


Range = tuple[int, int]


def clip(ranges: Iterable[Range], start: int, numel: int) -> list[Range]:
    """The parts of `ranges` in [start, start + numel), relative to `start`."""
    clipped = [(max(low - start, 0), min(high - start, numel)) for low, high in ranges]
    return [(low, high) for low, high in clipped if low < high]


@final
class FrozenValues:
    """Saved values that an update must not change. `restore` writes them back."""

    def __init__(self) -> None:
        self._values: list[tuple[Tensor, Tensor]] = []
        # ranges of tensors that have no states yet: the update makes them
        self._first: list[tuple[ShardOptimizer, Tensor, Sequence[Range]]] = []

    def keep(self, tensor: Tensor, ranges: Sequence[Range]) -> None:
        """Save these elements, in the order of memory, of a tensor that is row-major or channels_last."""
        flat = flattened(tensor.detach(), is_channels_last(tensor))
        self._values += [(flat[low:high], flat[low:high].clone()) for low, high in ranges]

    def keep_state(self, state: dict[str, Any], numel: int, ranges: Sequence[Range]) -> None:
        """Save the states of a range of `numel` elements: per element, or all if all of it is frozen.

        The step count is not saved: there is one for a range, and it must not depend on the ranges' bounds.
        """
        is_whole = sum(high - low for low, high in ranges) == numel
        for key, value in state.items():
            if key == "step" or not isinstance(value, Tensor):
                continue
            if not (value.is_contiguous() or is_channels_last(value)):
                continue
            if has_elements(value, numel):
                self.keep(value.view(-1) if is_coded(value) else value, _places(value, ranges))
            elif is_whole:
                self.keep(value, [(0, value.numel())])

    def keep_states(
        self,
        optimizer: ShardOptimizer,
        master: Master,
        tensors: Iterable[tuple[Tensor, int]],
        ranges: Sequence[Range],
    ) -> None:
        """Save the states of what is frozen.

        tensors: those of `optimizer` in `master`, and their first elements.
        """
        for item in master.items:
            inside = clip(ranges, item.start, item.master.numel())
            if inside:
                optimizer.make_states(item)
                self._keep_parts(optimizer.states.get(item.master, {}), item, inside)
        for tensor, offset in tensors:
            inside = clip(ranges, offset, tensor.numel())
            state = optimizer.states.get(tensor, {}) if inside else {}
            if state:
                self.keep_state(state, tensor.numel(), inside)
            elif inside:
                self._first.append((optimizer, tensor, inside))

    def _keep_parts(self, state: dict[str, Any], item: Item, ranges: Sequence[Range]) -> None:
        """Save the states that belong to frozen parameters."""
        frozen = [
            part.name
            for part in item.parts
            if any(low <= part.start < high for low, high in ranges)
        ]
        for value in state.values():
            for name in frozen if isinstance(value, PartTensors) else ():
                if name in value:
                    self._values.append((value[name], value[name].clone()))

    def restore(self) -> None:
        """Write the saved values back. Without gradients."""
        for target, value in self._values:
            target.copy_(value)
        for optimizer, tensor, ranges in self._first:
            _reset_first_states(optimizer, tensor, ranges)


def _reset_first_states(optimizer: ShardOptimizer, tensor: Tensor, ranges: Sequence[Range]) -> None:
    """Set the states of what is frozen to zero, after the first step has made them with its gradient."""
    for key, value in optimizer.states.get(tensor, {}).items():
        if key != "step" and isinstance(value, Tensor) and has_elements(value, tensor.numel()):
            flat = value.view(-1) if is_coded(value) else flattened(value, is_channels_last(value))
            for low, high in _places(value, ranges):
                flat[low:high] = 0


def _places(state: Tensor, ranges: Sequence[Range]) -> list[Range]:
    """Where elements are in the memory of `state`. Of a row the rest is the padding of its parameter."""
    last = BLOCK_NUMEL - 1 if is_coded(state) else 0
    return [(place_of(state, low), place_of(state, high + last)) for low, high in ranges]


def states_of_others(
    optimizer: ShardOptimizer, in_master: Sequence[Tensor], empty: Tensor, group: int
) -> dict[str, Any] | None:
    """States for a parameter of hyperparameter group `group`, without elements; None where there are none.

    First those of the same group: an optimizer may keep other states for other groups.

    Args:
        in_master: the optimizer's tensors in the parameter's master, whose states are returned as they are.
        empty: a state without elements.
    """
    states = optimizer.states
    alike = {id(tensor) for tensor in optimizer.param_groups[group]["params"]}
    order = sorted([*in_master, *states], key=lambda tensor: id(tensor) not in alike)
    source = next((tensor for tensor in order if states.get(tensor)), None)
    if source is None:
        return None
    if id(source) not in alike:
        keys = optimizer.state_keys(optimizer.param_groups[group])
        if keys is not None:
            return dict.fromkeys(keys, empty)
    if any(tensor is source for tensor in in_master):
        state: dict[str, Any] = states[source]
        return state
    return {
        key: empty if isinstance(value, Tensor) and value.dim() else value
        for key, value in states[source].items()
    }


def copies_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hyperparameters of now: a schedule may change them, a rate that is a tensor in place."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in groups
    ]


__all__ = ["FrozenValues", "OptimizerTensors", "Range", "clip", "states_of_others"]
