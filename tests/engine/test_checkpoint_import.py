"""Importing: DeepSpeed's checkpoints go on as they would have there, weights load, and nothing is executed."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkpoint_runs
import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.engine.checkpoint.imports.deepspeed import read_deepspeed
from xds.engine.checkpoint.imports.importing import import_checkpoint
from xds.engine.checkpoint.io.folders import read_manifest
from xds.engine.checkpoint.io.reader import CheckpointReader
from xds.launcher.cli import main
from xds.ops.flat import numel_of
from xds.ops.weights.safe_pickle import read_pickle

DATA = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"
sys.path.insert(0, str(DATA))

import recipes  # noqa: E402

RUNS = json.loads((DATA / "runs.json").read_text())
TAG = "global_step3"


def engine_of(key: str, stage: int, world_size: int) -> Any:
    """An engine as the run `key` had it, at another stage and number of ranks."""
    name, _, precision = key.split("_")
    config = recipes.config_of(name, stage, precision, world_size)
    config["zero_optimization"] |= {"unit_min_numel": 0, "stage3_param_persistence_threshold": 0}
    model = recipes.build(name)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)  # what is loaded is what counts
    return xds.initialize(model, config, model_parameters=recipes.groups_of(name, model))


def go_on(key: str, stage: int, folder: Path) -> dict[str, Any]:
    """Load on every rank, look, and take the recorded steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = engine_of(key, stage, world_size)
    path, client_state = engine.load_checkpoint(folder)
    found: dict[str, Any] = {
        "path": path,
        "client": client_state,
        "counters": [engine.global_steps, engine.skipped_steps, engine.global_samples],
        "micro_steps": engine.micro_steps,
        "states": checkpoint_runs.states_of(engine),
        "steps": {float(state["step"]) for state in engine.optimizer.state.values()},
        "scale": engine.loss_scale,
        "losses": [],
        "norms": [],
    }
    for number in range(recipes.STEPS_AFTER):
        batch = recipes.batch_of(recipes.STEPS_BEFORE + number, rank, world_size)
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        found["losses"].append(mean.item() / world_size)
        found["norms"].append(float(engine.get_global_grad_norm()))
    return found


def whole(answers: list[dict[str, Any]]) -> checkpoint_runs.Whole:
    return checkpoint_runs.whole([answer["states"] for answer in answers])


