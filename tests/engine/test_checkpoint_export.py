"""Exports open in what they are for, hold the values, appear whole, and need no more memory than a tensor."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_processes
from saved_checkpoints import Net, engine_of, save
from torch import Tensor, nn

import xds
from xds.deepspeed.utils import zero_to_fp32
from xds.engine.checkpoint.exports.dcp import export_dcp
from xds.engine.checkpoint.exports.export import (
    ExportOptions,
    export_bytes,
    export_safetensors,
    export_torch,
)
from xds.engine.checkpoint.io.reader import CheckpointReader

WAYS = {"safetensors": export_safetensors, "torch": export_torch, "dcp": export_dcp}
MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # of malloc.h: larger blocks go back to the system when they are freed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of two ranks at stage 3 in bf16, and its state dict in full precision."""
    folder = tmp_path_factory.mktemp("checkpoint")
    state, _ = run_processes(save, 2, str(folder), 3, "bf16")[0]
    return folder, state


def export(way: str, folder: Path, out: Path, **options: Any) -> list[str]:
    with CheckpointReader(folder) as reader:
        return WAYS[way](reader, out, ExportOptions(**options))


def load_dcp(out: Path, state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=out)
    return state


def load(way: str, out: Path, names: list[str], like: dict[str, Tensor]) -> dict[str, Tensor]:
    if way == "torch":
        return dict(torch.load(out, weights_only=True))
    if way == "dcp":
        return load_dcp(out, {name: torch.zeros_like(value) for name, value in like.items()})
    load_file = pytest.importorskip("safetensors.torch").load_file
    found: dict[str, Tensor] = {}
    for name in names:
        if name.endswith(".safetensors"):
            found.update(load_file(out / name))
    return found


