"""A value of a state dict that this rank does not have whole: a tensor of shape [0] that warns when used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from torch import Tensor

from ...ops.torch_internals import NoTorchFunctionSubclass, tree_map_only

log = logging.getLogger("xds")

_NO_VALUES = frozenset(
    (
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "requires_grad", "ndim", "is_sparse", "layout"),
                "is_meta",
            )
        ),
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.is_floating_point),
    )
)


@final
class Sentence:
    """What a use of values in parts logs, once."""

    def __init__(self) -> None:
        self.text = ""  # of the first one
        self._is_said = False

    def say(self) -> None:
        """Log it, at the first call."""
        if not self._is_said:
            self._is_said = True
            log.warning("%s", self.text)


@final
class InParts(Tensor):
    """Shape [0]. Whatever is made of it, copies and files too, is a plain tensor."""

    _sentence: Sentence

    @staticmethod
    def of(value: Tensor, sentence: Sentence) -> InParts:
        """One with the dtype and device of `value`."""
        made = value.detach().new_empty(0).as_subclass(InParts)
        made._sentence = sentence
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with NoTorchFunctionSubclass():
            if func in _NO_VALUES:
                return func(*args, **(kwargs or {}))
            return func(*_plain(args), **_plain(dict(kwargs or {})))


def _plain(given: Any) -> Any:
    def plain(one: InParts) -> Tensor:
        one._sentence.say()
        return one.as_subclass(Tensor)

    return tree_map_only(InParts, plain, given)


__all__ = ["InParts", "Sentence"]
