"""Groups of ranks train alone and meet: the groups of the section `outer`, and the loop around their steps.

    rank = group * R + r      group 0: 0 1 | group 1: 2 3       an engine's data, pipe and tensor groups
                              meet: 0 2 / 1 3                   equal ranks of the groups, over their elements

    step of a group ──> starts: read masters, outer gradient, job in the background
                   └──> due: outer parameters, mixed with the masters ──> masters, parameters

What a rank meets over is its shard. Where several ranks of a group have the same elements (stage 0, replicas of
MiCS), each takes an equal part of them, and they exchange the results inside the group.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.comm.backend import state_of
from ..ops.comm.collectives import Collectives
from ..ops.comm.config import Communication
from ..ops.comm.exchange import agreeing, all_gather_json
from ..ops.comm.opening import open_collectives
from ..ops.comm.threads import OrderedThreads
from ..outer.config import Outer
from ..outer.fragment import DONE, Fragment, Job, Meeting, OuterSgd
from ..outer.mean import EXACT_BITS, mean_of
from ..outer.schedule import MeetingSchedule
from ..utils.errors import UsageError
from ..utils.version import __version__
from ..zero.core.master import Master
from ..zero.core.param_bucket import ParamBucket
from .counters import Counters
from .model.arguments import settings_of_groups
from .parallel.outer_parts import OuterPart, outer_parts
from .parts import OuterLoop, Parts
from .process.process import num_sites, timeout_seconds

if TYPE_CHECKING:
    from ..zero.checkpoint.restore import Restore
    from ..zero.checkpoint.snapshot import Snapshot, StateBlock
    from ..zero.checkpoint.targets import Target

_threads = OrderedThreads("xds-outer")
Result = TypeVar("Result")
NO_SHARED_MEMORY = Communication.model_construct(shared_memory=False)


@final
@dataclass(frozen=True, eq=False)
class RankGroups:
    """The group of ranks that this one trains with, and the equal ranks of all groups, which meet.

    sites: the ranks of each group, as numbers in the job.
    """

    own: Any
    meet: Any
    sites: tuple[tuple[int, ...], ...]


def check_sites(section: Outer) -> None:
    """Raises UsageError: a group would have ranks of several sites, or messages between them could be read."""
    if section.groups % num_sites():
        raise UsageError(
            f"outer.groups = {section.groups}: the hostfile has {num_sites()} sites, and a group would have "
            "ranks of two; set a multiple of the sites"
        )
    if num_sites() > 1 and not section.private_network:
        raise UsageError(
            f"outer.private_network = false, and the hostfile has {num_sites()} sites: groups send plain TCP, "
            "which others on the way can read and change; put the sites into a VPN or behind tunnels, as "
            "docs/between-sites.md shows, and set it to true"
        )


def open_rank_groups(section: Outer, world: dist.ProcessGroup) -> RankGroups:
    """Divide the ranks of the job. For all of them.

    Raises UsageError: `world` is not the whole job, or a group would have ranks of several sites.
    """
    check_sites(section)
    if world is not dist.group.WORLD:
        raise UsageError(
            "group= with the section outer: its groups are made of all ranks; leave group= out, or remove outer"
        )
    num_ranks = world.size() // section.groups
    sites = tuple(
        tuple(range(first, first + num_ranks)) for first in range(0, world.size(), num_ranks)
    )
    made, key = state_of(world).parts, ((section.groups,), "outer")
    if key not in made:
        timeout = timedelta(seconds=timeout_seconds())
        inside = [dist.new_group(list(ranks), timeout=timeout) for ranks in sites]
        # messages between sites are those of hosts, whatever the device
        across = [
            dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            for ranks in zip(*sites, strict=True)
        ]
        made[key] = RankGroups(
            inside[world.rank() // num_ranks], across[world.rank() % num_ranks], sites
        )
    found: RankGroups = made[key]
    return found


class HeldStates(OuterLoop, ABC):
    """What a group holds of outer parameters: its fragments, and where they are in masters and checkpoints."""

    is_on = True

    def __init__(self, section: Outer, number: int) -> None:
        """number: of this group."""
        self._section = section
        self.num_groups, self.number = section.groups, number
        self._optimizer = OuterSgd(section.optimizer)
        self._fragments: list[Fragment] = []
        self._parts: list[list[OuterPart]] = []  # of each fragment
        self._engine: Parts
        self._counters: Counters

    @property
    def held_bytes(self) -> dict[str, int]:
        return {"outer": sum(fragment.held_bytes for fragment in self._fragments)}

    # -- the start --------------------------------------------------------------------------------------

    def bind(self, parts: Parts, counters: Counters) -> None:
        self._engine, self._counters = parts, counters
        count = self._section.fragments
        found = outer_parts(parts.sharded.units, parts.updater.masters, count)
        sizes = [sum(part.numel for part in each) for each in found]
        with agreeing(parts.sharded.collectives, "xds.initialize"):
            _check(parts, self._section, sizes)
        self._parts = found
        self._fragments = [
            Fragment(
                number,
                numel,
                self.num_groups,
                momentum=self._optimizer.has_momentum,
                error=self._section.bits < EXACT_BITS,
            )
            for number, numel in enumerate(sizes)
        ]

    def _values_beside(self) -> Iterator[Tensor]:
        """What is not trained: buffers, and frozen parameters or this rank's shards of them.

        A shard on a disk is in memory until the next one is asked for.
        """
        yield from self._engine.module.buffers()
        yield from (param.data for param in self._engine.sharded.frozen.values())
        yield from (flat.shard for flat in self._frozen_flats())

    def _frozen_flats(self) -> Iterator[ParamBucket]:
        """Those of stage 3. Below it frozen parameters are whole, and in none."""
        trained = {id(master.params) for master in self._engine.updater.masters}
        flats = (flat for unit in self._engine.sharded.units for flat in unit.params)
        yield from (flat for flat in flats if id(flat) not in trained)

    def _check_alike(self, meet: Collectives) -> str:
        """The digest of what groups must have alike. For all of them. meet: their equal ranks.

        Raises UsageError: they have other sections outer, models, divisions of it, or versions.
        """
        places: list[Any] = [
            [(slot.name, slot.shape) for slot in master.params.layout.slots]
            + [master.params.layout.numel, start, part.numel, number]
            for number, master, start, part in self._places()
        ]
        places += [list(buffer.shape) for buffer in self._engine.module.buffers()]
        places += [list(param.shape) for param in self._engine.sharded.frozen.values()]
        places += [
            [(slot.name, slot.shape) for slot in flat.layout.slots] + [flat.layout.numel]
            for flat in self._frozen_flats()
        ]
        settings = settings_of_groups(self._engine.config)
        mine = [[settings, str(torch.__version__), __version__], places]
        digests = [zlib.crc32(json.dumps(each, sort_keys=True).encode()) for each in mine]
        table = meet.gather_small(torch.tensor(digests), what="configs").tolist()
        for group, found in enumerate(table):
            if found[0] != table[0][0]:
                raise UsageError(
                    f"groups 0 and {group} have different configs, or versions of xds or torch: start all with "
                    "the same; only batch sizes, accumulation and zero_optimization may differ"
                )
            if found[1] != table[0][1]:
                raise UsageError(
                    f"equal ranks of groups 0 and {group} have other elements of the model: give all groups "
                    "the same model, and sections zero_optimization that divide it alike; with parameters that "
                    "are not trained, stage 3 in all groups or in none"
                )
        return f"{digests}"

    # -- parameters --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _read(self, number: int) -> Tensor:
        """The values of a fragment's masters, fp32 [numel] on the host."""
        values = torch.empty(self._fragments[number].numel)
        with self._engine.updater.changing(()):
            for part in self._parts[number]:
                values[part.place()] = part.master.tensor[part.start : part.stop].to("cpu")
        return values

    def _write(self, numbers: Iterable[int], mix: float) -> None:
        """Give masters and parameters what the meetings of these fragments have found."""
        self._set({number: self._mixed(number, mix) for number in numbers})

    def _mixed(self, number: int, mix: float) -> Tensor:
        values = self._read(number) if mix else torch.empty(0)
        return self._fragments[number].mixed(values, mix)

    def _begin_at_outer(self) -> None:
        """After a load: go on from the outer parameters, with nothing learned since the last meetings."""
        self._write(range(len(self._fragments)), mix=0.0)
        for fragment in self._fragments:
            fragment.weight = 0.0

    def _set(self, values: Mapping[int, Tensor]) -> None:
        """Give masters and parameters these values of fragments, fp32 [numel] each."""
        masters = [part.master for number in values for part in self._parts[number]]
        with self._engine.updater.changing(masters):
            for number, flat in values.items():
                for part in self._parts[number]:
                    _give(part, flat[part.place()])

    # -- checkpoints -------------------------------------------------------------------------------------

    def _tensors(self, fragment: Fragment) -> list[tuple[str, Tensor]]:
        """The states of a fragment, with their keys in a checkpoint."""
        from ..zero.checkpoint.ranges import OUTER

        held = zip(OUTER, (fragment.outer, fragment.momentum, fragment.error), strict=True)
        return [(key, tensor) for key, tensor in held if tensor is not None]

    def _places(self) -> Iterator[tuple[int, Master, int, OuterPart]]:
        """The fragment, the master, the first element in its flat buffer, the part."""
        for number, parts in enumerate(self._parts):
            for part in (part for part in parts if part.numel):
                master, start = part.master, part.start
                if master.is_sharded:
                    start += master.params.layout.shard_range(master.rank)[0]
                yield number, master, start, part

    def _ranges(self) -> Iterator[tuple[Master, int, str, Tensor]]:
        """The master, the first element in its flat buffer, the key, the elements."""
        for number, master, start, part in self._places():
            for key, tensor in self._tensors(self._fragments[number]):
                yield master, start, key, tensor[part.place()]

    def blocks(self, snapshot: Snapshot) -> Sequence[StateBlock]:
        from ..zero.checkpoint.snapshot import StateBlock as Block

        return [
            Block(snapshot.number_of(master), key, start, tensor, is_own=True)
            for master, start, key, tensor in self._ranges()
        ]

    def state(self) -> dict[str, Any]:
        weights = [fragment.weight for fragment in self._fragments]
        return {"outer": {"groups": self.num_groups, "weights": weights}}

    def targets(self, restore: Restore) -> Sequence[Target]:
        return [
            restore.plan_range(restore.number_of(master), key, start, tensor)
            for master, start, key, tensor in self._ranges()
        ]

    @torch.no_grad()
    def restored(self, state: Any) -> None:
        """Without a state the outer parameters are those of the group, and nothing is pending."""
        weights = [] if state is None else state["weights"]
        is_same = state is not None and state["groups"] == self.num_groups
        for number, fragment in enumerate(self._fragments):
            fragment.weight = weights[number] if len(weights) == len(self._fragments) else 0.0
            if not is_same and fragment.error is not None:
                fragment.error.zero_()
            if state is None:
                fragment.outer[: fragment.numel] = self._read(number)
                if fragment.momentum is not None:
                    fragment.momentum.zero_()


