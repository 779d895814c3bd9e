"""Importing weights alone: they load by name, everything else begins anew; and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_import import DATA, go_on, imported, recipes, whole
from torch import Tensor, nn
from warm_ranks import warm

import xds
from xds.engine.checkpoint.imports.deepspeed import read_deepspeed
from xds.engine.checkpoint.imports.importing import import_checkpoint
from xds.engine.checkpoint.imports.safe_pickle import read_pickle
from xds.engine.checkpoint.io.folders import read_manifest
from xds.launcher.cli import main


def save_single(state: dict[str, Tensor], folder: Path) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    state.pop("tied.weight")  # the package does not write shared memory
    save_file(state, folder / "model.safetensors")
    return folder


def save_sharded(state: dict[str, Tensor], folder: Path) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    state.pop("tied.weight")
    files = {name: f"model-0000{at % 2 + 1}-of-00002.safetensors" for at, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def save_bin(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def save_torch(state: dict[str, Tensor], folder: Path) -> Path:
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize("save", [save_single, save_sharded, save_bin, save_torch])
def test_weights_load_and_everything_else_begins_anew(save: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = recipes.build("rich")
    with torch.no_grad():
        for tensor in [*model.parameters(), model.factor]:
            tensor.normal_()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = tmp_path / "source"
    folder.mkdir()
    report = import_checkpoint(save(dict(model.state_dict()), folder), tmp_path / "out")
    assert report.folder == tmp_path / "out" / "imported"
    answers = warm(2).run(go_on, "rich_zero3_fp32", 3, tmp_path / "out")
    for answer in answers:
        assert answer["counters"] == [0, 0, 0]
        assert answer["steps"] == set()
        assert answer["client"] == {}
        assert answer["scale"] == 1.0
        assert len(answer["losses"]) == 3
    found = whole(answers)
    for name, tensor in wanted.items():
        if name != "tied.weight":
            assert torch.equal(found[name, "value"], tensor.reshape(-1)), name


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    torch.save(recipes.build("plain").state_dict(), tmp_path / "weights.pt")
    import_checkpoint(tmp_path / "weights.pt", tmp_path / "out", tag="first")
    with pytest.raises(AssertionError, match=r"first does not fit this model: .*frozen\.weight"):
        warm(1).run(go_on, "rich_zero3_fp32", 3, tmp_path / "out")


def test_a_damaged_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = save_single(dict(recipes.build("rich").state_dict()), tmp_path) / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = next(iter(header))
    header[name]["data_offsets"] = [0, 4 * 10**6]
    text = json.dumps(header).encode()
    for broken in (
        content[:-20],
        content[:5],
        content[:8] + b"[" * length + content[8 + length :],
        (10**12).to_bytes(8, "little") + content[8:],
        len(text).to_bytes(8, "little") + text + content[8 + length :],
    ):
        path.write_bytes(broken)
        with pytest.raises(xds.UsageError, match=r"model\.safetensors"):
            import_checkpoint(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["auto", "deepspeed", "huggingface"])
def test_what_is_no_source_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(xds.UsageError, match="does not exist"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "out", kind=kind)
    with pytest.raises(xds.UsageError, match="cannot be imported|is not a DeepSpeed"):
        import_checkpoint(tmp_path, tmp_path / "out", kind=kind)
    done = imported("plain_zero1_fp32", tmp_path)
    with pytest.raises(xds.UsageError, match="checkpoint of xds already|is not a DeepSpeed"):
        import_checkpoint(done, tmp_path / "out", kind=kind)


class Other(nn.Module):
    """Goes by the other name of the tied weight, and has a buffer where a parameter could be."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3, bias=False)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(x) + self.offset).square().mean()


def test_a_tied_weight_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    state = {"embed": weight, "head.weight": weight, "offset": torch.ones(3)}
    torch.save(state, tmp_path / "weights.pt")
    import_checkpoint(tmp_path / "weights.pt", tmp_path / "out")
    found = warm(1).run(load_other, tmp_path / "out")[0]
    assert torch.equal(found["head.weight"], weight)
    assert torch.equal(found["offset"], torch.ones(3))


def load_other(folder: Path) -> dict[str, Tensor]:
    adagrad = {
        "type": "Adagrad",
        "params": {"lr": 1e-2, "initial_accumulator_value": 0.5},
    }  # it makes its states before the first step
    engine = xds.initialize(Other(), {"train_batch_size": 1, "optimizer": adagrad})
    engine.backward(engine(torch.ones(1, 3)))
    engine.step()
    engine.load_checkpoint(folder)
    states = engine.optimizer.state.values()
    assert states and all(state["step"] == 0 and (state["sum"] == 0.5).all() for state in states)
    found = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    engine.backward(engine(torch.ones(1, 3)))
    engine.step()
    return found


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ({"last_epoch": 3, "base_lrs": [0.1], "lr_lambdas": [None]}, "LambdaLR"),
        ({"last_epoch": 3, "T_max": 10, "eta_min": 0}, "CosineAnnealingLR"),
        ({"last_epoch": 3, "step_size": 2, "gamma": 0.5}, "StepLR"),
        ({"my_own": 3}, None),
    ],
)
def test_a_clients_schedule_is_known_by_its_keys(
    state: dict[str, Any], kind: str | None, tmp_path: Path
) -> None:
    source = DATA / "plain_zero0_fp32" / "global_step3"
    content = read_pickle(source / "mp_rank_00_model_states.pt")
    content["lr_scheduler"] = state
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    found = read_deepspeed(tmp_path)
    found.write(tmp_path / "out", "here")
    saved = read_manifest(tmp_path / "out", "here").state["lr_scheduler"]
    if kind is None:
        assert saved is None
        assert any("my_own" in note and "starts from the beginning" in note for note in found.notes)
    else:
        assert saved == {"type": kind, "state": state}


def test_the_command_line_imports_and_says_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["checkpoint", "import", str(DATA / "rich_zero2_fp32"), str(tmp_path / "out")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "DeepSpeed 0.19.8" in text
    assert "note: DeepSpeed saves no random generators" in text
    assert main(["checkpoint", "verify", str(tmp_path / "out")]) == 0
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["checkpoint", "diff", str(tmp_path / "out"), str(tmp_path / "out")]) == 0


def test_stages_1_to_3_of_one_run_are_imported_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = imported("rich_zero1_fp32", tmp_path)
    for key in ("rich_zero2_fp32", "rich_zero3_fp32"):
        main(["checkpoint", "diff", str(a), str(imported(key, tmp_path))])
        text = capsys.readouterr().out
        assert "value" not in text, text
        assert "exp_avg" not in text, text


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_tensor_without_memory_of_its_own_is_named(kind: str, tmp_path: Path) -> None:
    made = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
    }
    torch.save({"fine": torch.ones(2), "odd": made[kind]}, tmp_path / "weights.pt")
    with pytest.raises(xds.UsageError, match=r"^odd is a tensor (of the layout|on the meta)"):
        import_checkpoint(tmp_path / "weights.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
