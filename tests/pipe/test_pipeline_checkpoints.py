"""Checkpoints of pipelines: any cut of a model loads any other, bit for bit."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import run_processes, run_ranks
from manifest_damages import manifest_text
from pipeline_checkpoints import Cut, Net, Saved, engine_of, random_loads, read, write
from torch import Tensor

import xds
from xds.engine.checkpoint.format import dump, parse
from xds.engine.checkpoint.joining import join_flats, parts_of
from xds.launcher.cli import main
from xds.ops.mesh import Mesh
from xds.zero.checkpoint.ranges import SavedFlat
from xds.zero.layout.layout import Slot

DATA = Path(__file__).parents[1] / "data"


# -- any cut to any cut -------------------------------------------------------------------------------------


def save(folder: Path, cut: Cut) -> Saved:
    return Saved(cut, run_ranks(write, cut.world_size, str(folder), cut))


def load(folder: Path, cut: Cut, *saved: Saved) -> None:
    """Load every checkpoint at this cut, and compare what all ranks then hold."""
    tags = [one.cut.tag for one in saved]
    by_rank = run_ranks(read, cut.world_size, str(folder), cut, tags)
    for number, one in enumerate(saved):
        assert one.differences(cut, [held[number] for held in by_rank]) == []


def test_a_pipeline_loads_at_one_rank_and_at_data_ranks_and_back(tmp_path: Path) -> None:
    pipeline, data_ranks, one_rank = Cut(2, 1, 1), Cut(1, 2, 3), Cut(1, 1, 0)
    saved = [save(tmp_path, cut) for cut in (pipeline, data_ranks, one_rank)]
    load(tmp_path, data_ranks, saved[0])
    load(tmp_path, one_rank, saved[0])
    load(tmp_path, pipeline, *saved)


def test_shards_of_a_stage_load_at_data_ranks_and_back(tmp_path: Path) -> None:
    pipeline, data_ranks = (Cut(p, 2, z, frozen=1, precision="bf16") for p, z in ((2, 2), (1, 3)))
    saved = save(tmp_path, pipeline)
    load(tmp_path, data_ranks, saved)  # with the buffers and random generators of each data rank
    load(tmp_path, pipeline, saved, save(tmp_path, data_ranks))


@pytest.mark.slow
def test_random_cuts_load_at_random_cuts(tmp_path: Path) -> None:
    found = list(random_loads(str(tmp_path), 10, seed=1))
    assert len(found) == 10
    assert [one for one in found if one[2]] == []


# -- how flats are joined -----------------------------------------------------------------------------------


def flat(*names: str, kind: str = "param", **more: Any) -> SavedFlat:
    slots = tuple(Slot(name, (4,), 0, 4 * at) for at, name in enumerate(names))
    return SavedFlat(kind, kind == "param", "float32", 4 * len(names), slots, **more)


def test_stages_are_joined_by_name() -> None:
    mesh = Mesh(pipe=3, data=2)
    tie = (("head", "embed"),)
    joined = join_flats(
        mesh,
        [
            [flat("a", "b"), flat("embed"), flat("scale", kind="buffer")],
            [],
            [flat("scale", kind="buffer"), flat("c"), flat("embed", tied=tie)],
        ],
    )
    assert [(one.slots[0].name, one.held_by) for one in joined.flats] == [
        *(("a", 0), ("embed", 1), ("scale", 1), ("c", 2)),
    ]
    assert joined.flats[1].tied == tie
    assert joined.holders == ((0, 1), (0, 1, 4, 5), (4, 5))
    assert joined.numbers == ((0, 1, 2), (), (2, 3, 1))
    assert parts_of(mesh) == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize("second", [flat("b", "c"), flat("b"), flat("a"), flat("a", "b", "c")])
def test_a_parameter_in_two_buffers_is_refused(second: SavedFlat) -> None:
    with pytest.raises(
        xds.XdsError, match="ranks 0 and 1 both have [ab], in different flat buffers"
    ):
        join_flats(Mesh(2, 1), [[flat("a", "b")], [second]])


# -- versions -----------------------------------------------------------------------------------------------


def load_version_1(folder: str, cut: Cut) -> dict[str, Tensor]:
    """What the checkpoint of version 1 holds, from a pipeline: values and first moments."""
    from pipeline_runs import Model, config_of

    torch.manual_seed(5)
    config = config_of(cut.pipe, 4, zero={"stage": cut.stage})
    engine = xds.initialize(Model(2, tied=True, frozen=1), config)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    found: dict[str, Tensor] = engine.full_state_dict(full_precision=True)
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"moments {name}"] = xds.zero.get_full_optimizer_state(param, "exp_avg")
    engine.save_checkpoint(folder, "again")
    engine.destroy()
    return found


@pytest.mark.contract
def test_version_1_loads_into_a_pipeline(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(DATA / "version_1_checkpoint", folder)
    old = (folder / "global_step2" / "manifest.json").read_bytes()
    assert b'"version": 1' in old and b"holders" not in old
    wanted = torch.load(folder / "wanted.pt")
    by_rank = run_ranks(load_version_1, 2, str(folder), Cut(2, 1, 1))
    found = by_rank[0] | by_rank[1]
    for name, value in wanted["model"].items():
        assert torch.equal(found[name], value), name
    for name, value in wanted["moments"].items():
        assert torch.equal(found[f"moments {name}"], value), name
    assert torch.equal(found["head.weight"], found["embed.weight"])
    assert xds.get_fp32_state_dict(folder, "again").keys() == wanted["model"].keys()


def test_other_versions_are_refused(tmp_path: Path) -> None:
    engine = engine_of(Cut(1, 1, 0), seed=0)
    engine.save_checkpoint(tmp_path, "it")
    path = tmp_path / "it" / "manifest.json"
    manifest = parse(path.read_bytes(), "it")
    assert b'"box"' not in dump(manifest)
    raw = json.loads(path.read_bytes())
    with pytest.raises(
        xds.UsageError, match="is 'xds-checkpoint' version 3, and this xds reads xds-"
    ):
        parse(manifest_text({**raw, "version": 3}), "it")


# -- the whole model ----------------------------------------------------------------------------------------


def whole_states(folder: str, cut: Cut) -> dict[str, Any]:
    """State dicts of a pipeline, and weights from outside, on this rank."""
    torch.manual_seed(3)
    source = {
        name: value.detach().clone()
        for name, value in Net(tied=True, frozen=1).state_dict().items()
    }
    engine = engine_of(cut, seed=0)
    found = {"rank0": engine.full_state_dict(), "all": engine.full_state_dict(rank0_only=False)}
    del source["head.weight"]  # one of its names is enough
    engine.load_state_dict(source)
    found["loaded"] = engine.full_state_dict(rank0_only=False, full_precision=True)
    for changed, text in (
        ({**source, "stranger": torch.zeros(2)}, "not in the model: stranger; strict=False"),
        (
            {n: v for n, v in source.items() if n != "norm.bias"},
            "missing in the weights: norm.bias",
        ),
        (
            {**source, "blocks.3.up.bias": torch.zeros(2)},
            r"shapes differ: blocks.3.up.bias is \(2,\)",
        ),
    ):
        with pytest.raises(xds.UsageError, match=text):
            engine.load_state_dict(changed)
    engine.destroy()
    source["head.weight"] = source.pop("embed.weight")
    torch.save(source, f"{folder}/weights-{torch.distributed.get_rank()}.pt")
    given = engine_of(cut, seed=0, weights=f"{folder}/weights-{torch.distributed.get_rank()}.pt")
    found["given"] = given.full_state_dict(rank0_only=False, full_precision=True)
    xds.zero.load_weights(given.module, {"norm.bias": torch.ones(13)}, strict=False)
    found["partly"] = given.full_state_dict(rank0_only=False)
    given.destroy()
    return found


@pytest.mark.parametrize(
    "cut",
    [
        Cut(2, 1, 1, frozen=1),
        Cut(2, 2, 3, frozen=1),
        Cut(1, 2, 3, frozen=1, tensor=2),
        pytest.param(Cut(2, 1, 1, frozen=1, tensor=2), marks=pytest.mark.slow),
        pytest.param(Cut(1, 1, 0, frozen=1, tensor=4), marks=pytest.mark.slow),
    ],
    ids=lambda cut: cut.tag,
)
@pytest.mark.quick("2x1x1-zero1-tied-1-fp32", "2x2x1-zero3-tied-1-fp32")
def test_state_dicts_span_the_stages(tmp_path: Path, cut: Cut) -> None:
    torch.manual_seed(0)
    first = Net(tied=True, frozen=1).state_dict()
    torch.manual_seed(3)
    source = Net(tied=True, frozen=1).state_dict()
    ranks = run_ranks(whole_states, cut.world_size, str(tmp_path), cut)
    for rank, found in enumerate(ranks):
        assert found["rank0"].keys() == (first.keys() if rank == 0 else set())
        partly = {**source, "norm.bias": torch.ones(13)}
        for key, wanted in (
            ("rank0", first),
            ("all", first),
            ("loaded", source),
            ("given", source),
            ("partly", partly),
        ):
            assert found[key].keys() == wanted.keys() or (key, rank > 0) == ("rank0", True)
            for name, value in found[key].items():
                assert torch.equal(value, wanted[name]), (rank, key, name)
        assert found["all"]["head.weight"] is found["all"]["embed.weight"]


# -- damaged manifests, and tools ---------------------------------------------------------------------------


def save_in_background(folder: str, cut: Cut) -> dict[str, Tensor]:
    engine = engine_of(cut, seed=0, checkpoint={"async_save": True})
    engine.train_batch()
    engine.save_checkpoint(folder, "it")
    engine.wait_for_checkpoint()
    found: dict[str, Tensor] = engine.full_state_dict(full_precision=True)
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of two stages, saved in the background, and the whole model's values."""
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, run_processes(save_in_background, 2, str(folder), Cut(2, 1, 1))[0]


