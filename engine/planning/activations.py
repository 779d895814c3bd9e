"""What a forward and a backward keep and send, from one run of the model on the meta device.

The layers are sliced as on the first tensor rank, so sums of activations are counted by the layers themselves.
Nothing is computed: the run costs as much as its calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ...ops.comm.fake import FakeGroups, Journal, backend_of
from ...ops.mesh import Axis
from ...ops.torch_internals import tree_leaves
from ...pipe.cut.meta_copies import ShapesOnly
from ..model.forwards import Forward, replace_forwards
from .fusion import FusedWatch
from .models import FusedKernels
from .work import Call, Kernel

BEFORE = -1
NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")  # of a block among the others


def after(number: int) -> int:
    """The key of what runs after block `number`, before the next one."""
    return -2 - number


@final
@dataclass
class Activations:
    """Of one micro-batch.

    tokens: of the whole micro-batch; samples, where its inputs are no whole numbers.
    kept: block number -> bytes that autograd keeps for its backward, without parameters; `BEFORE` and `after`
        are what runs outside of the blocks.
    inputs: block number -> bytes of its arguments, which a recomputed block keeps instead.
    flows: block number -> bytes of those of its arguments that a stage before it would send.
    sent: block number -> bytes that this rank sends inside of the layers, by kind.
    groups: kind -> the axes of the mesh along which it is sent, and over how many neighbouring ranks there.
    forward, backward: block number -> its kernels and messages in order, without a forward that is run again.
    again: block number -> those of its forward that a recomputation runs. torch ends it where all that the
        backward needs is there: the last product of a block does not run again.
    sent_again: as `sent`, of these.
    """

    tokens: int = 0
    kept: Counter[int] = field(default_factory=Counter)
    inputs: Counter[int] = field(default_factory=Counter)
    flows: Counter[int] = field(default_factory=Counter)
    sent: dict[int, Counter[str]] = field(default_factory=dict)
    groups: dict[str, tuple[tuple[Axis, ...], int]] = field(default_factory=dict)
    forward: dict[int, list[object]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[int, list[object]] = field(default_factory=lambda: defaultdict(list))
    again: dict[int, list[object]] = field(default_factory=lambda: defaultdict(list))
    sent_again: dict[int, Counter[str]] = field(default_factory=dict)


class _Save(NamedTuple):
    """A block saves a tensor. events: their number. kernels: the last of them. sent: bytes by kind so far."""

    events: int
    kernels: Counter[Any]
    sent: Counter[str]


@final
class Observer:
    """Hooks the blocks of a model, and counts into `found` while it runs."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        groups: FakeGroups,
        calls: dict[Kernel, Call] | None,
        *,
        compiles: bool,
    ) -> None:
        self.found = Activations()
        self.journal = Journal()
        self.watch = FusedWatch(self.journal, calls)
        self._compiles = compiles
        self._events = self.found.forward
        self._groups = groups
        self._running = BEFORE
        self._sent = self._all_sent()
        self._outputs: list[Tensor] = []  # alive, so that no other tensor gets their memory
        self._seen: set[int] = {
            _memory(tensor) for tensor in [*model.parameters(), *model.buffers()]
        }
        self._begun = self._sent
        self._last_save = _Save(0, Counter(), self._sent)  # of the running block
        self._tails: dict[
            int, tuple[int, Counter[Any]]
        ] = {}  # by block: count, kernels that follow
        self._hooks: list[Any] = []
        for number, block in enumerate(blocks):
            begin, end = partial(self._begin, number), partial(self._end, number)
            self._hooks.append(block.register_forward_pre_hook(begin, with_kwargs=True))
            self._hooks.append(block.register_forward_hook(end))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is saved for backward inside."""
        self._switch(BEFORE)
        self._groups.note(self.journal)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept):
                yield
        finally:
            self._groups.note(None)
            for hook in self._hooks:
                hook.remove()
            self._switch(BEFORE)
            self._outputs.clear()  # their hooks keep this object, and it would keep their graph

    def end(self, kept: Iterable[Tensor]) -> None:
        """Forward and backward are over. kept: what is in memory afterwards, as gradients are."""
        self.watch.end(kept)
        for number, (count, tail) in self._tails.items():
            events = self.found.forward[number][:count]
            if events and isinstance(events[-1], Counter):
                events[-1] = events[-1] - tail
            self.found.again[number] = events

    def begin_backward(self) -> None:
        """The forward is over."""
        self._events = self.found.backward
        self.watch.is_backward = True
        self._switch(self._running)

    def _switch(self, running: int) -> None:
        """What was sent since the last call belongs to what ran until now."""
        now = self._all_sent()
        self.found.sent.setdefault(self._running, Counter()).update(now - self._sent)
        self._sent = now
        self._running = running
        self.journal.events = self._events[running]
        self.watch.fuses = self._compiles and running >= 0

    def _all_sent(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for group in self._groups.opened:
            found.update(group.sent_bytes)
            ranks = backend_of(group).axes, group.world_size
            self.found.groups.update(dict.fromkeys(group.sent_bytes, ranks))
        return found

    def _begin(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        before = self._running
        self._switch(number)
        self._begun = self._sent
        self._last_save = _Save(0, Counter(), self._sent)
        outputs = {_memory(tensor) for tensor in self._outputs}
        for tensor in _tensors((args, kwargs)):
            if tensor.requires_grad or _memory(tensor) in outputs:
                self.found.flows[number] += tensor.nbytes
                self.found.inputs[number] += tensor.nbytes
            if tensor.requires_grad and _memory(tensor) not in outputs:
                tensor.register_hook(partial(self._back, before))  # type: ignore[no-untyped-call]

    def _end(self, number: int, _: nn.Module, __: Any, outputs: Any) -> None:
        save = self._last_save
        last = self.journal.events[save.events - 1] if save.events else None
        tail = Counter(last) - save.kernels if isinstance(last, Counter) else Counter()
        self._tails[number] = save.events, tail
        self.found.sent_again[number] = save.sent - self._begun
        self._switch(after(number))
        self._outputs += _tensors(outputs)
        for tensor in _tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._back, number))  # type: ignore[no-untyped-call]

    def _back(self, number: int, _: Tensor) -> None:
        self._switch(number)

    def _save(self, tensor: Tensor) -> Tensor:
        key = _memory(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self.found.kept[self._running] += tensor.untyped_storage().nbytes()
        events = self.journal.events
        last = events[-1] if events else None
        kernels = Counter(last) if isinstance(last, Counter) else Counter()
        self._last_save = _Save(len(events), kernels, self._all_sent())
        return tensor


class NotRepeated(Exception):
    """A block returns something else than its input's shape, so what follows it depends on it."""


