"""What a forward and a backward keep and send, from one run of the model on the meta device.

The layers are sliced as on the first tensor rank, so sums of activations are counted by the layers themselves.
Nothing is computed: the run costs as much as its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...ops.comm.on_paper import PaperGroups

BEFORE = -1


def after(number: int) -> int:
    """The key of what runs after block `number`, before the next one."""
    return -2 - number


@final
@dataclass
class Activations:
    """Of one micro-batch.

    kept: block number -> bytes that autograd keeps for its backward, without parameters; `BEFORE` and `after`
        are what runs outside of the blocks.
    inputs: block number -> bytes of its arguments, which a recomputed block keeps instead.
    flows: block number -> bytes of those of its arguments that a stage before it would send.
    sent: block number -> bytes that this rank sends to its tensor ranks, by kind.
    """

    kept: Counter[int] = field(default_factory=Counter)
    inputs: Counter[int] = field(default_factory=Counter)
    flows: Counter[int] = field(default_factory=Counter)
    sent: dict[int, Counter[str]] = field(default_factory=dict)


@final
class Observer:
    """Hooks the blocks of a model, and counts into `found` while it runs."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], groups: PaperGroups) -> None:
        self.found = Activations()
        self._groups = groups
        self._running = BEFORE
        self._sent: Counter[str] = Counter()
        self._outputs: list[Tensor] = []  # alive, so that no other tensor gets their memory
        self._seen: set[int] = {
            _memory(tensor) for tensor in [*model.parameters(), *model.buffers()]
        }
        self._hooks: list[Any] = []
        for number, block in enumerate(blocks):
            before, after = partial(self._begin, number), partial(self._end, number)
            self._hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(block.register_forward_hook(after))
            self._hooks.append(block.register_full_backward_pre_hook(partial(self._back, number)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is saved for backward inside."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept):
                yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self.settle()

    def settle(self) -> None:
        """What was sent since the last call belongs to the block that runs."""
        now: Counter[str] = Counter()
        for collectives in self._groups.opened:
            now.update(collectives.sent_bytes)
        new = now - self._sent
        self.found.sent.setdefault(self._running, Counter()).update(new)
        self._sent = now

    def begin_backward(self) -> None:
        """The loss is about to be differentiated."""
        self.settle()

    def _switch(self, running: int) -> None:
        self.settle()
        self._running = running

    def _begin(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._switch(number)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = {_memory(tensor) for tensor in self._outputs}
        for tensor in tensors:
            if tensor.requires_grad or _memory(tensor) in outputs:
                self.found.flows[number] += tensor.nbytes
                self.found.inputs[number] += tensor.nbytes

    def _end(self, number: int, _: nn.Module, __: Any, outputs: Any) -> None:
        self._switch(after(number))
        self._outputs += [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]

    def _back(self, number: int, _: nn.Module, __: Any) -> None:
        self._switch(number)

    def _save(self, tensor: Tensor) -> Tensor:
        key = _memory(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self.found.kept[self._running] += tensor.untyped_storage().nbytes()
        return tensor


def observe(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    groups: PaperGroups,
    call: Callable[[], Tensor],
) -> Activations:
    """Run `call`, a forward of `model` to its loss, and its backward. All on the meta device.

    Raises whatever the model raises: not every forward runs without values.
    """
    observer = Observer(model, blocks, groups)
    with observer.watching():
        loss = call()
        observer.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
    for param in model.parameters():
        param.grad = None
    return observer.found


def held_by(
    found: Activations, blocks: Mapping[int, Sequence[int]], *, recomputes: bool
) -> dict[int, int]:
    """Bytes that one micro-batch keeps on each virtual stage.

    blocks: virtual stage -> its blocks. recomputes: each block keeps its inputs only.
    """
    per_block = found.inputs if recomputes else found.kept
    held = {
        stage: sum(per_block[number] + found.kept[after(number)] for number in own)
        for stage, own in blocks.items()
    }
    held[min(held)] += found.kept[BEFORE]
    return held


def sent_by(found: Activations, numbers: Sequence[int], *, is_first: bool) -> Counter[str]:
    """Bytes by kind that one rank sends to its tensor ranks for one micro-batch.

    numbers: its blocks. is_first: it has what runs before the blocks.
    """
    places = [key for number in numbers for key in (number, after(number))]
    total: Counter[str] = Counter()
    for place in places + [BEFORE] * is_first:
        total.update(found.sent.get(place, Counter()))
    return total


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


__all__ = ["BEFORE", "Activations", "after", "held_by", "observe", "sent_by"]
