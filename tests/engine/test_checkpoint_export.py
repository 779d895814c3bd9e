"""Checkpoints read in one process: the engine's values, each byte checked. Exports open where they should."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import random
import re
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_new_ranks, run_processes, run_ranks
from saved_checkpoints import Net, engine_of, save, save_each, train
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
from xds.engine.checkpoint.io import checked_file
from xds.engine.checkpoint.io.reader import CheckpointReader, Saved
from xds.engine.checkpoint.tools.compare import differences
from xds.engine.checkpoint.tools.verify import damage
from xds.utils.errors import DamagedError

WAYS = {"safetensors": export_safetensors, "torch": export_torch, "dcp": export_dcp}
MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # of malloc.h: larger blocks go back to the system when they are freed

Checkpoint = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of two ranks at stage 3 in bf16, and its state dict in full precision."""
    folder = tmp_path_factory.mktemp("checkpoint")
    state, _ = run_ranks(save, 2, str(folder), 3, "bf16")[0]
    return folder, state


def nothing(_: int) -> None:
    return


def cast(state: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {
        name: value.to(dtype) if dtype and value.is_floating_point() else value
        for name, value in state.items()
    }


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


# -- reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "cases"), [(1, [(0, "bf16")]), (2, [(1, "fp32"), (2, "bf16"), (3, "fp32")])]
)
def test_a_reader_finds_what_the_engine_had(
    tmp_path: Path, world_size: int, cases: list[tuple[int, str]]
) -> None:
    expected = run_ranks(save_each, world_size, str(tmp_path), cases)[0]
    for (stage, precision), (state, moments) in zip(cases, expected, strict=True):
        folder = tmp_path / f"{stage}-{precision}"
        equal(xds.get_fp32_state_dict(folder), cast(state, torch.float32))
        with CheckpointReader(folder) as reader:
            equal(
                {name: reader.read(one) for name, one in reader.values.items()}
                | {other: state[other] for other in reader.tied},
                state,
            )
            for name, moment in moments.items():
                states = reader.states(name)
                assert sorted(states) == ["exp_avg", "exp_avg_sq", "step"]
                assert torch.equal(reader.read(states["exp_avg"]), moment), name
                assert float(states["step"]) == 2.0
            assert list(damage(reader, nothing)) == []


def test_kinds_dtypes_and_the_engines_state_are_told(checkpoint: Checkpoint) -> None:
    with CheckpointReader(checkpoint[0]) as reader:
        weight, frozen = reader.values["inner.weight"], reader.values["frozen.weight"]
        assert (weight.kind, weight.shape, weight.trains) == ("param", (27, 9), True)
        assert (weight.dtype, weight.compute_dtype) == (torch.float32, torch.bfloat16)
        assert (frozen.dtype, frozen.trains) == (torch.bfloat16, False)
        assert reader.values["norm.num_batches_tracked"].kind == "buffer"
        assert reader.values["empty"].shape == (0,)
        assert reader.tied == {"again.weight": "inner.weight"}
        assert reader.states("frozen.weight") == reader.states("norm.running_mean") == {}
        assert isinstance(reader.states("gain")["exp_avg"], Saved)
        state = reader.state()
        assert state["counters"]["global_steps"] == 2
        assert state["client_state"]["note"] == "mine"
        assert torch.equal(state["client_state"]["t"], torch.arange(3))


def test_a_piece_is_what_the_whole_has_there(checkpoint: Checkpoint) -> None:
    with CheckpointReader(checkpoint[0]) as reader:
        saved = reader.values["inner.weight"]
        whole = reader.read(saved).view(-1)
        parts = [part.clone() for part in reader.pieces(saved, torch.float32, 40)]
        assert {part.numel() for part in parts} == {10, 3}
        assert torch.equal(torch.cat(parts), whole)
        narrow = torch.cat([part.clone() for part in reader.pieces(saved, torch.bfloat16, 40)])
        assert torch.equal(narrow, whole.bfloat16())


def test_few_files_are_open_at_a_time(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_file, "MAX_OPEN", 1)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with CheckpointReader(checkpoint[0]) as reader:
        for saved in reader.values.values():
            reader.read(saved)
            assert len(list(descriptors.iterdir())) <= before + 1
    assert len(list(descriptors.iterdir())) == before
    equal(xds.get_fp32_state_dict(checkpoint[0]), cast(checkpoint[1], torch.float32))