def in_the_files(key: str) -> dict[tuple[str, str], Tensor]:
    """Masters and moments of a run at stages 1 to 3, read another way: as DeepSpeed's zero_to_fp32 does."""
    folder = DATA / key / TAG
    optim = [read_pickle(path)["optimizer_state_dict"] for path in sorted(folder.glob("*optim*"))]
    model = read_pickle(sorted(folder.glob("*model*"))[-1])
    found: dict[tuple[str, str], Tensor] = {}
    is_3 = "fp32_flat_groups" in optim[0]
    for number, group in enumerate(model["param_shapes"]):
        base = "optimizer_state_dict" if is_3 else "base_optimizer_state"
        master = "fp32_flat_groups" if is_3 else "single_partition_of_fp32_groups"
        rows = {"value": [one[master][number] for one in optim]}
        for moment in ("exp_avg", "exp_avg_sq"):
            rows[f"state/{moment}"] = [one[base]["state"][number][moment] for one in optim]
        for what, row in rows.items():
            at = 0
            for name, shape in group.items():
                numel = numel_of(tuple(shape))
                if is_3:
                    part = -(-numel // len(row))
                    pieces = torch.cat([one[at : at + part] for one in row])
                    found[name, what] = pieces[:numel].clone()
                    at += part
                else:
                    found[name, what] = torch.cat(row)[at : at + numel].clone()
                    at += numel
    return found


def imported(key: str, folder: Path) -> Path:
    import_checkpoint(DATA / key, folder / key)
    return folder / key


# -- DeepSpeed ----------------------------------------------------------------------------------------------

# every stage and number of ranks is there as the origin and as the goal
EXACT = [
    ("plain_zero1_fp32", 3, 3),
    ("plain_zero2_fp32", 0, 3),
    ("plain_zero3_fp32", 1, 1),
    ("rich_zero1_fp32", 1, 2),
    ("rich_zero2_fp32", 3, 1),
    ("rich_zero3_fp32", 2, 3),
]
ROUNDED = [
    ("plain_zero1_fp16", 1, 2),
    ("plain_zero2_bf16", 2, 2),
    ("plain_zero3_fp16", 3, 2),
    ("rich_zero3_bf16", 2, 1),
]


def load_experts(key: str, folder: Path, size: int) -> tuple[dict[str, Tensor], set[float], float]:
    """Masters of the whole model, where `size` ranks share experts; after a step, Adam's steps; its loss."""
    name, _, precision = key.split("_")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = recipes.config_of(name, 2, precision, world_size)
    config["expert_parallel"] = {"enabled": True, "autoep_size": size}
    model = recipes.build(name)
    engine = xds.initialize(model, config, model_parameters=recipes.groups_of(name, model))
    engine.load_checkpoint(folder)
    assert engine.global_steps == recipes.STEPS_BEFORE
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    loss = engine(recipes.batch_of(recipes.STEPS_BEFORE, rank, world_size))
    engine.backward(loss)
    engine.step()
    steps = {float(state["step"]) for state in engine.optimizer.state.values()}
    engine.destroy()
    return values, steps, loss.item()


def test_experts_of_deepspeed_load(tmp_path: Path) -> None:
    """Each rank of DeepSpeed counts its experts from 0; here a parameter has its name in the whole model."""
    key = "moe_zero2_bf16"
    wanted = {}
    for path in (DATA / key / TAG).glob("*model_states.pt"):
        content = read_pickle(path)
        wanted |= content.get("module", content)
    folder = imported(key, tmp_path)
    masters = in_the_files(key)
    for size, ranks in ((2, 4), (1, 1)):
        answers = run_ranks(load_experts, ranks, key, folder, size)
        if ranks == 4:
            mean = sum(loss for *_, loss in answers) / ranks
            assert mean == pytest.approx(RUNS[key]["losses"][0], rel=2e-2)
        for values, steps, _ in answers:
            assert values.keys() == wanted.keys()
            assert all(torch.equal(values[name].bfloat16(), wanted[name]) for name in wanted)
            assert torch.equal(values["last.weight"].flatten(), masters["last.weight", "value"])
            assert steps == {recipes.STEPS_BEFORE + 1.0}


@pytest.mark.parametrize(("key", "stage", "world_size"), [*EXACT, *ROUNDED])
def test_goes_on_as_deepspeed_did(key: str, stage: int, world_size: int, tmp_path: Path) -> None:
    """In 16 bits losses differ by the order of sums; what was loaded does not differ at all."""
    answers = run_ranks(go_on, world_size, key, stage, imported(key, tmp_path))
    is_exact = key.endswith("fp32")
    for answer in answers:
        assert answer["losses"] == pytest.approx(
            RUNS[key]["losses"], rel=1e-6 if is_exact else 2e-2
        )
        assert answer["scale"] == (64.0 if key.endswith("fp16") else 1.0)
        if is_exact:
            assert answer["norms"] == pytest.approx(RUNS[key]["norms"], rel=1e-5)
    check_states(answers, key)


def check_states(answers: list[dict[str, Any]], key: str) -> None:
    """Counters, client state, and every bit of masters, moments, frozen parameters and buffers."""
    for answer in answers:
        assert answer["counters"] == [3, 0, 36]
        assert answer["micro_steps"] == 3
        assert answer["client"] == recipes.CLIENT_STATE
        assert answer["steps"] == {3}
    found, wanted = whole(answers), in_the_files(key)
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name], tensor), name
    model = recipes.build(key.split("_")[0])
    untouched = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    for name, tensor in [*untouched, *model.named_buffers()]:
        if name != "unsaved":
            there = found[name, "value"]
            assert torch.equal(there, tensor.detach().to(there.dtype).reshape(-1)), name
    assert {name for name, what in found if what == "value"} == {
        *(name for name, _ in model.named_parameters()),
        *(name for name, _ in model.named_buffers() if name != "unsaved"),
    }


def test_a_tag_is_chosen_by_latest_by_name_or_as_the_folder_and_not_replaced(
    tmp_path: Path,
) -> None:
    source = Path(shutil.copytree(DATA / "plain_zero1_fp32", tmp_path / "source"))
    shutil.copytree(source / TAG, source / "other")
    assert import_checkpoint(source, tmp_path / "out").folder.name == TAG
    assert import_checkpoint(source, tmp_path / "out", tag="other").folder.name == "other"
    assert import_checkpoint(source / TAG, tmp_path / "c").folder.name == TAG
    for out, tag, says in (
        ("d", "none", "no checkpoint 'none'; there is global_step3, other"),
        ("out", "other", "already exists, a checkpoint"),
        ("source", None, "already exists, a folder"),
    ):
        with pytest.raises(xds.UsageError, match=says):
            import_checkpoint(source, tmp_path / out, tag=tag)
    assert (source / "latest").read_text() == TAG


def test_stage_0_gives_weights_and_values_and_says_so(tmp_path: Path) -> None:
    key = "plain_zero0_fp32"
    report = import_checkpoint(DATA / key, tmp_path / "out")
    assert any("stage 0" in note and "zero_optimization.stage 1" in note for note in report.notes)
    for answer in run_ranks(go_on, 2, key, 2, tmp_path / "out"):
        assert answer["counters"] == [3, 0, 36]
        assert answer["client"] == recipes.CLIENT_STATE
        assert answer["steps"] == set()
        assert answer["losses"][0] == pytest.approx(RUNS[key]["losses"][0], rel=1e-6)


