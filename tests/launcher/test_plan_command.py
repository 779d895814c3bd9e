"""`xds plan`: its bytes are those of real ranks, and its text says who has what."""

from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_models import config_of, run, run_layers
from thinned import pairwise
from warm_ranks import warm

from xds.engine.config.config import parse_config
from xds.engine.planning.models import FolderModel, FunctionModel
from xds.engine.planning.objects import Link, spread
from xds.engine.planning.plan import Plan, RankPlan, make_plan
from xds.launcher.plan import main
from xds.ops.comm.on_paper import PaperGroups
from xds.ops.mesh import Mesh
from xds.zero.core.reuse import num_kept

TESTS = Path(__file__).resolve().parents[1]
KINDS = ("param", "grad", "master", "optimizer")
# norms and flags, batches, shapes, one number for each forward
NOT_PLANNED = {"control", "broadcast", "header", "sequence losses"}

SLOW = pytest.mark.slow


def plan_of(build: str, config: dict[str, Any], world_size: int) -> Plan:
    return make_plan(FunctionModel(f"planned_models:{build}"), parse_config(config), world_size, 8)


def planned_for(plan: Plan, rank: int) -> RankPlan:
    at = plan.mesh.coordinates(rank)
    return next(
        each
        for each in plan.ranks
        if each.share.pipe == at.pipe and at.tensor in each.share.tensors
    )


def compare(build: str, config: dict[str, Any], world_size: int, num_notes=0, last=None) -> None:
    """Bytes held and sent, kind by kind, on every rank; on the first `last`, if that is given."""
    plan = plan_of(build, config, world_size)
    assert len(plan.notes) == num_notes
    for rank, (held, sent) in enumerate(warm(world_size).run(run, build, config)[:last]):
        planned = planned_for(plan, rank)
        assert {kind: planned.states.get(kind, 0) for kind in KINDS} == {k: held[k] for k in KINDS}
        found = {kind: size for kind, size in sent.items() if size and kind not in NOT_PLANNED}
        assert {kind: link.total for kind, link in planned.sent.items() if link.total} == found


@pytest.mark.parametrize(
    ("build", "config", "world_size"),
    [
        pytest.param("plain", config_of(0, "bf16"), 2, marks=SLOW),
        ("plain", config_of(2, count=2), 2),
        pytest.param(
            "frozen",
            config_of(3, "bf16", param_persistence_threshold=3000),
            2,
            marks=pytest.mark.slow,
        ),
        ("tied", config_of(3, "bf16", pipe=2, count=4), 4),
        pytest.param("plain", config_of(1, pipe=2, tensor=2, count=2), 4, marks=SLOW),
        ("plain", config_of(3, "bf16", tensor=2, count=2, max_reuse_distance=0), 4),
        ("plain", config_of(3, "bf16", count=2, mics_shard_size=2), 4),
        pytest.param("plain", config_of(1, mics_shard_size=2), 4, marks=SLOW),
    ],
)
def test_bytes_equal_those_of_real_ranks(build, config, world_size):
    compare(build, config, world_size)


@SLOW
@pytest.mark.parametrize(
    ("build", "mesh", "precision", "stage"),
    pairwise(
        ("plain", "tied"),
        ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)),
        ("fp32", "bf16"),
        range(4),
    ),
)
def test_bytes_of_every_stage_and_mesh(build, mesh, precision, stage):
    pipe, tensor = mesh
    for count in (pipe, 4):  # 1F1B needs a micro-batch for each stage
        compare(build, config_of(stage, precision, pipe, tensor, count), 4)


@SLOW
@pytest.mark.parametrize(
    ("stage", "pipe", "tensor", "world_size", "size"),
    [
        (2, 1, 1, 4, 2),
        (1, 2, 1, 8, 2),
        (3, 2, 1, 8, 2),
        (3, 1, 2, 8, 2),
        (2, 1, 1, 4, 1),
        (3, 1, 1, 4, 4),
    ],
)
def test_bytes_of_shard_groups_with_replicas(stage, pipe, tensor, world_size, size):
    config = config_of(stage, "bf16", pipe, tensor, 4, mics_shard_size=size)
    compare("plain", config, world_size)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=SLOW)])
