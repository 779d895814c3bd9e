"""The engine counts as a `torch.nn.Module`, as DeepSpeed's does: libraries ask `isinstance`.

Only the type is torch's. What torch would answer from its own tables, `parameters()` or `_apply`, goes on to
the engine and from there to the user's module. Names begin with "module.", as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

Module = object if TYPE_CHECKING else nn.Module


PREFIX = "module."  # the model is the engine's only child, under this name
_RETURN_SELF = (
    *("apply", "bfloat16", "cpu", "cuda", "double", "float", "half", "requires_grad_"),
    *("share_memory", "to", "to_empty", "type", "xpu"),
)


@final
class _GoesOn:
    """A name of torch's class that is read as if the class lacked it. An instance's own value comes first."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, kind: type | None = None) -> Any:
        if engine is None:
            return self
        found = type(engine).__getattr__(engine, self._name)
        return partial(_returning, engine, found) if self._name in _RETURN_SELF else found


def _returning(engine: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`engine = engine.to(device)` keeps the engine."""
    found = method(*args, **kwargs)
    return engine if isinstance(found, nn.Module) else found


class AsModule(Module):  # type: ignore[misc, valid-type]
    """The last base of an adapter whose `__getattr__` asks the engine."""

    __repr__ = object.__repr__
    __dir__ = object.__dir__

    _engine: Any

    @property
    def _parameters(self) -> dict[str, Any]:
        return {}

    _buffers = _parameters

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {PREFIX[:-1]: self._engine.module}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's; the names begin with "module."."""
        if recurse:
            yield from self._engine.module.named_parameters(_inside(prefix), True, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As torch's; the names begin with "module."."""
        if recurse:
            yield from self._engine.module.named_buffers(_inside(prefix), True, remove_duplicate)

    def named_modules(
        self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """As torch's: the engine, and then the model under the name "module"."""
        yield prefix, self
        yield from self._engine.module.named_modules(memo, _inside(prefix), remove_duplicate)

    def modules(self) -> Iterator[Any]:
        """As torch's: the engine, and then the model's."""
        for _, one in self.named_modules():
            yield one

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model alone."""
        yield PREFIX[:-1], self._engine.module

    def children(self) -> Iterator[nn.Module]:
        """The model alone."""
        yield self._engine.module

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """`xds.Engine.state_dict`; names begin with "module.". As part of another module: the own tensors."""
        if destination is not None or prefix or keep_vars:
            own = self._engine.module.state_dict
            within: dict[str, Any] = own(
                destination=destination, prefix=prefix + PREFIX, keep_vars=keep_vars
            )
            return within
        given = self._engine.state_dict()
        return {PREFIX + name: value for name, value in given.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """`xds.Engine.load_state_dict`, of names with or without "module."."""
        has_prefix = bool(state_dict) and all(name.startswith(PREFIX) for name in state_dict)
        cut = len(PREFIX) if has_prefix else 0
        plain = {name[cut:]: value for name, value in state_dict.items()}
        return self._engine.load_state_dict(plain, *args, **kwargs)


def _inside(prefix: str) -> str:
    return f"{prefix}.{PREFIX[:-1]}" if prefix else PREFIX[:-1]


for _name in vars(nn.Module):
    if not (_name.startswith("__") or _name in vars(AsModule)):
        _goes_on = _GoesOn()
        _goes_on.__set_name__(AsModule, _name)
        setattr(AsModule, _name, _goes_on)