@settings(max_examples=40)
@given(st.data())
def test_shards_of_any_shapes_are_put_together(data: st.DataObject) -> None:
    """A checkpoint as each stage writes it, of any parameters, groups, paddings and ranks."""
    shape = st.lists(st.integers(0, 5), max_size=3).map(torch.Size)
    groups = data.draw(st.lists(st.lists(shape, min_size=1, max_size=4), min_size=1, max_size=3))
    world_size, is_3 = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    paddings = [[data.draw(st.integers(0, 3)) for _ in group] for group in groups]
    wanted: dict[str, Tensor] = {}
    masters: list[list[Tensor]] = [[] for _ in range(world_size)]
    for number, group in enumerate(groups):
        values = {f"{number}.{at}": torch.rand(one) for at, one in enumerate(group)}
        wanted |= values
        if is_3:
            parts = [_parts(value, world_size) for value in values.values()]
            row = [torch.cat(own) for own in zip(*parts, strict=True)]
        else:
            padded = zip(values.values(), paddings[number], strict=True)
            row = _parts(
                torch.cat([F.pad(one.view(-1), (0, pad)) for one, pad in padded]), world_size
            )
        for rank, part in enumerate(row):
            masters[rank].append(part)
    with tempfile.TemporaryDirectory() as folder:
        for rank, own in enumerate(masters):
            base = {"state": {}, "param_groups": [{"lr": 0.1, "params": list(range(len(groups)))}]}
            key = "fp32_flat_groups" if is_3 else "single_partition_of_fp32_groups"
            inner = "optimizer_state_dict" if is_3 else "base_optimizer_state"
            raw = {key: own, inner: base} | ({} if is_3 else {"param_alignment_paddings": paddings})
            path = f"{folder}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": raw}, path)
        shapes = [
            {f"{number}.{at}": one for at, one in enumerate(group)}
            for number, group in enumerate(groups)
        ]
        config = {"optimizer": {"type": "Adam"}}
        model = {"module": {}, "param_shapes": shapes, "ds_config": config}
        torch.save(model, f"{folder}/mp_rank_00_model_states.pt")
        import_checkpoint(folder, f"{folder}/out")
        with CheckpointReader(f"{folder}/out") as reader:
            found = {name: reader.read(one) for name, one in reader.values.items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def _parts(value: Tensor, count: int) -> list[Tensor]:
    """`count` equal parts of the elements, the last ones padded."""
    length = -(-value.numel() // count)
    return list(F.pad(value.view(-1), (0, count * length - value.numel())).view(count, length))


# -- weights alone, and the command line --------------------------------------------------------------------


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


@pytest.mark.parametrize("save", [save_sharded, save_bin, save_torch])
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
    answers = run_ranks(go_on, 2, "rich_zero3_fp32", 3, tmp_path / "out")
    for answer in answers:
        assert answer["counters"] == [0, 0, 0]
        assert answer["steps"] == set()
        assert answer["client"] == {}
        assert answer["scale"] == 1.0 and len(answer["losses"]) == 3
    found = whole(answers)
    for name, tensor in wanted.items():
        if name != "tied.weight":
            assert torch.equal(found[name, "value"], tensor.reshape(-1)), name


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
    found = run_ranks(load_other, 1, tmp_path / "out")[0]
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


SCHEDULES: list[tuple[dict[str, Any], str | None]] = [
    ({"last_epoch": 3, "base_lrs": [0.1], "lr_lambdas": [None]}, "LambdaLR"),
    ({"last_epoch": 3, "T_max": 10, "eta_min": 0}, "CosineAnnealingLR"),
    ({"last_epoch": 3, "step_size": 2, "gamma": 0.5}, "StepLR"),
    ({"my_own": 3}, None),
]


def test_a_clients_schedule_is_known_by_its_keys(tmp_path: Path) -> None:
    content = read_pickle(DATA / "plain_zero0_fp32" / TAG / "mp_rank_00_model_states.pt")
    for number, (state, kind) in enumerate(SCHEDULES):
        torch.save({**content, "lr_scheduler": state}, tmp_path / "mp_rank_00_model_states.pt")
        found = read_deepspeed(tmp_path)
        found.write(tmp_path / "out", f"{number}")
        saved = read_manifest(tmp_path / "out", f"{number}").state["lr_scheduler"]
        assert saved == (kind and {"type": kind, "state": state})
        notes = [note for note in found.notes if "my_own" in note]
        assert bool(notes) == (kind is None)
        assert all("starts from the beginning" in note for note in notes)


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
    assert main(["checkpoint", "diff", *2 * [str(tmp_path / "out")]]) == 0