def test_one_copy_of_the_parameters_for_each_host(stage):
    config = config_of(stage, "bf16", shared_parameters=True)
    compare("plain", config, 2, num_notes=1)
    found = [
        make_plan(FunctionModel("planned_models:plain"), parse_config(one), 4, 2).ranks[0]
        for one in (config, config_of(stage, "bf16"))
    ]
    shared, own = (rank.states["param"] for rank in found)
    assert own * 0.5 <= shared < own * 0.51  # parameters of one element have a copy in each rank
    gathers = [rank.sent["all_gather"] for rank in found]
    assert gathers[0].inside == 0 < gathers[0].between == gathers[1].between // 2


def test_gathers_in_two_levels_send_fewer_bytes_between_hosts():
    """Four ranks of a group on two hosts: a shard goes to one other host once, not to both of its ranks."""
    plans = []
    for is_on in (False, True):
        zero = {"mics_shard_size": 4, "mics_hierarchical_params_gather": is_on}
        config = parse_config(config_of(3, count=2, **zero))
        plans.append(make_plan(FunctionModel("planned_models:plain"), config, 8, 2))
    one, two = (plan.ranks[0].sent for plan in plans)
    assert one["all_gather"].total == two["all_gather"].total
    assert one["all_gather"].between == 2 * two["all_gather"].between > 0
    assert one["reduce_scatter"] == two["reduce_scatter"]
    assert one["all_reduce"].inside == 0 and one["all_reduce"] == two["all_reduce"]


@pytest.mark.parametrize(
    ("kind", "params", "stage"),
    [
        ("Muon", {}, 2),
        pytest.param("SGD", {"momentum": 0.9}, 1, marks=SLOW),
        pytest.param("Adagrad", {}, 0, marks=SLOW),
        pytest.param("RMSprop", {}, 1, marks=SLOW),
        pytest.param("Lamb", {}, 1, marks=SLOW),
    ],
)
def test_states_and_messages_are_those_of_the_optimizer(kind, params, stage):
    config = config_of(stage, "bf16")
    config["optimizer"] = {"type": kind, "params": {"lr": 1e-3, **params}}
    is_even = kind != "Muon"
    compare("plain", config, 2, num_notes=not is_even, last=None if is_even else 1)


@SLOW
@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (2, {"zero_quantized_gradients": True}),
        (3, {"zero_quantized_weights": True}),
        (3, {"zero_hpz_partition_size": 2}),
    ],
)
def test_bytes_of_quantized_messages_and_second_shards(stage, zero):
    compare("plain", config_of(stage, "bf16", count=2, **zero), 4)


@SLOW
@pytest.mark.parametrize("stage", range(4))
def test_bytes_of_states_on_the_host(stage):
    config = config_of(stage, "bf16", count=2, offload_optimizer={"device": "cpu", "ratio": 0.5})
    compare("plain", config, 2, num_notes=1)


@SLOW
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zero_bubble", "zbv"])
@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_of_every_schedule(schedule, stage):
    config = config_of(stage, "bf16", pipe=2, count=4)
    config["pipeline"] |= {"schedule": schedule, "reduce": "micro_batch"}
    compare("plain", config, 4)


@pytest.mark.parametrize(
    ("tensor", "more"),
    [
        # two heads of keys and values, which ranks copy; uneven columns of the head
        pytest.param(4, {}, marks=SLOW),
        pytest.param(2, {"activation_checkpointing": {"enabled": True}}, marks=SLOW),
    ],
)
def test_bytes_of_copied_heads_and_of_recomputed_blocks(tensor, more):
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    config = config_of(2, tensor=tensor) | more
    config["tensor_parallel"] = {"tp_size": tensor}
    compare("llama", config, tensor)
    plan = plan_of("llama", config, tensor)
    assert all(link.between == 0 for rank in plan.ranks for link in rank.sent.values())


@SLOW
@pytest.mark.parametrize(("stage", "pipe"), [(1, 1), (3, 2)])
def test_bytes_of_a_transformers_model(stage, pipe):
    """Its head has 61 columns, which two ranks share unevenly."""
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    config = config_of(stage, "bf16", pipe=pipe, tensor=2, count=pipe)
    config["tensor_parallel"] = {"tp_size": 2}
    compare("llama", config, 2 * pipe)


@pytest.mark.parametrize(
    ("stage", "pipe", "tensor"),
    [(3, 1, 1), *(pytest.param(*case, marks=SLOW) for case in ((1, 2, 1), (0, 1, 2)))],
)
def test_bytes_of_sequence_ranks(stage, pipe, tensor):
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    config = config_of(stage, pipe=pipe, tensor=tensor, count=2) | {"sequence_parallel_size": 2}
    config["tensor_parallel"] = {"tp_size": tensor}
    compare("llama", config, 2 * pipe * tensor)