@final
class GroupsLoop(HeldStates):
    """The meetings of one engine whose groups all live, and take the same steps."""

    def __init__(self, section: Outer, groups: RankGroups) -> None:
        device = torch.device("cpu")
        self.meet = open_collectives(groups.meet, device, section=NO_SHARED_MEMORY)
        super().__init__(section, self.meet.rank)
        self._groups = groups
        self.meet.name_places({number: f"group {number}" for number in range(self.num_groups)})
        self.opened = [self.meet]
        self._schedule = MeetingSchedule(section.steps, section.fragments, section.delay)
        self._meeting = Meeting(self.meet, mean_of(self.meet, section.bits), self._optimizer)

    @torch.no_grad()
    def begin(self) -> None:
        """All groups begin with the values of the first one."""
        self._check_alike(self.meet)
        for tensor in self._values_beside():
            values = tensor.detach().cpu().contiguous()
            if values.numel():
                self.meet.broadcast(values.view(-1).view(torch.uint8))
                tensor.detach().copy_(values)
        everything = range(len(self._fragments))
        for number in everything:
            fragment = self._fragments[number]
            fragment.outer[: fragment.numel] = self._read(number)
            self.meet.broadcast(fragment.outer)
        if self.number:
            self._write(everything, mix=0.0)

    # -- after each step --------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self, weight: float) -> None:
        step = self._counters.global_steps
        for fragment in self._fragments:
            fragment.weight += weight
        starts, due = self._schedule.starts(step), self._schedule.due(step)
        if self._section.delay and due:
            self._write(due, self._section.mix)
        for number in starts:
            fragment = self._fragments[number]
            fragment.start(self._read(number), self._meeting, self._run)
        if due and not self._section.delay:
            self._write(due, self._section.mix)

    def _run(self, job: Callable[[], None]) -> Job:
        if self._section.delay:
            return _threads.add(id(self), job)
        job()  # nothing is computed meanwhile
        return DONE

    # -- checkpoints ------------------------------------------------------------------------------------

    def save(self, folder: str | Path, save: Callable[[str | Path], Result]) -> Result:
        from .checkpoint.groups import save_in_turn

        self._settle()
        return save_in_turn(self.meet, folder, save)

    def load(
        self,
        folder: str | Path,
        tag: str | None,
        load: Callable[[str | Path, str | None], Result],
        *,
        falls_back: bool,
    ) -> Result:
        """Raises UsageError: the groups have loaded different steps."""
        from .checkpoint.groups import check_steps, choose

        self._settle()
        own = self._engine.sharded.collectives
        folder, tag, is_new = choose(self.meet, own, folder, tag, falls_back=falls_back)
        result = load(folder, tag)
        if tag is not None:
            check_steps(self.meet, self._counters.global_steps)
            if is_new:
                self._begin_at_outer()
        return result

    def of_first(self, value: bool) -> bool:
        return bool(all_gather_json(self.meet, value, "what group 0 has")[0])

    # -- the end ----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for what runs in the background. For all groups."""
        for fragment in self._fragments:
            fragment.settle()

    def end(self) -> None:
        self._settle()
        self._fragments, self._parts = [], []


def _give(part: OuterPart, values: Tensor) -> None:
    """Set the elements of the master that this rank meets over, and those of the other holders."""
    master = part.master.tensor
    if part.holders is None:
        master.copy_(values)
        return
    whole = torch.empty_like(master)
    part.holders.collect(whole, values.to(whole), part.bounds)
    master.copy_(whole)


def _check(parts: Parts, section: Outer, sizes: Sequence[int]) -> None:
    """Raises UsageError: the model cannot be divided as the section says."""
    wide = next((m for m in parts.updater.masters if m.raw.dtype == torch.float64), None)
    if wide is not None:
        raise UsageError(
            f"the section outer with fp64 parameters ({wide.params.layout.slots[0].name}): outer parameters "
            "are fp32; train in fp32, or remove outer"
        )
    has_stages = parts.config.pipeline.stages > 1
    if not has_stages and len(sizes) > len(parts.sharded.units):
        raise UsageError(
            f"outer.fragments = {section.fragments}: a fragment has at least one unit, and the model has "
            f"{len(parts.sharded.units)}; lower outer.fragments, or zero_optimization.unit_min_numel"
        )


__all__ = ["NO_SHARED_MEMORY", "GroupsLoop", "HeldStates", "RankGroups", "open_rank_groups"]
