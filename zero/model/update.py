"""The update: master weights, the optimizer over flat ranges, and publishing the new values.

    grad shard --(scale)--> optimizer --> master --cast--> parameters' shard --gather--> full (stages 1, 2)

If the stage shards the optimizer state, an item is a range of this rank's shard, else of the full buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ...offload.interfaces import JobHandle, OptimizerStates
from ...ops.device import device_of
from ...ops.optim.scale import Scale
from ...ops.optim.shard_optimizer import ADDED_GROUP, Flat, ShardOptimizer, Update, World
from ...utils.errors import PeerError, UsageError, XdsError
from ..core.master import Master, parts_in
from ..core.optimizer_tensors import FrozenValues, OptimizerTensors, copies_of, states_of_others
from ..core.reduction import StepStatus
from ..layout.layout import Slot
from .sharded_model import ShardedModel, agree_on_disks

if TYPE_CHECKING:
    from ..features.host_updates import HostUpdates
    from ..features.super_offload import SuperOffload


def _flat(master: Master) -> Flat:
    layout = master.params.layout
    parts = parts_in(layout.pieces_in(0, layout.numel), 0, layout.numel)
    group = master.grads.group
    return Flat(
        master.params.index,
        layout.numel,
        parts,
        group.collectives,
        group.policy.shards_optimizer,
        master.raw.dtype,
    )


@final
class Updater:
    """Owns the masters. `bind` sets the optimizer, whose param_groups hold the masters' items."""

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self.masters = [
            Master(params, grads, store)
            for unit in model.units
            for params, grads, store in zip(
                unit.params, unit.grads, unit.master_stores, strict=False
            )
        ]
        self.masters.sort(key=lambda master: master.grads.group.number)
        place = {id(grads): number for number, grads in enumerate(model.reduction.order)}
        self._as_sums_arrive = sorted(self.masters, key=lambda master: place[id(master.grads)])
        self.world = World(model.collectives, tuple(_flat(master) for master in self.masters))
        self.stores = model.stores
        self._optimizer: ShardOptimizer | None = None
        self._num_tensors = 0  # in the optimizer's groups
        self._host_updates: HostUpdates | None = None
        self._super_offload: SuperOffload | None = None
        self.optimizer_tensors = OptimizerTensors(self.masters, self.world)
        self.lost: PeerError | None = None  # why new values of this step are not published

    @property
    def casts(self) -> bool:
        """Parameters, masters or states have fewer bits than fp32, so updates cast."""
        widths = (
            width for master in self.masters for width in (master.raw.itemsize, self._width(master))
        )
        return any(master.casts for master in self.masters) or min(widths, default=4) < 4

    @property
    def has_narrow_states(self) -> bool:
        """Some states have fewer bits than fp32."""
        return any(self._width(master) < 4 for master in self.masters)

    @staticmethod
    def _width(master: Master) -> int:
        return min((item.state_dtype.itemsize for item in master.items), default=4)

    @property
    def has_slices(self) -> bool:
        """Some parameters are slices, of which other tensor ranks have the rest."""
        slots = (slot for master in self.masters for slot in master.params.layout.slots)
        return any(slot.box is not None for slot in slots)

    def bind(self, optimizer: ShardOptimizer) -> None:
        """Use `optimizer`, whose param_groups hold `tensors_of` or `whole_params` of each group."""
        self._optimizer = optimizer
        self._num_tensors = _num_tensors(optimizer)
        optimizer.bind(self.wait, self.world)
        self._bind_host(optimizer)
        for master in self.masters:
            states = OptimizerStates(optimizer, self._tensors_in(master))
            master.state_storage.bind(states)
        if self.stores.host is not None:
            given = optimizer.of_script
            given.register_state_dict_pre_hook(partial(self._before_state_dict, "state_dict"))
            load_hook = partial(self._before_state_dict, "load_state_dict")
            given.register_load_state_dict_pre_hook(load_hook)

    def _bind_host(self, optimizer: ShardOptimizer) -> None:
        """Let masters on the host update in its thread."""
        host = self.stores.host
        if host is None:
            return
        from ..features.host_updates import HostUpdates

        self._host_updates = HostUpdates(optimizer, self.world, self.optimizer_tensors)
        if host.undo_pool is not None and optimizer.is_elementwise:
            from ..features.super_offload import SuperOffload

            self._super_offload = SuperOffload(self.masters, self._host_updates, host.undo_pool)

    def _before_state_dict(self, call: str, *_: Any) -> None:
        """User code calls state_dict or load_state_dict of the optimizer itself."""
        if self.stores.states.is_on_disk:
            raise UsageError(
                f'optimizer.{call}() with offload_optimizer.device = "nvme": the states are in a file; use '
                "engine.save_checkpoint and load_checkpoint, or xds.zero.get_full_optimizer_state and "
                "set_full_optimizer_state"
            )
        self.wait()

    def expect(self, scale: float | None) -> None:
        """A backward begins. If its step is expected to have this `scale`, updates may run before it.

        None: unknown, or another backward may follow before the step.
        """
        if self._super_offload is not None:
            self._super_offload.expect(scale)

    def allocate_states(self, *, also_on_host: bool = False) -> None:
        """Make the states that the first step would make on the device, or `also_on_host`."""
        if self._optimizer is None:  # the engine only infers
            return
        made = [m for m in self.masters if also_on_host or not m.store.is_on_host]
        for master in made:
            for item in master.items:
                self._optimizer.make_states(item)

    @property
    def takes_decisions(self) -> bool:
        """`step` can be called before the host knows whether it is a plain one."""
        optimizer = self._optimizer
        if optimizer is None or self.stores.host is not None:
            return False
        device = self.world.collectives.device
        place = device_of(device)
        return (
            place.has_streams
            and place.has_fp64  # the table of norms
            and optimizer.is_elementwise
            and not any(
                master.sends_differences or master.crosses_device for master in self.masters
            )
            and optimizer.takes_decisions(device, casts=self.casts)
        )

    @torch.no_grad()
    def step(
        self,
        scale: Scale,
        *,
        decided: StepStatus | None = None,
        written: Sequence[bool] | None = None,
    ) -> bool:
        """Update all masters with gradient `scale` times the sums, and publish the new values.

        Stages 1 and 2 send (world_size - 1) shards per rank, in the parameters' dtype.

        Args:
            decided: `scale` is what the device has decided from it. The host reads it when the device is busy
                with updates. False: the step is not a plain one, and nothing has changed.
            written: the values of `ask_written`, if they are known.
        """
        assert self._optimizer is not None
        if _num_tensors(self._optimizer) != self._num_tensors:
            raise UsageError(ADDED_GROUP)
        agree_on_disks(self.world.collectives, self.stores)
        self.model.before_update()
        optimizer = self._optimizer
        if optimizer.is_elementwise:
            if not self._step_elementwise(optimizer, scale, decided, written):
                return False
        else:
            with self.in_memory():
                self._step_at_once(optimizer, scale, written)
        optimizer.count_update()
        try:
            self._raise_lost()
            self.model.wait_published()
            self.model.exchange_maxima()
        except PeerError as error:
            self.lost = error
        for master in self.masters:
            master.remember()
        return True

    def check_published(self) -> None:
        """After `step`. Raises PeerError: all masters are updated, and parameters have not got their values."""
        lost, self.lost = self.lost, None
        if lost is not None:
            raise lost

    def _raise_lost(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _publish(self, master: Master) -> None:
        """Publish its values. A failure is kept for `check_published`: all masters are updated, or none."""
        if self.lost is None:
            try:
                master.publish()
            except PeerError as error:
                self.lost = error

    @torch.no_grad()
    def publish_again(self) -> None:
        """After a failure: parameters get the values of their masters. For all ranks of a shard group."""
        for master in self.masters:
            master.write_compute()
        self.model.publish_all()

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside, all masters and states are in memory. They are moved back to a disk on exit. For all ranks.

        Raises XdsError: on every rank, if the disk of one has failed.
        """
        stores = self.stores
        trained = {id(master.params) for master in self.masters}
        flats = [flat for unit in self.model.units for flat in unit.params]
        frozen = [flat for flat in flats if id(flat) not in trained]
        with stores.states.hold(), stores.shards.hold():
            with suppress(XdsError):  # `failure` has it
                for master in self.masters:
                    master.load()
                    master.join()
                for flat in frozen:
                    flat.stored_shard.load()
            agree_on_disks(self.world.collectives, stores)
            try:
                yield
            finally:
                for master in self.masters:
                    master.drop()

    @contextmanager
    def changing(self, masters: Sequence[Master] | None = None) -> Iterator[None]:
        """Inside, the caller writes masters. On exit all ranks' parameters get their values. A collective.

        masters: those that it writes, the same on all ranks that share them; None: all.
        """
        self.model.before_update()
        with torch.no_grad(), self.in_memory():
            self.take_edits()
            yield
            for master in self.masters if masters is None else masters:
                master.write_compute()
                master.publish()
        self.model.wait_published()

    def take_edits(self) -> None:
        """Make user code's writes to parameters since the last update their values and the masters'."""
        self.model.take_edits()
        self._take_edits_into_masters()

    def ask_written(self) -> Tensor | None:
        """Where user code has written, which `step` would read: bool [masters with a delta]; or None."""
        if self.stores.host is not None:
            return None
        written = [master.written() for master in self.masters if master.has_sent_delta]
        return torch.stack(written) != 0 if written else None

    def _take_edits_into_masters(
        self, written: Sequence[bool] | None = None, *, also_in_update: bool = True
    ) -> None:
        """
        Args:
            written: the values of `ask_written`, if they are known.
            also_in_update: False leaves out the masters whose update takes edits itself.
        """
        with_delta = [master for master in self.masters if master.has_sent_delta]
        # what is on the device is read together, because each read waits for it
        flags = written if written else _values_of([master.written() for master in with_delta])
        for master, is_written in zip(with_delta, flags, strict=True):
            if is_written:
                master.take_edits_across()
        for master in self.masters:
            by_update = master.casts and not (also_in_update or master.sends_differences)
            by_update &= master.split is None
            if master.params.is_written and master.frozen_ranges():
                by_update = False  # an update keeps the masters of frozen parameters as they are
            if not (master.has_sent_delta or (by_update and not master.crosses_device)):
                master.take_edits()

    def _step_elementwise(
        self,
        optimizer: ShardOptimizer,
        scale: Scale,
        decided: StepStatus | None,
        written: Sequence[bool] | None,
    ) -> bool:
        """Masters on the host update in a thread, those on the device meanwhile."""
        self._take_edits_into_masters(written, also_in_update=not optimizer.takes_edits)
        arrivals = self._start_on_host(scale)
        groups = copies_of(optimizer.param_groups)
        on_device = [master for master in self._as_sums_arrive if not master.store.is_on_host]
        is_counted = optimizer.count_step([item for m in on_device for item in m.items], scale)
        for master in on_device:
            frozen = self._keep_frozen([master])
            updates_here = self._updates(master, groups, is_counted=is_counted)
            optimizer.update(updates_here, scale, self.world)
            frozen.restore()
            master.write_copy()
            if decided is not None and master.publishes and not decided.is_plain:
                return False
            self._publish(master)
        if decided is not None and not decided.is_plain:
            return False
        if self.stores.are_on_disk:
            self._wait_for_disks(arrivals)
        for master, arrival in arrivals:
            if master.params.may_be_resharded:
                master.params.expect(arrival)  # the unit's next use waits for it
            elif self.stores.defers and not master.params.shards_params:
                master.params.defer(arrival, gathers=master.is_sharded)
            else:
                arrival.wait_on_device()
                self._publish(master)
        return True

    def _start_on_host(self, scale: Scale) -> list[tuple[Master, JobHandle]]:
        """Start the updates of the masters on the host; a handle is done when forward can read the values."""
        if self._host_updates is None:
            return []
        updates = [
            self._host_updates.prepare(master, scale.value)
            for master in self._in_order_of_use()
            if master.store.is_on_host
        ]
        if self._super_offload is not None:
            handles = self._super_offload.start_rest(updates)
        else:
            handles = self._host_updates.start(updates)
        return [(u.master, handle) for u, handle in zip(updates, handles, strict=True)]

    def _wait_for_disks(self, arrivals: Sequence[tuple[Master, JobHandle]]) -> None:
        """Wait for what is published in this step. Raises XdsError: on every rank, if a disk has failed."""
        for master, arrival in arrivals:
            if not master.params.may_be_resharded and not self.stores.defers:
                arrival.wait_on_device()
        agree_on_disks(self.world.collectives, self.stores)

    def _in_order_of_use(self) -> list[Master]:
        """First what is published in this step, then the root, then the blocks."""
        roots = {id(params) for unit, params, _ in self.model.trainable if unit.is_root}
        return sorted(
            self.masters, key=lambda m: (m.params.may_be_resharded, id(m.params) not in roots)
        )

    def _updates(
        self, master: Master, groups: Sequence[dict[str, Any]], *, is_counted: bool = False
    ) -> list[Update]:
        grad = master.grads.total.for_update()
        out = None
        if master.casts and master.crosses_device:
            # a tensor beside the master: an optimizer may round differently without one
            out = torch.empty(grad.numel(), dtype=master.params.dtype, device=master.raw.device)
        elif master.casts and master.split is None and not master.sends_differences:
            out = master.compute
        has_old = not (master.crosses_device or master.has_sent_delta)
        return master.updates(groups, grad, out, has_old=has_old, is_counted=is_counted)

    def _step_at_once(
        self, optimizer: ShardOptimizer, scale: Scale, written: Sequence[bool] | None
    ) -> None:
        self._take_edits_into_masters(written, also_in_update=not optimizer.takes_edits)
        groups = optimizer.hyperparameters()
        updates = [update for master in self.masters for update in self._updates(master, groups)]
        frozen = self._keep_frozen(self.masters)
        optimizer.update(updates, scale, self.world)
        frozen.restore()
        for master in self.masters:
            master.write_copy()
            self._publish(master)

    def _keep_frozen(self, masters: Sequence[Master]) -> FrozenValues:
        """Save the values and states of the parameters that are frozen now."""
        frozen = FrozenValues()
        for master in masters:
            ranges = master.frozen_ranges()
            if not ranges:
                continue
            frozen.keep(master.memory, ranges)
            if master.casts:
                frozen.keep(master.compute, ranges)
            assert self._optimizer is not None
            frozen.keep_states(self._optimizer, master, self._tensors_in(master), ranges)
        return frozen

    def state_of(
        self, master: Master, slot: Slot
    ) -> tuple[dict[str, Any] | None, tuple[int, int] | None]:
        """The optimizer's states of this rank's part of `slot`, and the range that they cover.

        Returns:
            the states by key, None where there are none yet; and [start, stop) in this rank's part of the flat
            buffer that the state tensors cover, or None if they have the parameter's own shape.
        """
        assert self._optimizer is not None
        master.load()
        start = master.params.layout.shard_range(master.rank)[0]
        first = slot.offset - (start if master.is_sharded else 0)
        for tensor, begin in self._tensors_in(master):
            state = self._optimizer.states.get(tensor)
            if begin == first and tensor.shape == slot.shape and not master.is_sharded:
                return state or None, None
            if begin < first + slot.numel and first < begin + tensor.numel():
                return state or None, (begin, begin + tensor.numel())
        tensors = [tensor for tensor, _ in self._tensors_in(master)]
        empty = master.raw.new_empty(0, dtype=master.read_state_dtype)
        return states_of_others(self._optimizer, tensors, empty, slot.group), (0, 0)

    def states_in(self, master: Master) -> list[tuple[int, Tensor, dict[str, Any]]]:
        """The optimizer's tensors in `master`: the first element of each, and its states."""
        return [
            (begin, tensor, self._states_of(tensor)) for tensor, begin in self._tensors_in(master)
        ]

    def _tensors_in(self, master: Master) -> Iterator[tuple[Tensor, int]]:
        """The optimizer's tensors that are ranges of `master`, and their first elements in it."""
        if self._optimizer is not None:
            yield from self.optimizer_tensors.tensors_in(master, self._optimizer)

    @property
    def optimizer(self) -> ShardOptimizer | None:
        """What `bind` was given."""
        return self._optimizer

    def wait(self) -> None:
        """Wait for all updates that run on the host."""
        for master in self.masters:
            master.wait()

    def release(self) -> None:
        """The engine has ended: free masters and states. The optimizer's tensors lose their elements."""
        masters = [tensor for master in self.masters for tensor in master.tensors]
        given = [] if self._optimizer is None else self._optimizer.param_groups
        for tensor in [*masters, *(tensor for group in given for tensor in group["params"])]:
            tensor.data = tensor.data.new_empty(0)
        if self._optimizer is not None:
            self._optimizer.states.clear()

    def _states_of(self, tensor: Tensor) -> dict[str, Any]:
        return {} if self._optimizer is None else self._optimizer.states.get(tensor, {})


def _num_tensors(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _values_of(scalars: Sequence[Tensor]) -> list[Any]:
    """The values of scalars on one device, with one synchronization."""
    return torch.stack(list(scalars)).tolist() if scalars else []