def test_a_list_of_layers_is_built_stage_by_stage():
    config = config_of(2, pipe=2, count=2)
    plan = plan_of("layers", config, 2)
    assert plan.num_parameters == 5 * (8 * 8 + 8)
    assert len(plan.notes) == 1 and "stage by stage" in plan.notes[0]
    for rank, held in enumerate(warm(2).run(run_layers, config)):
        states = planned_for(plan, rank).states
        assert {kind: states.get(kind, 0) for kind in KINDS} == {k: held[k] for k in KINDS}


def test_uneven_slices_are_planned_one_by_one():
    plan = plan_of("plain", config_of(1, tensor=3), 3)
    widths = [each.share.numel for each in plan.ranks]
    assert [each.share.tensors for each in plan.ranks] == [(0,), (1, 2)]  # 64 = 22 + 21 + 21
    assert widths[0] - widths[1] == 4 * (16 + 1 + 16)  # a column, its bias, a row; of 4 blocks


def test_activations_are_those_that_autograd_keeps():
    """A forward on the CPU keeps as many bytes as the plan says, without repeated blocks."""
    from planned_models import plain

    model, batch = plain()
    own = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    kept: dict[int, Any] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model(*batch)
    planned = plan_of("plain", config_of(0), 1).ranks[0].activations
    assert planned == sum(storage.nbytes() for storage in kept.values())
    assert loss.requires_grad


def test_the_links_of_a_group():
    mesh = Mesh(pipe=2, data=2, tensor=4)
    for axes, ranks_per_host, num_near in (
        (("tensor",), 8, 3),
        (("data",), 8, 1),
        (("data",), 4, 0),
        (("data", "tensor"), 6, 5),
        (("pipe",), 8, 0),
    ):
        group = PaperGroups(mesh, ranks_per_host).along(axes)
        assert group.num_near == num_near
    assert spread(70, PaperGroups(mesh, 6).along(("data", "tensor"))) == Link(50, 20)
    assert spread(0, PaperGroups(Mesh(1, 1)).along("data")) == Link()


def test_the_arithmetic_of_units():
    assert num_kept([5, 5, 5], 0, 100) == 1
    assert num_kept([5, 5, 5], 20, 100) == 3
    assert num_kept([5, 5, 5], 20, 4) == 1
    assert num_kept([], 20, 4) == 0


@pytest.fixture
def here(monkeypatch):
    monkeypatch.chdir(TESTS)


def show(capsys: Any, config: dict[str, Any], model: str, ranks: int, *more: str) -> list[str]:
    command = [json.dumps(config), "--model", model, "--world-size", str(ranks), *more]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line.strip() for line in out.splitlines()]


def test_the_text_names_layers_bytes_and_the_schedule(here, capsys):
    config = config_of(1, pipe=2, tensor=2, count=2)
    lines = show(capsys, config, "planned_models:plain", 8, "--ranks-per-host", "4")
    assert lines[0].endswith("parameters on 2 pipe x 2 data x 2 tensor = 8 ranks")
    assert any(
        line.split()[:6] == ["stage", "0,", "tensor", "0-1", "4", "blocks.0"] and "embed" in line
        for line in lines
    )
    assert any("33.3% if all stages are equally fast" in line for line in lines)
    assert not any(line == "Notes" for line in lines)
    for title in ("Who has what", "Bytes that a rank holds"):
        assert title in lines


def test_a_model_without_a_batch_is_planned_without_activations(here, capsys):
    lines = show(capsys, config_of(2), "planned_models:without_batch", 2)
    assert any(line.startswith("activations are not counted: no micro-batch") for line in lines)
    assert any("param" in line and "grad" in line for line in lines)


