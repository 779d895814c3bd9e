"""Batches on their way to the device: containers keep their types, copies wait for nothing."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import UserDict
from contextlib import AbstractContextManager
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

from xds.engine.data import batches, loaders
from xds.engine.data.batches import move, replaced
from xds.engine.data.loaders import build_loader

META = torch.device("meta")
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: Tensor
    more: list[Tensor]
    name: str = "first"


def test_every_container_is_moved_and_the_scripts_own_stay() -> None:
    sample = Sample(torch.ones(2), [torch.zeros(1)])
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    tokens = UserDict({"ids": torch.ones(1)})
    view = MappingProxyType({"x": torch.ones(1)})
    batch: dict[str, Any] = {
        "a": [torch.ones(3)],
        "s": sample,
        "p": packed,
        "t": tokens,
        "v": view,
        "n": None,
    }
    moved = move(batch, META)
    assert moved["a"][0].is_meta and moved["s"].ids.is_meta and moved["s"].more[0].is_meta
    assert (type(moved["s"]), moved["s"].name) == (Sample, "first")
    assert moved["p"].data.is_meta and moved["p"].batch_sizes.device == CPU  # torch needs it there
    assert type(moved["t"]) is UserDict and moved["t"]["ids"].is_meta and moved["v"]["x"].is_meta
    assert sample.ids.device == tokens["ids"].device == batch["a"][0].device == CPU


def test_what_is_there_already_is_the_same_object() -> None:
    sample, tokens, layer = Sample(torch.ones(2), []), UserDict({"x": torch.ones(1)}), nn.Identity()
    moved = move([sample, tokens, layer, torch.float16, torch.Tensor], CPU)
    assert all(
        new is old
        for new, old in zip(
            moved, [sample, tokens, layer, torch.float16, torch.Tensor], strict=True
        )
    )


def test_walking_through_a_batch_leaves_no_cycle_that_keeps_its_tensors() -> None:
    copied = torch.ones(3)
    alive = weakref.ref(copied)
    gc.disable()
    try:
        walked = replaced(
            {"s": Sample(torch.ones(2), [])},
            lambda tensor, copied=copied: copied,
            lambda value: value,
        )
        assert walked["s"].ids is copied
        del copied, walked
        assert alive() is None
    finally:
        gc.enable()


def test_inputs_in_16_bits_keep_the_scripts_objects() -> None:
    sample = Sample(torch.ones(2), [])
    weights = torch.ones(2), torch.tensor(1.0)
    held, (wide, scalar) = move((sample, weights), CPU, torch.float16)
    assert held is sample and wide.dtype == torch.float16 and scalar.dtype == torch.float32


class Streams:
    """Stands in for torch.accelerator and writes down what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        monkeypatch.setattr(torch, "Stream", self._side)
        monkeypatch.setattr(batches, "accelerator_of", lambda device: self)
        monkeypatch.setattr(
            Tensor, "record_stream", lambda tensor, stream: self.seen.append("record")
        )

    def _side(self, device: torch.device) -> AbstractContextManager[None]:
        side = MagicMock()
        side.__enter__.side_effect = lambda: self.seen.append("copies on side")
        side.__exit__.side_effect = lambda *_: self.seen.append("end")
        return side

    def current_stream(self) -> Streams:
        return self

    def wait_stream(self, stream: Any) -> None:
        self.seen.append("computation waits for side")


def marks_instead_of_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(pins_memory=True)
    monkeypatch.setattr(loaders, "present", lambda: card)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.clone())


def test_what_a_loader_pinned_is_copied_on_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks_instead_of_pinning(monkeypatch)
    streams = Streams(monkeypatch)
    copier = batches.SideStream(META)
    ours = batches.pinned({"x": torch.ones(2), "y": [torch.ones(1)]})
    copies = copier.copies_of({"ours": ours, "scripts": torch.ones(3)})
    assert {id(ours["x"]), id(ours["y"][0])} == set(copies)
    assert all(copied.is_meta for copied in copies.values())
    assert streams.seen == [
        "copies on side",
        "end",
        "computation waits for side",
        "record",
        "record",
    ]
    # a tensor of the script may be what the device still writes to, and so may a view of ours
    streams.seen.clear()
    assert not copier.copies_of([torch.ones(3), ours["x"][:1]]) and not streams.seen


def test_a_loader_pins_its_batches_and_reads_none_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    marks_instead_of_pinning(monkeypatch)
    read = []

    class Data(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, at: int) -> dict[str, Any]:
            read.append(at)
            return {"x": torch.tensor([float(at)]), "name": "n"}

    loader = build_loader(Data(), micro_batch_size=2, rank=0, world_size=1)
    batch = next(iter(loader))
    assert len(read) == 2 and loader.position() == {"epoch": 0, "samples": 2}  # type: ignore[attr-defined]
    assert hasattr(batch["x"], batches._MARK) and batch["name"] == ["n", "n"]
    on_gpu = torch.ones(2, device=META)
    assert batches.pinned([on_gpu])[0] is on_gpu


def test_without_a_gpu_batches_are_as_they_were_collated() -> None:
    loader = build_loader([torch.ones(1)] * 2, micro_batch_size=2, rank=0, world_size=1)
    assert isinstance(loader, loaders.RankLoader) and loader._ready is batches.not_pinned
    assert isinstance(batches.copier_for(CPU), batches.SameStream)
    seen: list[Tensor] = []
    replaced((torch.ones(1), [torch.ones(2)]), lambda tensor: seen.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert [tensor.numel() for tensor in seen] == [1, 2]