def models_of(kinds: Iterable[Hashable]) -> dict[int, int]:
    """Number of a block that need not run -> the one that it is like, from the kind of each block.

    Two of each kind run. The second one is the model for the others, as the first also keeps what all share.
    """
    found: dict[int, int] = {}
    numbers: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike = numbers.setdefault(kind, [])
        alike.append(number)
        if len(alike) > 2:
            found[number] = alike[1]
    return found


@final
class Repeated:
    """Blocks that are like an earlier one do not run: their outputs are their inputs, and they count alike."""

    def __init__(
        self, blocks: Sequence[nn.Module], like: Mapping[int, int], *, can_run: bool = True
    ) -> None:
        """like: see `models_of`. can_run: such blocks are cut as the others, so they may run all the same."""
        self._blocks, self._can_run = blocks, can_run
        self._like = like
        self._skipped: set[int] = set()
        self._passes: dict[int, bool] = {}  # number of a model -> its output is like its input

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Inside, such blocks return their inputs."""
        models = set(self._like.values())
        watched = [self._blocks[n].register_forward_hook(partial(self._look, n)) for n in models]
        undo = [
            replace_forwards([self._blocks[number]], partial(self._stub, number))
            for number in self._like
        ]
        try:
            yield
        finally:
            for restore in undo:
                restore()
            for hook in watched:
                hook.remove()

    def complete(self, found: Activations) -> None:
        """Count the skipped blocks like their models."""
        for number in self._skipped:
            model = self._like[number]
            found.kept[number] = found.kept[model]
            found.sent[number] = found.sent[model]
            found.forward[number] = found.forward[model]
            found.backward[number] = found.backward[model]
            found.again[number] = found.again[model]
            found.sent_again[number] = found.sent_again[model]

    def _look(self, number: int, _: nn.Module, args: Any, output: Any) -> None:
        first = next(iter(_tensors(args)), None)
        self._passes[number] = (
            isinstance(output, Tensor)
            and first is not None
            and (first.shape, first.dtype) == (output.shape, output.dtype)
        )

    def _stub(self, number: int, forward: Forward) -> Forward:
        def stub(*args: Any, **kwargs: Any) -> Any:
            if not self._passes.get(self._like[number]):
                if not self._can_run:
                    raise NotRepeated
                return forward(*args, **kwargs)
            self._skipped.add(number)
            first = _tensors(args)[0]
            return first.view_as(first)

        return stub


def observe(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    groups: FakeGroups,
    call: Callable[[], Tensor],
    calls: dict[Kernel, Call] | None,
    *,
    repeated: Repeated,
    compiles: bool = False,
) -> Activations:
    """Run `call`, a forward of `model` to its loss, and its backward. All on the meta device.

    calls: gets a call of torch for each kernel. compiles: the forward of each block is compiled.

    Raises whatever the model raises: not every forward runs without values.
    """
    observer = Observer(model, blocks, groups, calls, compiles=compiles)
    with repeated.skipped(), observer.watching(), FusedKernels(), ShapesOnly():
        with observer.watch:
            loss = call()
            observer.begin_backward()
            loss.backward()  # type: ignore[no-untyped-call]
    observer.end(param.grad for param in model.parameters() if param.grad is not None)
    for param in model.parameters():
        param.grad = None
    repeated.complete(observer.found)
    return observer.found


def places_of(blocks: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """The keys of what each virtual stage runs: its blocks, and what runs before or after them.

    A last stage without blocks has what runs after the last one.

    blocks: virtual stage -> its blocks, of all stages.
    """
    found = {stage: [key for n in own for key in (n, after(n))] for stage, own in blocks.items()}
    found[min(blocks)].insert(0, BEFORE)
    numbers = [number for own in blocks.values() for number in own]
    if numbers and not blocks[max(blocks)]:
        head = after(max(numbers))
        for places in found.values():
            if head in places:
                places.remove(head)
        found[max(blocks)].append(head)
    return found


def held_by(
    found: Activations, places: Mapping[int, Sequence[int]], *, recomputes: bool
) -> dict[int, int]:
    """Bytes that one micro-batch keeps on each virtual stage.

    places: see `places_of`. recomputes: each block keeps its inputs only.
    """
    of_block = found.inputs if recomputes else found.kept
    return {
        stage: sum((of_block if place >= 0 else found.kept)[place] for place in own)
        for stage, own in places.items()
    }


def sent_by(found: Activations, places: Iterable[int], *, recomputes: bool) -> Counter[str]:
    """Bytes by kind that one rank sends inside of its layers for one micro-batch. places: what it runs."""
    total: Counter[str] = Counter()
    for place in places:
        total.update(found.sent.get(place, Counter()))
        if recomputes:
            total.update(found.sent_again.get(place, Counter()))
    return total


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def kind_of(block: nn.Module) -> Hashable:
    """Equal for blocks that keep and send the same: classes, shapes and settings, but for their number."""
    settings = [
        (name, type(module).__name__, key, value)
        for name, module in block.named_modules()
        for key, value in module.__dict__.items()
        if isinstance(value, (int, float, str)) and key not in NUMBERS
    ]
    params = [
        (name, param.shape, param.dtype, param.requires_grad)
        for name, param in block.named_parameters()
    ]
    return tuple(settings), tuple(params)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


__all__ = [
    "BEFORE",
    "Activations",
    "NotRepeated",
    "Repeated",
    "after",
    "held_by",
    "kind_of",
    "models_of",
    "observe",
    "places_of",
    "sent_by",
]
