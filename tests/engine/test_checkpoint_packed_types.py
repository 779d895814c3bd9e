"""Tests of what `client_state` may hold beside JSON and tensors, and of files that nobody has packed."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import xds
from xds.engine.checkpoint.packing import pack, unpack


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


def test_a_defaultdict_still_has_its_default() -> None:
    found = back({"best": defaultdict(int, a=1), "lists": defaultdict(list)})
    assert found["best"]["new"] == 0 and found["lists"]["new"] == []


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


def test_deep_values_stop(recursion: int = 300) -> None:
    value: Any = 1
    for _ in range(recursion):
        value = Namespace(inner=value)
    with pytest.raises(xds.UsageError, match="nested more than 100 levels"):
        back(value)
