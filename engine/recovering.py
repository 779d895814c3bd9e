"""Goes on in the same process when another rank has failed: drops the step, opens the group again, heals.

    collective fails ──> drop the step ──> next generation ──> open groups ──> compare steps ──> shares, loader
                         gradients, counts  from the launcher                   who is behind copies the states

No update begins before the message of the norm has arrived from all ranks. So a failure finds each rank before
or after an update, never in one. If some rank has updated, the step counts: the others copy its states. If none
has, all repeat the step.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from ..ops.comm.backend import SingleRank, state_of
from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import all_gather_json
from ..ops.comm.opening import open_collectives
from ..ops.mesh import Mesh
from ..recovery.generations import (
    SHARED_MEMORY,
    STATES_PREFIX,
    Generation,
    Meeting,
    shares_of,
)
from ..utils.errors import PeerError, UsageError
from ..utils.version import __version__
from ..zero.core.reduction import StepStatus
from .checkpoint.load_plan import LoadOptions
from .checkpoint.random_state import read_random_state, set_random_state
from .checkpoint.save import SaveOptions
from .config.config import Config
from .counters import Counters
from .data.loaders import RankLoader
from .data.step_sampler import StepSampler
from .parts import Parts, Recovery
from .process.process import joins, timeout_seconds
from .states import States
from .steps.training_step import TrainingStep

log = logging.getLogger("xds")
LIGHTHOUSE = "XDS_LIGHTHOUSE"  # host:port of the store in which the launcher names generations
ENGINES = 2  # of a group: one engine, and the comparison of configs before it
LOOK_SECONDS = 0.1  # between two looks of rank 0 for another generation
CONNECT_SECONDS = 2.0  # of a new group: all its ranks are there
Result = TypeVar("Result")


@final
@dataclass(frozen=True, eq=False)
class RecoveryTarget:
    """The pieces of the engine that recovers."""

    parts: Parts
    counters: Counters
    step: TrainingStep
    states: States


@dataclass
class _Committed:
    """Where this rank was after its last step."""

    position: dict[str, int]
    micro_steps: int
    global_samples: int


@final
class LiveRecovery(Recovery):
    """Recovery of one engine, whose ranks each hold all states (stage 0)."""

    is_on = True

    def __init__(self, config: Config, collectives: Collectives, loader: Any) -> None:
        """Raises UsageError: recovery cannot work here."""
        group = collectives.group
        _check(config, collectives, loader)
        assert group is not None
        source = loader.source
        assert isinstance(source, StepSampler)
        self._config, self._collectives = config, collectives
        self._loader, self._source = loader, source
        self._unit, self._num_units = collectives.rank, collectives.world_size
        self._generation = Generation(0, tuple(range(self._num_units)))
        self._joins = joins()
        if self._joins is not None:
            self._generation = Generation(self._joins.generation, ())
        self._base = _connection()  # of groups
        self._meeting = Meeting(_connection(), "recovery", self._unit)
        self._regroups = False  # another generation begins after the step that runs
        self._looked_seconds = 0.0
        self._has_newcomer = False  # in the newest generation
        self._target: RecoveryTarget | None = None
        self._committed: _Committed
        self._num_calls = 0  # collective calls between steps; the last one may be running
        self._is_inside = False
        self._first_inside = -1  # the first rank that is in such a call
        self._lost_seconds = 0.0  # when a collective failed; 0: none has
        settings = json.dumps(config.as_dict(), sort_keys=True, default=str)
        self._digest = zlib.crc32(f"{torch.__version__} {__version__} {settings}".encode())

    # -- what the engine calls --------------------------------------------------------------------------

    def bind(self, parts: Parts, counters: Counters, step: TrainingStep, states: States) -> None:
        self._target = RecoveryTarget(parts, counters, step, states)

    def begin(self) -> None:
        self._collectives.watch.recovers = True
        self._note(self._source.start())
        if self._joins is not None:
            self._meeting.ask_to_join(self._joins.attempt)
            self._meet()
            return
        self._collectives.barrier()  # from here on every rank can recover
        self._meeting.announce(self._config.recovery.least_units(self._num_units))

    @property
    def has_lost(self) -> bool:  # type: ignore[override]
        return self._lost_seconds > 0

    def takes_failure(self) -> bool:
        group = self._collectives.group
        if group is not None and state_of(group).num_engines > ENGINES:
            return False  # another engine of this process uses the group that would be opened again
        if not self.has_lost:
            self._lost_seconds = time.monotonic()
            self._collectives.leave()  # those that wait for this rank recover as well
        return True

    @property
    def must_regroup(self) -> bool:  # type: ignore[override]
        if self._collectives.rank or time.monotonic() - self._looked_seconds < LOOK_SECONDS:
            return False
        self._looked_seconds = time.monotonic()
        return self._meeting.is_replaced(self._generation)

    def agree(self, status: StepStatus) -> None:
        self._regroups = status.regroups

    def commit(self) -> None:
        taken, before = self._source.taken(), self._committed.position
        is_next = taken["samples"] == before["samples"] + self._source.step_samples
        is_first = taken["samples"] == self._source.step_samples
        in_order = is_next if taken["epoch"] == before["epoch"] else is_first
        if not in_order:
            raise UsageError(
                f"recovery.enabled: a step ended with the samples before {taken}, and the one before it with "
                f"those before {before}: take batches from engine.training_dataloader one by one, in the step "
                "that trains them, and not ahead"
            )
        self._note(taken)
        if self._regroups:  # all ranks do, after this step
            self._lost_seconds = time.monotonic()

    def loaded(self) -> None:
        self._note(self._source.start())

    def recover(self) -> None:
        """See `Recovery`. Raises PeerError: the run does not go on, or not with this rank."""
        assert self._target is not None
        self._drop(self._target)
        self._meet()

    def _meet(self) -> None:
        """Take part in the newest generation, from the newest step on."""
        target, begun_seconds = self._target, self._lost_seconds or time.monotonic()
        assert target is not None
        while True:
            generation = self._next()  # raises PeerError where there is none for this rank
            try:
                self._enter(generation, target.parts)
                self._heal(target)
                break
            except PeerError:  # another rank has failed meanwhile
                self._collectives.leave()
        if self._joins is not None:
            self._meeting.say_joined(self._joins.attempt)
        self._lost_seconds, self._regroups, self._joins = 0.0, False, None
        self._take_shares(target.counters)
        if self._collectives.rank == 0:
            units = ", ".join(map(str, self._generation.units))
            seconds = time.monotonic() - begun_seconds
            log.warning(
                "%s: ranks %s go on after step %d, %.2f s later",
                self._generation.reason,
                units,
                target.counters.global_steps,
                seconds,
            )

    def run(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """`call`, a collective between two steps. It is repeated if a rank fails before any has ended it.

        otherwise: the result where another rank has ended the call, so all have done their part.
        """
        self._num_calls += 1
        self._is_inside = True
        try:
            while True:
                with self:
                    return call()
                self.recover()
                if not self._is_inside:
                    return otherwise
                if self._has_newcomer:  # which does not run this call
                    return self._run_alone(call, otherwise)
        finally:
            self._is_inside = False

    def _run_alone(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """Let one rank that is in the call run it for all. At stage 0 it has all states."""
        assert self._target is not None
        if self._collectives.rank != self._first_inside:
            return otherwise
        with self._alone(Collectives(self._collectives.backend), self._target.parts):
            return call()

    def end(self) -> None:
        self._target = None
        self._collectives.watch.recovers = False

    def refuse(self, call: str) -> None:
        raise UsageError(
            f"{call}() with recovery.enabled: steps keep their samples when a rank fails, so their number is "
            "that of the config; set train_batch_size there"
        )

    # -- the parts of a recovery ------------------------------------------------------------------------

    def _note(self, position: dict[str, int]) -> None:
        assert self._target is not None
        counters = self._target.counters
        self._committed = _Committed(position, counters.micro_steps, counters.global_samples)

    def _drop(self, target: RecoveryTarget) -> None:
        """Be where the last step has ended."""
        target.parts.sharded.abandon_step()
        target.step.restart()
        target.counters.micro_steps = self._committed.micro_steps
        target.counters.global_samples = self._committed.global_samples
        self._loader.resume(self._committed.position)

    def _next(self) -> Generation:
        """The next generation that all its units have joined."""
        number = self._generation.number
        while True:
            is_new = self._joins is not None
            found = self._meeting.next_after(number, timeout_seconds(), is_new=is_new)
            if self._meeting.gather(found):
                return found
            number = found.number

    def _enter(self, generation: Generation, parts: Parts) -> None:
        """Open the group of all ranks anew. Raises PeerError: a rank has failed meanwhile."""
        self._generation = generation
        rank, size = generation.units.index(self._unit), len(generation.units)
        self._collectives.stop_watching()
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore(f"generation{generation.number}", self._base)  # type: ignore[attr-defined]
        short = timedelta(seconds=CONNECT_SECONDS)
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=short)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._unit}: generation {generation.number}: {error}"
            ) from error
        group = dist.group.WORLD
        assert group is not None
        seconds = timedelta(seconds=timeout_seconds())
        dist.distributed_c10d._set_pg_timeout(seconds, group)
        section = self._config.communication.where(has_native_ops=self._config.ops.native)
        self._be(open_collectives(group, self._collectives.device, section=section), parts)
        if self._config.watch.enabled:
            self._collectives.start_watching(self._config.watch, timeout_seconds())

    def _be(self, opened: Collectives, parts: Parts) -> None:
        self._collectives.reopen(opened)
        parts.sharded.regroup(Mesh(pipe=1, data=opened.world_size))

    def _heal(self, target: RecoveryTarget) -> None:
        """Let ranks whose last step is older copy the states of one whose step is the newest."""
        parts, step = target.parts, target.counters.global_steps
        now = (step if self._joins is None else -1, self._num_calls, self._is_inside, self._digest)
        own = torch.tensor([int(number) for number in now])
        table = self._collectives.gather_small(own, what="steps").tolist()
        steps = [row[0] for row in table]
        newest = steps.index(max(steps))
        if self._digest != table[newest][3]:
            raise UsageError(
                f"rank {self._unit} cannot take the place of a lost rank: its config, or its version of xds or "
                "torch, differs from that of the ranks that train; start the run again"
            )
        if max(steps) < 0:
            raise UsageError(
                "all ranks that have trained are lost, before a new process has their states: start the run "
                "again from its last checkpoint"
            )
        self._has_newcomer = min(steps) < 0
        self._first_inside = next((rank for rank, row in enumerate(table) if row[2]), -1)
        if self._joins is not None:
            self._num_calls = max(row[1] for row in table)
        # another rank has ended the call that this one is in: all have done their part of it
        if any(calls - inside >= self._num_calls for _, calls, inside, _ in table):
            self._is_inside = False
        if min(steps) == max(steps):
            return
        opened = Collectives(self._collectives.backend)
        rank, folder = self._collectives.rank, ""
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        try:
            if rank == newest:
                folder = tempfile.mkdtemp(prefix=f"{STATES_PREFIX}{os.getppid()}-", dir=parent)
                with self._alone(opened, parts):
                    target.states.save(folder, None, None, SaveOptions())
            place = all_gather_json(self._collectives, folder, "the folder of states")[newest]
            if steps[rank] < max(steps):
                with self._alone(opened, parts), _keeping_random(self._collectives.device):
                    target.states.load(place, None, LoadOptions())
                self._note(self._source.start())
            self._collectives.barrier()
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _alone(self, opened: Collectives, parts: Parts) -> Iterator[None]:
        """Inside, this rank is the only one. opened: the collectives of the group."""
        saver, parts.saver, level = parts.saver, None, log.level
        log.setLevel(logging.WARNING)
        self._be(Collectives(SingleRank(self._collectives.device)), parts)
        try:
            yield
        finally:
            log.setLevel(level)
            parts.saver = saver
            self._be(opened, parts)

    def _take_shares(self, counters: Counters) -> None:
        steps = self._config.gradient_accumulation_steps
        shares = shares_of(self._generation.units, self._num_units, steps, self._unit)
        self._source.share(shares)
        counters.accumulation.extra = len(shares) - steps


def _connection() -> Any:
    """A connection of its own to the store of the launcher."""
    host, _, port = os.environ[LIGHTHOUSE].rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


def _check(config: Config, collectives: Collectives, loader: Any) -> None:
    if LIGHTHOUSE not in os.environ:
        raise UsageError(
            "recovery.enabled: the launcher has to keep the other ranks when one fails: start the script with "
            "`xds --recover train.py`, or set recovery.enabled to false"
        )
    if (
        collectives.device.type != "cpu"
        or joins() is None
        and dist.get_backend(collectives.group) != "gloo"
    ):
        raise UsageError(
            f"recovery.enabled on {collectives.device.type} with {dist.get_backend(collectives.group)}: it is "
            "built for gloo on CPUs; set recovery.enabled to false"
        )
    is_world = collectives.group is dist.group.WORLD or joins() is not None
    if not is_world or collectives.backend.member.engine >= ENGINES:
        raise UsageError(
            "recovery.enabled: the engine must be the only one of its process, over all ranks; set "
            "recovery.enabled to false where there are several"
        )
    if not isinstance(loader, RankLoader) or not isinstance(loader.source, StepSampler):
        raise UsageError(
            "recovery.enabled needs training_data = a dataset in xds.initialize: a step that is dropped reads "
            "its samples again, and other ranks read those of a lost one"
        )


@contextmanager
def _keeping_random(device: torch.device) -> Iterator[None]:
    state = read_random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


__all__ = ["LIGHTHOUSE", "LiveRecovery"]
