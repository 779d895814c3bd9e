"""Messages between pipeline stages: what flows forward, and its gradients, each direction in its own group.

    stage s   send_forward ──leaves──>  stage s + 1   post_forward, take_forward
    stage s   post_backward, take_backward  <──gradients──   stage s + 1   send_backward

- A header (shapes, dtypes, structure) travels once for each new shape of the input of the model. Both sides
  know the input, so both know when a header is on its way. With `is_dynamic` every message has one.
- Receives are posted before they are needed, in the order in which the peer sends: NCCL has no tags. What
  follows a header waits until that is read. A send keeps its memory until `free`, or the end of the step.
- Leaves that require no gradient get none sent back.
- Tensor ranks have equal activations. With `parts` each sends its share, and the receivers exchange theirs.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import EqualParts
from ..ops.comm.handles import Handle
from ..ops.flat import bytes_of, bytes_to
from ..utils.errors import UsageError
from .cut.part import Flow
from .schedules.actions import Action, Op

JOINS = "pipeline joins"  # the kind of messages between tensor ranks that have parts of activations
HEADER_BYTES = 1024  # of the first message of a header; a longer one has a second message
LENGTH_BYTES = 8
SENT_AS_IT_IS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8})


class Ranks(Protocol):
    """Which rank of the pipeline has a stage."""

    def rank_of(self, stage: int) -> int: ...


@dataclass(frozen=True)
class _Leaf:
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def parts(self, parts: EqualParts | None) -> EqualParts | None:
        """How it is cut for sending; None: it is sent whole."""
        return (
            parts if parts is not None and self.needs_grad and parts.are_used(self.shape) else None
        )

    def empty(self, device: torch.device, parts: EqualParts | None) -> Tensor:
        shape = self.shape if parts is None else (parts.numel_of(math.prod(self.shape)),)
        return torch.empty(shape, dtype=self.dtype, device=device)


@final
@dataclass(frozen=True)
class Header:
    """Shapes and dtypes of the leaves of a flow, which of them require a gradient, and the flow's spec."""

    leaves: tuple[_Leaf, ...]
    spec: str

    @classmethod
    def of(cls, flow: Flow) -> Header:
        leaves = [_Leaf(tuple(x.shape), x.dtype, x.requires_grad) for x in flow.leaves]
        return cls(tuple(leaves), flow.spec)

    def to_bytes(self) -> bytes:
        rows = [[x.shape, str(x.dtype).removeprefix("torch."), x.needs_grad] for x in self.leaves]
        return json.dumps([rows, self.spec]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        rows, spec = json.loads(data)
        leaves = [_Leaf(tuple(s), getattr(torch, d), bool(needs)) for s, d, needs in rows]
        return cls(tuple(leaves), spec)

    def __str__(self) -> str:
        return ", ".join(
            f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in self.leaves
        )


@final
@dataclass(frozen=True, eq=False)
class DirectionGroups:
    """The ranks of a pipeline for one kind of message, once for each direction between two ranks.

    Messages of one group run in one order on GPUs: a receive that is posted early would hold back a send.
    up: to ranks with a larger number; down: to smaller ones.
    """

    up: Collectives
    down: Collectives

    def towards(self, receiver: int, sender: int) -> Collectives:
        """The group for messages from `sender` to `receiver`."""
        return self.up if receiver > sender else self.down


@dataclass(frozen=True, eq=False)
class _HeaderOnItsWay:
    stage: int
    micro_batch: int
    first: Tensor
    handle: Handle


@final
class Channel:
    """Sends and receives for the stages of one rank."""

    def __init__(
        self,
        forward: DirectionGroups,
        backward: DirectionGroups,
        ranks: Ranks,
        *,
        is_dynamic: bool,
        parts: tuple[EqualParts | None, EqualParts | None] = (None, None),
    ) -> None:
        """parts: of activations and gradients, where each tensor rank sends its share; None: all of them."""
        self._activation_parts, self._gradient_parts = parts
        self._forward = forward
        self._backward = backward
        self._rank = forward.up.rank
        self._device = forward.up.device
        self._ranks = ranks
        self._is_dynamic = is_dynamic
        self._sent: dict[
            tuple[int, Hashable], Header
        ] = {}  # (stage, input) -> what flows out of it
        self._known: dict[tuple[int, Hashable], Header] = {}  # (stage, input) -> what flows into it
        # (stage, micro-batch) -> header, and its leaves with the receives in flight
        self._arriving: dict[tuple[int, int], tuple[Header, list[tuple[Tensor, Handle]]]] = {}
        # by sender, not started yet
        self._due: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        # by sender: in flight, read before the receives in `_due` start
        self._headers: dict[int, _HeaderOnItsWay] = {}
        self._returning: dict[tuple[int, int], list[tuple[_Leaf, Tensor, Handle]]] = {}
        self._outgoing: dict[Action, list[Handle]] = {}  # by the send
        self._inputs: Sequence[Hashable] = ()

    def begin(self, inputs: Sequence[Hashable]) -> None:
        """A step begins. `inputs`: for each micro-batch the shapes of its input, see `signature`."""
        self._inputs = inputs

    def forget(self) -> None:
        """The groups are new ones: drop what was on its way, and the headers, which each side may lack."""
        for known in (self._sent, self._known, self._arriving, self._due):
            known.clear()
        self._headers.clear()
        self._returning.clear()
        self._outgoing.clear()

    # -- forward ----------------------------------------------------------------------------------------

    def send_forward(self, stage: int, micro_batch: int, flow: Flow) -> Header:
        """Start to send what flows out of `stage`.

        Raises:
            UsageError: the shapes are not those of an earlier micro-batch with the same input.
        """
        header, key = Header.of(flow), (stage, self._inputs[micro_batch])
        known = self._sent.get(key)
        if known is not None and known != header and not self._is_dynamic:
            raise UsageError(
                f"stage {stage} returns {header} for micro-batch {micro_batch}, but {known} for an earlier "
                "input of the same shapes: what flows depends on the data; set pipeline.dynamic_shape to true"
            )
        peer = self._ranks.rank_of(stage + 1)
        if known is None or self._is_dynamic:
            self._sent[key] = header
            self._send_header(header, peer, stage, micro_batch)
        for leaf, tensor in zip(header.leaves, flow.leaves, strict=True):
            parts = leaf.parts(self._activation_parts)
            sent = tensor if parts is None else parts.own(tensor)
            self._send(self._forward, sent, peer, (stage, micro_batch), "activations")
        return header

    def _send_header(self, header: Header, peer: int, stage: int, micro_batch: int) -> None:
        data = header.to_bytes()
        data = len(data).to_bytes(LENGTH_BYTES, "little") + data
        data += bytes(max(0, HEADER_BYTES - len(data)))
        for part in (data[:HEADER_BYTES], data[HEADER_BYTES:]):
            if part:
                sent = bytes_to(self._device, part)
                self._send(self._forward, sent, peer, (stage, micro_batch), "header")

    def post_forward(self, stage: int, micro_batch: int) -> None:
        """Start to receive what flows into `stage`, once every header before it is known."""
        sender = self._ranks.rank_of(stage - 1)
        self._due[sender].append((stage, micro_batch))
        self._start_due(sender)

    def _start_due(self, sender: int) -> None:
        due = self._due[sender]
        while due and sender not in self._headers:
            stage, micro_batch = due.popleft()
            known = self._known.get((stage, self._inputs[micro_batch]))
            if known is not None and not self._is_dynamic:
                self._post_leaves(known, stage, micro_batch)
                continue
            first = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
            handle = self._receive(
                self._forward, first, stage - 1, stage - 1, micro_batch, "header"
            )
            self._headers[sender] = _HeaderOnItsWay(stage, micro_batch, first, handle)

    def _post_leaves(self, header: Header, stage: int, micro_batch: int) -> None:
        device, works = self._device, []
        for leaf in header.leaves:
            tensor = leaf.empty(device, leaf.parts(self._activation_parts))
            handle = self._receive(
                self._forward, tensor, stage - 1, stage - 1, micro_batch, "activations"
            )
            works.append((tensor, handle))
        self._arriving[stage, micro_batch] = (header, works)

    def take_forward(self, stage: int, micro_batch: int) -> Flow:
        """What flows into `stage`; leaves that need a gradient require it."""
        sender = self._ranks.rank_of(stage - 1)
        while (stage, micro_batch) not in self._arriving:
            self._take_header(sender)
        header, works = self._arriving.pop((stage, micro_batch))
        leaves = []
        for leaf, (tensor, work) in zip(header.leaves, works, strict=True):
            work.wait()
            parts = leaf.parts(self._activation_parts)
            if parts is not None:
                what = f"activations of micro-batch {micro_batch} from stage {stage - 1}"
                tensor = parts.joined(tensor, leaf.shape, what)
            leaves.append(tensor.requires_grad_(leaf.needs_grad))
        return Flow(tuple(leaves), header.spec)

    def _take_header(self, sender: int) -> None:
        """Read the header that is on its way, and start to receive what follows it. The host waits for it."""
        pending = self._headers.pop(sender)
        pending.handle.wait()
        header = Header.from_bytes(self._read(pending))
        self._known[pending.stage, self._inputs[pending.micro_batch]] = header
        self._post_leaves(header, pending.stage, pending.micro_batch)
        self._start_due(sender)

    def _read(self, pending: _HeaderOnItsWay) -> bytes:
        data = bytes_of(pending.first)
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        rest = LENGTH_BYTES + length - HEADER_BYTES
        if rest > 0:
            more = torch.empty(rest, dtype=torch.uint8, device=self._device)
            before, micro_batch = pending.stage - 1, pending.micro_batch
            self._receive(self._forward, more, before, before, micro_batch, "header").wait()
            data += bytes_of(more)
        return data[LENGTH_BYTES : LENGTH_BYTES + length]

    # -- backward ---------------------------------------------------------------------------------------

    def post_backward(self, stage: int, micro_batch: int, header: Header) -> None:
        """Start to receive the gradients of what flowed out of `stage`, as `send_forward` returned it."""
        self._returning[stage, micro_batch] = []
        for leaf in header.leaves:
            if leaf.needs_grad:
                grad = leaf.empty(self._device, leaf.parts(self._gradient_parts))
                handle = self._receive(
                    self._backward, grad, stage + 1, stage, micro_batch, "gradients"
                )
                self._returning[stage, micro_batch].append((leaf, grad, handle))

    def take_backward(self, stage: int, micro_batch: int) -> list[Tensor]:
        """The gradients of the leaves that need one, in order."""
        grads = []
        for leaf, grad, handle in self._returning.pop((stage, micro_batch)):
            handle.wait()
            parts = leaf.parts(self._gradient_parts)
            if parts is not None:
                what = f"gradients of micro-batch {micro_batch} from stage {stage + 1}"
                grad = parts.joined(grad, leaf.shape, what)
            grads.append(grad)
        return grads

    def send_backward(self, stage: int, micro_batch: int, grads: Sequence[Tensor]) -> None:
        """Start to send the gradients of what flowed into `stage`."""
        peer = self._ranks.rank_of(stage - 1)
        parts = self._gradient_parts
        for grad in grads:
            is_cut = parts is not None and parts.are_used(grad.shape)
            sent = parts.own(grad) if parts is not None and is_cut else grad
            self._send(self._backward, sent, peer, (stage - 1, micro_batch), "gradients")

    # -- both -------------------------------------------------------------------------------------------

    def _send(
        self, ways: DirectionGroups, tensor: Tensor, peer: int, place: tuple[int, int], subject: str
    ) -> None:
        stage, micro_batch = place
        sender = stage + 1 if subject == "gradients" else stage
        handle = ways.towards(peer, self._rank).send(
            _sendable(tensor),
            peer,
            what=f"{subject} of micro-batch {micro_batch} from stage {sender}",
            kind=subject,
        )
        op = Op.SEND_B if subject == "gradients" else Op.SEND_F
        self._outgoing.setdefault(Action(op, sender, micro_batch), []).append(handle)

    def _receive(
        self,
        ways: DirectionGroups,
        tensor: Tensor,
        sender: int,
        boundary: int,
        micro_batch: int,
        subject: str,
    ) -> Handle:
        peer = self._ranks.rank_of(sender)
        return ways.towards(self._rank, peer).receive(
            _sendable(tensor),
            peer,
            what=f"{subject} of micro-batch {micro_batch} from stage {sender}",
        )

    def free(self, sends: Iterable[Action]) -> None:
        """End the references to what these have sent, which has arrived."""
        for send in sends:
            for handle in self._outgoing.pop(send, ()):
                handle.wait()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self.free(list(self._outgoing))


def _sendable(tensor: Tensor) -> Tensor:
    """The memory of a tensor, without its graph; as bytes where a backend may not send its dtype."""
    memory = tensor.detach() if tensor.requires_grad else tensor
    memory = memory if memory.is_contiguous() else memory.contiguous()
    return memory if memory.dtype in SENT_AS_IT_IS else memory.view(-1).view(torch.uint8)


__all__ = ["JOINS", "Channel", "Header", "Ranks", "DirectionGroups"]
