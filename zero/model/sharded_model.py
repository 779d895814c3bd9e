"""The sharded model: builds and hooks the units, and drives them through forward, backward and step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from ...compression.scheme import exchange_maxima
from ...offload.interfaces import Shard
from ...offload.stores import Stores
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import agree, all_gather_json
from ...ops.mesh import Mesh
from ...ops.pool import BufferPool
from ...utils.errors import UsageError, XdsError
from ..config import ZeroConfig
from ..core.backward_pass import IN_ROLLOUT, BackwardPass
from ..core.gather import Gatherer, num_kept
from ..core.hooks import UnitHooks
from ..core.param_bucket import LiveElements, ParamBucket
from ..core.reduction import REDUCTIONS_IN_FLIGHT, Reduction, StepStatus
from ..core.unit import Unit
from ..features.dtype_guard import DtypeGuard
from ..features.external_params import CHECKED_FORWARDS, ExternalParams
from ..features.replica_check import ReplicaCheck
from ..layout.discover import found_blocks
from ..layout.groups import FlatGroup, FlatGroups
from .building import Builder
from .memory import Memory

log = logging.getLogger("xds")

CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # others are not rounded in a rollout


@final
class ShardedModel:
    """Owns the parameters and gradients of `model`. `backward_pass` takes the gradients."""

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[int, int],
        flat_groups: FlatGroups,
        config: ZeroConfig,
        stores: Stores,
        runs: Sequence[Sequence[tuple[str, nn.Module]]] | None = None,
    ) -> None:
        """Move the parameters of `model`, which passed `check_model`, into flat buffers and hook them.

        Args:
            groups: id(parameter) -> index of its hyperparameter group, for every trainable parameter that
                the optimizer is to update. Parameters that are not in it are treated as frozen.
            stores: where masters and optimizer states are stored.
            runs: the blocks, in runs that are not merged with one another; None: found in `model`.
        """
        self.policy = policy = flat_groups.data.policy
        self.flat_groups = flat_groups
        self.collectives = flat_groups.world
        self._pool = BufferPool(self.collectives.empty)
        self.stores = stores
        shares_params = config.shared_parameters
        builder = Builder(groups, flat_groups, self._pool, stores, shares_params=shares_params)
        block_runs = [found_blocks(model, config.units)] if runs is None else runs
        self.units = builder.build(model, block_runs, config.unit_min_numel)
        self._flats = [flat for unit in self.units for flat in unit.params]
        self.trainable = [
            (unit, params, grads)
            for unit in self.units
            for params, grads in zip(unit.params, unit.grads, strict=False)
        ]
        # backward reaches the last block first; the root, which holds the embeddings, is complete last
        blocks_last_first = [entry for entry in self.trainable if not entry[0].is_root][::-1]
        roots = [entry for entry in self.trainable if entry[0].is_root]
        self.reduction = Reduction(
            [entry[2] for entry in blocks_last_first + roots],
            flat_groups,
            in_flight=REDUCTIONS_IN_FLIGHT if config.overlap_comm else 0,
        )
        self._unit_of = {
            id(param): unit for unit in self.units for flat in unit.params for param in flat.params
        }
        self.frozen = {  # in no unit, below stage 3
            name: param
            for name, param in model.named_parameters()
            if id(param) not in self._unit_of
        }
        order, frozen = self.reduction.order, list(self.frozen.values())
        self.memory = Memory(self.units, order, self._pool, flat_groups, frozen)
        self._diverges = config.divergent_graphs and policy.shards_params
        self.defers = stores.defers and not policy.shards_params
        hooks = policy.shards_params or self.defers
        self.gatherer = self._build_gatherer(config, builder.live) if hooks else None
        self.backward_pass = BackwardPass(
            [(unit, grads) for unit, _, grads in self.trainable],
            self.reduction,
            self.gatherer,
            shards_grads=policy.shards_grads,
            diverges=self._diverges,
        )
        self._hooks: UnitHooks | None = None
        if self.gatherer is not None:
            self._hooks = UnitHooks(
                self.units, self.gatherer, self.backward_pass, gathers_all=self.defers
            )
        self._shared = [flat for flat in self._flats if flat.memory.is_shared]
        # some ranks may have no buffer that is shared: a pipeline stage that is frozen, a slice without copies
        self._any_shares = shares_params and any(
            all_gather_json(self.collectives, bool(self._shared), "which ranks share parameters")
        )
        self._dtype_guard = DtypeGuard(model, self._flats, groups.keys(), self.backward_pass)
        self._num_checked = {True: 0, False: 0}  # forwards, of training and of evaluation
        self._replica_check = ReplicaCheck(self._flats, flat_groups)
        self.backward_pass.hook_gradients()

    def _build_gatherer(self, config: ZeroConfig, live: LiveElements) -> Gatherer:
        for unit in self.units:
            if unit.most_numel <= config.param_persistence_threshold:
                for flat in unit.params:
                    flat.keep_gathered()
                    flat.unshard()
        blocks = [unit for unit in self.units if not unit.is_root]
        reuse_distance = config.max_reuse_distance
        if self.stores.shards.is_on_host and "max_reuse_distance" not in config.model_fields_set:
            reuse_distance = 0  # who stores parameters on the host wants the memory
        numels = [unit.most_numel for unit in blocks]
        kept = num_kept(numels, reuse_distance, config.max_live_parameters)
        for unit in blocks[len(blocks) - kept :]:
            unit.is_kept_until_backward = True
        return Gatherer(
            self.units,
            prefetch_numel=config.prefetch_bucket_size if config.overlap_comm else 0,
            max_live_numel=config.max_live_parameters,
            live=live,
            collectives=self._gathering,
        )

    @property
    def _gathering(self) -> Collectives:
        """The ranks that gather some buffer together: with tensor ranks those of what they hold whole.

        What several stages hold stays whole, so no other stage takes part.
        """
        flats = [flat for flat in self._flats if flat.may_be_resharded]
        groups = [self.flat_groups.data.collectives, *(flat.collectives for flat in flats)]
        return max(groups, key=lambda group: group.world_size)

    @cached_property
    def num_dropped(self) -> int:
        """The parameters that are dropped between their uses."""
        return sum(len(flat.params) for flat in self._flats if flat.may_be_resharded)

    # -- forward ----------------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Before forwards: end a backward of user code.

        Raises:
            UsageError: user code has changed a dtype, or unfrozen a parameter that is not trained.
        """
        self.end_script_backward()
        self._dtype_guard.check()

    def forward_context(
        self, *, is_training: bool, is_compiled: bool
    ) -> AbstractContextManager[Any]:
        """Around a call of the module. The first ones look for parameters used outside of their unit."""
        if self.gatherer is None or self._hooks is None or self.gatherer.holds_all:
            return nullcontext()
        context = ExitStack()
        self._hooks.exclude_from_compile()
        if self._diverges:
            context.enter_context(self.uneven_forwards())
        if self._num_checked[is_training] < CHECKED_FORWARDS and not (
            is_compiled or self._user_compiled
        ):
            self._num_checked[is_training] += 1
            context.enter_context(ExternalParams(self.gatherer, self._unit_of, self.units[-1]))
        return context

    @property
    def _user_compiled(self) -> bool:
        """User code compiled the model or a part of it: torch would compile a mode around it as well."""
        return any(
            type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
            for module in self.units[-1].modules[0].modules()
        )

    def register_use(self, param: nn.Parameter, module: nn.Module) -> bool:
        """Gather `param` for calls of `module` as well. False: `module` is not part of this model."""
        user = self._user_of.get(module)
        if user is not None and self.gatherer is not None:
            self.gatherer.register_use(self._unit_of[id(param)], user)
        return user is not None

    @cached_property
    def _user_of(self) -> dict[nn.Module, Unit]:
        """The unit that each module of the model is part of. The root, which contains all, comes last."""
        users: dict[nn.Module, Unit] = {}
        for unit in self.units:
            for outer in unit.modules:
                if outer not in users:
                    for module in outer.modules():
                        users.setdefault(module, unit)
        return users

    @contextmanager
    def uneven_forwards(self) -> Iterator[None]:
        """Inside, ranks may run unequal numbers of forwards, without backward. For all ranks."""
        if self.gatherer is None or self.defers or self.gatherer.is_uneven:
            self.gather_deferred()
            yield
            return
        self.gatherer.begin_uneven()
        try:
            yield
        finally:
            self.gatherer.end_uneven()

    def leave_out(self, modules: Collection[nn.Module], *, in_backward: bool) -> None:
        """Forwards that begin from now on do not call `modules`, the same on all ranks.

        Units of which all modules are left out are not gathered ahead.

        in_backward: nor are their gradients reduced, until the next call of this with `in_backward`.
        """
        gone = set(modules)
        units = frozenset(
            unit
            for unit in self.units
            if not unit.is_root and not unit.is_used_by_others and gone.issuperset(unit.modules)
        )
        if self.gatherer is not None:
            self.gatherer.leave_out(units)
        if in_backward:
            self.backward_pass.left_out = frozenset(g for unit in units for g in unit.grads)

    def bytes_to_gather(self) -> int:
        """Bytes that this rank would allocate to have all units gathered."""
        if self.gatherer is None or self.defers:
            return 0
        return sum(unit.full_bytes for unit in self.units if not unit.is_unsharded)

    @property
    def may_keep(self) -> bool:
        """`keep_used` has an effect: units are dropped after their use, and all ranks use the same ones."""
        return self.gatherer is not None and not (self.defers or self._diverges)

    @property
    def keeps(self) -> bool:
        """`keep_used` was called; or all units are held, so there is nothing to keep."""
        gatherer = self.gatherer
        return gatherer is None or gatherer.keeps_used or gatherer.holds_all or gatherer.is_uneven

    def keep_used(self, most_bytes: int) -> None:
        """See `Gatherer.keep_used`."""
        if self.gatherer is not None:
            self.gatherer.keep_used(most_bytes)

    def end_keeping(self) -> None:
        """See `Gatherer.end_keeping`."""
        if self.gatherer is not None:
            self.gatherer.end_keeping()

    @contextmanager
    def rollout(self, *, gathers: bool, in_bits: bool = False) -> Iterator[None]:
        """Around forwards without backward, of which ranks may run unequal numbers. For all ranks.

        Args:
            gathers: all units are gathered at the begin, once, and no forward sends anything. Else each
                forward gathers them one after the other.
            in_bits: then matrices of blocks are rounded to 8 bits. Their shards are on the host.
        """
        if self.gatherer is None or self._hooks is None or self.defers:
            self.gather_deferred()
            yield
            return
        self._hooks.exclude_from_compile()
        alone = self._gathering.world_size == 1  # and its parameters are on the host
        with self.gatherer.keeping_order():
            if gathers:
                with self.gatherer.holding_all():
                    self.gatherer.refuses_backward = True
                    yield
            else:
                self.gatherer.end_keeping()
                try:
                    with (
                        self._rounded() if in_bits else nullcontext(),
                        nullcontext() if alone else self.uneven_forwards(),
                    ):
                        yield
                finally:
                    self.gatherer.drop_all()

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """Inside, shards on the host are copies in 8 bits. Only matrices of blocks are rounded."""
        assert self.gatherer is not None
        self.gatherer.drop_all()
        exact: list[tuple[ParamBucket, Shard]] = []
        try:
            for flat in [flat for unit in self.units if not unit.is_root for flat in unit.params]:
                if flat.is_on_host and flat.may_be_resharded and flat.dtype in CODED_DTYPES:
                    mine = flat.layout.shard_range(flat.collectives.rank)
                    pieces = flat.layout.pieces_in(*mine)
                    kept = [
                        (piece.start, piece.stop) for piece in pieces if len(piece.slot.shape) < 2
                    ]
                    coded = self.stores.shards.coded(flat.shard, kept)
                    exact.append((flat, flat.exchange_shard(coded)))
            yield
        finally:
            try:
                self.gatherer.drop_all()
            finally:
                for flat, shard in exact:
                    flat.exchange_shard(shard)
                    flat.wait()
                    if flat.is_unsharded:  # user code has written to it: not for later forwards
                        flat.discard()

    # -- step -------------------------------------------------------------------------------------------

    @contextmanager
    def holding(self, module: nn.Module) -> Iterator[None]:
        """Inside, all units in `module` are gathered. For all ranks, outside of backward."""
        inner = set(module.modules())
        units = [unit for unit in self.units if not inner.isdisjoint(unit.modules)]
        dropped = [unit for unit in units if not unit.is_unsharded]
        for unit in dropped:
            unit.unshard()
        try:
            yield
        finally:
            for unit in dropped:
                unit.reshard()

    def start_finish(self, *, flags: int, means: Tensor) -> StepStatus:
        """Every gradient is summed over the ranks on return. See `Reduction.start_finish`."""
        self.backward_pass.end()  # a loss.backward() of user code's own
        num_writes = self._replica_check.count()
        return self.reduction.start_finish(num_writes=num_writes, flags=flags, means=means)

    def end_finish(self, status: StepStatus) -> float:
        """The squared norm. See `Reduction.end_finish`.

        Raises UsageError: see `ReplicaCheck.agree`; the gradients are kept.
        """
        self._replica_check.agree(status.num_writes)
        return self.reduction.end_finish(status)

    def reduce_rest(self, *, also_held: bool) -> bool:
        """Reduce all gradients into the totals. False: some are held back without reduction.

        also_held: reduce gradients that were held back as well: the step will get no others.
        """
        self.backward_pass.end_checked()
        if also_held:
            self.reduction.reduce_held()
            self.reduction.fill_left_out()
        self.complete_sums()
        if self.reduction.holds:
            return False
        self.reduction.reduce_late()
        self.reduction.cross_replicas()
        return True

    def complete_sums(self) -> None:
        """What is reduced is summed over all ranks on return, also over replicas. For all ranks."""
        self.reduction.settle()
        self.reduction.cross_replicas()

    @property
    def reduces_each_backward(self) -> bool:
        """Each backward ends with a reduction that frees its gradients. Lossy ones wait for the last."""
        return self.policy.shards_grads and not self.reduction.is_lossy

    def end_script_backward(self) -> None:
        """End a backward that user code started. Raises UsageError: user code has set some `.grad` since."""
        with self.collectives.publishing_errors("the check of .grad"):
            self.backward_pass.end_checked()

    def before_update(self) -> None:
        """Gathered parameters are about to become stale.

        Raises UsageError: this is inside of a rollout, or of GatheredParameters.
        """
        if self.gatherer is not None and self.gatherer.refuses_backward:
            raise UsageError(IN_ROLLOUT.format("an update"))
        self.gather_deferred()
        if self.gatherer is not None:
            self.gatherer.begin_update()
        if not self._any_shares:
            self._check_writes()
            return
        failure = ""
        try:
            self._check_writes()
        except UsageError as error:
            failure = str(error)
        # also: no other rank still reads what is about to be written
        agree(self.collectives, failure, UsageError, "an update of shared parameters")

    def _check_writes(self) -> None:
        self._check_overridden()
        self.take_edits()
        for flat in self._shared:
            flat.memory.check_place()

    def gather_deferred(self, only: FlatGroup | None = None) -> None:
        """Wait for the values of an update that runs under the next forward, if one does. For all ranks.

        only: the ranks of this group alone call it, so what other pipeline stages hold as well is left out.
        """
        if not self.defers:
            return
        for flat in self._flats:
            if only is None or flat.group is only or not flat.group.is_shared:
                flat.unshard()

    @property
    def needs_others_to_gather(self) -> bool:
        """`gather_deferred` would send something."""
        return any(flat.gathers_deferred for flat in self._flats)

    def _check_overridden(self) -> None:
        names = [name for flat in self._flats for name in flat.overridden]
        names += [flat.layout.slots[0].name for flat in self._flats if flat.is_held]
        if names:
            raise UsageError(
                f"new values inside xds.zero.GatheredParameters, by engine.step() or a load: its end would "
                f"overwrite those of {names[0]}; end it before"
            )

    def take_edits(self) -> None:
        """Make user code's writes to parameters since the last update their values.

        Raises UsageError: the first one of `ParamBucket.take_edits`; every flat buffer has been looked at.
        """
        errors: list[UsageError] = []
        for flat in self._flats:
            try:
                flat.take_edits()
            except UsageError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def wait_published(self) -> None:
        """Wait until the parameters that stay gathered are gathered again."""
        for flat in self._flats:
            flat.wait()

    def publish_all(self) -> None:
        """All shards have changed: gather what stays gathered. For all ranks; sends as an update does."""
        for flat in self._flats:
            if flat.group.policy.shards_optimizer or flat.shards_params:
                flat.start_publish()
        self.wait_published()

    def exchange_maxima(self) -> None:
        """Agree on what gathers of new values need of all ranks, in one message. For all ranks.

        With shards on the host each gather does it: their values are still on their way.
        """
        if self.stores.host is None:
            kept = [flat for flat in self._flats if flat.sender.num_maxima]
            shards = [(flat.sender, flat.shard) for flat in kept]
            exchange_maxima(self.flat_groups.data.collectives, shards)

    def skip(self) -> None:
        """Drop all gradients: the step is skipped. A lossy reducer adds what was sent to its pending error."""
        self.reduction.undo()
        self.reduction.reset()

    def abandon_step(self) -> None:
        """Drop the gradients since the last update, without a wait: the group has failed."""
        self.backward_pass.abandon_all()

    def regroup(self, mesh: Mesh) -> None:
        """The groups have other ranks, and there are no gradients: divide what is not sharded over them anew.

        mesh: of these ranks.
        """
        self.flat_groups.mesh = mesh
        for flat in self._flats:
            ranks = flat.collectives.world_size
            assert ranks == flat.layout.world_size or not flat.group.policy.shards_optimizer
            flat.layout.divide(ranks)
        self._replica_check.begin()
        if self.gatherer is not None:  # ranks gather together, and new ones have found nothing yet
            self.gatherer.forget_found_uses()
            self._num_checked = dict.fromkeys(self._num_checked, 0)

    def detach(self) -> None:
        """Remove every hook from the user's model; its parameters stay in the flat buffers, gathered.

        If a disk has failed, sharded parameters stay NaN, and a warning says why.
        """
        self.backward_pass.remove_hooks()
        try:
            if self._hooks is not None:
                self._hooks.remove()
                self._gather_all()
            for flat in self._shared:
                flat.end_sharing()
        finally:
            self.stores.close()

    def release(self) -> None:
        """After `detach`: free everything but the gathered parameters."""
        for unit in self.units:
            for flat in unit.params:
                flat.release()
            for grads in unit.grads:
                grads.end()
        self.stores.release()  # it gives buffers back
        self._pool.clear()
        for collectives in self.flat_groups.opened:
            collectives.free_scratch()

    def _gather_all(self) -> None:
        try:
            agree_on_disks(self.collectives, self.stores)
            for flat in self._flats:
                flat.gather_exactly()
        except XdsError as error:
            if not self.stores.are_on_disk:
                raise
            log.warning("xds: parameters cannot be gathered at the end: %s", error)

    @property
    def has_new_gradients(self) -> bool:
        """A backward has begun since the last step, also one that user code started. Looks at no gradient."""
        return self.backward_pass.has_seen_one or self.reduction.has_sums

    @property
    def has_gradients(self) -> bool:
        """Some gradients have not been used by a step yet."""
        self.reduction.settle()
        return any(g.has_local or g.reduced() is not None for g in self.reduction.order)


def agree_on_disks(collectives: Collectives, stores: Stores) -> None:
    """Sends 512 bytes to each rank if values are on a disk, and nothing otherwise. A collective.

    Raises:
        XdsError: on every rank; the disk of one has failed.
    """
    if stores.are_on_disk:
        agree(collectives, stores.failure(), XdsError, "offload to NVMe")
