"""Tensors of every kind, and all else that `client_state` holds, come back, or are refused by name."""

from __future__ import annotations

import json
import random
import re
import struct
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import engine_of as plain_engine
from helpers import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import xds
from xds.engine.checkpoint.imports.imported import Imported
from xds.engine.checkpoint.imports.importing import import_checkpoint
from xds.engine.checkpoint.io.reader import CheckpointReader
from xds.engine.checkpoint.packing import pack, unpack
from xds.engine.checkpoint.random_state import KeptRandom, read_random_state
from xds.engine.checkpoint.tools.compare import differences
from xds.launcher import checkpoint as command
from xds.ops.weights.tensor_table import DTYPES, PAIRS


def elements(dtype: torch.dtype, numel: int) -> Tensor:
    """`numel` different elements, as far as the dtype has so many."""
    if dtype.is_complex:
        count = torch.arange(numel).float()
        with warnings.catch_warnings():  # torch warns once that complex32 is experimental
            warnings.simplefilter("ignore")
            return torch.complex(count, -count - 1).to(dtype)
    if dtype == torch.bool:
        return torch.arange(numel) % 3 == 1
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return (torch.arange(numel) % 100 + 1).to(torch.uint8).view(dtype)
    return (torch.arange(numel) * 3 + 1).to(dtype)


def every_kind() -> dict[str, Tensor]:
    """The tensors by descriptive names."""
    found: dict[str, Tensor] = {}
    for dtype in (*DTYPES, *PAIRS):
        short = str(dtype).removeprefix("torch.")
        found |= {f"{short}_{name}": one for name, one in _ways(elements(dtype, 24)).items()}
    found["complex64_conjugate"] = elements(torch.complex64, 6).conj()
    found["float32_negative"] = elements(torch.complex64, 6).conj().imag
    found["float32_nan"] = torch.tensor([float("nan"), float("-inf"), -0.0])
    return found


def _ways(flat: Tensor) -> dict[str, Tensor]:
    return {
        "plain": flat.view(4, 6),
        "alone": flat[5],
        "empty": flat[:0].view(0, 3),
        "uneven": flat[1:4],
        "every_second": flat[::2],
        "column": flat.view(6, 4)[:, 1],
        "narrow": flat.view(6, 4)[:, 1:2],
        "turned": flat.view(4, 6).t(),
        "expanded": flat[2:3].expand(7),
        "rows": flat[:3].expand(2, 3),
        "windows": flat.unfold(0, 4, 2),
        "inner": flat.view(2, 3, 4)[:, 1:, ::2],
    }


