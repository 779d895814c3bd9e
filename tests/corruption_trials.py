"""Test helper: damages a checkpoint, and checks that both ranks refuse it and can fall back."""

from __future__ import annotations

import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kill_runs import Scenario, expected, make_engine, parts_of

from xds.utils.errors import DamagedError

KINDS = ("flip", "flip", "flip", "truncate", "swap", "delete", "foreign")
STEPS = 3
ELSEWHERE = 9  # the step that the engine is at when it loads
OTHER = "names another checkpoint, which is loaded"  # `latest` has no sum


def corrupt_often(folder: str, trials: int, seed: int, width: int = 64) -> dict[str, Any]:
    """On every rank: save three checkpoints, then damage the last one in `trials` ways, one after another.

    Returns how often which damage came to what, and the sentences that say what went wrong.
    """
    logging.getLogger("xds").setLevel(logging.ERROR)  # thousands of warnings
    all_of_them = Trials(Path(folder), seed, width)
    for _ in range(trials):
        all_of_them.trial()
    return {"outcomes": dict(all_of_them.outcomes), "problems": all_of_them.problems}


class Trials:
    """Three checkpoints of a stage 3 engine; the last one is damaged and mended again and again."""

    def __init__(self, folder: Path, seed: int, width: int) -> None:
        self.folder = folder
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._draw = random.Random(seed)
        self._engine = make_engine(Scenario(width=width), 3)
        for step in range(1, STEPS + 1):
            self._set(step)
            self._engine.save_checkpoint(folder)
        dist.barrier()
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self._whole = {path: path.read_bytes() for path in files}

    def _set(self, step: int) -> None:
        """All states are those of `step`."""
        self._engine.global_steps = step
        for name, key, start, stop, part in parts_of(self._engine):
            part.copy_(expected(name, key, start, stop, step))

    def _has(self, step: int) -> bool:
        return self._engine.global_steps == step and all(
            torch.equal(part, expected(name, key, start, stop, step))
            for name, key, start, stop, part in parts_of(self._engine)
        )

    def _write(self, files: dict[Path, bytes | None]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for path, content in files.items():
                path.unlink() if content is None else path.write_bytes(content)
        dist.barrier()

    def trial(self) -> None:
        """One damage."""
        newest, older = (self.folder / f"global_step{step}" for step in (STEPS, STEPS - 1))
        damaged, what = damage_for(self._draw, self._whole, newest, older)
        self._write(damaged)
        self._set(ELSEWHERE)
        outcome, said = self._load(damaged, what, newest)
        self.outcomes[f"{what}: {outcome}"] += 1
        if outcome == "refused":
            step = STEPS if self.folder / "latest" in damaged else STEPS - 1
            path, _ = self._engine.load_checkpoint(self.folder, fallback=True)
            if path != f"{self.folder}/global_step{step}" or not self._has(step):
                self.problems.append(f"{what}: fell back to {path}")
        elif outcome != OTHER:
            self.problems.append(f"{what} of {sorted(damaged)}: {outcome}: {said}")
        self._write({path: self._whole[path] for path in damaged})

    def _load(self, damaged: dict[Path, Any], what: str, newest: Path) -> tuple[str, str]:
        """What came of loading without a fallback, and the error's sentence."""
        try:
            path, _ = self._engine.load_checkpoint(self.folder)
        except DamagedError as error:
            said = str(error)
            is_named = any(str(one.parent) in said and one.name in said for one in damaged)
            if what.startswith("foreign, manifest"):  # whole, but of files that are not there
                is_named = f"{newest}/rank_" in said
            if is_named and self._has(ELSEWHERE):
                return "refused", said
            return "refused, but not named, or something has changed", said
        if self.folder / "latest" in damaged and self._has(int(str(path)[-1])):
            return OTHER, ""
        return "loaded", ""


def damage_for(
    draw: random.Random, whole: dict[Path, bytes], newest: Path, older: Path
) -> tuple[dict[Path, bytes | None], str]:
    """What to write over which files (None: delete), the same on every rank; and what it is called."""
    kind = draw.choice(KINDS)
    latest = newest.parent / "latest"
    shards = [path for path in whole if path.parent == newest and path.suffix == ".safetensors"]
    manifest = newest / "manifest.json"
    path = draw.choice([*shards, *shards, manifest, latest])
    what = f"{kind}, {'a shard' if path in shards else path.name}"
    content = whole[path]
    if kind == "flip":
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        return {path: content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]}, what
    if kind == "truncate":
        return {path: content[: draw.randrange(len(content))]}, what
    if kind == "swap":
        one, two = shards
        return {one: whole[two], two: whole[one]}, "swap, two shards"
    if path == latest:
        path, what = manifest, f"{kind}, {manifest.name}"
    if kind == "delete":
        return {path: None}, what
    foreign = [two for two in whole if two.parent == older and two.name[:10] == path.name[:10]]
    return {path: whole[foreign[0]]}, what
