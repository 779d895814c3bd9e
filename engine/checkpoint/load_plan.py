"""The options of a load, and the checked plan of a load on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from ...zero.checkpoint.restore import Restore, Target
from .io.checked_file import CheckedFile
from .manifest import Manifest

DOING = "load_checkpoint"
MAX_NAMES = 50  # in one message


@dataclass(frozen=True)
class LoadOptions:
    """What to load; the names are those of `Engine.load_checkpoint`."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    fallback: bool = False

    @property
    def with_optimizer(self) -> bool:
        return self.load_optimizer_states and not self.load_module_only

    @property
    def with_scheduler(self) -> bool:
        return self.load_lr_scheduler_states and not self.load_module_only


@final
@dataclass(eq=False)
class Plan:
    """A load on this rank after all checks."""

    folder: Path
    manifest: Manifest
    restore: Restore
    files: dict[int, CheckedFile]
    targets: list[Target] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    is_same_world: bool = True


def some_of(names: Iterable[str]) -> str:
    """The first names for a message, and how many more there are."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more
