"""Actions of a pipeline step, and the table that lists them for each rank.

Terms: a virtual stage is one part of the model; stages are numbered in the order of the forward. A rank
holds one virtual stage for each of its chunks. All times are in seconds; micro-batches and stages count
from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, final

from ...utils.errors import UsageError

WHOLE_STEP = -1
"""The micro-batch of an action that concerns all micro-batches of the step."""


@final
class ScheduleError(UsageError, ValueError):
    """A table of actions, or the numbers it is made from, cannot work."""


@final
class DeadlockError(UsageError, ValueError):
    """The ranks of a table wait for each other forever. The message names who waits for what."""


class Op(Enum):
    """What an action does. The value is its text, as in torch's tables where torch has the action."""

    FORWARD = "F"
    INPUT = "I"
    """Backward for the gradient of the inputs only."""
    WEIGHT = "W"
    """Backward for the gradient of the weights, from what INPUT kept."""
    BACKWARD = "B"
    """INPUT and WEIGHT at once."""
    SEND_F = "SEND_F"
    """Sends the outputs of the stage to the next stage."""
    RECEIVE_F = "RECV_F"
    """Starts to receive the inputs of the stage. It does not wait; FORWARD does."""
    SEND_B = "SEND_B"
    """Sends the gradient of the inputs to the stage before."""
    RECEIVE_B = "RECV_B"
    """Starts to receive the gradient of the outputs. It does not wait; INPUT and BACKWARD do."""
    GATHER = "UNSHARD"
    """Makes the parameters of the stage whole."""
    DROP = "RESHARD"
    """Frees the whole parameters of the stage."""
    REDUCE = "REDUCE_GRAD"
    """Adds up the gradients of the stage over the data ranks."""

    __hash__ = object.__hash__  # Enum's hashes the name, and tables look up many actions


COMPUTE = frozenset({Op.FORWARD, Op.INPUT, Op.WEIGHT, Op.BACKWARD})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECEIVE_F, Op.RECEIVE_B})
FLOW_BACK = frozenset({Op.INPUT, Op.BACKWARD})
"""Actions that use the gradient of the outputs and make the gradient of the inputs."""
MAKES_GRADIENTS = frozenset({Op.WEIGHT, Op.BACKWARD})
"""Actions that add to the gradients of the weights."""


class Action(NamedTuple):
    """One action of a rank: what, on which virtual stage, for which micro-batch (or `WHOLE_STEP`)."""

    op: Op
    stage: int
    micro_batch: int = WHOLE_STEP

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}" + (
            "" if self.micro_batch < 0 else str(self.micro_batch)
        )


Order = list[Action]
"""The compute actions of one rank, in the order in which it runs them."""


@final
@dataclass(frozen=True)
class Placement:
    """Which rank holds which virtual stage.

    Without `is_v`, stage s is on rank s % num_ranks. With `is_v` (two chunks), rank r holds the stages r and
    2 * num_ranks - 1 - r, so the first rank has the first and the last stage.
    """

    num_ranks: int
    num_chunks: int = 1
    is_v: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_chunks < 1:
            raise ScheduleError(
                f"a pipeline of {self.num_ranks} ranks with {self.num_chunks} chunks each has no stages; "
                "both numbers must be at least 1"
            )
        if self.is_v and self.num_chunks != 2:
            raise ScheduleError(f"a V placement has 2 chunks a rank, not {self.num_chunks}")

    @property
    def num_stages(self) -> int:
        """The number of virtual stages."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        rank = stage % self.num_ranks
        return self.num_ranks - 1 - rank if self.is_v and stage >= self.num_ranks else rank

    def chunk_of(self, stage: int) -> int:
        """The chunk of its rank, 0 to num_chunks - 1, that `stage` is."""
        return stage // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of `rank`, by chunk."""
        if self.is_v:
            return rank, 2 * self.num_ranks - 1 - rank
        return tuple(rank + chunk * self.num_ranks for chunk in range(self.num_chunks))

    def is_first(self, stage: int) -> bool:
        """Whether `stage` reads the loader's inputs."""
        return stage == 0

    def is_last(self, stage: int) -> bool:
        """Whether `stage` makes the loss."""
        return stage == self.num_stages - 1

    def peer_of(self, action: Action) -> int:
        """The rank at the other end of a message: the receiver of a send, the sender of a receive."""
        to_next = action.op in (Op.SEND_F, Op.RECEIVE_B)
        return self.rank_of(action.stage + (1 if to_next else -1))


@final
@dataclass(frozen=True)
class Table:
    """The actions of one step: `rows[rank]` in the order in which the rank starts them."""

    rows: tuple[tuple[Action, ...], ...]
    placement: Placement
    num_micro_batches: int

    def answers(self, rank: int) -> dict[Action, list[Action]]:
        """By the send of each message to `rank`: sends of `rank` that are complete when it arrives.

        The sender has waited for them before. Each is with the first message that tells.
        """
        placement, found = self.placement, dict[Action, list[Action]]()
        for row in self.rows:
            taken: list[Action] = []
            for op, stage, micro_batch in row:
                if op is Op.FORWARD and not placement.is_first(stage):
                    send = Action(Op.SEND_F, stage - 1, micro_batch)
                elif op in FLOW_BACK and not placement.is_last(stage):
                    send = Action(Op.SEND_B, stage + 1, micro_batch)
                else:
                    action = Action(op, stage, micro_batch)
                    if op in SENDS and placement.peer_of(action) == rank:
                        found[action], taken = taken, []
                    continue
                if placement.rank_of(send.stage) == rank:
                    taken.append(send)
        return found


def computed(rows: Sequence[Sequence[Action]]) -> list[Order]:
    """The compute actions of `rows` alone."""
    return [[action for action in row if action.op in COMPUTE] for row in rows]
