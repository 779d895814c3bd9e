"""The table of DeepSpeed's modules and public names (names.json), one module at a time.

write_names.py writes the table and describes its form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final


@final
@dataclass(frozen=True)
class Name:
    """What the table says of a name.

    kind: "class", "function", "value", "raises", "from", "python", "module", "enum" or "is".
    source: the module that has it ("from", "python", "module"), or the built-in base ("raises").
    original: its name there; "" is the module itself.
    value: of a constant; [bases, members] of an enumeration.
    """

    kind: str
    source: str = ""
    original: str = ""
    value: Any = None


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("names.json").read_text()
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def modules() -> frozenset[str]:
    """All modules of DeepSpeed, without "deepspeed." in front; "" is the package itself."""
    return frozenset(_table())


@cache
def packages() -> frozenset[str]:
    """The modules that have modules inside."""
    return frozenset(name.rpartition(".")[0] for name in _table() if name)


@cache
def names_of(module: str) -> dict[str, Name]:
    """The names of a module of DeepSpeed; empty for a module that it does not have."""
    found: dict[str, Name] = {}
    for kind, content in _table().get(module, {}).items():
        if isinstance(content, str):
            found.update({name: Name(kind) for name in content.split()})
        elif kind in ("raises", "from", "python"):
            for source, words in content.items():
                for word in words.split():
                    name, has_other, other = word.partition("=")
                    found[name] = Name(kind, source, other if has_other else name)
        elif kind == "module":
            found.update({name: Name(kind, source) for name, source in content.items()})
        else:
            found.update({name: Name(kind, value=value) for name, value in content.items()})
    return found
