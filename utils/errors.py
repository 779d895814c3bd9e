"""The exceptions that xds raises. Each message names the setting, its value, what is needed and the remedy.

XdsError
 +- ConfigError   the JSON config is invalid; lists all problems of the file at once
 +- UsageError    a call that cannot work: wrong order, wrong argument, wrong model
 |   +- DamagedError   a file of a checkpoint or dataset is missing, truncated or changed
 |   +- UnscaledLossError   loss.backward() by the script in fp16, without the loss scale
 +- PeerError     another rank failed or does not answer during a collective
 +- BuildError    a native op cannot be compiled or loaded on this machine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .quoting import plain_lines, printable

LISTED_COMPLAINTS = 20


class XdsError(Exception):
    """Base of every error that xds raises on purpose. Its text contains no terminal control characters."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(plain_lines(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(XdsError):
    """A call that cannot work as it was made. The message states what to do instead."""


class DamagedError(UsageError):
    """A file of a checkpoint or dataset is missing, truncated or changed. The message names it."""


class UnscaledLossError(UsageError, RuntimeError):
    """A backward in fp16 that the script started on a loss without the loss scale."""


class PeerError(XdsError):
    """Another rank failed or stopped answering. The message names the collective and the ranks."""


class BuildError(XdsError):
    """A native library cannot be built or loaded. Contains the command and the compiler's last lines."""

    def __init__(
        self, what: str, command: str = "", lines: Sequence[str] = (), remedy: str = ""
    ) -> None:
        self.what, self.command, self.lines, self.remedy = what, command, tuple(lines), remedy
        parts = [what + (f"; {remedy}" if remedy else "")]
        parts += [f"  command: {command}"] if command else []
        parts += [f"  | {line}" for line in lines]
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[type[BuildError], tuple[str, str, tuple[str, ...], str]]:
        return BuildError, (self.what, self.command, self.lines, self.remedy)


class ConfigError(XdsError, ValueError):
    """One or more problems of a config, each with its full key path.

    The text lists the first `LISTED_COMPLAINTS` of them; `complaints` has them all.
    `without_effect` has other keys, which are right and have no effect, and why; the text has not.
    """

    def __init__(
        self,
        complaints: Sequence[str],
        source: str = "config",
        without_effect: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.complaints = tuple(map(plain_lines, complaints))
        self.source = source
        self.without_effect = tuple(without_effect)
        listed = list(self.complaints[:LISTED_COMPLAINTS])
        if len(listed) < len(self.complaints):
            listed.append(f"... and {len(self.complaints) - len(listed)} more")
        many = "" if len(self.complaints) == 1 else f"{len(self.complaints)} problems\n  - "
        super().__init__(f"{printable(source)}: {many}" + "\n  - ".join(listed))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Any, ...]]:
        return ConfigError, (self.complaints, self.source, self.without_effect)
