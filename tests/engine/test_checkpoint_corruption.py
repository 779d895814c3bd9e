"""A damaged checkpoint is refused by the name of its file, on every rank, and the older one can be loaded."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import torch.distributed as dist
from checkpoint_runs import States, check_same, engine_of, states_of, train
from helpers import run_ranks

from xds.utils.errors import DamagedError

TRIALS = 25
KINDS = ("flip", "flip", "flip", "truncate", "swap", "delete", "foreign")
Files = dict[Path, bytes]


def damage_for(
    draw: random.Random, whole: Files, newest: Path, older: Path
) -> tuple[str, dict[Path, bytes | None]]:
    """What to write over which files (None: delete), the same on every rank; and its kind."""
    kind = draw.choice(KINDS)
    latest, manifest = newest.parent / "latest", newest / "manifest.json"
    shards = [path for path in whole if path.parent == newest and path != manifest]
    path = draw.choice([*shards, *shards, manifest, latest])
    if path == latest and kind in ("delete", "foreign"):
        path = manifest
    content = whole[path]
    if kind == "flip":
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        return kind, {path: content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]}
    if kind == "truncate":
        return kind, {path: content[: draw.randrange(len(content))]}
    if kind == "swap":
        one, two = shards
        return kind, {one: whole[two], two: whole[one]}
    if kind == "delete":
        return kind, {path: None}
    foreign = [two for two in whole if two.parent == older and two.name[:10] == path.name[:10]]
    return kind, {path: whole[foreign[0]]}


def corrupt_often(folder: Path, seed: int) -> Counter[str]:
    """Save twice, then damage and mend the last one again and again. How often each kind was refused."""
    draw, saved = random.Random(seed), dict[str, States]()
    engine = engine_of(3)
    for step in (1, 2):
        train(engine, step, step + 1)
        engine.save_checkpoint(folder)
        saved[f"{folder}/global_step{step}"] = states_of(engine)
    dist.barrier()
    train(engine, 3, 4)
    whole = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    newest, older = folder / "global_step2", folder / "global_step1"

    def write(files: dict[Path, bytes | None]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for path, content in files.items():
                path.unlink() if content is None else path.write_bytes(content)
        dist.barrier()

    refused: Counter[str] = Counter()
    for _ in range(TRIALS):
        kind, files = damage_for(draw, whole, newest, older)
        where = f"{kind} of {sorted(files)}"
        before, steps = states_of(engine), engine.global_steps
        write(dict(files))
        try:
            path, _ = engine.load_checkpoint(folder)
        except DamagedError as error:
            refused[kind] += 1
            is_foreign = kind == "foreign" and newest / "manifest.json" in files
            said = str(error)  # a foreign manifest is whole, but of files that are not there
            assert f"{newest}/rank_" in said or not is_foreign, (where, said)
            is_named = any(str(one.parent) in said and one.name in said for one in files)
            assert is_foreign or is_named, (where, said)
            assert engine.global_steps == steps
            check_same(before, states_of(engine))
            path, _ = engine.load_checkpoint(folder, fallback=True)
            assert path == str(newest if folder / "latest" in files else older), where
        else:  # `latest` has no sum: it may name the other one
            assert folder / "latest" in files and path == str(older), where
        check_same(saved[path], states_of(engine))
        write({path: whole[path] for path in files})
    return refused


def test_every_damage_is_refused_by_file_and_fallen_back_from(tmp_path: Path) -> None:
    for refused in run_ranks(corrupt_often, 2, tmp_path, 1):
        assert set(refused) == set(KINDS)