def bits(tensor: Tensor) -> bytes:
    """Its elements in order, byte by byte."""
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def differing(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of what is missing or another in dtype, shape or elements."""
    return [
        name
        for name, one in wanted.items()
        if name not in found
        or (found[name].dtype, found[name].shape) != (one.dtype, one.shape)
        or bits(found[name]) != bits(one)
    ]


class Holder(nn.Module):
    """A buffer of every kind, and frozen parameters that are views."""

    def __init__(self, kinds: dict[str, Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, tensor in kinds.items():
            self.register_buffer(name, tensor)
        whole = torch.arange(20.0)
        self.second = nn.Parameter(whole[::2], requires_grad=False)
        self.column = nn.Parameter(whole.view(5, 4)[:, 1], requires_grad=False)
        self.expanded = nn.Parameter(whole[3:4].expand(6), requires_grad=False)
        self.trained = nn.Parameter(whole.view(10, 2)[:, 1])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() + self.trained.sum() + self.column.sum()


def engine_of(kinds: dict[str, Tensor], stage: int = 0, **checkpoint: Any) -> Any:
    engine = plain_engine(stage, model=Holder(kinds), checkpoint=checkpoint)
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    return engine


def values_of(folder: Path) -> dict[str, Tensor]:
    with CheckpointReader(folder) as reader:
        return {name: reader.read(one) for name, one in reader.values.items()}


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().resolve_conj().resolve_neg().clone()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("is_async", [False, True])
def test_every_kind_of_tensor_is_saved_and_loaded(tmp_path: Path, is_async: bool) -> None:
    engine = engine_of(every_kind(), async_save=is_async)
    wanted = copies(
        {**dict(engine.module.named_buffers()), **dict(engine.module.named_parameters())}
    )
    mine = every_kind()
    engine.save_checkpoint(tmp_path, client_state={"kinds": mine, "list": list(mine.values())})
    engine.wait_for_checkpoint()
    assert differing(wanted, values_of(tmp_path)) == []
    assert command.main(["verify", str(tmp_path)]) == 0
    with torch.no_grad():
        for buffer in engine.module.buffers():
            if 0 not in buffer.stride():  # else there is no way to write to all of it
                buffer.zero_()
        engine.module.second.zero_()
    _, state = engine.load_checkpoint(tmp_path)
    found = {**dict(engine.module.named_buffers()), **dict(engine.module.named_parameters())}
    assert differing(wanted, found) == []
    assert differing(copies(mine), state["kinds"]) == []
    assert [bits(one) for one in state["list"]] == [bits(one) for one in mine.values()]
    engine.destroy()


def test_every_kind_of_tensor_is_imported_and_exported(tmp_path: Path) -> None:
    wanted = copies(every_kind())
    torch.save(every_kind(), tmp_path / "all.pt")
    import_checkpoint(tmp_path / "all.pt", tmp_path / "torch")
    assert differing(wanted, values_of(tmp_path / "torch")) == []
    assert command.main(["verify", str(tmp_path / "torch")]) == 0
    for kind in ("torch", "dcp"):
        code = command.main(
            ["export", str(tmp_path / "torch"), str(tmp_path / f"to_{kind}"), "--to", kind]
        )
        assert code == 0
    assert differing(wanted, torch.load(tmp_path / "to_torch", weights_only=True)) == []
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "to_dcp", tmp_path / "from_dcp.pt")
    assert differing(wanted, torch.load(tmp_path / "from_dcp.pt", weights_only=True)) == []


def test_a_comparison_finds_one_other_bit_in_every_kind(tmp_path: Path) -> None:
    """Also in numbers, arrays and tensors of client_state; NaN is NaN."""
    kinds = {name: one for name, one in copies(every_kind()).items() if one.numel()}
    client: dict[str, Any] = {
        "array": numpy.arange(3),
        "nan": float("nan"),
        "nans": kinds["float32_nan"],
    }
    others = {}
    for name, one in kinds.items():
        raw = one.contiguous().view(-1).view(torch.uint8).clone()
        raw[0] = 1 - raw[0] if one.dtype == torch.bool else raw[0] ^ 1
        others[name] = raw.view(one.dtype).view(one.shape)
    for name, tensors in (("a", kinds), ("b", kinds), ("c", others)):
        source = Imported("here", "tag")
        for key, one in tensors.items():
            source.add_whole("buffer", [key], one)
        source.set_state(
            "client_state", client | {"array": numpy.ones(3)} if name == "c" else client
        )
        source.write(tmp_path / name, "tag")
    readers = [CheckpointReader(tmp_path / name) for name in "abc"]
    assert list(differences(*readers[:2], on_read=lambda _: None)) == []
    found = {one.name: one.text for one in differences(readers[0], readers[2], lambda _: None)}
    assert found.pop("client_state.array").startswith("array([0, 1, 2]) in the first")
    assert found.keys() == kinds.keys() - {"float32_nan"}  # another NaN
    assert all(
        re.match(r"[1-7] of \d+ elements differ, by at most [\d.]", one) for one in found.values()
    )


def test_every_kind_that_safetensors_has_goes_in_and_out(tmp_path: Path) -> None:
    lacking = ("complex128", "complex32", "float8_e8m0fnu")
    wanted = {
        name: one for name, one in copies(every_kind()).items() if not name.startswith(lacking)
    }
    save_file({name: one.contiguous() for name, one in wanted.items()}, tmp_path / "x.safetensors")
    import_checkpoint(tmp_path / "x.safetensors", tmp_path / "in")
    assert differing(wanted, values_of(tmp_path / "in")) == []
    code = command.main(
        ["export", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "safetensors"]
    )
    assert code == 0
    assert differing(wanted, load_file(tmp_path / "out" / "model.safetensors")) == []


def every_rank_saves_views(folder: str) -> None:
    for stage in (0, 1, 3):
        rank = dist.get_rank()
        kinds = {f"b{number}": one for number, one in enumerate(_plain_views())}
        engine = engine_of(kinds, stage)
        with torch.no_grad():
            engine.module.b0.add_(rank)  # each rank's own
        wanted = copies(dict(engine.module.named_buffers()))
        engine.save_checkpoint(f"{folder}/{stage}", client_state={"x": torch.arange(9.0)[::2]})
        with torch.no_grad():
            engine.module.b0.zero_()
        _, state = engine.load_checkpoint(f"{folder}/{stage}")
        assert differing(wanted, dict(engine.module.named_buffers())) == []
        assert state["x"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
        whole = engine.full_state_dict(rank0_only=False)
        saved = values_of(Path(f"{folder}/{stage}"))
        for name in ("second", "column", "expanded", "trained"):
            assert saved[name].tolist() == whole[name].tolist(), (stage, name)
        engine.destroy()


def _plain_views() -> list[Tensor]:
    flat = torch.arange(24.0)
    return [flat.clone()[::2], flat.view(6, 4)[:, 1], flat.view(4, 6).t(), flat[:0]]


def test_views_come_back_on_every_rank_at_every_stage(tmp_path: Path) -> None:
    run_ranks(every_rank_saves_views, 2, str(tmp_path))


# -- views that share memory --------------------------------------------------------------------------------


def test_different_values_for_an_expanded_buffer_are_refused_before_anything(
    tmp_path: Path,
) -> None:
    plain = engine_of({"wide": torch.arange(3.0), "windows": torch.arange(6.0).view(3, 2)})
    plain.save_checkpoint(tmp_path)
    for name, view in (
        ("wide", torch.zeros(1).expand(3)),
        ("windows", torch.zeros(4).unfold(0, 2, 1)),
    ):
        kinds = {"wide": torch.zeros(3), "windows": torch.zeros(3, 2), name: view}
        engine = engine_of(kinds)
        before = copies(engine.module.state_dict())
        with pytest.raises(xds.UsageError, match=f"{name} are views whose elements share memory"):
            engine.load_checkpoint(tmp_path)
        assert differing(before, engine.module.state_dict()) == []
        assert engine.global_steps == 1
        with pytest.raises(xds.UsageError, match=f"{name} is a view whose elements share memory"):
            engine.load_state_dict(plain.full_state_dict())
        assert differing(before, engine.module.state_dict()) == []


def test_a_state_dict_is_loaded_into_expanded_buffers() -> None:
    engine = engine_of({"wide": torch.zeros(1).expand(3)})
    state = engine.full_state_dict()
    engine.load_state_dict({**state, "wide": torch.full((3,), 5.0)})
    assert engine.module.wide.tolist() == [5.0, 5.0, 5.0]


# -- what cannot be held ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.zeros(3, device="meta"), r"client_state\['x'\] is a tensor on the meta device"),
        (
            torch.eye(3).to_sparse(),
            r"client_state\['x'\] is a tensor of the layout torch.sparse_coo",
        ),
        (
            torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
            "is a tensor of torch.bits8, which a",
        ),
        (10**5000, r"client_state\['x'\] is a number of \d+ bits"),
    ],
    ids=["meta", "sparse", "bits8", "number"],
)
def test_what_a_checkpoint_cannot_hold_is_named_before_anything_is_written(
    tmp_path: Path, value: Any, sentence: str
) -> None:
    engine = engine_of({})
    with pytest.raises(xds.UsageError, match=sentence):
        engine.save_checkpoint(tmp_path / "new", client_state={"x": value})
    assert not (tmp_path / "new").exists()


# -- files of others ----------------------------------------------------------------------------------------


def test_an_empty_tensor_may_lie_anywhere(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
        b'"b":{"dtype":"F32","shape":[0],"data_offsets":[3,3]},'
        b'"c":{"dtype":"C64","shape":[2,0],"data_offsets":[1,1]}}'
    )
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    import_checkpoint(path, tmp_path / "in")
    found = values_of(tmp_path / "in")
    assert found["a"].tolist() == [97, 98, 99]
    assert (found["b"].dtype, list(found["b"].shape)) == (torch.float32, [0])
    assert (found["c"].dtype, list(found["c"].shape)) == (torch.complex64, [2, 0])


class Node(dict[str, Any]):
    """As the nodes of a config: its items are attributes."""


class Pair(NamedTuple):
    one: int
    two: int


class Items(list[int]):
    pass


class Options(Namespace):
    pass


def back(value: Any) -> Any:
    tensors: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    packed = json.loads(json.dumps(pack(value, "client_state", put), allow_nan=False))
    return unpack(packed, lambda name: tensors[int(name)])


VALUES: list[Any] = [
    Namespace(lr=0.1, sizes=(1, 2), inner=Namespace(name="a"), none=None),
    Namespace(**{"with space": 1, "class": "text", "$tensor": 2}),
    {1, "a", (2, 3)},
    frozenset({1.5}),
    set(),
    Path("runs/one"),
    torch.bfloat16,
    torch.device("cuda", 1),
    numpy.float32(3.5),
    numpy.int64(-(2**63)),
    numpy.bool_(True),
    numpy.complex128(1 + 2j),
    random.getstate(),
    {},
    {"$array": 1, "other": 2},
    {"$namespace": "a user's key"},
    OrderedDict(b=1, a=OrderedDict()),
    OrderedDict({"$ordered": 1}),
    defaultdict(list, a=[1]),
    defaultdict(None, {2: 3.5}),
    Counter("abca"),
    torch.Size((2, 3)),
]


def test_a_value_comes_back_with_its_type() -> None:
    for value in VALUES:
        found = back({"kept": value})["kept"]
        assert type(found) is type(value) and found == value
        if isinstance(value, defaultdict):
            assert found.default_factory is value.default_factory


def test_what_is_deep_comes_back_and_what_has_no_end_is_refused() -> None:
    deep: Any = (torch.arange(3),)
    for _ in range(49):
        deep = ({1: deep},)
    found = back(deep)
    for _ in range(49):
        found = found[0][1]
    assert found[0].tolist() == [0, 1, 2]
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(
        xds.UsageError, match="is nested more than 100 levels deep, or contains itself"
    ):
        back(loop)


def test_a_class_that_would_be_lost_is_refused_at_the_save() -> None:
    values: list[Any] = [Node(lr=0.1), Pair(1, 2), Items([1]), UserDict(a=1), Options(lr=0.1)]
    for value in values:
        with pytest.raises(
            xds.UsageError, match=rf"client_state\['kept'\] is a .*{type(value).__name__}: "
        ):
            back({"kept": value})
    with pytest.raises(
        xds.UsageError, match=r"is a defaultdict of <function .*; convert it with dict"
    ):
        back(defaultdict(lambda: 3))


def test_arrays_come_back_as_they_were() -> None:
    name, words, *rest = numpy.random.RandomState(3).get_state()
    arrays = [words, numpy.arange(6.0).reshape(2, 3).T, numpy.zeros((0, 2), ">i2"), numpy.array(1)]
    found = back({"all": arrays, "state": (name, words, *rest)})
    for one, other in zip(found["all"], arrays, strict=True):
        assert one.shape == other.shape and one.dtype.kind == other.dtype.kind
        assert numpy.array_equal(one, other) and one.flags.writeable
    numpy.random.RandomState(1).set_state(found["state"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (numpy.array(["a", None], object), "arrays of numbers; convert it to a list"),
        (numpy.array(["text"]), "arrays of numbers"),
        (numpy.zeros(2**18), "torch.from_numpy"),
        (Namespace(model=object()), r"client_state\.model is a builtins.object"),
        ({object()}, "an item is a builtins.object"),
    ],
)
def test_other_values_are_named(value: Any, words: str) -> None:
    with pytest.raises(xds.UsageError, match=words):
        back(value)


NOT_PACKED: list[Any] = [
    {"$array": ["|O", [1], "AAAAAAAAAAA="]},
    {"$array": ["<f4", [3], "AAAA"]},
    {"$array": ["(1000000,1000000)f8", [1], ""]},
    {"$scalar": ["<f4", [1], "AAAA!"]},
    {"$namespace": [[1, 2]]},
    {"$set": [[1]]},
    {"$dtype": "Tensor"},
    {"$device": "nowhere"},
    {"$path": 3},
    {"$namespace": [["a", 1], ["a", 2]]},
    {"$items": [["a", 1], ["a", 2]]},
    {"$ordered": [[1, 1], [True, 2]]},
    {"$default": ["eval", []]},
    {"$default": ["int", {}]},
    {"$size": ["a"]},
]


def test_what_was_not_packed_is_a_value_error() -> None:
    for packed in NOT_PACKED:
        with pytest.raises(ValueError, match=r"^\$"):
            unpack(packed, lambda name: torch.ones(1))


def test_a_defaultdict_still_has_its_default() -> None:
    found = back({"best": defaultdict(int, a=1), "lists": defaultdict(list)})
    assert found["best"]["new"] == 0 and found["lists"]["new"] == []


def test_deep_values_stop(recursion: int = 300) -> None:
    value: Any = 1
    for _ in range(recursion):
        value = Namespace(inner=value)
    with pytest.raises(xds.UsageError, match="nested more than 100 levels"):
        back(value)


def test_random_states_that_are_kept_step_by_step_are_those_of_their_time() -> None:
    """Of numpy: nothing drawn, one number, the second of a pair that changes no word, and a new seed."""
    draws = [
        lambda: None,
        numpy.random.rand,
        numpy.random.randn,
        numpy.random.randn,
        lambda: None,
        random.random,
        lambda: numpy.random.seed(3),
    ]
    kept, former = [], None
    for draw in draws:
        draw()
        former = KeptRandom(torch.device("cpu"), former)
        kept.append((former, read_random_state(torch.device("cpu"))))
    for state, wanted in kept:
        state.restore()
        found = read_random_state(torch.device("cpu"))
        for key in ("words", "gauss", "rest"):
            for name in ("python", "numpy"):
                values = [each[name].get(key) for each in (found, wanted, state.state())]
                assert str(values[0]) == str(values[1]) == str(values[2])
