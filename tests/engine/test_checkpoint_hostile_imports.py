"""Imports of files that are damaged or meant to do harm: one sentence, nothing is executed, nothing changes."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xds
from xds.engine.checkpoint.imports.importing import import_checkpoint
from xds.engine.checkpoint.io.folders import read_manifest
from xds.engine.checkpoint.io.reader import CheckpointReader
from xds.engine.checkpoint.tools.verify import damage
from xds.ops.weights.safe_pickle import UnpickledObject, read_pickle

DATA = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"
TAG = "global_step3"
MODEL, OPTIM = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
EXPERT = "layer_1_expert_{}_mp_rank_00_model_states.pt"


def refused(source: Path, out: Path, says: str) -> None:
    """The import of `source` is refused with one sentence, and `out` is not made."""
    with pytest.raises(xds.UsageError, match=says) as caught:
        import_checkpoint(source, out)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 1000, text
    assert not out.exists()


def refused_as_weights(path: Path, out: Path, says: str) -> None:
    """A file of weights is refused by an import and by `load_weights`."""
    refused(path, out, says)
    with pytest.raises(xds.UsageError, match=says) as caught:
        xds.zero.load_weights(nn.Linear(1, 1), path)
    assert str(caught.value).isprintable()


def copied(key: str, folder: Path) -> Path:
    """A copy of a checkpoint of DeepSpeed; the folder of its tag."""
    return Path(shutil.copytree(DATA / key, folder / "source")) / TAG


def change(path: Path, *keys: Any, to: Any) -> None:
    """Change one value in a file of torch.save."""
    content = inner = _picklable(read_pickle(path))
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def _picklable(value: Any) -> Any:
    """The value with objects of a class of this module for stand-ins."""
    if isinstance(value, UnpickledObject):
        made = Thing(0)
        vars(made).update(value.fields or {})
        return made
    if isinstance(value, dict):
        return {key: _picklable(inner) for key, inner in value.items()}
    return [*map(_picklable, value)] if isinstance(value, list) else value


# -- DeepSpeed ----------------------------------------------------------------------------------------------

FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("plain_zero1_fp32", lambda f: (f / "mp_rank_01_model_states.pt").touch(), "tensor-parallel"),
    ("plain_zero1_fp32", lambda f: (f / "layer_00-model_00-model_states.pt").touch(), "pipeline"),
    (
        "plain_zero1_fp32",
        lambda f: (f / EXPERT.format(1)).touch(),
        "expert 0 of layer 1 is missing",
    ),
    ("plain_zero1_fp32", lambda f: (f / EXPERT.format(0)).touch(), "is not a file that torch.save"),
    ("plain_zero1_fp32", lambda f: (f / "zero").touch(), "ds_to_universal"),
    ("plain_zero1_fp32", lambda f: (f / "offloaded_tensors").touch(), "NVMe"),
    ("plain_zero1_fp32", lambda f: (f / f"bf16_{OPTIM.format(0)}").touch(), "are of one rank"),
    ("plain_zero1_fp32", lambda f: (f / OPTIM.format(10**15)).touch(), "rank 2 are missing"),
    ("plain_zero1_fp32", lambda f: (f / OPTIM.format(0)).unlink(), "rank 0 are missing"),
    ("plain_zero1_fp32", lambda f: (f / OPTIM.format(1)).unlink(), "is not complete: 2 ranks"),
    ("plain_zero1_fp32", lambda f: [p.unlink() for p in f.glob("*opt*")], "no optimizer states"),
    (
        "rich_zero3_fp32",
        lambda f: (f / f"zero_pp_rank_1_{MODEL}").unlink(),
        "is not complete: .* 25 of",
    ),
    ("rich_zero3_fp32", lambda f: (f / f"zero_pp_rank_0_{MODEL}").unlink(), "rank 0 are missing"),
    ("plain_zero1_fp32", lambda f: _special(f / MODEL, os.mkfifo), "is not a file that torch.save"),
    (
        "plain_zero1_fp32",
        lambda f: _special(f / MODEL, Path.mkdir),
        "is not a file that torch.save",
    ),
    (
        "plain_zero1_fp32",
        lambda f: _special(f / MODEL, lambda path: path.symlink_to("/dev/zero")),
        "is not a file that torch.save",
    ),
    (
        "plain_zero1_fp32",
        lambda f: os.truncate(f / OPTIM.format(1), 3000),
        r"rank_1.* is not a file that torch\.save wrote",
    ),
]


def _special(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("number", range(len(FILES)))
def test_files_that_are_no_whole_checkpoint_are_refused(number: int, tmp_path: Path) -> None:
    key, spoil, says = FILES[number]
    folder = copied(key, tmp_path)
    spoil(folder)
    refused(folder.parent, tmp_path / "out", says)


FORMS = (
    "contradicts itself|is not complete|does not have the form|cannot hold|cannot be|are missing"
)


def test_values_of_another_form_are_refused(tmp_path: Path) -> None:
    folder = copied("rich_zero3_fp32", tmp_path)
    path = folder / f"zero_pp_rank_0_{MODEL}"
    whole = path.read_bytes()
    shapes = read_pickle(path)["param_shapes"]
    name = next(iter(shapes[0]))
    for keys, value in (
        *((("param_shapes",), one) for one in (7.5, [], [{}], None)),
        *((("param_shapes", 0, name), one) for one in ((-1, -9), (1 << 62, 4), (2.5,), "ab", (1,))),
        (("param_shapes", 0, "new"), torch.Size((0, 1 << 62, 1 << 62))),
        (("frozen_param_shapes",), 7.5),
        (("buffer_names",), 7.5),
        (("shared_params",), 7.5),
        (("module",), []),
        *((("mp_world_size",), one) for one in (2, "\x1b[31m\n\u202e")),
        *((("global_steps",), one) for one in ("x", -1, 1 << 70)),
        (("ds_config", "fp16"), 7),
        (("global_samples",), float("inf")),
    ):
        change(path, *keys, to=value)
        if keys == ("ds_config", "fp16"):  # it is looked at only with a dynamic loss scale
            change(folder / OPTIM.format(0), "optimizer_state_dict", "dynamic_loss_scale", to=True)
        refused(folder, tmp_path / "out", FORMS)
        path.write_bytes(whole)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15
def test_tensors_that_no_checkpoint_holds_are_refused(tmp_path: Path) -> None:
    folder = copied("plain_zero1_fp32", tmp_path)
    path = folder / OPTIM.format(0)
    keys = ("optimizer_state_dict", "single_partition_of_fp32_groups", 0)
    numel = read_pickle(path)["optimizer_state_dict"][keys[1]][0].numel()
    for tensor, says in (
        (torch.empty(numel, device="meta"), "on the meta device"),
        (torch.ones(numel).to_sparse(), FORMS),
        (torch.ones(numel - 1), "is not complete"),
        (torch.ones(numel, dtype=torch.uint8).view(torch.bits8), "torch.bits8"),
        (torch.ones(numel, dtype=torch.int64), "contradicts itself"),
        (5, "does not have the form"),
    ):
        change(path, *keys, to=tensor)
        refused(folder, tmp_path / "out", says)


def test_a_huge_tensor_for_a_list_or_a_number_is_refused_at_once(tmp_path: Path) -> None:
    huge = torch.zeros(1).expand(1 << 45)
    folder = copied("rich_zero3_fp32", tmp_path)
    model, optim = folder / f"zero_pp_rank_0_{MODEL}", folder / OPTIM.format(0)
    inner = ("optimizer_state_dict", "optimizer_state_dict")
    shape = ("param_shapes", 0, next(iter(read_pickle(model)["param_shapes"][0])))
    for path, *keys in (
        *((model, key) for key in ("param_shapes", "buffer_names", "shared_params")),
        *((model, key) for key in ("mp_world_size", "frozen_param_shapes", "global_steps")),
        (model, *shape),
        (optim, inner[0], "fp32_flat_groups"),
        (optim, inner[0], "partition_count"),
        (optim, *inner, "param_groups"),
        (optim, *inner, "param_groups", 0, "params"),
        (optim, *inner, "state"),
        (optim, *inner, "state", 0),
    ):
        whole = path.read_bytes()
        change(path, *keys, to=huge)
        refused(folder, tmp_path / "out", ".")
        path.write_bytes(whole)


def test_states_of_some_parameters_or_twice_are_refused(tmp_path: Path) -> None:
    folder = copied("plain_zero3_fp32", tmp_path)
    path = folder / OPTIM.format(1)
    whole = path.read_bytes()
    keys = ("optimizer_state_dict", "optimizer_state_dict", "state", 0)
    for inner, value in (((), {}), (("exp_avg",), "text"), (("exp_avg",), torch.ones(2, 3))):
        change(path, *keys, *inner, to=value)
        refused(folder, tmp_path / "out", r"is not complete: it has no .*\(state/exp_avg\)")
        path.write_bytes(whole)
    change(path, *keys, to=read_pickle(path)[keys[0]][keys[1]]["state"][0] | {1: 1.0, "1": 1.0})
    refused(folder, tmp_path / "out", "two ranges of state/1")


def test_a_changed_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    folder = copied("plain_zero1_fp32", tmp_path)
    path = folder / OPTIM.format(1)
    import_checkpoint(folder, tmp_path / "good")
    good = read_manifest(tmp_path / "good", TAG).files[0].crc32
    content = path.read_bytes()
    num_refused = 0
    for at in range(0, len(content), 401):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        try:
            import_checkpoint(folder, tmp_path / f"{at}")
        except xds.UsageError as error:
            assert path.name in str(error)
            num_refused += 1
        else:  # a bit of what pads the records
            assert read_manifest(tmp_path / f"{at}", TAG).files[0].crc32 == good
    assert num_refused > len(content) // 401 // 2


# -- weights ------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, header: bytes, data: bytes = bytes(8)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


NO_HEADERS = [
    b"[" * 50_000 + b"]" * 50_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"a":null}',
    *(
        b'{"a":{"dtype":%s,"shape":%s,"data_offsets":%s}}' % one
        for one in (
            (b"[]", b"[1]", b"[0,4]"),
            (b'"F32"', b"[true]", b"[0,4]"),
            (b'"F32"', b"5", b"[0,4]"),
            (b'"F32"', b"[1]", b"[false,4]"),
            (b'"F32"', b"[1]", b"[0,4,8]"),
            (b'"F32"', b"[-1]", b"[4,0]"),
            (b'"F32"', b"[4]", b"[0,16]"),
            (b'"F32"', b"[0,4611686018427387904,4611686018427387904]", b"[0,0]"),
        )
    ),
    b'{"__metadata__":{"a":"complex128"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    # JSON of other encodings, and a name that is no text
    *(
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.encode(code)
        for code in ("utf-16", "utf-8-sig")
    ),
    b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
]


def test_a_safetensors_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for header in NO_HEADERS:
        write_safetensors(path, header)
        refused_as_weights(tmp_path, tmp_path / "out", "model.safetensors is damaged: ")
    sound = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    write_safetensors(path, sound)
    content = path.read_bytes()
    for broken in (content[:-1], content[:5], b"", b"\xff" * 8 + content[8:]):
        path.write_bytes(broken)
        refused_as_weights(tmp_path, tmp_path / "out", r"model\.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("latest", b"\xff", "latest names '.*', and .* has no such folder"),
        ("model.safetensors.index.json", b"[" * 100_000, "is nested too deeply"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
            "has the key 'a' twice",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../x"}}', "no file in its folder"),
        ("pytorch_model.bin.index.json", b'{"weight_map": {"a": "x\\u0000"}}', "is missing"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "%s.safetensors"}}' % (b"x" * 5000),
            "xxxx... is missing",
        ),
    ],
)
def test_an_index_that_cannot_be_read_is_refused(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, tmp_path / "out", says)
    if name != "latest":
        refused_as_weights(tmp_path, tmp_path / "out", says)


def test_names_in_a_message_are_one_line(tmp_path: Path) -> None:
    header = b'{"a\\nb":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = write_safetensors(tmp_path / "model.safetensors", header)
    with pytest.raises(xds.UsageError, match=r"not in the model: a\\nb") as caught:
        xds.zero.load_weights(nn.Linear(1, 1), path)
    assert str(caught.value).isprintable()
    with pytest.raises(xds.UsageError):
        xds.zero.load_weights(nn.Linear(1, 1), tmp_path / ("x" * 5000))


def test_a_source_that_is_no_source_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").touch()
    for name, says in {
        "nowhere": "does not exist",
        "loop": "does not exist",
        "a\0b": "does not exist|does not have the form",
        "pipe": "cannot be imported",
        "empty": "is not a file that torch.save wrote",
        "": "cannot be imported",
    }.items():
        refused(tmp_path / name, tmp_path / "out", says)
    import_checkpoint(DATA / "plain_zero1_fp32", tmp_path / "done")
    refused(tmp_path / "done", tmp_path / "out", "checkpoint of xds already")
    with pytest.raises(xds.UsageError, match="is not a DeepSpeed checkpoint"):
        import_checkpoint(tmp_path / "done", tmp_path / "out", kind="deepspeed")


def test_a_file_that_unpacks_to_more_than_it_is_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in plain.namelist():
                packed.writestr(name, plain.read(name))
    refused_as_weights(path, tmp_path / "out", "bomb.pt is compressed, or its parts overlap")
    torch.save({"w": torch.zeros(1).expand(1 << 20, 1 << 20)}, path)
    refused(path, tmp_path / "out", r"w has 4398046511104 bytes, made of 4 in the file")
    torch.save({f"{n}": torch.zeros(1).expand(n, 1 << 26) for n in range(1, 9)}, path)
    refused(path, tmp_path / "out", "8 has 2147483648 bytes, made of 4")  # together


# -- nothing is executed ------------------------------------------------------------------------------------


class Bomb:
    """Unpickled by Python, it calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class Thing:
    def __init__(self, size: int) -> None:
        self.size = size


