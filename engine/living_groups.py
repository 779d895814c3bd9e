"""Groups of ranks that meet as long as they live: one that dies, stops or is late is left out, and comes back.

    group 0   steps ── meeting 3: 0 1 2 ── steps ── meeting 4: 0 2 ── steps ── meeting 5: 0 1 2
    group 1   steps ── meeting 3        ── killed   new processes ── waits ──> takes the outer parameters
    group 2   steps ── meeting 3        ── steps ── meeting 4 ...

Each group is a default group of torch of its own, so what happens in one touches no message of another one. In
a meeting equal ranks of its groups open a group, which stays as long as the same groups meet. All ranks of a
try keep what they have until it counts: see outer/rounds.py.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.comm.backend import SingleRank, set_timeout
from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import all_gather_json
from ..ops.comm.message_log import Traffic
from ..ops.comm.opening import open_collectives
from ..ops.comm.threads import OrderedThreads
from ..ops.torch_internals import open_group_beside
from ..ops.watch.store import Store
from ..outer.config import Outer
from ..outer.fragment import DONE, Fragment, Job, OuterSgd
from ..outer.mean import mean_of, padded_numel
from ..outer.rounds import Patience, Rounds, Try, changes
from ..outer.schedule import MeetingSchedule
from ..recovery.generations import Generation, Presence
from ..recovery.generations import Meeting as Generations
from ..utils.errors import PeerError, UsageError, XdsError
from ..zero.core.reduction import StepStatus
from .config.config import Config
from .counters import Counters
from .meeting import NO_SHARED_MEMORY, HeldStates, check_sites
from .parts import Parts, Recovery
from .process.process import joins, timeout_seconds

log = logging.getLogger("xds")
LIGHTHOUSE = "XDS_LIGHTHOUSE"  # host:port of the launcher's store
CPU = torch.device("cpu")
LOOK_SECONDS = 0.1  # between two looks of a group's first rank, whether others call it
CONNECT_SECONDS = 10.0  # of the ranks of a try
NONE_YET = -1  # the meeting whose outer parameters a new group has
Result = TypeVar("Result")
_threads = OrderedThreads("xds-outer")


@final
@dataclass
class _Column:
    """The equal ranks of the groups of the last meeting that this rank was in."""

    trial: Try
    meet: Collectives


@final
@dataclass
class _Meeting:
    """A meeting that this group comes to.

    grads: the outer gradients, by fragment: of the next one, or of all if others have met without this group.
    Until the meeting is held they are the parameters. weights: of all fragments. clock: the steps since the
    last meeting. last: the last meeting that it can come to; None: there is none. trial: how it has gone;
    None: it goes on. slow: the groups that came with less than half of the steps of others, and these steps.
    """

    clock: int
    grads: dict[int, Tensor]
    weights: list[float]
    last: int | None
    told: dict[str, Any]
    buffers: list[Tensor]
    job: Job = DONE
    steps: int = 0  # since its start
    trial: Try | None = None
    seconds: float = 0.0  # after the first try that was dropped
    taken: Any = None  # what the group with the newest outer parameters has told
    slow: dict[int, str] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)  # groups whose processes were new in it
    moved: dict[int, Tensor] = field(
        default_factory=dict
    )  # how outer parameters of other fragments changed


@final
class _Found:
    """What a try has found on this rank, until it counts. fragment: that meets."""

    def __init__(self, fragment: Fragment, grad: Tensor | None, num_groups: int) -> None:
        """grad: None: a new group has none."""
        numel, size = fragment.numel, padded_numel(fragment.numel, num_groups)
        self.fragment = fragment
        self.grad, self.error = torch.zeros(size), None
        if grad is not None:
            self.grad[:numel] = grad
        if fragment.error is not None:
            self.error = torch.zeros(size)
            self.error[:numel] = fragment.error[:numel]
        # what came from another group: outer parameters and momentum, by fragment
        self.came: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.told: Any = None
        self.slow: dict[int, str] = {}
        self.new: list[int] = []

    def keep(self, fragments: Sequence[Fragment], optimizer: OuterSgd) -> dict[int, Tensor]:
        """The try counts. Returns how the outer parameters of the fragments that do not meet have changed."""
        moved = {}
        for number, (outer, momentum) in self.came.items():
            held = fragments[number]
            if held is not self.fragment:
                moved[number] = (outer - held.outer)[: held.numel]
            held.outer, held.momentum = outer, momentum
        fragment = self.fragment
        numel, momentum = fragment.numel, fragment.momentum
        if fragment.error is not None and self.error is not None:
            fragment.error[:numel] = self.error[:numel]
        optimizer.step(
            fragment.outer[:numel],
            None if momentum is None else momentum[:numel],
            self.grad[:numel],
        )
        return moved


@final
class LivingGroups(HeldStates):
    """The meetings of one engine whose groups may come and go. One runs at a time."""

    def __init__(self, config: Config, world: dist.ProcessGroup, device: torch.device) -> None:
        """world: the ranks of this group. Raises UsageError: there are no such groups."""
        section = config.outer
        assert section is not None
        total = int(os.environ["WORLD_SIZE"])
        self._num_ranks = total // section.groups
        check_place(section, world, self._num_ranks, device)
        number, self._rank = divmod(int(os.environ["RANK"]), self._num_ranks)
        super().__init__(section, number)
        units = [
            tuple(range(first, first + self._num_ranks))
            for first in range(0, total, self._num_ranks)
        ]
        self._joins = joins()
        first = 0 if self._joins is None else self._joins.generation + 1
        self._base = _connection()  # of groups
        messages = Store(_connection(), "outer", int(os.environ["RANK"]))
        everyone = Generation(0, tuple(range(section.groups)))
        process = 0 if self._joins is None else self._joins.attempt
        rank = int(os.environ["RANK"])
        told = Store(_connection(), "recovery", rank)
        presence = Presence(told, everyone, number, rank, process)
        self._generations = Generations(
            _connection(), "recovery", int(os.environ["RANK"]), units, process
        )
        self._store, self._presence = messages, presence
        patience = Patience(section.quorum, section.window_seconds, timeout_seconds())
        place = (number, self._rank, self._num_ranks)
        self._rounds = Rounds(messages, presence, patience, place, first)
        self._min_units = config.recovery.min_units
        counted = Collectives(SingleRank(CPU))  # the bytes to all groups, whichever are there
        counted.traffic = Traffic(section.groups)
        self.opened = [counted]
        self._column: _Column | None = None
        self._schedule = MeetingSchedule(section.steps, section.fragments, section.delay)
        self._next = 1  # the number of the next meeting
        self._version = NONE_YET  # the meeting that the outer parameters are of
        self._members: tuple[int, ...] = everyone.units  # of the last meeting
        self._slow: set[int] = set()  # in the last meeting
        self._clock = 0  # steps since the last meeting
        self._now: _Meeting | None = None
        self._num_loads = 0
        self._has_trained = False
        self._looked_seconds = 0.0
        self._is_called = False

    def calls(self) -> Recovery:
        return CalledGroups(self)

    # -- the start --------------------------------------------------------------------------------------

    def bind(self, parts: Parts, counters: Counters) -> None:
        super().bind(parts, counters)
        if len(list(self._values_beside())) > len(list(parts.module.buffers())):
            raise UsageError(
                "outer with recovery.enabled, and parameters that are not trained: a new group would not get "
                "them; train all parameters, or set recovery.enabled to false"
            )

    @torch.no_grad()
    def begin(self) -> None:
        """All groups begin with the values of the first one, and a new one with those of the next meeting."""
        self._told()  # raises what a state of the script's schedule cannot be
        if self._joins is not None:
            self._join()
            return
        everyone = Try(0, 0, self._members)
        column = self._open(everyone)
        digest = self._check_alike(column.meet)
        for tensor in self._engine.module.buffers():
            _broadcast(column.meet, tensor, 0)
        for number, fragment in enumerate(self._fragments):
            fragment.outer[: fragment.numel] = self._read(number)
            column.meet.broadcast(fragment.outer)
        if self.number:
            self._write(range(len(self._fragments)), mix=0.0)
        self._version = 0
        column.meet.barrier()
        if not self.number:
            self._store.set(f"digest/{self._rank}", digest)
        self._generations.announce(self._min_units, are_alone=True)

    def _join(self) -> None:
        """Take the place of a group that is lost."""
        assert self._joins is not None
        alone = Collectives(SingleRank(CPU))
        if self._store.read(f"digest/{self._rank}") != self._check_alike(alone):
            raise UsageError(
                f"group {self.number} cannot come back: its section outer, its model, how it is divided, or "
                "its version of xds or torch differs from that of other groups; start the run again"
            )
        if not self._rank:
            self._next = self._rounds.begin_anew()
        self._engine.sharded.collectives.barrier()
        self._generations.ask_to_join(self._joins.attempt)
        self._generations.next_after(self._joins.generation, timeout_seconds(), is_new=True)
        while self._version == NONE_YET:
            self._start()
            self._finish(mix=0.0)
        self._clock = 0
        self._generations.say_joined(self._joins.attempt)
        self._engine.report.has_joined()

    # -- after each step --------------------------------------------------------------------------------

    @property
    def is_called(self) -> bool:
        """The other groups wait for this one. What its first rank says in the message of a step."""
        if self._rank or time.monotonic() - self._looked_seconds < LOOK_SECONDS:
            return False
        self._looked_seconds = time.monotonic()
        return self._now is None and self._rounds.is_called(self._next)

    def agree(self, is_called: bool) -> None:
        """What the ranks of this group said."""
        self._is_called |= is_called

    @torch.no_grad()
    def advance(self, weight: float) -> None:
        self._has_trained = True
        for fragment in self._fragments:
            fragment.weight += weight
        self._clock += 1
        now, section = self._now, self._section
        if now is not None:
            now.steps += 1
            if now.steps >= section.delay:
                self._finish(section.mix)
        if self._clock >= self._schedule.interval(self._next) or self._is_called:
            self._is_called = False
            if self._now is None:
                self._start()
                if not section.delay:
                    self._finish(section.mix)

    def _start(self) -> None:
        """Come to the next meeting."""
        is_new = self._version == NONE_YET
        values = {number: self._read(number) for number in self._meeting_next()}
        weights = [fragment.weight for fragment in self._fragments]
        for fragment in self._fragments:
            fragment.weight = 0.0
        clock, self._clock = self._clock, 0
        last = None if is_new or len(values) == len(self._fragments) else self._next
        buffers = [buffer.detach().to(CPU, copy=True) for buffer in self._engine.module.buffers()]
        now = self._now = _Meeting(clock, values, weights, last, self._told(), buffers)
        if self._section.delay and not is_new:
            now.job = _threads.add(id(self), lambda: self._hold(now))
        else:
            self._hold(now)

    def _meeting_next(self) -> Sequence[int]:
        """The fragments that may meet next. A group that has missed a meeting may miss one more."""
        if self._version == NONE_YET:
            return ()
        if self._version < self._next - 1:
            return range(len(self._fragments))
        return [self._schedule.fragment(self._next)]

    def _finish(self, mix: float) -> None:
        """Take what the meeting has found."""
        now, self._now = self._now, None
        assert now is not None
        now.job.join()
        assert now.trial is not None
        trial, is_new = now.trial, self._version == NONE_YET
        met = self._schedule.fragment(trial.number) if trial.groups else None
        for number, fragment in enumerate(self._fragments):
            fragment.weight += now.weights[number] if number != met else 0.0
        if met is None:
            self._next = trial.number
            return
        if now.taken is not None:
            self._take(now)
        self._next, self._version = trial.number + 1, trial.number
        if is_new:
            self._write(range(len(self._fragments)), mix=0.0)
        else:  # in the other fragments this group keeps what it has learned since it was there last
            moved = {number: self._read(number).add_(by) for number, by in now.moved.items()}
            self._set({met: self._mixed(met, mix)} | moved)
        self._report(trial, now)

    def _report(self, trial: Try, now: _Meeting) -> None:
        gone, back = changes(self._members, trial.groups)
        self._members = trial.groups
        groups, living = ", ".join(map(str, trial.groups)), self._presence.newest().units
        self._engine.report.stand_in(writes=self.number == min(living, default=self.number))
        lost = self._presence.reasons
        texts = [
            f"group {group} is {'late or stopped' if group in living else f'gone ({lost[group]})'}"
            for group in gone
        ]
        texts += [f"group {group} is there again" for group in back]
        texts += [
            f"group {group} was gone ({lost.get(group, 'its ranks ended')}) and is there again"
            for group in now.new
            if group not in back
        ]
        texts += [f"group {each} is slow ({now.slow[each]})" for each in {*now.slow} - self._slow]
        self._slow = {*now.slow}
        for text in texts:
            reason = f"{text}: groups {groups} have held meeting {trial.number}"
            if not self._rank and self.number == trial.groups[0]:
                log.warning("%s, %.2f s later", reason, now.seconds)
            self._engine.report.recovered(reason, {"stall": round(now.seconds, 6)})

    # -- a meeting, possibly in the background ------------------------------------------------------------

    @torch.no_grad()
    def _hold(self, now: _Meeting) -> None:
        """Take part in the next meeting, as often as it is tried."""
        number, begun_seconds = self._next, 0.0
        for which, grad in now.grads.items():
            torch.sub(self._fragments[which].outer[: grad.numel()], grad, out=grad)
            if not torch.isfinite(grad.sum()):
                raise XdsError(
                    f"the parameters of group {self.number} are not finite: load the last checkpoint, and "
                    "lower the learning rate or set gradient_clipping"
                )
        while True:
            trial = self._rounds.seek(number, now.last, is_new=self._version == NONE_YET)
            if not trial.groups:
                now.trial = trial
                return
            found = self._try(trial, now)
            if self._rounds.conclude(trial, is_done=found is not None):
                assert found is not None
                now.moved = found.keep(self._fragments, self._optimizer)
                now.taken, now.slow, now.new = found.told, found.slow, found.new
                now.trial = trial
                now.seconds = time.monotonic() - begun_seconds if begun_seconds else 0.0
                return
            begun_seconds = begun_seconds or time.monotonic()
            self._close()

    def _try(self, trial: Try, now: _Meeting) -> _Found | None:
        """The mean over the groups of a try. None: a group does not take part after all."""
        try:
            column = self._column_of(trial)
            with self._leaving_if_one_is_lost(trial, column.meet):
                return self._mean(trial, now, column.meet)
        except PeerError:
            return None

    def _mean(self, trial: Try, now: _Meeting, meet: Collectives) -> _Found:
        """Send 24 bytes, the mean, and what groups lack that have missed meetings."""
        number = self._schedule.fragment(trial.number)
        weight = now.weights[number]
        mine = torch.tensor([weight, self._version, now.clock], dtype=torch.float64)
        table = meet.gather_small(mine, what="weights of groups")
        weights, versions = table[:, 0], table[:, 1].tolist()
        newest = max(versions)
        if newest == NONE_YET:
            raise UsageError(
                "all groups that have trained are lost: start the run again from its last checkpoint"
            )
        source = versions.index(newest)
        found = _Found(self._fragments[number], now.grads.get(number), len(trial.groups))
        found.new = [
            group
            for group, version in zip(trial.groups, versions, strict=True)
            if version == NONE_YET
        ]
        found.slow = _slow(trial.groups, versions, table[:, 2].tolist())
        for lacked in self._schedule.fragments_since(int(min(versions)), int(newest)):
            held, is_behind = self._fragments[lacked], self._version < newest
            outer, momentum = _sent(meet, held.outer, source), held.momentum
            if momentum is not None:
                momentum = _sent(meet, momentum, source)
            if is_behind:
                found.came[lacked] = outer, momentum
        if min(versions) == NONE_YET:
            every = all_gather_json(meet, now.told, "the state of groups")
            for buffer in now.buffers:
                _broadcast(meet, buffer, source)
            if self._version == NONE_YET:
                found.told = every[source]
        total = float(weights.sum())
        if total and len(trial.groups) > 1:
            mean_of(meet, self._section.bits).of(found.grad, found.error, weight / total)
        elif not total:
            found.grad.zero_()
        return found

    def _column_of(self, trial: Try) -> _Column:
        """The equal ranks of its groups. All of them know alike whether they have it open."""
        last = self._column
        if last is not None and not trial.attempt:
            is_next = last.trial.number == trial.number - 1
            same = (last.trial.groups, last.trial.generation)
            if is_next and same == (trial.groups, trial.generation):
                last.trial = trial
                return last
        self._close()
        return self._open(trial)

    def _open(self, trial: Try) -> _Column:
        """Raises PeerError: a rank is not there."""
        group, places = None, {rank: f"group {number}" for rank, number in enumerate(trial.groups)}
        name = f"outer/{trial.number}/{trial.attempt}/{self._rank}"
        if len(trial.groups) > 1:
            seconds = CONNECT_SECONDS if trial.number else timeout_seconds()
            try:
                group = open_group_beside(
                    self._base,
                    name,
                    trial.groups.index(self.number),
                    len(trial.groups),
                    timedelta(seconds=seconds),
                )
            except RuntimeError as error:
                raise PeerError(f"meeting {trial.number}: {error}") from error
            set_timeout(group, timedelta(seconds=timeout_seconds()))
        meet = open_collectives(group, CPU, section=NO_SHARED_MEMORY)
        meet.name_places(places)
        meet.watch.recovers = True
        meet.traffic = self.opened[0].traffic
        self._column = _Column(trial, meet)
        return self._column

    def _close(self) -> None:
        column, self._column = self._column, None
        if column is not None and column.meet.group is not None:
            with suppress(RuntimeError):
                column.meet.leave()
                dist.destroy_process_group(column.meet.group)

    @contextmanager
    def _leaving_if_one_is_lost(self, trial: Try, meet: Collectives) -> Iterator[None]:
        """Inside, fail the waits of this rank when a group of the try has ended or stopped."""
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(LOOK_SECONDS):
                with suppress(RuntimeError, PeerError):
                    if self._rounds.lacks(trial):
                        meet.leave()
                        return

        watcher = threading.Thread(target=look, daemon=True, name="xds-outer-watch")
        if len(trial.groups) > 1:
            watcher.start()
        try:
            yield
        finally:
            is_over.set()
            if watcher.ident is not None:
                watcher.join()

    # -- what a new group takes beside outer parameters ---------------------------------------------------

    def _told(self) -> dict[str, Any]:
        """Counters, schedule and position of this group, as JSON values."""
        from .checkpoint.save import engine_state

        return engine_state(self._engine, self._counters)

    def _take(self, now: _Meeting) -> None:
        """Take those of another group. The optimizer's states start anew."""
        from .checkpoint.load_effect import take_state

        take_state(self._engine, self._counters, now.taken)
        for buffer, values in zip(self._engine.module.buffers(), now.buffers, strict=True):
            buffer.detach().copy_(values)

    # -- checkpoints ------------------------------------------------------------------------------------

    def save(self, folder: str | Path, save: Callable[[str | Path], Result]) -> Result:
        """The first group that lives and is not stopped saves, and waits for nobody. The others return None."""
        own = self._engine.sharded.collectives
        answering = set(self._presence.newest().units) - self._presence.stopped()
        is_first = self.number == min(answering, default=self.number)
        if not all_gather_json(own, is_first, "who saves")[0]:
            nothing: Any = None
            return nothing  # type: ignore[no-any-return]
        if self._now is not None:
            self._finish(self._section.mix)
        return save(folder)

    def load(
        self,
        folder: str | Path,
        tag: str | None,
        load: Callable[[str | Path, str | None], Result],
        *,
        falls_back: bool,
    ) -> Result:
        """A group that came back has newer states, and reads nothing. Raises UsageError: it has trained."""
        from .checkpoint.load import find_tag

        if self._has_trained:
            raise UsageError(
                "load_checkpoint() after a step, with outer and recovery.enabled: other groups go on "
                "meanwhile; load before the first step, or start the run again"
            )
        if self._joins is not None:
            log.info(
                "load_checkpoint: this group has the states of the others, so nothing is loaded"
            )
            nothing: Any = (None, None)
            return nothing  # type: ignore[no-any-return]
        own = self._engine.sharded.collectives
        chosen = tag
        if not self.number:
            chosen = find_tag(own, folder, tag, falls_back=falls_back)
        chosen = self._of_first(own, chosen)
        result = load(folder, chosen)
        if chosen is not None and self.number:
            self._begin_at_outer()
        return result

    def of_first(self, value: bool) -> bool:
        return bool(self._of_first(self._engine.sharded.collectives, value))

    def _of_first(self, own: Collectives, value: Any) -> Any:
        """What the first rank of group 0 says. For all ranks of all groups, before the first step."""
        if self._joins is not None:
            return value
        self._num_loads += 1
        key, found = f"load/{self._num_loads}", None
        if not self._rank and not self.number:
            self._store.set(key, json.dumps([value]))
        deadline = time.monotonic() + timeout_seconds()
        while not self._rank and (found := self._store.read(key)) is None:
            if time.monotonic() > deadline:
                found = ""  # raised below, on all ranks of the group
                break
            time.sleep(LOOK_SECONDS / 10)
        found = all_gather_json(own, found, "what group 0 says")[0]
        if not found:
            raise PeerError("load_checkpoint: group 0 does not answer; start the run again")
        return json.loads(found)[0]

    # -- the end ----------------------------------------------------------------------------------------

    def end(self) -> None:
        if self._now is not None:
            with suppress(XdsError):
                self._now.job.join()
            self._now = None
        self._close()
        self._fragments, self._parts = [], []


