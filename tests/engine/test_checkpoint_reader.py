"""Reading checkpoints in one process: the same values as the engine's, each byte checked, files named."""

from __future__ import annotations

import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_processes
from saved_checkpoints import Net, save, save_each
from torch import Tensor

import xds
from xds.engine.checkpoint.io import reader as reader_module
from xds.engine.checkpoint.io.reader import CheckpointReader, Saved
from xds.engine.checkpoint.tools.compare import differences
from xds.engine.checkpoint.tools.verify import damage
from xds.utils.errors import DamagedError

CASES = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]


def nothing(_: int) -> None:
    return


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def fp32(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: v.float() if v.is_floating_point() else v for n, v in state.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of two ranks at stage 3 in bf16; its state dict and moments."""
    folder = tmp_path_factory.mktemp("two")
    return folder, run_processes(save, 2, str(folder), 3, "bf16")[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_reader_finds_what_the_engine_had(tmp_path: Path, world_size: int) -> None:
    cases = [case for case in CASES if world_size > 1 or case[0] == 0]
    expected = run_processes(save_each, world_size, str(tmp_path), cases)[0]
    for (stage, precision), (state, moments) in zip(cases, expected, strict=True):
        folder = tmp_path / f"{stage}-{precision}"
        equal(xds.get_fp32_state_dict(folder), fp32(state))
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


def test_kinds_dtypes_and_the_engines_state_are_told(two: tuple[Path, Any]) -> None:
    with CheckpointReader(two[0]) as reader:
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


def test_a_piece_is_what_the_whole_has_there(two: tuple[Path, Any]) -> None:
    with CheckpointReader(two[0]) as reader:
        saved = reader.values["inner.weight"]
        whole = reader.read(saved).view(-1)
        parts = [part.clone() for part in reader.pieces(saved, torch.float32, 40)]
        assert {part.numel() for part in parts} == {10, 3}
        assert torch.equal(torch.cat(parts), whole)
        narrow = torch.cat([part.clone() for part in reader.pieces(saved, torch.bfloat16, 40)])
        assert torch.equal(narrow, whole.bfloat16())


def test_few_files_are_open_at_a_time(
    two: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MAX_OPEN", 1)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with CheckpointReader(two[0]) as reader:
        for saved in reader.values.values():
            reader.read(saved)
            assert len(list(descriptors.iterdir())) <= before + 1
    assert len(list(descriptors.iterdir())) == before
    equal(xds.get_fp32_state_dict(two[0]), fp32(two[1][0]))


def test_the_state_dict_loads_into_a_plain_model_and_tied_names_share(
    two: tuple[Path, Any],
) -> None:
    state = xds.get_fp32_state_dict(two[0])
    assert state["again.weight"] is state["inner.weight"]
    model = Net()
    model.load_state_dict(state, strict=True)
    few = xds.get_fp32_state_dict(two[0], exclude_frozen_parameters=True)
    assert state.keys() - few.keys() == {"frozen.weight", "frozen.bias"}


def test_a_checkpoint_is_found_by_folder_tag_or_its_own_folder(two: tuple[Path, Any]) -> None:
    folder = two[0]
    for path, tag in ((folder, None), (folder, "global_step2"), (folder / "global_step2", None)):
        assert CheckpointReader(path, tag).tag == "global_step2"
    with pytest.raises(xds.UsageError, match="is not a folder; give the save_dir"):
        CheckpointReader(folder / "nowhere")
    with pytest.raises(xds.UsageError, match="global_step7 is not a committed checkpoint"):
        CheckpointReader(folder, "global_step7")


def test_without_latest_the_tags_are_named(tmp_path: Path) -> None:
    run_processes(save_quietly, 1, str(tmp_path))
    with pytest.raises(
        xds.UsageError, match="no file `latest`: give a tag; there are global_step2"
    ):
        CheckpointReader(tmp_path)
    state = xds.get_fp32_state_dict(tmp_path, "global_step2")
    assert "frozen.weight" not in state and "inner.weight" in state
    with CheckpointReader(tmp_path, "global_step2") as reader:
        assert reader.left_out == ["frozen.weight", "frozen.bias"]


def save_quietly(folder: str) -> None:
    save(folder, 0, "fp32", save_latest=False, exclude_frozen_parameters=True)


def test_what_was_not_saved_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_processes(save_quietly, 1, str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="xds"):
        xds.get_fp32_state_dict(tmp_path, "global_step2", exclude_frozen_parameters=True)
        assert caplog.text == ""
        xds.get_fp32_state_dict(tmp_path, "global_step2")
    assert "saved without its frozen parameters: 2 names, such as frozen.weight" in caplog.text


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def test_damage_is_named_by_file_wherever_it_is(two: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(two[0], folder)
    first, second = sorted((folder / "global_step2").glob("*.safetensors"))
    with open(second, "rb") as file:
        header = struct.unpack("<Q", file.read(8))[0]
    flip(second, 8 + header + 5)  # of a value
    with pytest.raises(DamagedError, match=second.name):
        xds.get_fp32_state_dict(folder)
    flip(first, 3)
    with CheckpointReader(folder) as reader:
        sentences = list(damage(reader, nothing))
    assert [name in text for name, text in zip((first.name, second.name), sentences, strict=True)]
    first.unlink()
    with open(second, "r+b") as file:
        file.truncate(100)
    with CheckpointReader(folder) as reader:
        one, other = damage(reader, nothing)
    assert one == f"{first} is missing" and f"{second} has 100 bytes" in other
    flip(folder / "global_step2" / "manifest.json", 500)
    with pytest.raises(DamagedError, match="manifest.json is damaged"):
        CheckpointReader(folder)


# -- two checkpoints ----------------------------------------------------------------------------------------


def test_checkpoints_of_different_layouts_are_compared_by_name(tmp_path: Path) -> None:
    run_processes(save_and_move, 2, str(tmp_path))
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
    from saved_checkpoints import engine_of, train

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
