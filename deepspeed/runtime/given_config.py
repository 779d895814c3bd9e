"""The config of an engine as the script gave it: a dict, whose attributes are the checked `xds.Config`'s."""

from __future__ import annotations

from typing import Any, final

from ...engine.config.config import Config
from ...engine.config.text import read_source


@final
class GivenConfig(dict[str, Any]):
    """`engine.config`: scripts read keys (`config["zero_optimization"]["stage"]`, `config.get`)."""

    def __init__(self, source: Any, checked: Config) -> None:
        given = source.model_dump(exclude_unset=True) if isinstance(source, Config) else None
        found = read_source(source)[0] if given is None else given
        super().__init__(found)
        self._checked = checked

    def __getattr__(self, name: str) -> Any:
        if name == "_checked":  # before __init__ has set it, in a copy
            raise AttributeError(name)
        return getattr(self._checked, name)


__all__ = ["GivenConfig"]