def _without_stage(raw: dict[str, Any]) -> None:
    raw["files"].pop()
    raw["world_size"] = 1


def _doubled(raw: dict[str, Any]) -> None:
    raw["flats"].append(raw["flats"][0])


def _swapped(raw: dict[str, Any]) -> None:
    raw["holders"][0], raw["holders"][2] = raw["holders"][2], raw["holders"][0]


def _descending(raw: dict[str, Any]) -> None:
    raw["holders"][1].reverse()


def _without_holders(raw: dict[str, Any]) -> None:
    del raw["holders"]


def _without_shards(raw: dict[str, Any]) -> None:
    raw["files"][1]["ranges"] = [one for one in raw["files"][1]["ranges"] if one["key"] != "value"]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            _without_stage,
            r"it has the files of 1 ranks and should have those of 2 \(pipe 2 x data 1 x",
        ),
        (_doubled, "name of a slot is 'blocks.0.norm.weight', which does not fit"),
        (
            _swapped,
            r"file of rank 0 has a part of flats\[0\] \('blocks.0.norm.weight'\), .* ranks \[1\]",
        ),
        (_descending, r"holders\[1\] is \(1, 0\), which does not fit"),
        (_without_holders, "held_by is 0, which does not fit"),
        (_without_shards, r"its files have \d+ elements of 'value', and \d+ were saved"),
    ],
)
def test_a_manifest_of_stages_that_does_not_fit_is_refused(
    tmp_path: Path, pipeline: tuple[Path, Any], damage: Any, text: str
) -> None:
    shutil.copytree(pipeline[0] / "it", tmp_path / "it")
    path = tmp_path / "it" / "manifest.json"
    raw = json.loads(path.read_bytes())
    damage(raw)
    path.write_bytes(manifest_text(raw))
    engine = engine_of(Cut(1, 1, 0), seed=1)
    with pytest.raises(xds.UsageError, match=text):
        engine.load_checkpoint(tmp_path, "it")


