"""Messages between two stages are received in the order in which they are sent: NCCL does not know tags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
