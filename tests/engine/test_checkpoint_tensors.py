"""Tensors of every kind come back as they were: through saves, loads, imports and exports."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from safetensors.torch import load_file, save_file
from tensor_kinds import bits, differing, every_kind
from torch import Tensor, nn

import xds
from xds.engine.checkpoint.imports.imported import Imported
from xds.engine.checkpoint.imports.importing import import_checkpoint
from xds.engine.checkpoint.io.reader import CheckpointReader
from xds.engine.checkpoint.io.tensor_file import bytes_of
from xds.engine.checkpoint.tools.compare import differences
from xds.launcher import checkpoint as command


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
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "checkpoint": checkpoint,
    }
    engine = xds.initialize(Holder(kinds), config)
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


def test_memory_is_never_taken_for_elements_that_lie_elsewhere() -> None:
    for view in (
        torch.arange(6.0)[::2],
        torch.ones(1).expand(3),
        torch.ones(3, dtype=torch.cfloat).conj(),
    ):
        with pytest.raises(AssertionError, match="its memory is not its elements"):
            bytes_of(view)


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


def test_values_in_themselves_are_refused(tmp_path: Path) -> None:
    engine = engine_of({})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(
        xds.UsageError, match="is nested more than 100 levels deep, or contains itself"
    ):
        engine.save_checkpoint(tmp_path / "new", client_state={"loop": loop})
    deep: Any = (torch.arange(3),)
    for _ in range(49):
        deep = ({1: deep},)
    engine.save_checkpoint(tmp_path / "new", client_state={"deep": deep})
    _, state = engine.load_checkpoint(tmp_path / "new")
    for _ in range(49):
        state["deep"] = state["deep"][0][1]
    assert state["deep"][0].tolist() == [0, 1, 2]


# -- files of others ----------------------------------------------------------------------------------------


def write_safetensors(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_an_empty_tensor_may_lie_anywhere(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
        b'"b":{"dtype":"F32","shape":[0],"data_offsets":[3,3]},'
        b'"c":{"dtype":"C64","shape":[2,0],"data_offsets":[1,1]}}'
    )
    path = write_safetensors(tmp_path / "x.safetensors", header, b"abc")
    import_checkpoint(path, tmp_path / "in")
    found = values_of(tmp_path / "in")
    assert found["a"].tolist() == [97, 98, 99]
    assert (found["b"].dtype, list(found["b"].shape)) == (torch.float32, [0])
    assert (found["c"].dtype, list(found["c"].shape)) == (torch.complex64, [2, 0])


NO_HEADERS = [
    b"[" * 50_000 + b"]" * 50_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"a":null}',
    b'{"a":{"dtype":[],"shape":[1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":5,"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[false,4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}',
    b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
    b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    b'{"a":{"dtype":"F32","shape":[0,4611686018427387904,4611686018427387904],"data_offsets":[0,0]}}',
    b'{"__metadata__":{"a":"complex128"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
]
