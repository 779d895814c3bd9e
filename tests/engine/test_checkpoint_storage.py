"""A storage without folders, added as CONTRIBUTING says: saves, loads, falls back, keeps the last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import xds
from xds.engine.checkpoint.io import storage

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "checkpoint": {"keep_last": 2},
}


class NewObject:
    def __init__(self, bucket: Bucket, path: Path) -> None:
        self.bucket, self.path, self.parts = bucket, str(path), dict[int, bytes]()

    def write(self, block: memoryview, at: int) -> None:
        self.parts[at] = bytes(block)

    def sync(self) -> None:
        self.bucket.objects[self.path] = b"".join(self.parts[at] for at in sorted(self.parts))

    def close(self) -> None:
        return


class OldObject:
    def __init__(self, content: bytes) -> None:
        self.content, self.size_bytes = content, len(content)

    def fill(self, view: memoryview, at: int) -> int:
        found = self.content[at : at + len(view)]
        view[: len(found)] = found
        return len(found)

    def close(self) -> None:
        return


class NoLock:
    is_taken = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def release(self) -> None:
        return


class Bucket:
    """Objects by name. A folder is renamed object by object, the manifest first."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def create(self, path: Path, size_bytes: int) -> NewObject:
        return NewObject(self, path)

    def open(self, path: Path) -> OldObject:
        return OldObject(self.read(path, 0))

    def write(self, path: Path, content: bytes) -> None:
        self.objects[str(path)] = content

    def read(self, path: Path, most_bytes: int) -> bytes:
        if str(path) not in self.objects:
            raise FileNotFoundError(2, "No such object", str(path))
        return self.objects[str(path)]

    def names(self, folder: Path) -> list[str]:
        start = f"{folder}/"
        below = [name.removeprefix(start) for name in self.objects if name.startswith(start)]
        return sorted({name.partition("/")[0] for name in below})

    def is_folder(self, path: Path) -> bool:
        return True

    def size_of(self, path: Path) -> int:
        return len(self.objects[str(path)]) if str(path) in self.objects else -1

    def make_folder(self, folder: Path) -> None:
        return

    def rename(self, old: Path, new: Path) -> None:
        moved = [name for name in self.objects if f"{name}/".startswith(f"{old}/")]
        for name in sorted(moved, key=lambda name: not name.endswith("manifest.json")):
            self.objects[f"{new}{name.removeprefix(str(old))}"] = self.objects.pop(name)

    def sync(self, path: Path) -> None:
        return

    def remove(self, path: Path) -> None:
        for name in [*self.objects]:
            if name == str(path) or name.startswith(f"{path}/"):
                del self.objects[name]

    def claim(self, folder: Path) -> NoLock:
        return NoLock(folder)


def engine_of(**checkpoint: Any) -> xds.Engine:
    torch.manual_seed(0)
    config = CONFIG | {"checkpoint": CONFIG["checkpoint"] | checkpoint}
    return xds.initialize(torch.nn.Linear(300, 300), config)


@pytest.mark.parametrize("in_background", [False, True])
def test_checkpoints_in_a_bucket(in_background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket()
    monkeypatch.setattr(storage, "_DISK", bucket)
    engine = engine_of(async_save=in_background)
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 300)).sum())
        engine.step()
        engine.save_checkpoint("/bucket/run")
    engine.wait_for_checkpoint()
    assert bucket.names(Path("/bucket/run")) == ["global_step3", "global_step4", "latest"]
    other = engine_of()
    assert other.load_checkpoint("/bucket/run")[0] == "/bucket/run/global_step4"
    for mine, theirs in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    name = next(name for name in bucket.objects if "step4/rank" in name)
    bucket.objects[name] = bucket.objects[name][:-1] + b"?"
    with pytest.raises(xds.UsageError, match="do not match their checksum"):
        other.load_checkpoint("/bucket/run")
    assert other.load_checkpoint("/bucket/run", fallback=True)[0] == "/bucket/run/global_step3"
    assert other.load_checkpoint("/bucket/nowhere") == (None, None)
    assert not os.path.exists("/bucket")
