"""Test helper: changes the contents of a checkpoint, and corrects every checksum.

Checksums detect disk errors. These changes are other errors: of another version, of a script that edits
manifests, or of an attacker. A change replaces the value at some path of the JSON.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from xds.engine.checkpoint.format import HEAD, NO_SUM

MANIFEST = "manifest.json"


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


TOO_DEEP = "this becomes an abyss"  # in the text alone: Python cannot hold such a value
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 64, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30),
    *(-(10**30), 10**400, 0.0, -0.5, 1.5, 1e300, 5e-324, float("nan"), float("inf")),
    *(
        "",
        "x",
        "5",
        "value",
        "grad",
        "state/exp_avg",
        "state/",
        "param",
        "buffer",
        "state",
        "either",
    ),
    *("float32", "float64", "bfloat16", "bool", "uint8", "complex64", "float", "Tensor", "nn"),
    *("\ud800", "\0", "a/b", "../x", "/etc/passwd", "x" * 5000, "\x1b[31m", "\u202e", "__class__"),
    *([], {}, [[]], [True], [None], {"a": 1}, ["a", "b"], [0, 0], [2**62, 2**62], [10**12]),
    *(
        {"$tensor": "nope"},
        {"$tensor": 5},
        {"$tensor": []},
        {"$tensor": "engine/0"},
        {"$float": "x"},
    ),
    *({"$float": "nan"}, {"$float": "inf"}, {"$float": [1]}, {"$tuple": 5}, {"$tuple": {"a": 1}}),
    *(
        {"$items": 5},
        {"$items": [5]},
        {"$items": [[1]]},
        {"$items": [[[1], 2]]},
        {"$items": [["a", 1]]},
    ),
    *(
        {"$items": [[{"$tensor": "x"}, 1]]},
        {"$counter": [["a", "b"]]},
        {"$counter": None},
        {"$else": 1},
    ),
    *(deep(30), deep(150), deep(250), TOO_DEEP),
)


class Damages:
    """Draws changes of the checkpoint in `folder`; `what` describes the last one."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.what = ""
        self._draw = random.Random(seed)
        self._manifest = json.loads((folder / MANIFEST).read_text())
        self._whole = {path: path.read_bytes() for path in folder.iterdir()}

    def next(self) -> dict[Path, bytes]:
        """What to write to which files."""
        raw = copy.deepcopy(self._manifest)
        kind = self._draw.random()
        self.what = ""
        if kind < 0.8:
            for _ in range(1 if self._draw.random() < 0.8 else 2):
                self._change(raw, "manifest")
            return {self.folder / MANIFEST: manifest_text(raw)}
        record = self._draw.choice(raw["files"])
        path = self.folder / record["path"]
        content = (
            self._tensors(self._whole[path]) if kind < 0.9 else self._header(self._whole[path])
        )
        record["size_bytes"] = len(content)
        size = record["chunk_bytes"]
        record["crc32"] = [
            zlib.crc32(content[at : at + size]) for at in range(0, len(content), size)
        ]
        return {path: content, self.folder / MANIFEST: manifest_text(raw)}

    def mended(self) -> dict[Path, bytes]:
        """What every file was."""
        return self._whole

    # -- the files with tensors -------------------------------------------------------------------------

    def _header(self, content: bytes) -> bytes:
        length = struct.unpack("<Q", content[:8])[0]
        table = json.loads(content[8 : 8 + length])
        self._change(table, "header")
        text = json.dumps(table).encode()
        if self._draw.random() < 0.9:
            text = text.ljust(length)  # the data stay where they were, mostly
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    def _tensors(self, content: bytes) -> bytes:
        """The bytes of a small tensor become others: random generators and counters lie in such."""
        length = struct.unpack("<Q", content[:8])[0]
        table = json.loads(content[8 : 8 + length])
        names = [name for name, one in table.items() if name != "__metadata__"]
        own = [name for name in names if name.startswith(("own/", "engine/"))] or names
        name = self._draw.choice(own)
        start, stop = (8 + length + at for at in table[name]["data_offsets"])
        size = stop - start
        fill = self._draw.choice([bytes(size), b"\xff" * size, self._draw.randbytes(size)])
        self.what = f"bytes of {name}"
        return content[:start] + fill + content[stop:]

    # -- JSON -------------------------------------------------------------------------------------------

    def _change(self, root: Any, name: str) -> None:
        parent, key, path = self._walk(root)
        change = self._draw.choice(CHANGES)
        self.what += f" {change.__name__.strip('_')} {name}{path}"
        change(self._draw, parent, key, root)

    def _walk(self, root: Any) -> tuple[Any, Any, str]:
        """A place: its parent, its key there, and its path in words. Deep places are drawn more often."""
        at, path = root, ""
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = self._draw.choice(keys)
            path += f"[{key!r}]"
            inner = at[key]
            if not isinstance(inner, dict | list) or not inner or self._draw.random() < 0.12:
                return at, key, path
            at = inner


def _replace(draw: random.Random, parent: Any, key: Any, _: Any) -> None:
    parent[key] = copy.deepcopy(draw.choice(HOSTILE))


def _remove(_: random.Random, parent: Any, key: Any, root: Any) -> None:
    del parent[key]


def _repeat(_: random.Random, parent: Any, key: Any, root: Any) -> None:
    if isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[f"{key}2"] = copy.deepcopy(parent[key])


def _rename(draw: random.Random, parent: Any, key: Any, _: Any) -> None:
    if isinstance(parent, dict):
        parent[draw.choice([f"{key}x", key[:-1], "$tensor", "params", "", "5"])] = parent.pop(key)
    else:
        draw.shuffle(parent)


def _nudge(draw: random.Random, parent: Any, key: Any, _: Any) -> None:
    value = parent[key]
    if isinstance(value, bool) or value is None:
        parent[key] = not value
    elif isinstance(value, int | float):
        parent[key] = draw.choice(
            [value + 1, value - 1, value * 2, -value, value // 2, float(value)]
        )
    elif isinstance(value, str):
        parent[key] = draw.choice([value + "x", value[:-1], value[::-1], value.upper(), [value]])
    else:
        parent[key] = draw.choice([[value], {"a": value}, list(value), value and type(value)()])


def _borrow(draw: random.Random, parent: Any, key: Any, root: Any) -> None:
    """The value of some other place of the same name, or of any."""
    found: list[Any] = []
    pending = [root]
    while pending:
        at = pending.pop()
        for inner, value in at.items() if isinstance(at, dict) else enumerate(at):
            if inner == key or draw.random() < 0.02:
                found.append(value)
            if isinstance(value, dict | list):
                pending.append(value)
    if found:
        parent[key] = copy.deepcopy(draw.choice(found))


CHANGES: tuple[Callable[[random.Random, Any, Any, Any], None], ...] = (
    *(_replace, _replace, _replace, _remove, _remove, _repeat, _rename, _nudge, _nudge, _borrow),
)


def manifest_text(raw: dict[str, Any]) -> bytes:
    """The text of a manifest, with its sum made right."""
    body = {key: value for key, value in raw.items() if key != "sha256"}
    inside = json.dumps(body)[1:].replace(json.dumps(TOO_DEEP), "[" * 50_000 + "]" * 50_000)
    text = f'{HEAD}{NO_SUM}", {inside}'.encode()
    digest = sha256(text).hexdigest().encode()
    return text[: len(HEAD)] + digest + text[len(HEAD) + len(NO_SUM) :]