@final
class CalledGroups(Recovery):
    """Lets the ranks of a group agree in the message of a step whether other groups call them."""

    def __init__(self, groups: LivingGroups) -> None:
        self._groups = groups

    @property
    def must_regroup(self) -> bool:  # type: ignore[override]
        return self._groups.is_called

    def agree(self, status: StepStatus) -> None:
        self._groups.agree(status.regroups)


def _connection() -> Any:
    host, _, port = os.environ[LIGHTHOUSE].rpartition(":")
    return dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


def _slow(
    groups: Sequence[int], versions: Sequence[float], clocks: Sequence[float]
) -> dict[int, str]:
    """The groups with less than half of the steps of another one, of those that were in the last meeting."""
    here = [place for place in range(len(groups)) if versions[place] == max(versions)]
    most = max(clocks[place] for place in here)
    return {
        groups[place]: f"{clocks[place]:.0f} steps, others {most:.0f}"
        for place in here
        if 2 * clocks[place] < most
    }


def _sent(meet: Collectives, tensor: Tensor, source: int) -> Tensor:
    """`tensor` of `source`."""
    values = torch.empty_like(tensor) if meet.rank != source else tensor
    meet.broadcast(values, source)
    return values


def _broadcast(meet: Collectives, tensor: Tensor, source: int) -> None:
    """Overwrite `tensor` by that of `source`."""
    values = tensor.detach().cpu().contiguous()
    if values.numel():
        meet.broadcast(values.view(-1).view(torch.uint8), source)
        tensor.detach().copy_(values)


def check_place(
    section: Outer, world: dist.ProcessGroup, num_ranks: int, device: torch.device
) -> None:
    """Raises UsageError: groups cannot come and go here."""
    check_sites(section)
    if LIGHTHOUSE not in os.environ:
        raise UsageError(
            "recovery.enabled: the launcher has to keep the other groups when one fails: start the script with "
            "`xds --recover train.py`, or set recovery.enabled to false"
        )
    if device.type != "cpu":
        raise UsageError(
            f"outer with recovery.enabled on {device.type}: it is built for CPUs; set recovery.enabled to false"
        )
    if world is not dist.group.WORLD or world.size() != num_ranks:
        raise UsageError(
            "outer with recovery.enabled: each group is a default group of torch of its own: leave group= out, "
            "and let xds.initialize start torch.distributed; or set recovery.enabled to false"
        )


__all__ = ["CalledGroups", "LivingGroups", "check_place"]