def cast(state: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {
        name: value.to(dtype) if dtype and value.is_floating_point() else value
        for name, value in state.items()
    }


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_an_export_opens_and_holds_the_values(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path, way: str, dtype: Any
) -> None:
    folder, state = checkpoint
    expected = cast(state, dtype)
    if way == "safetensors":
        del expected["again.weight"]  # a tied tensor is written once
    names = export(way, folder, tmp_path / "out", dtype=dtype)
    equal(load(way, tmp_path / "out", names, expected), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with CheckpointReader(folder) as reader:
        counted = sum(t.nbytes for name, t in expected.items() if name != "again.weight")
        assert export_bytes(reader, ExportOptions(dtype=dtype)) == counted


def test_frozen_parameters_can_be_left_out(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    for way in ("safetensors", "torch"):
        names = export(way, checkpoint[0], tmp_path / way, exclude_frozen=True)
        found = load(way, tmp_path / way, names, {})
        assert not [name for name in found if name.startswith("frozen")]
        assert {"inner.weight", "norm.running_mean", "empty"} <= found.keys()


def test_several_safetensors_files_have_an_index(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, state = checkpoint
    names = export("safetensors", folder, tmp_path / "out", max_shard_bytes=1000)
    files, index = names[:-1], json.loads((tmp_path / "out" / names[-1]).read_text())
    assert files == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    assert names[-1] == "model.safetensors.index.json" and len(files) > 2
    found = {name: load("safetensors", tmp_path / "out", [name], {}) for name in files}
    assert index["weight_map"] == {name: file for file in files for name in found[file]}
    total = sum(t.nbytes for tensors in found.values() for t in tensors.values())
    assert index["metadata"]["total_size"] == total
    sizes = {file: sum(t.nbytes for t in tensors.values()) for file, tensors in found.items()}
    assert all(size <= 1000 or len(found[file]) == 1 for file, size in sizes.items())
    equal(
        {n: t for tensors in found.values() for n, t in tensors.items()}
        | {"again.weight": state["again.weight"]},
        state,
    )


def test_one_safetensors_file_says_what_is_tied(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors")
    out = tmp_path / "model.safetensors"
    export("safetensors", checkpoint[0], out)
    with safetensors.safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "again.weight": "inner.weight"}
    from safetensors.torch import load_model

    model = Net()
    assert load_model(model, out) == (set(), [])
    equal(
        {"outer.weight": model.outer.weight.data}, {"outer.weight": checkpoint[1]["outer.weight"]}
    )


def test_a_torch_file_is_a_sound_archive_with_shared_tied_tensors(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    out = tmp_path / "model.pt"
    export("torch", checkpoint[0], out, with_optimizer=True)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    state = torch.load(out, weights_only=True)["model"]
    assert state["again.weight"].data_ptr() == state["inner.weight"].data_ptr()


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_torchs_optimizer_goes_on_with_an_exported_one(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path, way: str
) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    folder, state = checkpoint
    export(way, folder, tmp_path / "out", with_optimizer=True)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    optimizer = torch.optim.AdamW(trained, lr=0.5)
    if way == "torch":
        found = torch.load(tmp_path / "out", weights_only=True)
    else:
        parts = get_state_dict(model, optimizer)
        found = load_dcp(tmp_path / "out", dict(zip(("model", "optimizer"), parts, strict=True)))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=StateDictOptions(full_state_dict=way == "torch"),
    )
    equal(dict(model.state_dict()), cast(state, torch.float32))
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (
        1e-2,
        0.1,
    )
    with CheckpointReader(folder) as reader:
        expected = reader.read(reader.states("inner.weight")["exp_avg"])
    got = optimizer.state[model.inner.weight]
    assert torch.equal(got["exp_avg"], expected) and float(got["step"]) == 2.0


def sharded_load(out: str) -> Any:
    """Load rows of `inner.weight` as a DTensor over the ranks; the whole of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.zeros(27, 9), mesh, [Shard(0)])
    return load_dcp(Path(out), {"inner.weight": sharded})["inner.weight"].full_tensor()


def test_dcp_loads_it_sharded(checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    export("dcp", checkpoint[0], tmp_path / "out")
    for whole in run_processes(sharded_load, 2, str(tmp_path / "out")):
        assert torch.equal(whole, checkpoint[1]["inner.weight"])


# -- Hugging Face -------------------------------------------------------------------------------------------


def save_gpt2(folder: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    engine = engine_of(3, "bf16", GPT2LMHeadModel(config))
    tokens = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(folder)
    return engine.full_state_dict(full_precision=True), config.to_dict()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    return folder, run_processes(save_gpt2, 2, str(folder))[0]


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000])
def test_from_pretrained_opens_an_exported_model(
    gpt2: tuple[Path, Any], tmp_path: Path, max_shard_bytes: int
) -> None:
    transformers = pytest.importorskip("transformers")
    folder, (state, config) = gpt2
    out = tmp_path / "out"
    export("safetensors", folder, out, max_shard_bytes=max_shard_bytes)
    (out / "config.json").write_text(json.dumps(config))
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    equal(dict(model.state_dict()), state)
    assert model.lm_head.weight is model.transformer.wte.weight


# -- whole or not at all ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_what_is_there_is_replaced_on_request_only(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path, way: str
) -> None:
    out = tmp_path / "out"
    export(way, checkpoint[0], out)
    with pytest.raises(xds.UsageError, match="out exists; choose another name, or .* --overwrite"):
        export(way, checkpoint[0], out)
    if out.is_dir():
        (out / "config.json").write_text("{}")
        (out / "more").mkdir()
    names = export(
        way, checkpoint[0], out, dtype=torch.float16, overwrite=True, max_shard_bytes=999
    )
    expected = cast(checkpoint[1], torch.float16)
    if way == "safetensors":
        del expected["again.weight"]
        assert not (out / "model.safetensors").exists()
    equal(load(way, out, names, expected), expected)
    if out.is_dir():
        assert {path.name for path in out.iterdir()} == {*names, "config.json", "more"}
    other = "torch" if out.is_dir() else "dcp"
    with pytest.raises(xds.UsageError, match="choose another name"):
        export(other, checkpoint[0], out, overwrite=True)


@pytest.mark.parametrize("way", WAYS)
def test_an_export_that_fails_leaves_nothing_and_the_old_one(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path, way: str
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    with pytest.raises(Exception, match="No space left on device"):
        export(way, checkpoint[0], out, on_written=full)
    assert list(tmp_path.iterdir()) == []
    names = export(way, checkpoint[0], out)
    with pytest.raises(Exception, match="No space left on device"):
        export(way, checkpoint[0], out, on_written=full, overwrite=True)
    expected = {
        n: t for n, t in checkpoint[1].items() if n != "again.weight" or way != "safetensors"
    }
    equal(load(way, out, names, expected), expected)
    assert list(tmp_path.iterdir()) == [out]


def test_what_a_killed_export_left_is_removed_by_the_next(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    (tmp_path / ".out.part-0123abcd").mkdir()
    export("safetensors", checkpoint[0], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# -- DeepSpeed's names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_safe", [False, True])
def test_deepspeeds_names_convert_and_load(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path, is_safe: bool
) -> None:
    folder, state = checkpoint
    expected = cast(state, torch.float32)
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert {name: one.dtype for name, one in lazy.items()} == {
        name: one.dtype for name, one in expected.items()
    }
    equal({name: one.contiguous() for name, one in lazy.items()}, expected)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), folder)
    equal(dict(model.state_dict()), expected)
    convert = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(folder, tmp_path / "one", None, safe_serialization=is_safe)
    convert(folder, tmp_path, "1KB", safe_serialization=is_safe)
    stem, suffix = ("model", "safetensors") if is_safe else ("pytorch_model", "bin")
    assert [p.name for p in (tmp_path / "one").iterdir()] == [f"{stem}.{suffix}"]
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())["weight_map"]
    if is_safe:
        del expected["again.weight"]
        found = load("safetensors", tmp_path, sorted(set(index.values())), {})
    else:
        equal(torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True), expected)
        found = {}
        for name in set(index.values()):
            found.update(torch.load(tmp_path / name, weights_only=True))
    equal(found, expected)


# -- memory -------------------------------------------------------------------------------------------------


def save_wide(folder: str, width: int) -> None:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
    engine = engine_of(0, "fp32", model)
    loss = engine(torch.ones(1, width)).square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder)


def status_mib(key: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{key}:\s+(\d+) kB", text)[0]) * 1024 / MIB


def peak_of_exports(folder: str) -> dict[str, float]:
    """MiB on top of what the process held, by way: in a process of its own, whose malloc keeps nothing."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    peaks = {}
    for way, dtype in (("safetensors", torch.bfloat16), ("torch", None), ("dcp", None)):
        options = {"dtype": dtype, "with_optimizer": dtype is None}
        export(
            way, Path(folder, "small"), Path(folder, f"small-{way}"), **options
        )  # imports, pools
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status_mib("VmRSS")
        export(way, Path(folder, "large"), Path(folder, f"large-{way}"), **options)
        peaks[way] = status_mib("VmHWM") - before
    return peaks


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does"
)
def test_an_export_holds_a_tensor_and_little_more(tmp_path: Path) -> None:
    run_processes(save_wide, 1, str(tmp_path / "small"), 16)
    run_processes(
        save_wide, 1, str(tmp_path / "large"), 2048
    )  # 6 of 16 MiB, and moments twice as much
    for way, peak in run_processes(peak_of_exports, 1, str(tmp_path))[0].items():
        assert peak < 16 + 24, way  # without an optimizer the whole is 96, with one 288 MiB
