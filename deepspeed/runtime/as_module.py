"""The engine counts as a `torch.nn.Module`, as DeepSpeed's does: libraries ask `isinstance`.

Only the type is torch's. What torch would answer from its own tables, `parameters()` or `_modules`, goes on to
the engine and from there to the user's module, so that names of parameters have no prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch import nn

Module = object if TYPE_CHECKING else nn.Module


@final
class _GoesOn:
    """A name of torch's class that is read as if the class lacked it. An instance's own value comes first."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, kind: type | None = None) -> Any:
        return self if engine is None else type(engine).__getattr__(engine, self._name)


class AsModule(Module):  # type: ignore[misc, valid-type]
    """The last base of an adapter whose `__getattr__` asks the engine."""

    __repr__ = object.__repr__
    __dir__ = object.__dir__


for _name in vars(nn.Module):
    if not _name.startswith("__"):
        _goes_on = _GoesOn()
        _goes_on.__set_name__(AsModule, _name)
        setattr(AsModule, _name, _goes_on)


__all__ = ["AsModule"]