def test_tools_read_the_checkpoint_of_a_pipeline(
    tmp_path: Path, pipeline: tuple[Path, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, values = pipeline
    one_rank = engine_of(Cut(1, 1, 0), seed=1)
    one_rank.load_checkpoint(folder, "it")
    one_rank.save_checkpoint(tmp_path, "it")
    arguments = [str(folder), "--tag", "it"]
    assert main(["checkpoint", "info", *arguments]) == 0
    assert "pipeline stages  2" in capsys.readouterr().out
    assert main(["checkpoint", "verify", *arguments]) == 0
    assert main(["checkpoint", "diff", str(folder / "it"), str(tmp_path / "it")]) == 0
    for form, out in (("torch", "model.pt"), ("dcp", "dcp"), ("safetensors", "hf")):
        assert main(["checkpoint", "export", *arguments, str(tmp_path / out), "--to", form]) == 0
    assert main(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    imported = xds.get_fp32_state_dict(tmp_path / "back")
    imported["head.weight"] = imported["embed.weight"]  # safetensors files hold a tied weight once
    exported = [xds.get_fp32_state_dict(folder), imported, torch.load(tmp_path / "model.pt")]
    filled = {name: torch.zeros_like(value) for name, value in values.items()}
    with warnings.catch_warnings():  # about the missing process group
        warnings.simplefilter("ignore")
        dcp.load(filled, checkpoint_id=tmp_path / "dcp")
    for found in (*exported, filled):
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())
