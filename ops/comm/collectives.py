"""The one door to torch.distributed: every collective of xds, on flat tensors, with its bytes counted.

On gloo the built-in reduce_scatter is a whole all_reduce and the built-in all_gather copies twice; both
are three to four times slower than point-to-point messages straight from and into the flat buffers.
So a CPU group gets `PeerToPeer`. Its sums run in rank order on the receiver, so the result does not
depend on where an element lies: stages and bucketings are bit-identical. Messages carry the number of
their buffer as tag, so two ranks may start them in different orders and still meet.
Every other backend (NCCL, MPI, torch's threaded test group) gets `Native`: its own collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..watch import Store, Watch
from ..watch.config import WatchConfig
from ..watch.sentinel import attend, leave
from .handles import Handle

TAG_BASE = 0x5D000  # away from the small tags that a user's own send and recv would take
TAGS_PER_BUFFER = 2
TAGS_PER_INSTANCE = 1 << 16  # so that two engines on one group never take each other's messages
SMALL_TAGS = 1 << 14  # the last ones of an instance: small gathers, by their size
CONTROL_BUFFER, ACCESS_BUFFER = -1, -2  # numbers of what is no flat buffer

Bounds = Sequence[tuple[int, int]]  # [start, stop) of each rank's part; empty parts are allowed
_instances: Counter[str] = Counter()  # by group: every rank opens its engines in the same order


class Collectives(ABC):
    """Collectives of one process group. Flat tensors are [world_size * shard_numel], shards [shard_numel].

    `buffer` numbers the flat buffer a message belongs to: concurrent messages of different buffers never
    mix. `sent_bytes` counts what this rank sent, for each kind, since construction.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, rank: int, world_size: int
    ) -> None:
        self.group = group
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.sent_bytes: dict[str, int] = {}
        instance = _instances[group.group_name] if group is not None else 0
        if group is not None:
            _instances[group.group_name] += 1
        self.instance = instance
        self._watch = Watch(rank, world_size, instance, partial(_store_of, group))
        self._watch.name(CONTROL_BUFFER, "norms and flags")
        self._watch.name(ACCESS_BUFFER, "a parameter")

    def name_buffer(self, buffer: int, name: str) -> None:
        """What messages call the flat buffer `buffer`, e.g. "unit 'blocks.5'"."""
        self._watch.name(buffer, name)

    def attend(self, section: WatchConfig, timeout_seconds: float) -> None:
        """Let the process's watcher speak for this rank until `leave`, where the group has a store.

        Args:
            timeout_seconds: of waits in the group, where it does not tell itself.
        """
        self._watch.keep(section.ring_size)
        if self.group is not None and self.world_size > 1:
            timeout_seconds = _timeout_of(self.group, self.device) or timeout_seconds
            attend(self._watch, self.group.group_name, section, timeout_seconds)

    def leave(self) -> None:
        """The end of `attend`."""
        leave(self._watch)

    def end_step(self) -> None:
        """A step of training is over: its time and its waiting are measured."""
        self._watch.step()

    def telling(self, where: str) -> AbstractContextManager[None]:
        """Around the user's code: an exception in it is named on the ranks that wait for this one."""
        return self._watch.telling(where)

    def shard_of(self, flat: Tensor, rank: int | None = None) -> Tensor:
        """The view of `flat` that belongs to `rank` (default: this one)."""
        numel = flat.numel() // self.world_size
        return flat.narrow(0, (self.rank if rank is None else rank) * numel, numel)

    @property
    def scratch_bytes(self) -> int:
        """Memory that receives what travels; kept between steps."""
        return 0

    def _count(self, kind: str, shard: Tensor) -> None:
        """Every algorithm here sends (world_size - 1) shards: the lower bound."""
        sent = (self.world_size - 1) * shard.numel() * shard.element_size()
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent

    def _count_parts(self, kind: str, part: Tensor) -> None:
        """One message of `part`."""
        sent = part.numel() * part.element_size()
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent

    @abstractmethod
    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        """Fill `flat` with every rank's `shard`. Sends (world_size - 1) * shard bytes a rank.

        `shard` may be this rank's own slice of `flat`. Neither may be written before `wait`.
        """

    @abstractmethod
    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        """out = (out +) the sum over ranks of their `flat`, this rank's shard of it.

        Shapes:  flat [world_size * n], out [n]; `out` may be wider than `flat`, and may be this rank's
                 slice of `flat` unless `add`.
        Sends:   (world_size - 1) * n elements of `flat`'s dtype a rank. Nothing may be written before `wait`.
        """

    @abstractmethod
    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        """Put together what the ranks hold parts of: rank r's `mine` becomes out[start:stop] of bounds[r].

        Shapes:  out [n], mine [stop - start] of this rank's bounds. `out` may be None on a rank that is not
                 `target`; without `target` every rank gets all of it.
        Sends:   this rank's part to each receiver. Done on return.
        """

    @abstractmethod
    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        """An all_gather that only `receivers` want: they fill their `flat`, the others just give.

        Sends this rank's shard to each receiver. Done on return.
        """

    @abstractmethod
    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        """out = full[start:stop] of this rank's bounds, from rank `source`, which alone needs `full` [n].

        Sends:   from `source`, every other rank its part. Done on return.
        """

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = "") -> Tensor:
        """[n] -> [world_size, n], in rank order, at once. For norms and flags: a few bytes.

        `what` it is about, for the message when a rank does not come, e.g. "get_full_param(blocks.0.bias)".
        """
        table, handle = self.start_gather_small(values, buffer, what)
        handle.wait()
        return table

    @abstractmethod
    def start_gather_small(
        self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = ""
    ) -> tuple[Tensor, Handle]:
        """The same begun: what will hold the values, and what to wait for."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with rank `source`'s (rank within the group)."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank came here."""

    def store(self) -> Store | None:
        """The store in which the ranks of the group met; None where there is none."""
        return _store_of(self.group)


def _store_of(group: dist.ProcessGroup | None) -> Store | None:
    """Where the ranks of `group` met: it still answers when the group does not."""
    try:
        return None if group is None else group.get_group_store()
    except RuntimeError:
        return None


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a wait in `group` lasts at most; 0 where this torch or backend does not tell."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 0.0