def explode(_: int) -> None:
    raise AssertionError("it was called")


@pytest.mark.parametrize("means", [os.system, eval, subprocess.call])
def test_nothing_that_a_file_names_is_executed(means: Any, tmp_path: Path) -> None:
    path = copied("plain_zero1_fp32", tmp_path) / MODEL
    witness = tmp_path / "witness"
    change(path, "x", to=Bomb(means, f"mkdir {witness}"))
    for number, origin in enumerate((path.parent, path)):
        if means is os.system:  # torch refuses its module
            says = f"{path.name} cannot be read without executing it"
            refused(origin, tmp_path / "out", says)
            refused_as_weights(path, tmp_path / "out", says)
        else:
            report = import_checkpoint(origin, tmp_path / f"{number}")
            assert any("x" in note and "left out" in note for note in report.notes)
    assert not witness.exists()


def test_objects_of_unknown_classes_are_fields_and_are_left_out_by_name(tmp_path: Path) -> None:
    path = copied("plain_zero1_fp32", tmp_path) / MODEL
    change(path, "thing", to={"deep": [Thing(3)]})
    things: dict[str, Any] = {"args": argparse.Namespace(lr=1.0), "call": Bomb(explode, 7)}
    things |= {"\x1b[31m" * 1000: Thing(1), "ds_version": "\x1b]0;"}
    torch.save(_picklable(read_pickle(path)) | things, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    found = read_pickle(path)
    assert isinstance(found["call"], UnpickledObject) and found["call"].arguments == (7,)
    assert found["thing"]["deep"][0].fields == {"size": 3}
    report = import_checkpoint(path.parent, tmp_path / "out")
    text = "".join([report.origin, *report.notes])
    assert text.isprintable() and len(text) < 5000
    for says in ("'args' is a argparse.Namespace", "'thing'", ".Thing", "'call'", ".explode"):
        assert says in text
    kept = read_manifest(tmp_path / "out", TAG).state["client_state"]
    assert "epoch" in kept and not {"args", "thing", "call"} & kept.keys()


# -- random damage ------------------------------------------------------------------------------------------


def _values(rng: random.Random) -> Any:
    made: list[Callable[[], Any]] = [
        lambda: rng.choice(
            [None, "x\x1b\n", 1 << 70, -1, float("nan"), [], {}, (), {None: 1}, b"x"]
        ),
        lambda: rng.choice([torch.Size((3, -1)), torch.Size((0, 1 << 62)), (1 << 31, 1 << 31)]),
        lambda: rng.choice([torch.ones(2, 2).to_sparse(), torch.ones(3, device="meta")]),
        lambda: rng.choice([torch.ones(0, 5), torch.tensor(3), torch.zeros(1).expand(1 << 45)]),
        lambda: rng.choice([Bomb(explode, 1), Bomb(bytearray, 1 << 45), Bomb(torch.Size, [-1])]),
    ]
    return rng.choice(made)()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    pairs = enumerate(value) if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else pairs:
        yield from _places(inner, (*path, key))


@pytest.mark.slow
def test_random_values_are_refused_or_give_a_checkpoint_that_loads(tmp_path: Path) -> None:
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    for number in range(60):
        folder = copied(
            rng.choice(["plain_zero1_fp16", "rich_zero2_fp32", "rich_zero3_bf16"]), tmp_path
        )
        path = rng.choice(sorted(folder.iterdir()))
        keys = rng.choice(list(_places(read_pickle(path))))
        change(path, *keys, to=_values(rng))
        out = tmp_path / f"{number}"
        try:
            report = import_checkpoint(folder, out)
        except xds.UsageError as error:
            assert str(error).isprintable() and not out.exists(), keys
            outcomes[False] += 1
        else:
            outcomes[True] += 1
            with CheckpointReader(report.folder) as reader:
                said = any("load_optimizer_states=False" in note for note in report.notes)
                assert said or not list(damage(reader, lambda _: None)), keys
                assert all(isinstance(reader.read(one), Tensor) for one in reader.values.values())
        shutil.rmtree(folder.parent)
    assert min(outcomes.values()) > 5, outcomes
