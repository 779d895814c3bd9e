"""Training text that exists on every machine: the sources of Python's standard library, as bytes."""

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


def load_text(path: Path | None, context: int) -> tuple[ByteWindows, ByteWindows]:
    """Windows for training (the first 95% of the text) and for validation (the rest)."""
    source = path.read_bytes() if path else standard_library()
    if len(source) < 40 * (context + 1):
        raise SystemExit(
            f"{path or sysconfig.get_path('stdlib')} has {len(source)} bytes of text, too few for "
            f"windows of {context}; name a larger file with --data."
        )
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    cut = len(text) * 95 // 100
    return ByteWindows(text[:cut], context), ByteWindows(text[cut:], context)
