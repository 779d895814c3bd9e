"""Stage 3: which units are gathered, which are started early, and when they are dropped.

A unit is gathered when it is used. The order of the previous pass only decides which unit is started early.
The hooks (hooks.py) say what is used, and the backward pass when it begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch.utils.hooks import RemovableHandle

from ...ops.comm.collectives import Collectives
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
class Gatherer:
    """Owns what is gathered. The owner of a backward pass calls `begin_backward` and `end_backward`."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        prefetch_numel: int,
        max_live_numel: int,
        collectives: Collectives,
    ) -> None:
        """
        Args:
            units: the root is the last one.
            prefetch_numel: units of at most this many elements are gathered ahead of their use.
            max_live_numel: no unit is gathered ahead if more elements than this would be in memory.
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
        self._order: list[Unit] = []  # units in the order of first use, this pass
        self._previous: list[Unit] = []  # the same of the previous pass, with what that left out
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

    # -- passes -----------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        self._previous, self._order = self._learned(), []
        self._left_out = self._leaves_out
        self.clear_calls()

    def leave_out(self, units: frozenset[Unit]) -> None:
        """Forwards that begin from now on do not use `units`, so none of them is gathered ahead."""
        self._leaves_out = units

    def _learned(self) -> list[Unit]:
        """The order of the last forward, with the units that it left out at their earlier places."""
        if not self._left_out:
            return self._order
        found = list(self._order)
        for at, unit in enumerate(self._previous):
            if unit in self._left_out and unit not in found:
                before = next((one for one in self._previous[at - 1 :: -1] if one in found), None)
                found.insert(0 if before is None or at == 0 else found.index(before) + 1, unit)
        return found

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

    @property
    def order(self) -> Sequence[Unit]:
        """Units in the order of the last forward: a new list for each forward."""
        return self._order

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
        if unit not in self._order:
            self._order.append(unit)

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
        if unit in self.running:
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

    def register_use(self, used: Unit, user: Unit) -> None:
        """Gather `used` for calls of `user` as well: for the running one and for all later ones."""
        if used is user or used in user.used_units:
            return
        user.used_units.append(used)
        used.is_used_by_others = True
        self.gather(used)
        if user in self.running:
            used.num_running_users += 1

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
            for at, unit in enumerate(dropped):
                for following in dropped[at : at + 2]:
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
        order, previous = self._order, self._previous
        try:
            yield
        finally:
            self._order, self._previous = order, previous

    def keep_used(self, most_bytes: int) -> None:
        """From now on units stay gathered after their use, while these take at most so many bytes.

        most_bytes: the same on all ranks, which run the same forwards until `end_keeping`.
        """
        self._most_kept_bytes = most_bytes

    def end_keeping(self) -> None:
        """Undo `keep_used`, and drop what it has kept. Not collective."""
        if self._most_kept_bytes is not None:
            self._most_kept_bytes = None
            kept, self._kept = self._kept, set()
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
            kept_bytes = sum(one.full_bytes for one in self._kept)
            if not unit.is_unsharded or kept_bytes + unit.full_bytes > self._most_kept_bytes:
                return False
            self._kept.add(unit)
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
        order = self._previous
        if self._left_out:
            order = [one for one in order if one not in self._left_out]
        self._start_next(order, unit)

    def start_next_of_backward(self, unit: Unit) -> None:
        """Start to gather the unit that came before `unit` in this forward."""
        self._start_next(self._order[::-1], unit)

    def _start_next(self, order: Sequence[Unit], unit: Unit) -> None:
        """Start to gather the unit after `unit` in `order`, if the limits allow it."""
        if self._uneven is not None:
            return
        for at, candidate in enumerate(order[:-1]):
            if candidate is unit:
                following = order[at + 1]
                live = sum(
                    u.most_numel for u in self._units if any(f.is_unsharded for f in u.params)
                )
                if (
                    following.most_numel <= self._prefetch_numel
                    and live + following.most_numel <= self._max_live_numel
                ):
                    if following.may_start:
                        following.start_unshard()
                    else:
                        self._put_off.add(following)
                return


__all__ = ["Gatherer", "UnevenGathers", "num_kept"]
