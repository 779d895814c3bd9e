"""Reads Hjson, the relaxed JSON that DeepSpeed's configs may be written in.

    # a comment, as // and /* */
    train_batch_size: 8          keys, and text up to the end of its line, need no quotes
    optimizer: {                 braces around the whole file may be left out
      type: AdamW
      params: {"lr": 1e-4,}      commas may be left out at the end of a line, or be too many by one
    }

Text may also be in single quotes, or over several lines in three single quotes. Nothing is executed.

Source: https://hjson.github.io/syntax.html. Differs, because a config that is misread would train wrongly:
text without quotes must not hold a double quote nor end in one of `,{}[]`; two values on one line need a
comma; and Python's True, False and None are refused, not read as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, final

_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*|//[^\r\n]*|/\*.*?(?:\*/|\Z))*", re.DOTALL)
_END = r"(?=[ \t]*(?:[,}\]#\r\n]|//|/\*|\Z))"
_NUMBER = re.compile(rf"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?{_END}")
_WORD = re.compile(rf"(true|false|null|True|False|None){_END}")
_KEY = re.compile(r"""[^\s{}\[\],:"']+""")
_LINE = re.compile(r"[^\r\n]*")
_QUOTED = re.compile(r"""(["'])((?:(?!\1)[^\\\r\n]|\\[^\r\n])*)\1""")
_ESCAPES = re.compile(r"""\\.|\"""")
_VALUES = {"true": True, "false": False, "null": None}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MULTILINE = "'''"


@final
class Malformed(Exception):
    """The text is no Hjson. `position` is that of the mistake; `is_certain` if its cause is known."""

    def __init__(self, reason: str, position: int, *, is_certain: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position
        self.is_certain = is_certain


def read_hjson(
    text: str, make_object: Callable[[list[tuple[str, Any]]], Any], most_levels: int
) -> Any:
    """The value that `text` describes. make_object: makes an object of its keys and values, as written.

    Raises:
        Malformed: it is no Hjson.
        RecursionError: it has more than `most_levels` levels.
        ValueError: it holds a number with thousands of digits.
    """
    reader = _Reader(text, make_object, most_levels)
    reader.skip()
    has_braces = text[reader.at : reader.at + 1] in ("{", "[")
    value = reader.value(0) if has_braces else reader.members("", 0)
    reader.skip()
    if reader.at < len(text):
        raise Malformed("there is more text after the end", reader.at)
    return value


class _Reader:
    """A position in the text, and what is read from there."""

    def __init__(
        self, text: str, make_object: Callable[[list[tuple[str, Any]]], Any], most_levels: int
    ) -> None:
        self.text = text
        self.at = 0
        self._make_object = make_object
        self._most_levels = most_levels

    def skip(self) -> bool:
        """Skip spaces and comments. Returns whether a new line began there."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None  # it matches nothing, too
        self.at = found.end()
        return "\n" in found[0] or "\r" in found[0]

    def value(self, level: int) -> Any:
        """The value at the position."""
        if level > self._most_levels:
            raise RecursionError
        first = self.text[self.at : self.at + 1]
        if first == "{":
            self.at += 1
            return self.members("}", level)
        if first == "[":
            self.at += 1
            return self._items(level)
        if self.text.startswith(_MULTILINE, self.at):
            return self._lines()
        if first in ('"', "'") and first:
            return self._quoted()
        if not first or first in "}],:":
            raise Malformed("a value is missing", self.at)
        return self._plain()

    def members(self, closing: str, level: int) -> Any:
        """Keys and values up to `closing`, which is "" for the end of the text."""
        start, pairs = self.at - 1, list[tuple[str, Any]]()
        self.skip()
        while not self._closes(closing, start):
            key = self._key()
            self.skip()
            if self.text[self.at : self.at + 1] != ":":
                raise Malformed('expecting ":" after a key', self.at)
            self.at += 1
            self.skip()
            pairs.append((key, self.value(level + 1)))
            self._separate(closing)
        return self._make_object(pairs)

    def _items(self, level: int) -> list[Any]:
        start, items = self.at - 1, list[Any]()
        self.skip()
        while not self._closes("]", start):
            items.append(self.value(level + 1))
            self._separate("]")
        return items

    def _closes(self, closing: str, start: int) -> bool:
        """Whether `closing` is here; it is then skipped."""
        if self.at < len(self.text):
            is_closed = bool(closing) and self.text[self.at] == closing
            self.at += is_closed
            return is_closed
        if closing:
            line = self.text.count("\n", 0, start) + 1
            opened = self.text[start]
            raise Malformed(f'the "{opened}" in line {line} is not closed', self.at)
        return True

    def _separate(self, closing: str) -> None:
        """Skip what is between two values: a comma, or the end of a line."""
        is_new_line = self.skip()
        following = self.text[self.at : self.at + 1]
        if following == ",":
            self.at += 1
            self.skip()
        elif following not in ("", closing) and not is_new_line:
            raise Malformed('expecting "," between two values of one line', self.at)

    def _key(self) -> str:
        if self.text[self.at] in "\"'":
            return self._quoted()
        found = _KEY.match(self.text, self.at)
        if found is None:
            raise Malformed("expecting a key", self.at)
        self.at = found.end()
        return found[0]

    def _plain(self) -> Any:
        """A number, true, false, null, or text without quotes, which ends with its line."""
        number = _NUMBER.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            whole, fraction, exponent = number.groups()
            return float(number[0]) if fraction or exponent else int(whole)
        word = _WORD.match(self.text, self.at)
        if word is not None:
            if word[0] in _PYTHON:
                meant = f"{word[0]} is Python: write {_PYTHON[word[0]]}"
                raise Malformed(meant, self.at, is_certain=True)
            self.at = word.end()
            return _VALUES[word[0]]
        line = _LINE.match(self.text, self.at)
        assert line is not None
        text = line[0].rstrip(" \t")
        if '"' in text or text[-1] in ",{}[]":
            reason = "text without quotes goes to the end of its line: put it in double quotes"
            raise Malformed(reason, self.at)
        self.at = line.end()
        return text

    def _quoted(self) -> str:
        found = _QUOTED.match(self.text, self.at)
        if found is None:
            raise Malformed("text in quotes does not end in its line", self.at)
        try:
            read: str = json.loads(f'"{_ESCAPES.sub(_as_in_json, found[2])}"')
        except json.JSONDecodeError as error:
            # near enough: a quote that JSON needs to escape moves the place by one
            place = min(self.at + error.pos, found.end() - 1)
            raise Malformed(error.msg[:1].lower() + error.msg[1:], place) from None
        self.at = found.end()
        return read

    def _lines(self) -> str:
        """Text of several lines, each without the spaces that stand before the opening quotes."""
        start = self.at + len(_MULTILINE)
        end = self.text.find(_MULTILINE, start)
        if end < 0:
            raise Malformed("the text after ''' does not end", self.at)
        width = self.at - (self.text.rfind("\n", 0, self.at) + 1)
        first, *others = self.text[start:end].replace("\r", "").split("\n")
        lines = [first.lstrip(" \t"), *(_without_indent(line, width) for line in others)]
        if others and not lines[0]:
            del lines[0]
        if len(lines) > 1 and not lines[-1]:
            del lines[-1]
        self.at = end + len(_MULTILINE)
        return "\n".join(lines)


def _as_in_json(escape: re.Match[str]) -> str:
    return {"\\'": "'", '"': '\\"'}.get(escape[0], escape[0])


def _without_indent(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip(" \t"))
    return line[min(indent, width) :]


__all__ = ["Malformed", "read_hjson"]