@pytest.mark.parametrize("threshold", [100_000, 0])
def test_a_small_model_at_stage_3_is_told_what_stays_whole(here, capsys, threshold):
    config = config_of(3, param_persistence_threshold=threshold)
    text = "\n".join(show(capsys, config, "planned_models:plain", 2))
    assert ("gathered: units of at most 100,000 elements stay whole" in text) is (threshold > 0)


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ("planned_models:nothing", 2, "has no attribute 'nothing'"),
        ("planned_models:config_of", 2, "missing a required argument"),
        ("no/such/folder", 2, "there is no such folder"),
        (".", 2, "the folder has no config.json"),
        ("planned_models:plain", 3, "no whole number of data ranks"),
    ],
)
def test_bad_input_is_one_sentence(here, capsys, model, ranks, message):
    config = json.dumps(config_of(0, pipe=2, count=2))
    assert main([config, "--model", model, "--world-size", str(ranks)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("xds plan: ") and message in err and err.count("\n") <= 3


def test_real_steps_are_not_run(here, capsys):
    config = json.dumps(config_of(1))
    words = ["--model", "planned_models:plain", "--world-size", "2", "--measured"]
    assert main([config, *words]) == 2
    assert "compare engine.memory_plan()" in capsys.readouterr().err


def test_a_picture_needs_matplotlib(here, capsys, tmp_path):
    config = json.dumps(config_of(1, pipe=2, count=2))
    command = [config, "--model", "planned_models:plain", "--world-size", "2"]
    code = main([*command, "--png", str(tmp_path / "plan.png")])
    if find_spec("matplotlib") is None:
        assert code == 2
        assert "--png needs the package matplotlib" in capsys.readouterr().err
    else:
        assert code == 0
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


OWN_CODE = """
open({ran!r}, "w").close()
import torch
from transformers import PretrainedConfig, PreTrainedModel

class C(PretrainedConfig):
    model_type = "own"

class M(PreTrainedModel):
    config_class = C

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(8, 8)
        self.post_init()

    def forward(self, input_ids, labels):
        return (self.table(input_ids).sum(),)
"""


def test_code_of_a_folder_runs_only_if_it_is_trusted(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    modules = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(modules, str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))  # the answer to every question
    ran, model = tmp_path / "ran", tmp_path / "model"
    model.mkdir()
    (model / "own.py").write_text(OWN_CODE.format(ran=str(ran)))
    own = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    config = {"model_type": "own", "architectures": ["M"], "auto_map": own}
    words = [json.dumps(config_of(0)), "--model", str(model), "--world-size", "2"]
    words += ["--sequence-length", "4"]
    for one in (config, {"model_type": "gpt2", "auto_map": {"AutoModelForCausalLM": "own.M"}}):
        (model / "config.json").write_text(json.dumps({**one, "vocab_size": 8, "n_layer": 1}))
        main(words)
        assert not ran.exists()
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 8}))
    capsys.readouterr()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"xds plan: --model {model}: its config.json names code of the folder")
    assert told.count("\n") == 1 and "add --trust-remote-code to run it" in told
    assert main([*words, "--trust-remote-code"]) == 0 and ran.exists()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"model_type": []}',
        '{"model_type": "gpt2", "architectures": 5}',
        '{"model_type": "gpt2", "n_layer": "many"}',
        '{"model_type": "gpt2", "n_layer": 1, "vocab_size": -3}',
        '{"model_type": "gpt2", "n_layer": 1, "max_position_embeddings": "a"}',
    ],
)
def test_a_damaged_folder_gets_one_sentence(text, tmp_path, capsys):
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    (tmp_path / "config.json").write_text(text)
    words = [json.dumps(config_of(0)), "--model", str(tmp_path), "--world-size", "2"]
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith(f"xds plan: --model {tmp_path}: transformers makes no model of it (")
    assert told[-1].endswith("); correct its config.json")


@SLOW
def test_a_published_layout_within_five_percent(tmp_path):
    """Llama 3 405B on 16 x 128 x 8 ranks: 1/128 of the parameters, 6 bytes each and 12 / 128 more."""
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    config = config_of(1, "bf16", pipe=16, count=16)
    config |= {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"tp_size": 8}}
    plan = make_plan(FolderModel(tmp_path, None), parse_config(config), 16384, 8)
    assert plan.num_parameters == 405_853_388_800
    each = plan.num_parameters / 128 * (6 + 12 / 128)
    for rank in plan.ranks[1:]:
        assert sum(rank.states.values()) == pytest.approx(each, rel=0.05)
    layers = [sum(map(len, rank.share.blocks.values())) for rank in plan.ranks]
    assert layers == [7, *[8] * 14, 7]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1])
def test_one_bit_optimizers_are_planned_before_their_freeze(stage):
    config = config_of(stage)
    config["optimizer"] = {"type": "OneBitAdam", "params": {"lr": 1e-2}}
    compare("plain", config, 2, num_notes=1)
    (note,) = plan_of("plain", config, 2).notes
    assert "After the freeze" in note