def test_the_state_dict_loads_into_a_plain_model_and_tied_names_share(
    checkpoint: Checkpoint,
) -> None:
    state = xds.get_fp32_state_dict(checkpoint[0])
    assert state["again.weight"] is state["inner.weight"]
    model = Net()
    model.load_state_dict(state, strict=True)
    few = xds.get_fp32_state_dict(checkpoint[0], exclude_frozen_parameters=True)
    assert state.keys() - few.keys() == {"frozen.weight", "frozen.bias"}


def test_a_checkpoint_is_found_by_folder_tag_or_its_own_folder(checkpoint: Checkpoint) -> None:
    folder = checkpoint[0]
    for path, tag in ((folder, None), (folder, "global_step2"), (folder / "global_step2", None)):
        assert CheckpointReader(path, tag).tag == "global_step2"
    with pytest.raises(xds.UsageError, match="is not a folder; give the save_dir"):
        CheckpointReader(folder / "nowhere")
    with pytest.raises(xds.UsageError, match="global_step7 is not a committed checkpoint"):
        CheckpointReader(folder, "global_step7")


def save_quietly(folder: str) -> None:
    save(folder, 0, "fp32", save_latest=False, exclude_frozen_parameters=True)


def test_what_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(save_quietly, 1, str(tmp_path))
    with pytest.raises(
        xds.UsageError, match="no file `latest`: give a tag; there are global_step2"
    ):
        CheckpointReader(tmp_path)
    with CheckpointReader(tmp_path, "global_step2") as reader:
        assert reader.left_out == ["frozen.weight", "frozen.bias"]
    with caplog.at_level(logging.WARNING, logger="xds"):
        xds.get_fp32_state_dict(tmp_path, "global_step2", exclude_frozen_parameters=True)
        assert "without its frozen" not in caplog.text
        state = xds.get_fp32_state_dict(tmp_path, "global_step2")
    assert "frozen.weight" not in state and "inner.weight" in state
    assert "saved without its frozen parameters: 2 names, such as frozen.weight" in caplog.text


def damages_of(folder: Path) -> list[str]:
    try:
        with CheckpointReader(folder) as reader:
            return list(damage(reader, nothing))
    except DamagedError as error:
        return [str(error)]


def test_damage_is_named_by_file_wherever_it_is(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint[0], folder)
    tag = folder / "global_step2"
    whole = {path: path.read_bytes() for path in sorted(tag.iterdir())}
    first, second = (path for path in whole if path.suffix == ".safetensors")
    draw, num_refused = random.Random(0), 0
    for path, content in whole.items():
        for at in (0, 9, *(draw.randrange(len(content)) for _ in range(20)), len(content) - 1):
            flipped = content[at] ^ 1 << draw.randrange(8)
            path.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
            (said,) = damages_of(folder)
            assert path.name in said, (path.name, at)
            try:
                found = xds.get_fp32_state_dict(folder)
            except DamagedError as error:
                num_refused += 1
                assert path.name in str(error)
            else:  # of what it does not read, such as states
                equal(found, cast(checkpoint[1], torch.float32))
        path.write_bytes(content)
    assert num_refused > 20
    first.write_bytes(whole[second])
    second.write_bytes(whole[first])
    said = damages_of(folder)
    assert [path.name in one for path, one in zip((first, second), said, strict=True)] == [True] * 2
    first.unlink()
    second.write_bytes(whole[second][:100])
    one, other = damages_of(folder)
    assert one.startswith(f"{first} is missing") and f"{second} has 100 bytes" in other


# -- two checkpoints ----------------------------------------------------------------------------------------


def test_checkpoints_of_different_layouts_are_compared_by_name(tmp_path: Path) -> None:
    run_ranks(save_and_move, 2, str(tmp_path))
    with (
        CheckpointReader(tmp_path / "a") as a,
        CheckpointReader(tmp_path / "b") as b,
        CheckpointReader(tmp_path / "c") as c,
    ):
        assert a.manifest.stage != b.manifest.stage
        assert list(differences(a, b, nothing)) == []
        found = {one.name: one.text for one in differences(a, c, nothing)}
    assert found["gain"] == "1 of 1 elements differ, by at most 2.5"
    assert found["counters.global_steps"] == "2 in the first, 3 in the second"
    assert "frozen.weight" not in found and "inner.weight" in found
    assert found["inner.weight (step)"] == "2.0 in the first, 3.0 in the second"


