"""Records a model: which of its modules runs, for how long, and what is computed in it.

    hooks of modules ──> the module that runs ─┐
    OperationCounter ──> work of operations ───┴──> one tally for each place in the model

A module that is held at several places counts at the place from which it was called. Nothing is written on the
model: the hooks are torch's global ones, and exist only inside of `forward` or between `start` and `stop`.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ...ops.torch_internals import graph_task_id
from .clock import ProfileClock
from .counter import OperationCounter, Tally
from .profile import BackwardProfile, ModuleProfile, Profile, share

_NONE = -1


class _Frame(NamedTuple):
    """A module that runs."""

    module: nn.Module
    place: str
    start: Any


@final
class Recorder:
    """Records forwards, and backwards, of one model until `profile` is asked for."""

    def __init__(
        self,
        model: nn.Module,
        clock: ProfileClock | None = None,
        ignored: Collection[type[nn.Module]] = (),
    ) -> None:
        """ignored: classes of modules that count nothing; what they compute themselves is their parent's."""
        self._model = model
        self._clock = clock or ProfileClock()
        self._places: dict[int, list[str]] = defaultdict(list)
        for place, module in model.named_modules(remove_duplicate=False):
            if type(module) not in ignored:
                self._places[id(module)].append(place)
        self._tallies: dict[str, Tally] = defaultdict(Tally)
        self._calls: Counter[str] = Counter()
        self._intervals: list[tuple[str, Any, Any]] = []  # of modules
        self._regions: list[tuple[str, Any, Any]] = []
        self._stack: list[_Frame] = []
        self._counter = OperationCounter(self._tallies[""])
        self._counts_by_calls = False
        self._handles: list[Any] = []
        self._plain: Any = None  # the context in which nothing is compiled

    # -- what is recorded -------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, what is computed outside of all modules belongs to the model itself."""
        start = self._clock.now()
        self._hook()
        try:
            with _Uncompiled(), self._counter:
                yield
        finally:
            self._unhook()
            self._regions.append(("forward", start, self._clock.now()))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, all that is computed belongs to a backward."""
        with self.region("backward"):
            self._counter.in_backward = True
            try:
                with self._counter:
                    yield
            finally:
                self._counter.in_backward = False

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Time the `with` block."""
        start = self._clock.now()
        try:
            yield
        finally:
            self._regions.append((name, start, self._clock.now()))

    def start(self) -> None:
        """Record all calls of modules from now on, until `stop`. A second call does nothing."""
        if not self._handles:
            self._counts_by_calls = True
            self._hook()
            self._plain = _Uncompiled()
            self._plain.__enter__()

    def stop(self) -> None:
        """Record no more calls. A second call does nothing."""
        if self._handles:
            self._plain.__exit__(None, None, None)
            self._unhook()
            self._counts_by_calls = False

    # -- the hooks --------------------------------------------------------------------------------------

    def _hook(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack.clear()
        self._counter.forward = self._tallies[""]

    def _enter(self, module: nn.Module, args: Any) -> None:
        places = self._places.get(id(module))
        if places is None or graph_task_id() != _NONE:  # autograd runs a forward again
            return
        if self._counts_by_calls and not self._stack:
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        place = places[0] if len(places) == 1 else self._nearest(places)
        self._stack.append(_Frame(module, place, self._clock.now()))
        self._counter.forward = self._tallies[place]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack or id(module) not in self._places or graph_task_id() != _NONE:
            return
        while self._stack:  # modules between were left by an exception that the model caught
            frame = self._stack.pop()
            if frame.module is module:
                break
        self._calls[frame.place] += 1
        self._intervals.append((frame.place, frame.start, self._clock.now()))
        self._counter.forward = self._tallies[self._stack[-1].place if self._stack else ""]
        if self._counts_by_calls and not self._stack:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _nearest(self, places: list[str]) -> str:
        """Of the places of one module the least deep one under the module that runs, else of all."""
        here = self._stack[-1].place if self._stack else ""
        under = [place for place in places if not here or place.startswith(f"{here}.")]
        return min(under or places, key=lambda place: place.count("."))

    # -- the result -------------------------------------------------------------------------------------

    def profile(self, num_batches: int = 1) -> Profile:
        """What was recorded, divided by `num_batches`."""
        self._clock.finish()
        seconds: dict[str, float] = defaultdict(float)
        for place, start, stop in self._intervals:
            seconds[place] += self._clock.seconds(start, stop) / num_batches
        regions: dict[str, float] = defaultdict(float)
        for name, start, stop in self._regions:
            regions[name] += self._clock.seconds(start, stop) / num_batches
        backward = None
        if "backward" in regions:
            works = self._counter.gradients, self._counter.recomputed
            backward = BackwardProfile(*(share(work.flops, num_batches) for work in works))
        root, _ = self._module("", "", self._model, seconds, num_batches)
        return Profile(root, num_batches, backward, dict(regions))

    def _module(
        self, name: str, place: str, module: nn.Module, seconds: dict[str, float], num_batches: int
    ) -> tuple[ModuleProfile, dict[int, int]]:
        """The profile of a module, and the elements of each parameter in it, by its id: ties count once."""
        numels = {id(p): p.numel() for p in module._parameters.values() if p is not None}
        found = []
        for each, child in module._modules.items():
            if child is not None:
                inside = f"{place}.{each}" if place else each
                one, more = self._module(each, inside, child, seconds, num_batches)
                found.append(one)
                numels |= more
        children, own = tuple(found), self._tallies.get(place, Tally())
        made = ModuleProfile(
            name=name,
            kind=type(module).__name__,
            extra=module.extra_repr(),
            params=sum(numels.values()),
            calls=share(self._calls[place], num_batches),
            flops=share(own.flops, num_batches) + sum(child.flops for child in children),
            seconds=seconds.get(place) or sum(child.seconds for child in children),
            children=children,
        )
        return made, numels


_COMPILING = ("torch._dynamo", "torch.nn.attention.flex_attention")


@final
class _Uncompiled(AbstractContextManager[None]):
    """Inside, compiled models run as they were written: a compiler's kernel hides what it computes.

    So do layers that torch fuses for inference.
    """

    def __enter__(self) -> None:
        self._had_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        # a process without these has compiled nothing, and does not load the compiler for this
        compiles = any(name in sys.modules for name in _COMPILING)
        self._eager: Any = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        self._eager.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._eager.__exit__(*exception)
        torch.backends.mha.set_fastpath_enabled(self._had_fast_path)


__all__ = ["Recorder"]
