"""Exports into folders that hold other weights: a reader finds the former ones or the new ones, whole."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import xds
from xds.engine.checkpoint.exports.publish import published
from xds.ops.weights.files import ENTRIES, find_weights, read_weights

State = dict[str, Tensor]
NAMES = ("a", "b", "c")
CALLS = ("replace", "rename", "unlink", "mkdir", "rmdir", "link", "open")
SINGLE, INDEXED, BIN, BIN_INDEXED = ENTRIES


def weights(seed: int, dtype: torch.dtype = torch.float32) -> State:
    torch.manual_seed(seed)
    return {name: torch.randn(3).to(dtype) for name in NAMES}


def write(folder: Path, entry: str, state: State, count: int = 3) -> None:
    """The files of one entry, without xds."""
    stem, end = entry.removesuffix(".index.json").split(".")

    def put(path: Path, part: State) -> None:
        save_file(part, path) if end == "safetensors" else torch.save(part, path)

    if entry in (SINGLE, BIN):
        put(folder / entry, state)
        return
    files = {
        name: f"{stem}-{number % count + 1:05}-of-{count:05}.{end}"
        for number, name in enumerate(state)
    }
    for file in set(files.values()):
        put(folder / file, {name: state[name] for name in state if files[name] == file})
    (folder / entry).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def config(folder: Path, **content: Any) -> None:
    (folder / "config.json").write_text(json.dumps(content))


def read(folder: Path) -> tuple[State, str] | None:
    """What `from_pretrained` reads, and the dtype that config.json has then; None: nothing.

    `test_the_order_is_that_of_transformers` compares it.
    """
    told = {}
    if (folder / "config.json").exists():
        told = json.loads((folder / "config.json").read_text())
    names = [told["transformers_weights"]] if "transformers_weights" in told else ENTRIES
    entry = next((folder / name for name in names if (folder / name).exists()), None)
    if entry is None:
        return None
    load = load_file if ".safetensors" in entry.name else torch.load
    found: State = {}
    if entry.name.endswith(".index.json"):
        table = json.loads(entry.read_text())["weight_map"]
        for file in set(table.values()):
            there = load(folder / file)
            found |= {name: there[name] for name in table if table[name] == file}
    else:
        found = load(entry)
    return found, told.get("dtype", "")


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


class Killed(BaseException):
    """From the call with this number on, nothing reaches the disk."""


@contextmanager
def killed_at(number: int) -> Iterator[list[int]]:
    """Every call of `os` that changes a folder is counted."""
    calls = [0]

    def guarded(action: Callable[..., Any], is_open: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_open and not (len(args) > 1 and args[1] & os.O_CREAT):
                return action(*args, **kwargs)
            calls[0] += 1
            if calls[0] > number:
                raise Killed
            return action(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in CALLS:
            double = guarded(getattr(os, name), name == "open")
            stack.enter_context(mock.patch.object(os, name, double))
        yield calls


def export(folder: Path, entry: str, state: State, count: int = 3) -> None:
    """The same files as an exporter of xds writes them, with a config.json that names the dtype."""
    if entry in (SINGLE, BIN):
        with published(folder / entry, is_folder=False, overwrite=True) as path:
            write(path.parent, entry, state)
        return
    with published(folder, is_folder=True, overwrite=True) as path:
        write(path, entry, state, count)
        if entry == INDEXED:
            config(path, dtype=str(next(iter(state.values())).dtype))


OTHERS: list[tuple[str, ...]] = [(), (SINGLE,), (BIN,), (BIN_INDEXED,), (SINGLE, INDEXED)]


@pytest.mark.parametrize(
    "prior", [(INDEXED,), ENTRIES, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
)
@pytest.mark.quick("prior0")
def test_a_reader_finds_the_old_weights_or_the_new_ones_whenever_the_export_is_killed(
    tmp_path: Path, prior: tuple[str, ...]
) -> None:
    new = weights(9, torch.bfloat16)
    for target in ENTRIES:
        had_new = had_old = False
        for number in itertools.count():
            folder = tmp_path / target / str(number)
            folder.mkdir(parents=True)
            config(folder, dtype="torch.float32", hidden_size=7)
            for seed, entry in enumerate(prior):  # each one has other values
                write(folder, entry, weights(seed))
            old = read(folder)
            with killed_at(number) as calls:
                try:
                    export(folder, target, new)
                except Killed:
                    pass
            found = read(folder)
            is_new = found is not None and same(found[0], new)
            if not is_new:
                assert not had_new and (found is None) == (old is None)
                assert found is None or (old is not None and same(found[0], old[0]))
            if found is not None and target == INDEXED:
                assert found[1] == str(found[0]["a"].dtype)  # also in between
            had_new, had_old = had_new or is_new, had_old or not is_new
            own = find_weights(folder)
            assert (own is None) == (found is None)
            assert own is None or same(read_weights(own).tensors, found[0])  # type: ignore[index]
            if calls[0] <= number:
                assert is_new and had_old
                break
            export(folder, target, weights(8), count=2)  # over what the killed one has left
            found = read(folder)
            assert found is not None and same(found[0], weights(8))
            shards = 2 if target.endswith("index.json") else 0
            assert len(list(folder.iterdir())) == 2 + shards, sorted(folder.iterdir())
        assert number > 3


def test_the_order_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 8, "n_head": 1, "n_layer": 1, "vocab_size": 5, "n_positions": 4}
    models = []
    for seed in range(len(ENTRIES)):
        torch.manual_seed(seed)
        models.append(GPT2LMHeadModel(GPT2Config(**sizes)))
    models[0].config.save_pretrained(tmp_path)
    states = [
        {n: v for n, v in model.state_dict().items() if n != "lm_head.weight"} for model in models
    ]
    (tmp_path / "own").mkdir()
    write(tmp_path / "own", SINGLE, states[1])
    os.rename(tmp_path / "own" / SINGLE, tmp_path / "model-0123abcd.safetensors")
    for entry, state in zip(reversed(ENTRIES), reversed(states), strict=True):
        write(tmp_path, entry, state)
        found = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
        own, mine = find_weights(tmp_path), read(tmp_path)
        assert own is not None and mine is not None
        for name, value in state.items():
            assert torch.equal(found[name], value), entry
        assert same(read_weights(own).tensors, state) and same(mine[0], state)
    told = json.loads((tmp_path / "config.json").read_text())
    config(tmp_path, **told, transformers_weights="model-0123abcd.safetensors")
    own = find_weights(tmp_path)
    found = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    assert own is not None and same(read_weights(own).tensors, states[1])
    assert all(torch.equal(found[name], value) for name, value in states[1].items())


def test_what_readers_would_take_instead_is_refused(tmp_path: Path) -> None:
    write(tmp_path, SINGLE, weights(0))
    before = sorted(tmp_path.iterdir())
    for name in ("adapter_config.json", "shard-00000-model-00001-of-00001.safetensors"):
        (tmp_path / name).touch()
        for target in ENTRIES:
            with pytest.raises(xds.UsageError, match=f"has {name}.*another folder"):
                export(tmp_path, target, weights(1))
        with pytest.raises(xds.UsageError, match=f"has {name}"):
            find_weights(tmp_path)
        (tmp_path / name).unlink()
    assert sorted(tmp_path.iterdir()) == before
    config(tmp_path, transformers_weights=SINGLE)
    with pytest.raises(xds.UsageError, match="names 'model.safetensors' as transformers_weights"):
        export(tmp_path, BIN, weights(1))
    export(tmp_path, INDEXED, weights(1))
    found = read(tmp_path)
    assert found is not None and same(found[0], weights(1))


def test_two_writers_and_a_reader_at_a_time(tmp_path: Path) -> None:
    """One of the two stays; what is read is always of one of them."""
    states = [weights(seed) for seed in range(3)]
    export(tmp_path, INDEXED, states[0])
    failures: list[BaseException] = []

    def save(seed: int) -> None:
        try:
            for _ in range(40):
                export(tmp_path, INDEXED, states[seed])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        own = find_weights(tmp_path)
        assert own is not None
        found = read_weights(own).tensors
        assert any(same(found, state) for state in states)
    for thread in threads:
        thread.join()
    assert not failures and len(list(tmp_path.iterdir())) == 5


def test_a_folder_behind_a_link_takes_the_files(tmp_path: Path) -> None:
    """The folder's parent may be read-only, or on another disk."""
    (tmp_path / "real").mkdir()
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "out").symlink_to(tmp_path / "real")
    os.chmod(tmp_path / "parent", 0o555)
    for seed in (0, 1):
        export(tmp_path / "parent" / "out", INDEXED, weights(seed))
        found = read(tmp_path / "real")
        assert found is not None and same(found[0], weights(seed))
