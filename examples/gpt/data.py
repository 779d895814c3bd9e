"""Training text that exists on every machine: the sources of Python's standard library, as bytes.

windows      the text is cut every so many bytes: all have one length
paragraphs   the text is cut at empty lines: the engine packs them into rows (section `data_packing`)
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """A text divided into windows: item i is (bytes [context], the byte after each of them [context])."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Paragraphs(Dataset[dict[str, Tensor]]):
    """A text cut at empty lines, and after `context` bytes.

    Item i has `tokens`, its bytes, and `targets`, the byte after each of them: after the last a line feed.
    """

    def __init__(self, text: bytes, context: int) -> None:
        found = [part.strip(b"\n") for part in text.split(b"\n\n")]
        self.pieces = [
            part[at : at + context] for part in found for at in range(0, len(part), context)
        ]
        # each rank then reads its own rows only
        self.lengths = [len(piece) for piece in self.pieces]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.tensor(list(self.pieces[index] + b"\n"))
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


def standard_library() -> bytes:
    """All .py files of the standard library in the order of their paths, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not left_out.intersection(path.relative_to(root).parts)
    ]
    return b"\n".join(path.read_bytes() for path in paths)


def load_text(
    path: Path | None, context: int, packs: bool = False
) -> tuple[ByteWindows | Paragraphs, ByteWindows]:
    """The first 95% of the text for training, as windows or as paragraphs, and windows of the rest."""
    source = path.read_bytes() if path else standard_library()
    if len(source) < 40 * (context + 1):
        raise SystemExit(
            f"{path or sysconfig.get_path('stdlib')} has {len(source)} bytes of text, too few for "
            f"windows of {context}; name a larger file with --data."
        )
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    cut = len(text) * 95 // 100
    validation = ByteWindows(text[cut:], context)
    if packs:
        return Paragraphs(source[:cut], context), validation
    return ByteWindows(text[:cut], context), validation