def save_and_move(folder: str) -> None:
    first = engine_of(3)
    train(first, 2)
    first.save_checkpoint(f"{folder}/a")
    second = engine_of(1)
    second.load_checkpoint(f"{folder}/a")
    second.save_checkpoint(f"{folder}/b")
    train(second, 1)
    gain = second.module.gain
    value = xds.zero.get_full_param(first.module.gain)
    xds.zero.set_full_param(gain, value + 2.5)
    second.save_checkpoint(f"{folder}/c")


# -- exports ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_an_export_opens_and_holds_the_values(
    checkpoint: Checkpoint, tmp_path: Path, way: str, dtype: Any
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


def test_several_safetensors_files_have_an_index(checkpoint: Checkpoint, tmp_path: Path) -> None:
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


def test_one_safetensors_file_says_what_is_tied(checkpoint: Checkpoint, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_torch_file_is_a_sound_archive_with_shared_tied_tensors(
    checkpoint: Checkpoint, tmp_path: Path, with_optimizer: bool
) -> None:
    out = tmp_path / "model.pt"
    export("torch", checkpoint[0], out, with_optimizer=with_optimizer, exclude_frozen=True)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    found = torch.load(out, weights_only=True)
    state = found["model"] if with_optimizer else found
    assert state["again.weight"].data_ptr() == state["inner.weight"].data_ptr()
    assert checkpoint[1].keys() - state.keys() == {"frozen.weight", "frozen.bias"}


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_torchs_optimizer_goes_on_with_an_exported_one(
    checkpoint: Checkpoint, tmp_path: Path, way: str
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


def test_dcp_loads_it_sharded(checkpoint: Checkpoint, tmp_path: Path) -> None:
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


def test_from_pretrained_opens_an_exported_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder, out = tmp_path / "saved", tmp_path / "out"
    state, config = run_ranks(save_gpt2, 2, str(folder))[0]
    export("safetensors", folder, out, max_shard_bytes=20_000)
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
    checkpoint: Checkpoint, tmp_path: Path, way: str
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
    checkpoint: Checkpoint, tmp_path: Path, way: str
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
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    for way, name in (("safetensors", "o[u]t"), ("torch", "out.pt")):
        (tmp_path / f".{name}.part-0123abcd").mkdir()
        export(way, checkpoint[0], tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o[u]t", "out.pt"]


# -- DeepSpeed's names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_safe", [False, True])
def test_deepspeeds_names_convert_and_load(
    checkpoint: Checkpoint, tmp_path: Path, is_safe: bool
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


def save_wide(folder: str) -> None:
    for name, width in (("small", 16), ("large", 2048)):  # 6 of 16 MiB, and moments twice as much
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
        engine = engine_of(0, "fp32", model)
        engine.backward(engine(torch.ones(1, width)).square().mean())
        engine.step()
        engine.save_checkpoint(f"{folder}/{name}")


def status_mib(key: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{key}:\s+(\d+) kB", text)[0]) * 1024 / MIB


def check_peaks(folder: str) -> None:
    """In a process of its own, whose malloc keeps nothing."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    for way, dtype in (("safetensors", torch.bfloat16), ("torch", None), ("dcp", None)):
        options = {"dtype": dtype, "with_optimizer": dtype is None}
        export(way, Path(folder, "small"), Path(folder, f"small-{way}"), **options)  # imports
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status_mib("VmRSS")
        export(way, Path(folder, "large"), Path(folder, f"large-{way}"), **options)
        # without an optimizer the whole is 96, with one 288 MiB
        assert status_mib("VmHWM") - before < 16 + 24, way


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does"
)
def test_an_export_holds_a_tensor_and_little_more(tmp_path: Path) -> None:
    run_new_ranks(save_wide, 1, str(tmp_path))
    run_new_ranks(check_peaks, 1, str(tmp_path))
