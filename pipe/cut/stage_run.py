"""One micro-batch on one stage: what arrives at its first block, and what leaves with its last."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from .flows import flatten, unflatten, writable
from .part import Flow
from .tracing import Trace


class StageEnd(BaseException):
    """Ends a model's forward where the next stage begins. No `except Exception` of a model stops it."""

    def __init__(self, flow: Flow) -> None:
        super().__init__("the next pipeline stage begins here")
        self.flow = flow


@final
class StageRun:
    """The state of one run of a stage. Its recomputation in backward uses it again.

    Args:
        senders: what to send, by the structure of a call: positions among its tensors. Shared by all runs.
        trace: follows this run; None where the structures are known.
        copies: the blocks write to what arrives, which a recomputation needs again.
        is_trained: a block of this stage has a parameter that requires gradients.
    """

    def __init__(
        self,
        stage: int,
        arrived: Flow | None,
        senders: dict[str, tuple[int, ...]],
        trace: Trace | None,
        is_trained: bool,
        copies: bool,
    ) -> None:
        self.stage = stage
        self.trace = trace
        self.is_trained = is_trained
        self.has_begun = False
        self.passes_blocks = False  # a block of another stage was called
        self.is_recomputing = False
        self._copies = copies or trace is not None
        self._taken: list[Tensor] = []
        self._records = torch.is_grad_enabled()
        self._arrived = arrived
        self._senders = senders
        self._first: nn.Module | None = None
        self._first_calls = 0
        self._entered: set[nn.Module] = set()
        self._replaced: dict[Any, Tensor] = {}  # key of a tensor -> what arrived for it
        self._locals: list[Tensor] = []  # keeps the keys valid
        self._local_keys: set[Any] = set()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an own block, with what arrived in place of what this stage cannot know."""
        self._entered.add(module)
        if self._arrived is None:
            self.has_begun = True
            return args, kwargs
        leaves, structure = flatten((args, kwargs))
        if self._takes_arrived(module, leaves):
            self._put_arrived(module, leaves, structure)
        else:
            self._replace(leaves)
        entered: tuple[Any, Any] = unflatten(leaves, structure)
        return entered

    def begins_with(self, module: nn.Module) -> bool:
        """A call of `module`, which is no block, is that with which the stage begins."""
        return not self.has_begun or (self.is_recomputing and module is self._first)

    def has_run(self, blocks: Iterable[nn.Module]) -> bool:
        """All of these have been called."""
        return self._entered.issuperset(blocks)

    def close(self) -> bool:
        """End the run. Returns whether the blocks wrote to what arrived; known of followed runs only."""
        is_written = self.trace is not None and any(tensor._version for tensor in self._taken)
        self.trace = None
        self._taken.clear()
        return is_written

    def leave(self, args: Any, kwargs: Any) -> NoReturn:
        """The next stage's block was called: what it needs is this stage's output."""
        if self._arrived is not None and not self.has_begun:
            raise StageEnd(self._arrived)  # the model skipped all blocks of this stage
        leaves, structure = flatten((args, kwargs))
        self._replace(leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = str(structure) + "".join("t" if isinstance(leaf, Tensor) else "-" for leaf in leaves)
        if self.trace is not None:
            known = [
                position for position, tensor in enumerate(tensors) if self.trace.depends(tensor)
            ]
            self._senders[key] = tuple(known)
        # where this run is not followed and takes another way, all tensors are sent, now and later
        sent = self._senders.setdefault(key, tuple(range(len(tensors))))
        self._check_graph([tensors[position] for position in sent])
        text = json.dumps({"tensors": len(tensors), "sent": sent})
        raise StageEnd(Flow(tuple(tensors[position] for position in sent), text))

    def _check_graph(self, sent: list[Tensor]) -> None:
        """A reentrant checkpoint around blocks of two stages would leave the outputs without a graph."""
        is_hidden = self._records and not torch.is_grad_enabled() and not self.is_recomputing
        if is_hidden and self.is_trained and not any(tensor.requires_grad for tensor in sent):
            raise UsageError(
                f"pipeline stage {self.stage}: its outputs have no gradients, as a reentrant activation "
                "checkpoint covers blocks of two stages, or gets no input with gradients; call it with "
                "use_reentrant=False, or checkpoint each block on its own"
            )

    def _takes_arrived(self, module: nn.Module, leaves: list[Any]) -> bool:
        """This call is the stage's first one, or the recomputation of it."""
        if not self.is_recomputing:
            if self._first is module:
                self._first_calls += 1
            return not self.has_begun
        if module is not self._first:
            return False
        if self._first_calls == 1:
            return True
        return any(_key(leaf) in self._local_keys for leaf in leaves if isinstance(leaf, Tensor))

    def _put_arrived(self, module: nn.Module, leaves: list[Any], structure: Any) -> None:
        assert self._arrived is not None
        spec = json.loads(self._arrived.spec)
        places = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != spec["tensors"]:
            raise UsageError(
                f"pipeline stage {self.stage}: its first block gets {len(places)} tensors here, "
                f"{spec['tensors']} on the stage before; the model's forward must pass the same arguments on "
                "every rank, whatever the values of activations are"
            )
        if not self.is_recomputing:
            self._first, self._first_calls, self.has_begun = module, 1, True
            if self.trace is not None:
                self.trace.arrive()
        for index, leaf in zip(spec["sent"], self._arrived.leaves, strict=True):
            tensor = writable(leaf).clone() if self._copies else writable(leaf)
            self._taken.append(tensor)
            local = leaves[places[index]]
            if not self.is_recomputing:
                self._locals.append(local)
                self._local_keys.add(_key(local))
                self._replaced[_key(local)] = tensor
            leaves[places[index]] = tensor
            if self.trace is not None:
                self.trace.mark(tensor)
        self._check_arrived(leaves)

    def _replace(self, leaves: list[Any]) -> None:
        """Replace what arrived at the first block in the arguments of a later one."""
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and self._replaced:
                leaves[position] = self._replaced.get(_key(leaf), leaf)
        self._check_arrived(leaves)

    def _check_arrived(self, leaves: list[Any]) -> None:
        if self.trace is None or self.is_recomputing:
            return
        if any(isinstance(leaf, Tensor) and self.trace.is_unknown(leaf) for leaf in leaves):
            raise UsageError(
                f"pipeline stage {self.stage}: a block gets a tensor that was computed before the blocks from "
                "parameters of the first stage, and the stage's first block did not get it; pass it to every "
                "block, or set pipeline.stages to 1"
            )


def _key(tensor: Tensor) -> Any:
    """Identifies a tensor also after a reentrant checkpoint has detached it."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


__all__ = ["StageRun", "StageEnd"]
