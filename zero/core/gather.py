"""Stage 3: which units are gathered, which are started early, and when they are dropped.

A unit is gathered when it is used. The order of the previous pass only decides which unit is started early.
The hooks (hooks.py) say what is used, and the backward pass when it begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch.utils.hooks import RemovableHandle

from ...ops.comm.collectives import Collectives
from .param_bucket import LiveElements
from .unit import Unit

NOTHING = -1


@final
class UnevenGathers:
    """The requests of one rank, and its part in those of others. All ranks have one at the same time."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        """collectives: of all ranks that hold a part of some unit, among them those of each flat buffer."""
        self._units = list(units)
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._collectives = collectives

    def gather(self, unit: Unit) -> None:
        """Gather `unit`; until then, take part in the gathers of other ranks."""
        for flat in unit.params:
            flat.wait()
        if unit.is_unsharded:
            return
        while self._round(self._numbers[id(unit)]) != self._numbers[id(unit)]:
            pass

    def finish(self) -> None:
        """Take part in the gathers of other ranks until every rank is done."""
        while self._round(NOTHING) != NOTHING:
            pass

    def _round(self, requested: int) -> int:
        """Gather one unit; returns its number or NOTHING. Sends 8 bytes to each rank, a shard to requesters."""
        request = torch.tensor([requested], dtype=torch.int64, device=self._collectives.device)
        table = self._collectives.gather_small(request, what="unequal forwards").view(-1).tolist()
        requests = [number for number in table if number != NOTHING]
        if not requests:
            return NOTHING
        chosen: int = min(requests)
        members = self._collectives.members
        wanted = {members[rank] for rank, number in enumerate(table) if number == chosen}
        for flat in self._units[chosen].params:
            if flat.may_be_resharded:  # ranks of slices are some of those that ask
                ranks = enumerate(flat.collectives.members)
                flat.serve([rank for rank, member in ranks if member in wanted])
        return chosen


def num_kept(numels: Sequence[int], reuse_distance: int, max_live_numel: int) -> int:
    """How many of the last units: those used last in forward are used first in backward.

    Args:
        numels: elements of the units, in the order of forward.
        reuse_distance: at most so many elements may be used between the two uses of a unit.
        max_live_numel: no more units are kept than have so many elements.

    >>> num_kept([10, 10, 10, 10], 25, 1000)
    2
    """
    kept_numel = num_units = 0
    for numel in reversed(numels):
        if 2 * kept_numel > reuse_distance or kept_numel + numel > max_live_numel:
            break
        kept_numel += numel
        num_units += 1
    return num_units


@final
class UseOrder:
    """Units in the order of their first use in one forward, and the place of each."""

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self.units = list(units)
        self._places = {unit: place for place, unit in enumerate(self.units)}

    def add(self, unit: Unit) -> None:
        """The forward uses `unit`, possibly again."""
        if unit not in self._places:
            self._places[unit] = len(self.units)
            self.units.append(unit)

    def after(self, unit: Unit) -> Unit | None:
        """The unit that is used after `unit`; None: it is the last, or is not used."""
        place = self._places.get(unit, len(self.units)) + 1
        return self.units[place] if place < len(self.units) else None

    def before(self, unit: Unit) -> Unit | None:
        """The unit that is used before `unit`; None: it is the first, or is not used."""
        place = self._places.get(unit, 0)
        return self.units[place - 1] if place else None

    def with_left_out(self, left_out: frozenset[Unit], previous: UseOrder) -> UseOrder:
        """This order, with the units that its forward left out at their places in the `previous` one."""
        behind: dict[Unit | None, list[Unit]] = {}  # a used unit -> those left out that follow it
        used: Unit | None = None
        for unit in previous.units:
            if unit in self._places:
                used = unit
            elif unit in left_out:
                behind.setdefault(used, []).append(unit)
        units = behind.get(None, [])
        for unit in self.units:
            units += [unit, *behind.get(unit, [])]
        return UseOrder(units)


@final
class Gatherer:
    """Owns what is gathered. The owner of a backward pass calls `begin_backward` and `end_backward`."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        prefetch_numel: int,
        max_live_numel: int,
        live: LiveElements,
        collectives: Collectives,
    ) -> None:
        """
        Args:
            units: the root is the last one.
            prefetch_numel: units of at most this many elements are gathered ahead of their use.
            max_live_numel: no unit is gathered ahead if more elements than this would be in memory.
            live: counts those of all units.
            collectives: the ranks that gather some unit together.
        """
        # the storages that are freed and allocated again
        self.dropped_storages = frozenset(
            flat.raw.untyped_storage()._cdata
            for unit in units
            for flat in unit.params
            if flat.may_be_resharded
        )
        self.in_backward = False
        self.num_backwards = 0  # how many of the engine have begun
        self.running: list[Unit] = []  # units that are being called, the innermost last
        self._units = list(units)
        self._collectives = collectives
        self._uneven: UnevenGathers | None = None
        self._prefetch_numel = prefetch_numel
        self._max_live_numel = max_live_numel
        self._live = live
        self._order = UseOrder()  # of this pass
        self._previous = UseOrder()  # of the previous pass, with what that left out
        self._expected = UseOrder()  # the same without what this pass leaves out
        self._left_out: frozenset[Unit] = frozenset()  # of the last forward that began
        self._leaves_out: frozenset[Unit] = frozenset()  # of the next one
        # not started here, while other ranks may have started them
        self._put_off: set[Unit] = set()
        self._keeps_all = False  # nothing is dropped: a graph of create_graph needs full parameters
        self._leaf_handles: list[RemovableHandle] = []  # on tensors that outlive their step
        self.holds_all = False  # inside `holding_all`
        self.refuses_backward = False  # inside a rollout
        self._most_kept_bytes: int | None = None  # of `keep_used`; None: nothing is kept
        self._kept: set[Unit] = set()
        self._kept_bytes = 0

    # -- passes -----------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        previous = self._order
        if self._left_out:
            previous = previous.with_left_out(self._left_out, self._previous)
        self._previous, self._order = previous, UseOrder()
        self._left_out = self._leaves_out
        self._expected = previous
        if self._left_out:
            self._expected = UseOrder(unit for unit in previous.units if unit not in self._left_out)
        self.clear_calls()

    def leave_out(self, units: frozenset[Unit]) -> None:
        """Forwards that begin from now on do not use `units`, so none of them is gathered ahead."""
        self._leaves_out = units

    def begin_backward(self, *, is_own: bool) -> None:
        """A backward pass runs through the model from now on.

        is_own: it leaves gradients in parameters; False for torch.autograd.grad.
        """
        self.in_backward = True
        self.num_backwards += is_own

    def end_backward(self) -> None:
        """A backward is over. With retain_graph another one may run over the same graph."""
        self.in_backward = False
        for unit in self._units:
            unit.num_recomputes = 0
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles = []
        self.drop_all()

    def remove_after_backward(self, handle: RemovableHandle) -> None:
        """Remove a hook on a tensor that outlives its step, when the next backward is over."""
        self._leaf_handles.append(handle)

    def begin_update(self) -> None:
        """Parameters are about to change: no existing graph needs a unit any more."""
        self._keeps_all = False
        self.end_keeping()
        for unit in self._units:
            unit.is_kept_until_update = False
        self.end_backward()

    def abandon(self) -> None:
        """Drop all units, without a wait: the group has failed. The next forward begins as the first one."""
        for unit in self._units:
            unit.is_held = False
            for flat in unit.params:
                flat.abandon()
        self._put_off.clear()
        self._uneven = None
        self._order, self._previous, self._expected = UseOrder(), UseOrder(), UseOrder()
        self.begin_update()

    @property
    def order(self) -> Sequence[Unit]:
        """Units in the order of the last forward: a new list for each forward."""
        return self._order.units

    # -- one unit ---------------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """Its parameters may be used on return."""
        if self._uneven is not None:
            self._uneven.gather(unit)
        else:
            unit.unshard()
        self._put_off.discard(unit)

    def drop(self, unit: Unit) -> None:
        """Free its full parameters, if nothing needs them."""
        if not (self._keeps_all or self._stays(unit)):
            unit.reshard()

    def note_use(self, unit: Unit) -> None:
        """The running forward uses `unit`."""
        self._order.add(unit)

    def begin_call(self, unit: Unit) -> None:
        """A call of `unit` begins."""
        unit.is_running = True
        self.running.append(unit)
        for used in unit.used_units:
            self.gather(used)
            used.num_running_users += 1

    def end_call(self, unit: Unit) -> None:
        """A call of `unit` has returned."""
        unit.is_running = False
        if self.running and self.running[-1] is unit:
            self.running.pop()
        elif unit in self.running:  # a call inside has raised
            self.running.remove(unit)
        for used in unit.used_units:
            used.num_running_users = max(used.num_running_users - 1, 0)
            if not self.in_backward and not used.is_running:
                self.drop(used)

    def clear_calls(self) -> None:
        """Reset the state of all calls."""
        self.running = []
        for unit in self._units:
            unit.clear_calls()

    def register_use(self, used: Unit, user: Unit, *, is_found: bool = False) -> None:
        """Gather `used` for calls of `user` as well: for the running one and for all later ones.

        is_found: a forward has found that; user code has not declared it.
        """
        if used is user or used in user.used_units:
            return
        user.used_units[used] = is_found
        used.is_used_by_others = True
        self.gather(used)
        if user in self.running:
            used.num_running_users += 1

    def forget_found_uses(self) -> None:
        """Forwards find again which units are used by others. Between two steps."""
        for unit in self._units:
            unit.used_units = {used: found for used, found in unit.used_units.items() if not found}
        declared = {used for unit in self._units for used in unit.used_units}
        for unit in self._units:
            unit.is_used_by_others = unit in declared

    def after_grads(self, unit: Unit) -> None:
        """Drop `unit`: all its gradients have arrived, and backward has finished all its calls.

        Complete gradients do not show the end of its calls in two cases: the unit has frozen parameters, or
        reentrant checkpoints call it more than once in this backward. Then it is not dropped here.
        """
        if not unit.has_frozen and not unit.is_root and unit.num_recomputes < 2:
            self.drop(unit)

    # -- all units --------------------------------------------------------------------------------------

    def keep_all(self) -> None:
        """Drop nothing until the next update."""
        self._keeps_all = True

    def drop_all(self) -> None:
        """End the gathers in flight and drop every unit that may be dropped."""
        self.clear_calls()
        for unit in self._units:  # one that was not used after all: those that have started it wait
            if unit in self._put_off:
                unit.start_unshard()
        self._put_off.clear()
        for unit in self._units:
            self.drop(unit)

    @contextmanager
    def holding_all(self) -> Iterator[None]:
        """Inside, every unit is gathered, so no forward sends anything. **Collective** at the begin alone.

        Each unit is gathered once, into its own buffer, with the next one on its way.
        """
        dropped = [unit for unit in self._units if not unit.is_unsharded]
        try:
            for number, unit in enumerate(dropped):
                for following in dropped[number : number + 2]:
                    following.hold()
                unit.unshard()
                self._put_off.discard(unit)
            self.holds_all = True
            yield
        finally:
            self.holds_all = self.refuses_backward = False
            for unit in dropped:
                if unit.is_held:
                    unit.release()

    @contextmanager
    def keeping_order(self) -> Iterator[None]:
        """Forwards inside do not change what later ones start early."""
        orders = self._order, self._previous, self._expected
        try:
            yield
        finally:
            self._order, self._previous, self._expected = orders

    def keep_used(self, most_bytes: int) -> None:
        """From now on units stay gathered after their use, while these take at most so many bytes.

        most_bytes: the same on all ranks, which run the same forwards until `end_keeping`.
        """
        self._most_kept_bytes = most_bytes

    def end_keeping(self) -> None:
        """Undo `keep_used`, and drop what it has kept. Not collective."""
        if self._most_kept_bytes is not None:
            self._most_kept_bytes = None
            kept, self._kept, self._kept_bytes = self._kept, set(), 0
            for unit in kept:
                self.drop(unit)

    @property
    def keeps_used(self) -> bool:
        """`keep_used` was called, and `end_keeping` was not."""
        return self._most_kept_bytes is not None

    def _stays(self, unit: Unit) -> bool:
        """`unit` is one of those that `keep_used` keeps, or becomes one of them."""
        if self._most_kept_bytes is None or self._uneven is not None:
            return False
        if unit not in self._kept:
            kept_bytes = self._kept_bytes + unit.full_bytes
            if not unit.is_unsharded or kept_bytes > self._most_kept_bytes:
                return False
            self._kept.add(unit)
            self._kept_bytes = kept_bytes
        return True

    def begin_uneven(self) -> None:
        """From now on ranks may run unequal numbers of forwards. **Collective**, as `end_uneven`."""
        self.end_keeping()
        self.drop_all()
        self._uneven = UnevenGathers(self._units, self._collectives)

    def end_uneven(self) -> None:
        """Serve the other ranks until every rank is done."""
        rounds, self._uneven = self._uneven, None
        if rounds is not None:
            rounds.finish()
        self.drop_all()

    @property
    def is_uneven(self) -> bool:
        """`begin_uneven` was called, and `end_uneven` was not."""
        return self._uneven is not None

    # -- ahead of their use -----------------------------------------------------------------------------

    def start_next_of_forward(self, unit: Unit) -> None:
        """Start to gather the unit that followed `unit` in the previous forward."""
        self._start_ahead(self._expected.after(unit))

    def start_next_of_backward(self, unit: Unit) -> None:
        """Start to gather the unit that came before `unit` in this forward."""
        self._start_ahead(self._order.before(unit))

    def _start_ahead(self, unit: Unit | None) -> None:
        """Start to gather `unit`, if the limits allow it."""
        if unit is None or self._uneven is not None or unit.most_numel > self._prefetch_numel:
            return
        if self._live.numel + unit.most_numel > self._max_live_numel:
            return
        if unit.may_start:
            unit.start_unshard()
        else:
            self._put_off.add(unit)


__all__ = ["Gatherer", "UnevenGathers", "UseOrder", "num_kept"]
