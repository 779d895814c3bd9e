"""Follows one forward outside of the blocks: which tensors depend on parameters or on activations.

These tensors must be sent to the next stage; others (masks, positions, rotary tables) every stage computes.
The first forward of each way through a stage is followed: see `StageRunner.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...ops.torch_internals import tree_leaves
from ...utils.errors import UsageError

_SHAPE_ONLY = {
    *(
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
    ),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"),
}
_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__contains__"} | {
    f"__{name}__" for name in ("bool", "int", "float", "complex", "index", "array")
}


@final
class Trace(TorchFunctionMode):
    """Marks tensors that depend on parameters. Refuses what a later stage cannot know.

    Args:
        stage: the virtual stage that runs.
        sources: tensors that stand for parameters of other stages.
    """

    def __init__(self, stage: int, sources: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._stage = stage
        self._has_arrived = False
        self._dependent = WeakTensorKeyDictionary()
        self._unknown = WeakTensorKeyDictionary()  # computed from values of other stages
        for source in sources:
            self._dependent[source] = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _SHAPE_ONLY:
            return result
        inputs = _tensors((args, kwargs))
        outputs = _tensors(args[:1] if name == "__setitem__" else result)
        if outputs or name in _READS:
            self._check_known(inputs, name)
        if outputs and any(self.depends(tensor) for tensor in inputs):
            self.mark(outputs)
        elif name in _READS and self._stage and any(t in self._dependent for t in inputs):
            self._check_read(name)
        return result

    def depends(self, tensor: Tensor) -> bool:
        """`tensor` depends on parameters, and so possibly on other stages."""
        return isinstance(tensor, nn.Parameter) or tensor in self._dependent

    def is_unknown(self, tensor: Tensor) -> bool:
        """The right value of `tensor` is on another stage and did not arrive."""
        return tensor in self._unknown

    def mark(self, value: Any) -> None:
        """The tensors in `value` depend on parameters."""
        for tensor in _tensors(value):
            if not isinstance(tensor, nn.Parameter):
                self._dependent[tensor] = True

    def arrive(self) -> None:
        """The stage's inputs arrive now: what was computed from stand-ins before is unknown."""
        self._has_arrived = True
        if self._stage:
            self._unknown, self._dependent = self._dependent, WeakTensorKeyDictionary()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what runs in this context. Compiled functions run eagerly in it, so that they are followed.

        This loads the compiler, as building the optimizer does. What a stage sends must not depend on whether
        its rank has loaded it before a forward that compiles something itself.
        """
        with torch.compiler.set_stance("force_eager"), self:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls of blocks are not followed; they run compiled, if they are."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            with torch.compiler.set_stance("default"):
                yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _check_known(self, inputs: list[Tensor], name: str) -> None:
        if any(tensor in self._unknown for tensor in inputs):
            raise UsageError(
                f"pipeline stage {self._stage}: the model's forward computes ({name}) with a value from before "
                "its blocks, which only the first stage has; pass the value through the blocks, or set "
                "pipeline.stages to 1"
            )

    def _check_read(self, name: str) -> None:
        if not self._has_arrived:
            raise UsageError(
                f"pipeline stage {self._stage}: the model's forward reads ({name}) a value that depends on "
                "parameters of another stage before its blocks; compute it from the inputs, or set "
                "pipeline.stages to 1"
            )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


__all__ = ["Trace"]
