"""Goes on in the same processes when a rank of another unit has failed: drops the step, opens groups, heals.

    collective fails ──> next generation ──> open groups ──> compare steps ──> drop the step, or take it
                         from the launcher                                     newcomers copy states; shares

No update begins before the message of the norm has arrived from all ranks, and each rank sends its part when
its sums are complete. So what a rank lacks, if others have updated, is the message: they give it, and it
updates as well. If none has updated, all repeat the step.

Where ranks hold one copy of the states alone they keep versions of it (checkpoint/versions.py), and wait for a
new process in the place of the lost rank. All ranks then load the newest version that all have: of the last
step, or of the one before it. A process on another host gets it from the buddy of its place.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist

from ..ops.comm.backend import set_timeout, state_of
from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import agreeing, all_gather_json
from ..ops.comm.mesh_groups import OPENING_FACTOR, MeshGroups
from ..ops.comm.opening import open_collectives
from ..recovery.buddies import newest_common, steps_of
from ..recovery.generations import GONE_BACK, Generation, Meeting
from ..recovery.slots import NONE, new_folder
from ..recovery.units import data_ranks_of_unit, mesh_of_units, shares_of
from ..utils.errors import PeerError, UsageError, XdsError
from ..utils.version import __version__
from ..zero.core.reduction import StepStatus
from .checkpoint.image import Image, read_image, receive_image, send_image
from .checkpoint.random_state import KeptRandom
from .checkpoint.versions import Versions, held_of
from .config.config import Config
from .counters import Counters
from .data.loaders import RankLoader
from .data.step_sampler import StepSampler
from .last_save import LastSave, newest_path
from .lost_peers import FencedStore, Losses
from .parts import Parts, Recovery
from .process.process import check_spare_hosts, joins, timeout_seconds
from .states import States
from .steps.training_step import TrainingStep

log = logging.getLogger("xds")
LIGHTHOUSE = "XDS_LIGHTHOUSE"  # host:port of the store in which the launcher names generations
LOOK_SECONDS = 0.02  # between two looks of rank 0 for new processes, while ranks are missing
# gloo's timeout of a new group, of which it waits five times for a connection: for so long where a rank ends
# after it has told its address. All ranks are there when it begins. Doubled where that was too short
CONNECT_SECONDS = 0.1
MOST_CONNECT_SECONDS = 10.0
NEW = -1  # the step of a process that has no states yet
Result = TypeVar("Result")


@final
class GoneBack(SystemExit):
    """The script is in a save that the run has not come to yet, so a new process is this rank from now on."""

    def __init__(self, rank: int, step: int, saved_step: int) -> None:
        """step: to which the run goes back. saved_step: of the save."""
        text = (
            f"rank {rank}: the run goes back to step {step}, and the script is in a save after step "
            f"{saved_step}, so a new process takes its place after step {step}"
        )
        log.warning(text)
        super().__init__(text)
        self.code = GONE_BACK


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
    random: KeptRandom


class _Row(NamedTuple):
    """What a rank says in the first message of a generation.

    step: the steps that it has taken; NEW: it has no states. calls: collective calls between steps; is_inside:
    it is in the last one. digest: of config and versions. waits: it has lost the message of its next step.
    unsaved: the step of the save in the background that it has abandoned; NONE: it has not.
    newer, older: the steps of which its host has versions of its states; NONE: fewer than two.
    host: the number of its host.
    """

    step: int
    calls: int
    is_inside: int
    digest: int
    waits: int
    unsaved: int
    newer: int
    older: int
    host: int


@final
class LiveRecovery(Recovery):
    """Recovery of one engine. A unit is a set of ranks that holds all states: see recovery/units.py."""

    is_on = True

    def __init__(
        self, config: Config, collectives: Collectives, loader: Any, groups: MeshGroups
    ) -> None:
        """groups: all others than `collectives`. Raises UsageError: recovery cannot work here."""
        _check(config, collectives, loader)
        check_spare_hosts(config.recovery.spare_hosts)
        source = loader.source
        assert isinstance(source, StepSampler)
        self._config, self._collectives, self._groups = config, collectives, groups
        self._loader, self._source = loader, source
        self._rank, self._mesh = collectives.rank, groups.mesh  # at the start of the run
        self._shard_ranks = config.recovery.shard_ranks(config.zero_optimization, groups.mesh)
        self._units = config.recovery.units(config.zero_optimization, groups.mesh)
        self._versions: Versions | None = None
        if config.recovery.keeps_versions(config.zero_optimization, groups.mesh):
            self._versions = Versions(self._rank, _store_address())
        self._base = _connection()  # of groups
        self._fence: FencedStore  # torch keeps no reference to it
        self._generation = Generation(0, tuple(range(len(self._units))))
        self._joins = joins()
        if self._joins is not None:
            self._generation = Generation(self._joins.generation, ())
        process = 0 if self._joins is None else self._joins.attempt
        self._meeting = Meeting(_connection(), "recovery", self._rank, self._units, process)
        self._losses = Losses(
            Meeting(_connection(), "recovery", self._rank, self._units, process), groups
        )
        self._has_met = False  # in the newest generation; states are still to be settled
        self._rows: list[_Row] = []  # of the last meeting, by rank
        self._regroups = False  # another generation begins after the step that runs
        self._looked_seconds = 0.0
        self._num_engines = 0  # that use the group
        self._target: RecoveryTarget | None = None
        self._committed: _Committed
        self._random: KeptRandom | None = None  # the same as in `_committed`, once there is one
        self._num_calls = 0  # collective calls between steps; the last one may be running
        self._is_inside = False
        self._call: tuple[Any, ...] = ()  # its arguments
        self._last_save = LastSave()
        # this process went back: what the script does until the next forward it has done before, and new
        # processes do not do it
        self._repeats = False
        self._lost_seconds = 0.0  # when a collective failed; 0: none has
        settings = json.dumps(config.as_dict(), sort_keys=True, default=str)
        self._digest = zlib.crc32(f"{torch.__version__} {__version__} {settings}".encode())

    # -- what the engine calls --------------------------------------------------------------------------

    def bind(self, parts: Parts, counters: Counters, step: TrainingStep, states: States) -> None:
        self._target = RecoveryTarget(parts, counters, step, states)
        parts.sharded.reduction.sums_first = True

    def begin(self) -> None:
        assert self._target is not None
        self._collectives.watch.recovers = True
        if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
            self._losses.start()
            # Python unwinds threads that are left at its end, and C++ code in them then aborts
            atexit.register(self._losses.end)
        self._note(self._source.start())
        if self._joins is not None:
            if self._versions is not None:
                self._versions.find()
            self._meeting.ask_to_join(self._joins.attempt)
            reason, _ = self._recover()
            report = self._target.parts.report
            report.has_joined()
            if self._versions is not None:  # no other rank is the first one, which writes
                report.recovered(reason, {})  # whoever reads the record sees how long others waited
            self.has_taken_over = True
            if self._call:  # the others save
                self.run(self._target.states.save, *self._call)
            return
        self._count_engines()
        has_buddies = False
        if self._versions is not None:
            self._target.parts.updater.allocate_states(also_on_host=True)
            self._begin_copies(self._versions, self._image(self._target))
            has_buddies = self._versions.has_buddy
        self._collectives.barrier()  # from here on every rank can recover
        with self._losses.opening(self._generation):
            num_least = self._config.recovery.least_units(len(self._units))
        has_one_copy = self._versions is not None
        self._meeting.announce(num_least, has_one_copy=has_one_copy, has_buddies=has_buddies)

    def _begin_copies(self, versions: Versions, image: Image) -> None:
        """Take the memory of all versions, and connect to the buddy. image: any of this rank."""
        own = torch.tensor([versions.host, image.size_bytes, image.frozen_bytes])
        table = self._collectives.gather_small(own, what="hosts").tolist()
        hosts, sizes_bytes, frozen_bytes = map(list, zip(*table, strict=True))
        with agreeing(self._collectives, "recovery"):
            versions.drop_after(NONE)
            versions.reserve(hosts, sizes_bytes, frozen_bytes)
        told = versions.tell(self._generation.number, hosts, ())
        versions.hear(hosts, all_gather_json(self._collectives, told, "addresses"))

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self._generation.number

    @property
    def has_lost(self) -> bool:  # type: ignore[override]
        return self._lost_seconds > 0

    def takes_failure(self) -> bool:
        group = self._collectives.group
        if group is not None and state_of(group).num_engines > self._num_engines:
            return False  # another engine of this process uses the group that would be opened again
        if not self.has_lost:
            self._lost_seconds = time.monotonic()
            self._leave()
        return True

    def _leave(self) -> None:
        """Those that wait for this rank recover as well."""
        for opened in self._groups.opened:
            opened.leave()

    @property
    def must_regroup(self) -> bool:  # type: ignore[override]
        is_whole = len(self._generation.units) == len(self._units)
        if self._versions is not None or is_whole:  # another one begins with a failure alone
            return False
        if self._collectives.rank or time.monotonic() - self._looked_seconds < LOOK_SECONDS:
            return False
        self._looked_seconds = time.monotonic()
        return self._meeting.is_replaced(self._generation)

    def agree(self, status: StepStatus) -> None:
        self._regroups = status.regroups and not self.has_lost

    def settle(self, error: PeerError) -> StepStatus:
        if not self.takes_failure() or self._versions is not None:  # all go back to one version
            raise error
        assert self._target is not None
        with self._target.parts.report.spending("stall"):
            status = self._meet(waits=True)
        if status is None:
            raise error
        self._target.parts.updater.lost = error  # new values are published with those of the others
        return status

    def commit(self) -> None:
        self._note(self._source.taken(self._committed.position))

    def begin_step(self) -> None:
        self.has_taken_over = self._repeats = False
        self._source.use()
        self._keep_version()
        if not self._regroups or self.has_lost:
            return
        # what the script does between two steps, such as a save, is done: new processes know nothing of it
        assert self._target is not None
        report = self._target.parts.report
        with report.spending("stall"):
            reason, stall_seconds = self._recover()
        report.recovered(reason, {"stall": round(stall_seconds, 6)})
        self._end_abandoned(self._target)

    def before_vote(self) -> None:
        """See `Recovery`. Raises PeerError: a rank has failed, so the next host has no copy of this version."""
        if self._versions is None:
            return
        deadline = time.monotonic() + timeout_seconds()
        while not self._versions.complete(LOOK_SECONDS):
            is_late = time.monotonic() > deadline
            if is_late or self._meeting.is_replaced(self._generation):
                raise PeerError(
                    f"rank {self._rank}: a rank of the next host has not got the copy of the last step"
                )

    def loaded(self, path: str) -> None:
        self._note(self._source.start())
        self._last_save.loaded(path)
        if self._versions is None:
            return
        self.before_vote()
        self._versions.drop_after(NONE)
        if self._versions.has_buddy:
            self._versions.drop_guests_after(NONE)
            self._collectives.barrier()  # nobody sends a new one before

    def keep(self) -> None:
        self._keep_version()
        self.before_vote()

    def recover(self, *, stays: bool = False) -> None:
        """See `Recovery`. Raises PeerError: the run does not go on, or not with this rank."""
        assert self._target is not None
        report = self._target.parts.report
        repeated_seconds = report.drop_step()
        self._target.parts.saves.dropped()
        with report.spending("stall"):
            self._drop(self._target)
            reason, stall_seconds = self._recover(stays=stays)
            self._repeats = self._versions is not None and not (stays or self._is_inside)
        report.recovered(reason, {"stall": round(stall_seconds, 6), "repeated": repeated_seconds})
        self._end_abandoned(self._target)

    def _end_abandoned(self, target: RecoveryTarget) -> None:
        """Write a save again that was abandoned, if it is of the step from which the run goes on."""
        args = self._last_save.args_to_make(self._call)
        is_made_again = self._saves_again()
        self._last_save.end(is_made_again=is_made_again)
        if is_made_again:
            with target.parts.report.spending("save"):
                self.run(target.states.save, *args)

    def run(self, call: Callable[..., Result], *args: Any) -> Result | None:
        """`call`, a save between two steps. It is repeated if a rank fails before any has ended it."""
        assert self._target is not None
        self._num_calls += 1
        self._is_inside, self._call = True, args
        try:
            while True:
                with self:
                    self.keep()
                    self._last_save.begin(self._target.counters)
                    result = call(*args)
                    self._last_save.made(self._target.counters, args)
                    return result
                self.recover()
                if not self._is_inside:
                    return None
        finally:
            self._is_inside, self._call = False, ()

    def has_saved(self, save_dir: str | Path, tag: str) -> bool:
        assert self._target is not None
        step = self._target.counters.global_steps
        is_last = self._last_save.is_same(save_dir, tag, step)
        return self._repeats or self.has_taken_over and is_last

    def is_replaced(self) -> bool:
        return self._meeting.has_lost(self._generation)

    def end(self) -> None:
        self._losses.end()
        if self._versions is not None:
            # where a script ends its engine for an error, a new process goes on from them
            self._versions.close(removes=sys.exc_info()[0] is None)
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
        self._random = random = KeptRandom(self._collectives.device, self._random)
        self._committed = _Committed(
            position, counters.micro_steps, counters.global_samples, random
        )

    def _keep_version(self) -> None:
        """Begin to write the version of the last step, with what the script has written to parameters since."""
        versions, target = self._versions, self._target
        if versions is None or target is None or self.has_lost:
            return
        step = target.counters.global_steps
        if not versions.is_kept(step):
            self.before_vote()  # of the version before this one
            target.parts.updater.wait()  # of updates on the host
            is_first = max(versions.steps) == NONE
            versions.begin(self._image(target))
            if is_first:  # a rank that fails in its first forward leaves a version as well
                self.before_vote()
        elif not versions.is_sent(step):
            self.before_vote()
            versions.begin_sending(step)

    def _image(self, target: RecoveryTarget) -> Image:
        """What this rank holds, as it was when the last step ended."""
        args = self._last_save.args_to_make(self._call)  # has its own
        client_state = args[2] if args else target.states.client_state
        with self._loader.standing_at(self._committed.position):
            keeps = self._versions is not None
            random = self._committed.random.state() if keeps else None
            return Image(target.parts, target.counters, client_state, random, splits=keeps)

    def _drop(self, target: RecoveryTarget) -> None:
        """Be where the last step has ended."""
        target.parts.sharded.abandon_step()
        target.step.restart()
        target.counters.micro_steps = self._committed.micro_steps
        target.counters.global_samples = self._committed.global_samples
        self._loader.resume(self._committed.position)
        self._committed.random.restore()

    def _recover(self, *, stays: bool = False) -> tuple[str, float]:
        """Take part in the newest generation, from the newest step on. Returns why, and the seconds it took.

        stays: see `recover`.
        """
        target, begun_seconds = self._target, self._lost_seconds or time.monotonic()
        assert target is not None
        target.parts.updater.wait()  # of updates on the host
        while True:
            if self._versions is not None:
                self._versions.stop()
            if not self._has_met:
                self._meet()
            try:
                if self._versions is None:
                    self._heal(target)
                else:
                    self._go_back(target, self._versions, stays or self._is_inside)
                target.parts.packing.rejoin(is_new=self._joins is not None)
                break
            except PeerError:  # another rank has failed meanwhile
                self._has_met = False
                self.takes_failure()
                self._leave()
                target.parts.sharded.abandon_step()  # messages of a load would fail the next one
                self._meeting.ask_again(self._generation)
        if self._joins is not None:
            self._meeting.say_joined(self._joins.attempt, target.counters.global_steps)
        self._lost_seconds, self._regroups, self._joins, self._has_met = 0.0, False, None, False
        self._take_shares(target.counters)
        seconds = time.monotonic() - begun_seconds
        ranks = ", ".join(map(str, self._meeting.ranks_in(self._generation)))
        steps = target.counters.global_steps
        reason = f"{self._generation.reason}: ranks {ranks} go on after step {steps}"
        if self._collectives.rank == 0:
            log.warning("%s, %.2f s later", reason, seconds)
        return reason, seconds

    def _meet(self, *, waits: bool = False) -> StepStatus | None:
        """Meet the others in the newest generation.

        waits: this rank has lost the message of its step. Returns it, if others have it.
        """
        assert self._target is not None
        seconds = CONNECT_SECONDS
        while True:
            if self.has_lost:
                self._last_save.abandon(self._target.parts.saver)
            generation = self._next()  # raises PeerError where there is none for this rank
            try:
                self._enter(generation, self._target.parts, seconds)
                status = self._compare(self._target, waits)
                if self._collectives.rank == 0:
                    self._meeting.say_opened(generation)
                self._has_met = True
                return status
            except PeerError:  # another rank has failed meanwhile, or was too slow
                self.takes_failure()
                self._leave()
                self._meeting.ask_again(generation)
                seconds = min(2 * seconds, MOST_CONNECT_SECONDS)

    def _saves_again(self) -> bool:
        """The save that was abandoned is of the step from which the run goes on. The same on all ranks."""
        assert self._target is not None
        # a rank that is inside of a call that others have ended has lost the answer, and has not begun to write
        unsaved = {row.unsaved for row in self._rows if row.step != NEW and not row.is_inside}
        return self._is_call_ended() and unsaved == {self._target.counters.global_steps}

    def _is_call_ended(self) -> bool:
        """A rank has ended the last call between steps, or has never been in one."""
        rows = [row for row in self._rows if row.step != NEW]
        calls = max((row.calls for row in rows), default=0)
        return any(row.calls - row.is_inside >= calls for row in rows)

    def _next(self) -> Generation:
        """The next generation that all its ranks have joined."""
        number = self._generation.number
        while True:
            is_new = self._joins is not None
            found = self._meeting.next_after(number, timeout_seconds(), is_new=is_new)
            if self._meeting.gather(found):
                return found
            number = found.number

    def _enter(self, generation: Generation, parts: Parts, seconds: float) -> None:
        """Open all groups anew. Raises PeerError: a rank has failed meanwhile, or was not there in time."""
        with self._losses.opening(generation):
            self._open(generation, parts, seconds)

    def _open(self, generation: Generation, parts: Parts, seconds: float) -> None:
        self._generation = generation
        ranks = self._meeting.ranks_in(generation)
        mesh = self._mesh
        if self._versions is None:
            mesh = mesh_of_units(self._mesh, self._shard_ranks, len(generation.units))
        self._collectives.stop_watching()
        if not dist.is_initialized():
            # torch counts groups, and their numbers are in the names by which ranks meet. One that could not be
            # opened has left its number behind; the end of any default group begins anew
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        dist.destroy_process_group()
        self._fence = FencedStore(self._base, self._meeting, generation)
        store = dist.PrefixStore(f"generation{generation.number}", self._fence)  # type: ignore[attr-defined]
        short = timedelta(seconds=seconds)
        section = self._config.communication.where(has_native_ops=self._config.ops.native)
        device = self._collectives.device
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=ranks.index(self._rank),
                world_size=len(ranks),
                timeout=short,
            )
            group = dist.group.WORLD
            assert group is not None
            set_timeout(group, OPENING_FACTOR * short)
            opened = open_collectives(
                group, device, section=section, recovers=True, wait_seconds=timeout_seconds()
            )
            self._collectives.reopen(opened)
            self._groups.reopen(mesh, group, seconds)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._rank}: generation {generation.number}: {error}"
            ) from error
        set_timeout(group, timedelta(seconds=timeout_seconds()))
        parts.sharded.regroup(mesh)
        self._count_engines()
        if self._config.watch.enabled:
            self._collectives.start_watching(self._config.watch, timeout_seconds())

    def _count_engines(self) -> None:
        group = self._collectives.group
        self._num_engines = 0 if group is None else state_of(group).num_engines

    def _compare(self, target: RecoveryTarget, waits: bool) -> StepStatus | None:
        """Compare the steps of all ranks. Returns the message of the step that this rank `waits` for."""
        step = NEW if self._joins is not None else target.counters.global_steps
        copies = (NONE, NONE, NONE)
        if self._versions is not None:
            copies = (*self._versions.steps, self._versions.host)  # type: ignore[assignment]
        more = (self._digest, waits, self._last_save.unsaved_step)
        own = _Row(step, self._num_calls, self._is_inside, *more, *copies)
        table = self._collectives.gather_small(torch.tensor([int(n) for n in own]), what="steps")
        self._rows = rows = [_Row(*numbers) for numbers in table.tolist()]
        newest = max(rows, key=lambda row: row.step)
        if self._digest != newest.digest:
            raise UsageError(
                f"rank {self._rank} cannot take the place of a lost rank: its config, or its version of xds or "
                "torch, differs from that of the ranks that train; start the run again"
            )
        if newest.step == NEW and self._versions is None:
            raise UsageError(
                "all ranks that have trained are lost, before a new process has their states: start the run "
                "again from its last checkpoint"
            )
        # another rank has ended the call that this one is in: all have done their part of it
        if any(row.calls - row.is_inside >= self._num_calls for row in rows):
            self._is_inside = False
        behind = [row for row in rows if NEW < row.step < newest.step]
        if not behind or self._versions is not None:
            return None
        reduction = target.parts.sharded.reduction
        told: list[str] = []
        if step == newest.step and reduction.status is not None:
            told = [number.hex() for number in reduction.status.table.view(-1).tolist()]
        every = all_gather_json(self._collectives, told, "the message of a step")
        if step in (NEW, newest.step):
            return None
        if not waits or step + 1 != newest.step:
            raise XdsError(
                f"rank {self._rank} has taken {step} steps and others {newest.step}: it cannot go on with them"
            )
        table = next(each for each in every if each)
        return reduction.status_of([float.fromhex(number) for number in table])

    def _heal(self, target: RecoveryTarget) -> None:
        """Let processes without states copy those of the same rank of another unit, and publish parameters."""
        ranks = self._meeting.ranks_in(self._generation)
        new = {rank for rank, row in zip(ranks, self._rows, strict=True) if row.step == NEW}
        parts = target.parts
        if self._joins is None and self._saves_again():
            self._last_save.uncount(target.counters)
        if not new:
            if parts.sharded.policy.shards_optimizer:
                parts.updater.publish_again()
            return
        source = next(u for u in self._generation.units if new.isdisjoint(self._units[u]))
        folder, failure = "", ""
        try:
            if self._meeting.unit == source:
                folder = str(new_folder())
                try:
                    self._image(target).write(Path(folder))
                except OSError as error:
                    failure = str(error)
            told = {"folder": folder, "failure": failure}
            told |= self._last_save.told(self._call)
            every = all_gather_json(self._collectives, told, "the folder of states")
            sources = {rank: self._peer_of(rank, source) for rank in new}
            folder = self._send_images(sources, ranks, every, folder)
            if self._joins is not None:
                told = every[ranks.index(sources[self._rank])]
                self._take(target, {**told, "folder": folder or told["folder"]}, every)
            elif parts.sharded.policy.shards_optimizer:
                parts.updater.publish_again()
            self._collectives.barrier()
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _peer_of(self, rank: int, unit: int) -> int:
        """The rank of `unit` with the same place in it."""
        own = next(ranks for ranks in self._units if rank in ranks)
        return self._units[unit][own.index(rank)]

    def _send_images(
        self, sources: Mapping[int, int], ranks: Sequence[int], every: list[Any], folder: str
    ) -> str:
        """Send images to new processes on other hosts. For all ranks. Returns the folder of this one, if any.

        sources: by rank of a new process, the rank that has written its image. every: what each rank has told.
        """
        lacks = False
        if self._joins is not None:
            told = every[ranks.index(sources[self._rank])]
            # its name is random: where it exists, the memory is the same
            lacks = not told["failure"] and not Path(told["folder"]).exists()
        lacking = all_gather_json(self._collectives, lacks, "who lacks states")
        for rank, source in sorted(sources.items()):
            if not lacking[ranks.index(rank)]:
                continue
            if self._rank == source:
                send_image(self._collectives, ranks.index(rank), Path(folder))
            elif self._rank == rank:
                folder = str(new_folder())
                receive_image(self._collectives, ranks.index(source), Path(folder))
        return folder

    def _take(self, target: RecoveryTarget, told: Any, every: list[Any]) -> None:
        """Take the states that another rank has written, and its part in a call that runs."""
        if told["failure"]:
            raise UsageError(
                f"rank {self._rank} cannot take the place of a lost rank: the states of another rank do not "
                f"fit into memory: {told['failure']}"
            )
        folder = Path(told["folder"])
        client_state = read_image(target.parts, target.counters, folder, also_random=False)
        self._note(self._source.start())
        self._take_call(target, client_state, every)

    def _go_back(self, target: RecoveryTarget, versions: Versions, stays: bool) -> None:
        """All ranks load the newest version that all of them have, here or on the next host. For all ranks.

        stays: the script of this rank cannot go back.
        """
        hosts = [row.host for row in self._rows]
        own = [(row.newer, row.older) for row in self._rows]
        lacking = [rank for rank, row in enumerate(self._rows) if row.older == NONE]
        told = self._last_save.told(self._call)
        told["copies"] = versions.tell(self._generation.number, hosts, lacking)
        every = all_gather_json(self._collectives, told, "the calls and copies of ranks")
        copies = [each["copies"] for each in every]
        step = newest_common(steps_of(own, held_of(copies)))
        if step == NONE:
            self._meeting.give_up()
            saved = newest_path(every)
            where = f" ({saved})" if saved else ""
            raise UsageError(
                f"{self._generation.reason}, and the ranks have no version of the states in memory that all of "
                f"them share: start the run again from its last checkpoint{where}"
            )
        if stays and step < target.counters.global_steps:
            self._last_save.end(is_made_again=False)
            raise GoneBack(self._rank, step, target.counters.global_steps)
        versions.fetch_missing(step, own, copies)
        versions.drop_guests_after(step)
        client_state = read_image(
            target.parts, target.counters, versions.folder_of(step), also_random=True
        )
        self._collectives.barrier()
        versions.drop_after(step)
        versions.hear(hosts, copies)
        self._note(self._source.start())
        if self._joins is not None:
            self._take_call(target, client_state, every)

    def _take_call(self, target: RecoveryTarget, client_state: Any, every: list[Any]) -> None:
        """Take part in the save that the others make between two steps. every: what each rank has `told`."""
        self._num_calls, is_ended = max(row.calls for row in self._rows), self._is_call_ended()
        self._call = self._last_save.hear(every, client_state)
        if is_ended and not self._saves_again():
            self._call = ()
        if not self._call:
            target.states.client_state = client_state
        elif not is_ended:
            self._num_calls -= 1

    def _take_shares(self, counters: Counters) -> None:
        if self._versions is not None:  # no unit is gone
            return
        steps, unit = self._config.gradient_accumulation_steps, self._meeting.unit
        shares = shares_of(self._generation.units, len(self._units), steps, unit)
        each = data_ranks_of_unit(self._mesh, self._shard_ranks)
        place = self._mesh.coordinates(self._rank).data % each
        taken = [(number * each + place, micro) for number, micro in shares]
        self._source.share(taken, self._committed.position)
        counters.accumulation.extra = len(shares) - steps


def _store_address() -> tuple[str, int]:
    """Host and port of the store of the launcher."""
    host, _, port = os.environ[LIGHTHOUSE].rpartition(":")
    return host.strip("[]"), int(port)


def _connection() -> Any:
    """A connection of its own to the store of the launcher."""
    return dist.TCPStore(*_store_address(), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


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
    if not is_world or collectives.backend.member.engine > 1:  # the first compares configs
        raise UsageError(
            "recovery.enabled: the engine must be the only one of its process, over all ranks; set "
            "recovery.enabled to false where there are several"
        )
    if not isinstance(loader, RankLoader) or not isinstance(loader.source, StepSampler):
        raise UsageError(
            "recovery.enabled needs training_data = a dataset in xds.initialize: a step that is dropped reads "
            "its samples again, and other ranks read those of a lost one"
        )


__all__ = ["LIGHTHOUSE", "LiveRecovery"]
