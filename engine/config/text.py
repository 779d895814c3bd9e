"""Reads the source of a config: a path, JSON text, base64 of it, or a dict.

1. The text is read as JSON.
2. If that fails, `//` comments are replaced by spaces, so lines and columns in a message are those of the file.
3. If that fails too, it is read as Hjson, as DeepSpeed does, where the package `hjson` is installed.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from ...utils.errors import ConfigError
from ...utils.quoting import printable
from ...utils.schema.section import joined
from ...utils.schema.values import shown
from ...utils.small_files import MOST_BYTES, read_small_text

_EXCERPT_CHARS = 1000  # 100 characters of the file, each escaped
SCALARS = frozenset((str, int, float, bool, type(None)))
MAX_DEPTH = 40  # real configs are at most eight levels deep

_TEXT_OR_COMMENT = re.compile(r'("[^"\\\n]*(?:\\.[^"\\\n]*)*"?)|//[^\n]*', re.DOTALL)
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NEEDS_HJSON = (
    "; keys without quotes, trailing commas and other comments than // need pip install hjson"
)
# keys without quotes, comments, a trailing comma
_HJSON_ONLY = re.compile(r"\w+\s*:|#|/\*|'|[}\]]")
_OPENS_JSON = re.compile(r"\s*(?:[{\[]|//|#|/\*)")


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as written; keys may repeat."""


@final
@dataclass(frozen=True)
class ConfigText:
    """A config that has been read and not parsed. A pipe can be read only once."""

    text: str
    name: str


def open_source(source: str | os.PathLike[str]) -> ConfigText:
    """Read a path, JSON text or base64 of it once; `read_source` takes the result any number of times.

    Raises ConfigError if it cannot be read.
    """
    return ConfigText(*_text_of(source))


def read_source(source: object) -> tuple[Any, str, list[str]]:
    """(data, name of the source, complaints about keys). Raises ConfigError if it cannot be read.

    `data` is a fresh copy made of dict, list and scalars.
    """
    if isinstance(source, Mapping):
        complaints: list[str] = []
        return _copy(source, "", complaints, 0), "config", complaints
    if isinstance(source, ConfigText):
        return _parse(source.text, source.name)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            [
                f"config = {shown(source)}: must be a path, JSON text, a dict or a Config, "
                f"not {type(source).__name__}"
            ]
        )
    text, name = _text_of(source)
    return _parse(text, name)


def _text_of(source: str | os.PathLike[str]) -> tuple[str, str]:
    given = os.fspath(source)
    if not isinstance(given, str):
        given = os.fsdecode(given)
    if isinstance(source, str) and _OPENS_JSON.match(source) and not _is_file(source):
        return source, "config text"
    if _is_file(given):
        return _read_file(given), given
    decoded = _from_base64(given)
    if decoded is not None:
        return decoded, "base64 config"
    raise ConfigError([f"config = {shown(given)}: no such file, and neither JSON nor base64 of it"])


def _is_file(name: str) -> bool:
    try:
        return os.path.exists(name)
    except (OSError, ValueError):
        return False


def _read_file(name: str) -> str:
    try:
        return read_small_text(name)
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], name) from None


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if _OPENS_JSON.match(decoded) else None


def _blank_comments(text: str) -> str:
    """The text with `//` comments replaced by spaces; all positions stay the same."""
    return _TEXT_OR_COMMENT.sub(lambda found: found[1] or " " * len(found[0]), text)


def _parse(text: str, name: str) -> tuple[Any, str, list[str]]:
    if len(text) > MOST_BYTES:
        raise ConfigError([f"is longer than {MOST_BYTES >> 20} MiB; is it a config?"], name)
    try:
        pairs = _pairs(text)
    except _Unreadable as error:
        raise ConfigError([str(error)], name) from None
    except RecursionError:
        raise ConfigError([f"is nested deeper than {MAX_DEPTH} levels"], name) from None
    except ValueError:
        text = "holds a number with thousands of digits: write it shorter"
        raise ConfigError([text], name) from None
    complaints: list[str] = []
    return _copy(pairs, "", complaints, 0), name, complaints


class _Unreadable(Exception):
    """The text is neither JSON nor Hjson; the message says where."""


def _pairs(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError:
        pass  # perhaps comments, which are slower to find
    try:
        return json.loads(_blank_comments(text), object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        position, reason = error.pos, _reason(error)
    written = re.match(r"\w*", text[position:])
    if written is not None and written[0] in _PYTHON:
        reason = f"{written[0]} is Python: write {_PYTHON[written[0]]}"
        raise _Unreadable(_malformed(text, position, reason))
    try:
        import hjson
    except ImportError:
        raise _Unreadable(_malformed(text, position, reason + _NEEDS_HJSON)) from None
    try:
        return hjson.loads(text, object_pairs_hook=_Pairs)
    except RecursionError:
        raise
    except hjson.HjsonDecodeError as error:
        # Where JSON stopped at what Hjson allows, the mistake is the one that Hjson's reader found.
        if error.pos > position and _HJSON_ONLY.match(text, position):
            position, reason = error.pos, _reason(error)
    except Exception:  # the package raises IndexError at a comment that does not end, and others
        pass
    raise _Unreadable(_malformed(text, position, reason))


def _reason(error: Any) -> str:
    reason: str = error.msg[:1].lower() + error.msg[1:]
    if reason.startswith("expecting property name"):
        return "expecting a key in double quotes"
    return reason


def _malformed(text: str, position: int, reason: str) -> str:
    number = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    end = text.find("\n", position)
    line = text[position - column + 1 : end if end >= 0 else len(text)]
    start = max(0, column - 60)
    before, after = line[start : column - 1], line[column - 1 : start + 100]
    shown_before = printable(before.replace("\t", " "), _EXCERPT_CHARS)
    cut = shown_before + printable(after.replace("\t", " ").rstrip("\r"), _EXCERPT_CHARS)
    arrow = " " * len(shown_before) + "^"
    return f"line {number}, column {column}: is not JSON: {reason}\n    {cut}\n    {arrow}"


def _copy(value: Any, path: str, complaints: list[str], depth: int) -> Any:
    if depth > MAX_DEPTH:
        complaints.append(f"{path[:80]}: is nested deeper than {MAX_DEPTH} levels")
        return None
    if isinstance(value, _Pairs):
        return _copy_object(value, path, complaints, depth)
    if isinstance(value, Mapping):
        return _copy_object(list(value.items()), path, complaints, depth)
    if isinstance(value, (list, tuple)):
        return [
            item if type(item) in SCALARS else _copy(item, f"{path}[{at}]", complaints, depth + 1)
            for at, item in enumerate(value)
        ]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    complaints.append(
        f"{path} = {shown(value)}: must be a JSON value, not a Python {type(value).__name__}"
    )
    return None


def _copy_object(
    pairs: list[tuple[Any, Any]], path: str, complaints: list[str], depth: int
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            complaints.append(f"{joined(path, repr(key))}: a key must be text")
            continue
        here = joined(path, key)
        if key in result:
            complaints.append(
                f"{here} = {shown(_bare(value))}: appears twice in one object; keep one of them"
            )
            continue
        before = len(complaints)
        copied = _copy(value, here, complaints, depth + 1)
        if len(complaints) == before or isinstance(copied, dict):  # else all is said of this key
            result[key] = copied
    return result


def _bare(value: Any) -> Any:
    return dict(value) if isinstance(value, _Pairs) else value
