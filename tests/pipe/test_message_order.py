"""Messages between two stages: received in the order of sending, as NCCL knows no tags, and sent in time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from helpers import run_ranks
from pipeline_runs import Model, batches, config_of
from torch import Tensor

import xds
from xds.ops.comm.collectives import Collectives
from xds.ops.comm.handles import Done, Handle
from xds.pipe.channel import HEADER_BYTES, Channel, DirectionGroups
from xds.pipe.cut.part import Flow


class Pair:
    """One direction between two ranks: message n fills receive n, when that is waited for."""

    rank, device = 1, torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.num_receives = 0

    def send(self, tensor: Tensor, peer: int, **_: Any) -> Handle:
        self.sent.append(tensor.clone())
        return Done()

    def receive(self, tensor: Tensor, peer: int, **_: Any) -> Handle:
        number = self.num_receives
        self.num_receives += 1
        return Arrival(self, number, tensor)


class Arrival(Handle):
    def __init__(self, pair: Pair, number: int, tensor: Tensor) -> None:
        self._pair, self._number, self._tensor = pair, number, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._pair.sent[self._number])


class TwoRanks:
    def rank_of(self, stage: int) -> int:
        return stage


@pytest.mark.parametrize("spec", ["short", "long " * HEADER_BYTES])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_what_follows_a_header_is_received_in_the_order_of_sending(
    spec: str, is_dynamic: bool
) -> None:
    pair: Any = Pair()
    channel = Channel(
        DirectionGroups(pair, pair), DirectionGroups(pair, pair), TwoRanks(), is_dynamic=is_dynamic
    )
    shapes = [(2, 3), (4, 3), (2, 3), (2, 3), (4, 3)]
    channel.begin(shapes)
    flows = [
        Flow((torch.full(shape, number + 1.0), torch.arange(shape[0])), spec)
        for number, shape in enumerate(shapes)
    ]
    for number, flow in enumerate(flows):
        channel.send_forward(0, number, flow)
    for number in range(3):  # further ahead than a schedule is
        channel.post_forward(1, number)
    for number, flow in enumerate(flows):
        if number + 3 < len(flows):
            channel.post_forward(1, number + 3)
        found = channel.take_forward(1, number)
        assert found.spec == spec
        assert all(torch.equal(a, b) for a, b in zip(found.leaves, flow.leaves, strict=True))


class Sent(Handle):
    """A send that `waiting` has until somebody waits for it."""

    def __init__(self, handle: Handle, waiting: set[Handle]) -> None:
        self._handle, self._waiting = handle, waiting
        waiting.add(self)

    def wait(self) -> None:
        self._handle.wait()
        self._waiting.remove(self)  # once


def step_of_stages() -> None:
    engine = xds.initialize(Model(), config_of(2, 4))
    engine.train_batch(iter(batches(0, 0, 4)))
    engine.eval_batch(iter(batches(1, 0, 4)))
    engine.destroy()


def test_a_step_ends_when_all_its_messages_have_left() -> None:
    """A device may still read an activation whose memory the next step would use again."""
    waiting: set[Handle] = set()
    kinds: list[str] = []
    send = Collectives.send

    def counted(*args: Any, **how: Any) -> Handle:
        kinds.append(how["kind"])
        return Sent(send(*args, **how), waiting)

    with mock.patch.object(Collectives, "send", counted):
        run_ranks(step_of_stages, 2)
    assert {*kinds} == {"activations", "gradients", "header"} and not waiting
