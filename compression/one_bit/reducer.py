"""Reduces gradients with one bit per element; what a message loses is kept and sent with the next one.

    worker   gradient + error --pack--> N messages ------> each rank adds those of its part
    server   (stage 0) sum + error --pack--> a message --> every rank gets all sums

- A message is the momentum. The sum of all is the new momentum, and takes the gradient's place.
- At stage 0 the message is b m + (1 - b) g. All ranks hold m. The worker's error is kept divided by (1 - b), in
  the unit of gradients.
- At stages 1 and 2 a rank holds m of its part only. So each sends the momentum of its own gradients, from one
  buffer r that has the momentum and the error: r += g; send (1 - b) r; r -= what was sent. Without loss that is
  m = (1 - b) (g + b g' + b^2 g'' + ...). At the freeze the owner of a part adds its momentum to its buffer.
- A skipped step adds its messages to the errors again. So no error is lost.

Source: Tang et al., 1-bit Adam, 2021, algorithm 1, https://arxiv.org/abs/2102.02888. Differs: a magnitude
for each 1024 elements, which is their mean and not their norm; at stages 1 and 2 momenta of each rank's own
gradients.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle, Then
from ..gaps import gaps_in, zero_ranges
from ..scheme import Buffer, ExactReducer, GradientReducer, PendingError
from .packets import Packets, finite
from .phase import Phase

GRADIENT_KIND = "one-bit gradients"
SUM_KIND = "one-bit sums"


@final
class OneBitReducer(GradientReducer):
    """Exact, or one bit per element, as the optimizer says.

    error: the pending error of this rank, [world_size * n] fp32, in the unit of gradients; None: none yet. At
    stages 1 and 2 it has the momentum too, after the freeze.
    server_error: the pending error of its part of the sums, [n] fp32: at stage 0.
    """

    def __init__(
        self, collectives: Collectives, buffer: Buffer, phase: Phase, num_copies: int = 1
    ) -> None:
        """num_copies: so many ranks compute the same gradient, which counts once."""
        self._collectives = collectives
        self._buffer = buffer
        self._phase = phase
        self._num_copies = num_copies
        self._exact = ExactReducer(collectives, buffer.index, num_copies)
        self._packets = Packets(buffer.numel // collectives.world_size)
        self._own_gaps = gaps_in(buffer, collectives.rank, collectives.world_size)
        self._has_server = not buffer.is_sharded
        self.error: Tensor | None = None
        self.server_error: Tensor | None = None
        self._unit = math.nan  # in which the errors are
        self._poison: Tensor | None = None  # nan: a micro-batch was not finite
        self._holds_momentum = False  # `error` has the momentum: stages 1 and 2, after the freeze
        self._has_momentum = False  # stage 0: in this step the momentum was sent
        self._sent: list[Tensor] = []  # messages of this step: to each rank, from each, and to all
        self._received: list[Tensor] = []
        self._published: Tensor | None = None

    @property
    def is_lossy(self) -> bool:
        return self._phase.is_compressed

    @property
    def held_bytes(self) -> int:
        return sum(t.nbytes for t in (self.error, self.server_error) if t is not None)

    # -- the worker -------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, flat: Tensor, out: Tensor, *, add: bool) -> Handle:
        if not self.is_lossy:
            return self._exact.reduce(flat, out, add=add)
        error = self._in_unit(flat.device)
        if self._num_copies > 1:
            flat.div_(self._num_copies)
        if self._poison is not None:
            flat[:1].add_(self._poison)
            self._poison = None
        gain = self._bring_momentum(error)
        self._collectives.count_exact(GRADIENT_KIND, self._collectives.shard_of(flat, 0))
        return self._start_worker(flat, error, out, add=add, gain=gain)

    def _bring_momentum(self, error: Tensor) -> float:
        """Bring `error` to what a message of the momentum begins with. Returns how much of it is sent."""
        if self._holds_momentum and self._has_server:  # saved at stage 1 or 2
            self._add_momentum(error, -1.0)
            self._holds_momentum = False
        if not self._has_server:
            if not self._holds_momentum:  # the freeze, or saved at stage 0
                self._add_momentum(error, 1.0)
                self._holds_momentum = True
            return 1.0 - self._phase.state.beta
        if not self._has_momentum:
            self._add_momentum(error, 1.0)
            self._has_momentum = True
        return 1.0

    def _start_worker(
        self, flat: Tensor, error: Tensor, out: Tensor, *, add: bool, gain: float
    ) -> Handle:
        """Start to send gain * (flat + error) [world_size * n], and to set `out` [n] to the sum of its part."""
        world_size = self._collectives.world_size
        mine = self._packets.empty(world_size, flat.device)
        shard_of = self._collectives.shard_of
        # all messages of a step together are `gain` times what there was: the earlier ones count
        earlier = (1.0 - gain) / gain
        if earlier and self._sent:
            self._add_sent(error, -earlier)
        for rank in range(world_size):
            self._packets.pack(shard_of(flat, rank), shard_of(error, rank), mine[rank], gain)
        if earlier and self._sent:
            self._add_sent(error, earlier)
        zero_ranges(error, self._buffer.gaps)  # a checkpoint does not have them
        theirs = torch.empty_like(mine)
        self._sent.append(mine)
        handle = self._collectives.all_to_all(
            list(theirs),
            list(mine),
            what=f"flat buffer {self._buffer.index}",
            kind=GRADIENT_KIND,
            buffer=self._buffer.index,
        )
        return Then(handle, lambda: self._receive(theirs, out, add=add))

    @torch.no_grad()
    def _receive(self, packets: Tensor, out: Tensor, *, add: bool) -> None:
        total = torch.empty_like(out) if add else out
        factor = 1.0 - self._phase.state.beta if self._has_server else 1.0
        self._packets.unpack(packets, total, factor)
        zero_ranges(total, self._own_gaps)
        if add:
            out.add_(total)
        if self._has_server:
            self._received.append(packets)

    @torch.no_grad()
    def keep(self, flat: Tensor) -> None:
        error = self._in_unit(flat.device)
        if self._num_copies > 1:
            flat.div_(self._num_copies)
        is_finite = flat.isfinite().all()
        error.add_(torch.where(is_finite, flat, 0.0))
        found = torch.where(is_finite, 0.0, math.nan).to(flat.dtype)
        self._poison = found if self._poison is None else self._poison + found

    def _add_momentum(self, error: Tensor, sign: float) -> None:
        """Add (or subtract) this rank's part of b / (1 - b) times the momentum.

        Stage 0: an equal part of all of it. Stages 1 and 2: all of the part that it owns.
        """
        state = self._phase.state
        holders = self._collectives.world_size if self._has_server else 1
        part = error if self._has_server else self._collectives.shard_of(error)
        factor = sign * state.beta / ((1.0 - state.beta) * state.unit * holders)
        for start, momentum in state.momentum_of(self._buffer.index):
            part[start : start + momentum.numel()].add_(momentum, alpha=factor)

    def _add_sent(self, error: Tensor, factor: float) -> None:
        """Add `factor` times the messages of this step that were finite."""
        part = torch.empty(self._buffer.numel // self._collectives.world_size, device=error.device)
        for packets in self._sent:
            for rank, packet in enumerate(packets):
                self._packets.unpack(packet[None], part)
                self._collectives.shard_of(error, rank).add_(finite(part), alpha=factor)

    def _in_unit(self, device: torch.device) -> Tensor:
        """The error in the unit of this step's sums."""
        unit = self._phase.state.unit
        if self.error is None:
            self.error = torch.zeros(self._buffer.numel, dtype=torch.float32, device=device)
        elif unit != self._unit:  # powers of 2, so it is exact
            for one in (self.error, self.server_error):
                if one is not None:
                    one.mul_(self._unit / unit)
        self._unit = unit
        return self.error

    # -- the server -------------------------------------------------------------------------------------

    def cross_replicas(self, total: Tensor) -> Handle | None:
        return None

    def reduce_whole(self, flat: Tensor, out: Tensor) -> tuple[Handle, Handle] | None:
        return None if self.is_lossy else self._exact.reduce_whole(flat, out)

    @torch.no_grad()
    def gather(self, total: Tensor, flat: Tensor) -> Handle:
        if not self.is_lossy:
            return self._exact.gather(total, flat)
        self._collectives.count_exact(SUM_KIND, self._collectives.shard_of(flat))
        return self._start_server(total, flat)

    def _start_server(self, total: Tensor, flat: Tensor) -> Handle:
        """Start to send `total` [n] plus its error, and to set `flat` [world_size * n] to the sums."""
        if self.server_error is None:
            self.server_error = torch.zeros(total.numel(), dtype=torch.float32, device=total.device)
        world_size, rank = self._collectives.world_size, self._collectives.rank
        packets = self._packets.empty(world_size, total.device)
        self._packets.pack(total, self.server_error, packets[rank])
        zero_ranges(self.server_error, self._own_gaps)
        self._published = packets[rank].clone()
        handle = self._collectives.all_gather(
            packets.view(-1), self._published, buffer=self._buffer.index, kind=SUM_KIND
        )

        def finish() -> None:
            for peer, packet in enumerate(packets):
                self._packets.unpack(packet[None], self._collectives.shard_of(flat, peer))
            zero_ranges(flat, self._buffer.gaps)

        return Then(handle, finish)

    # -- the end of a step ------------------------------------------------------------------------------

    @torch.no_grad()
    def undo(self) -> None:
        if self.error is None or not (self._sent or self._has_momentum):
            self.end_step()
            return
        self._add_sent(self.error, 1.0)
        if self._has_momentum:
            self._add_momentum(self.error, -1.0)
        zero_ranges(self.error, self._buffer.gaps)
        if self._published is not None and self.server_error is not None:
            self._undo_server(self._published, self.server_error)
            zero_ranges(self.server_error, self._own_gaps)
        self.end_step()

    def _undo_server(self, published: Tensor, error: Tensor) -> None:
        """error + what was published - what had come: the error before. Blocks that were not finite kept it."""
        part = torch.empty_like(error)
        self._packets.unpack(published[None], part)
        come = torch.empty_like(part)
        for packets in self._received:
            self._packets.unpack(packets, come, 1.0 - self._phase.state.beta)
            zero_ranges(come, self._own_gaps)
            part.sub_(come)
        error.add_(finite(part))

    has_pending_error = True

    @property
    def pending_error(self) -> PendingError | None:
        if self.error is None:
            return None
        return PendingError(
            self.error,
            self.server_error,
            self._unit,
            holds_momentum=self._holds_momentum,
        )

    @torch.no_grad()
    def restore(self, pending: PendingError | None) -> None:
        self.error, self.server_error, self._unit = (
            pending[:3] if pending else (None, None, math.nan)
        )
        self._holds_momentum = pending is not None and pending.holds_momentum
        if self.error is None or self.server_error is None or self._has_server:
            return
        # saved at stage 0: there is no server here, and momenta are sums of (1 - b) times gradients
        full = torch.empty_like(self.error)
        index = self._buffer.index
        own, self.server_error = self.server_error, None
        self._collectives.all_gather(full, own, buffer=index, kind="access").wait()
        share = (1.0 - self._phase.state.beta) * self._collectives.world_size
        self.error.add_(full, alpha=1.0 / share)

    def end_step(self) -> None:
        self._sent, self._received, self._published = [], [], None
        self._has_momentum, self._poison = False, None


__all__ = ["GRADIENT_KIND", "SUM_KIND", "OneBitReducer"]
