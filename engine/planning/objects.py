"""The objects of one rank, as a run builds them, on the meta device with collectives that send nothing.

They are asked for the bytes that they hold, and run the messages of a step once. Kinds of bytes are those of
`engine.memory_plan()` and of `engine.bytes_sent()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import final

import torch
from torch import nn

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...ops.comm.collectives import Collectives
from ...ops.comm.fake import FakeGroups, backend_of
from ...ops.optim.scale import Scale
from ...zero.core.grad_bucket import GradBucket
from ...zero.core.param_bucket import ParamBucket
from ...zero.layout.groups import FlatGroups
from ...zero.layout.layout import FlatLayout
from ...zero.model.sharded_model import ShardedModel
from ...zero.model.state_memory import memory_plan
from ...zero.model.update import Updater
from ..config.config import Config
from ..config.optimizer import OptimizerConfig
from ..config.scheduler import warmup_steps
from ..model.arguments import BlockRuns
from ..model.storage import fake_stores
from ..optim.optimizers import Groups, as_shard_optimizer, named_optimizer
from ..parallel.messages import Messages

STATE_KINDS = ("param", "grad", "master", "optimizer", "gathered", "host", "disk", "outer")


@final
@dataclass(frozen=True)
class Link:
    """Bytes that one rank sends in a step to ranks of its own host, and to others."""

    inside: int = 0
    between: int = 0

    @property
    def total(self) -> int:
        return self.inside + self.between

    def __add__(self, other: Link) -> Link:
        return Link(self.inside + other.inside, self.between + other.between)

    def __sub__(self, other: Link) -> Link:
        return Link(self.inside - other.inside, self.between - other.between)

    def __mul__(self, times: int) -> Link:
        return Link(self.inside * times, self.between * times)


Sent = Mapping[str, Link]  # by kind


def sent_in(opened: Sequence[Collectives]) -> dict[str, Link]:
    """What the rank of these groups has sent until now."""
    found: dict[str, Link] = {}
    for group in opened:
        for kind, size in group.sent_bytes.items():
            across = group.sent_across_bytes[kind]
            found[kind] = found.get(kind, Link()) + Link(size - across, across)
    return found


def spread(size: int, group: Collectives) -> Link:
    """`size` bytes in equal parts for the other ranks of `group`."""
    num_near = backend_of(group).num_near
    near = size * num_near // (group.world_size - 1) if num_near else 0
    return Link(near, size - near)


@final
@dataclass(frozen=True, eq=False)
class FlatMessages:
    """What is sent for a flat buffer. unit: its name; "" is the root.

    reduced: by one reduction of its gradients. summed: by what completes the sums, once in a step.
    published: after an update. gathered: by the first gather of what was dropped since then. again: by others.
    """

    unit: str
    layout: FlatLayout
    is_shared: bool
    reduced: Sent
    summed: Sent
    published: Sent
    gathered: Sent
    again: Sent


@final
class RankObjects:
    """Builds and hooks the flat buffers of `module`, their masters and the optimizer.

    applied: what the optimizer itself sends in a step. After `count`:
    held: bytes by kind between two steps; "gathered" are whole parameters at stage 3 that are never dropped.
    flats: all flat buffers, in the order of their units.
    """

    held: Counter[str]
    applied: Sent
    flats: tuple[FlatMessages, ...]

    def __init__(
        self,
        module: nn.Module,
        runs: BlockRuns,
        groups: FlatGroups,
        opened: FakeGroups,
        trained: Groups,
        messages: Messages,
        config: Config,
    ) -> None:
        numel = sum(param.numel() for param in module.parameters() if id(param) in trained.index)
        stores = fake_stores(config, numel)
        zero = config.zero_optimization
        self.sharded = sharded = ShardedModel(module, trained.index, groups, zero, stores, runs)
        self.updater = Updater(sharded)
        self._opened = opened.opened
        self._config = config
        with self._counting() as self.applied:
            if self.updater.masters:
                self._update(config, trained, messages)

    def count(self) -> None:
        """Run the other messages of a step. Sets `held` and `flats`, and adds to `applied`."""
        self.flats = tuple(self._step())
        self._add_outer()

    def _add_outer(self) -> None:
        """The states of groups that train alone, and what they send in a step on average."""
        section = self._config.outer
        if section is None:
            return
        from ...outer.fragment import held_bytes, round_bytes
        from ..parallel.outer_parts import outer_parts

        parts = outer_parts(self.sharded.units, self.updater.masters, section.fragments)
        numels = [sum(part.numel for part in each) for each in parts]
        self.held["outer"] = held_bytes(section, numels)
        sent = Link(between=round_bytes(section, numels) // section.steps)
        self.applied = {**self.applied, "outer": sent}

    def end(self) -> None:
        """Take every hook out of the module."""
        self.sharded.detach()

    def _update(self, config: Config, trained: Groups, messages: Messages) -> None:
        """A step of the optimizer, which makes its states; one of a script is planned as Adam."""
        section = config.optimizer or OptimizerConfig(type="AdamW")
        more = {}
        if section.type in ONE_BIT_OPTIMIZERS:
            more["warmup_steps"] = warmup_steps(config.scheduler)
        optimizer = named_optimizer(section, self.updater, trained, **more)
        stepped = as_shard_optimizer(optimizer, self.updater)
        self.updater.bind(stepped)
        messages.bind(optimizer, self.updater, lambda: 1.0)
        for group in optimizer.param_groups:  # torch has no such kernels for the meta device
            group.update(dict.fromkeys(group.keys() & {"fused", "foreach"}))
        groups = stepped.hyperparameters()
        updates = [
            update
            for master in self.updater.masters
            for update in master.updates(groups, torch.empty_like(master.raw), None, has_old=False)
        ]
        # a step of single elements sends nothing, so only its states count
        rest = [
            update
            for update in updates
            if not (stepped.is_elementwise and stepped.state_of(update.item))
        ]
        if rest:
            stepped.update(rest, Scale(1.0), self.updater.world)

    def _step(self) -> Iterator[FlatMessages]:
        """The other messages of a step. Sets `held` by what is there before the update."""
        sharded, updater = self.sharded, self.updater
        pairs = [
            (unit, params, grads)
            for unit in sharded.units
            for params, grads in zip_longest(unit.params, unit.grads)
        ]
        sent = [({}, {}) if grads is None else self._backward(grads) for _, _, grads in pairs]
        plan = memory_plan(sharded, updater)
        self.held = Counter({kind: size for kind, size in plan.items() if kind in STATE_KINDS})
        self.held["gathered"] = sharded.memory.gathered_bytes()
        masters = {id(master.params): master for master in updater.masters}
        for (unit, params, _), (reduced, summed) in zip(pairs, sent, strict=True):
            with self._counting() as published:
                if id(params) in masters:
                    masters[id(params)].publish()
                    params.wait()
            gathered, again = self._gathered(params), self._gathered(params)
            yield FlatMessages(
                unit="" if unit.is_root else unit.name,
                layout=params.layout,
                is_shared=params.group.is_shared,
                reduced=reduced,
                summed=summed,
                published=published,
                gathered=gathered,
                again=again,
            )

    def _backward(self, grads: GradBucket) -> tuple[Sent, Sent]:
        """Gradients arrive and are summed over the ranks: see `FlatMessages.reduced` and `summed`."""
        grads.begin_backward(hold=grads.group.policy.holds_grads)
        for param in grads.params:
            param.grad = torch.empty_like(param)
        grads.collect()
        with self._counting() as reduced:
            if not grads.is_single_rank or grads.total.store.is_on_host:
                grads.start_reduce()
                grads.finish_reduce()
        with self._counting() as summed:
            crossing = grads.total.cross_replicas()
            if crossing is not None:
                crossing.wait()
            if not grads.group.policy.shards_optimizer:
                grads.total.start_gather()
                grads.total.finish_gather()
        return reduced, summed

    def _gathered(self, params: ParamBucket) -> Sent:
        with self._counting() as found:
            if params.may_be_resharded:
                params.unshard()
                params.reshard()
        return found

    @contextmanager
    def _counting(self) -> Iterator[dict[str, Link]]:
        """What is sent inside, when that is over."""
        found: dict[str, Link] = {}
        before = sent_in(self._opened)
        yield found
        for kind, link in sent_in(self._opened).items():
            sent = link - before.get(kind, Link())
            if sent.total:
                found[kind] = sent


__all__ = ["STATE_KINDS", "FlatMessages", "Link", "RankObjects", "Sent", "sent_in", "spread"]
