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
from helpers import run_processes, run_ranks
from planned_models import config_of, plain, run

from xds.engine.config.config import parse_config
from xds.engine.planning.models import FolderModel, FunctionModel
from xds.engine.planning.objects import Link, spread
from xds.engine.planning.plan import Plan, RankPlan, make_plan
from xds.launcher.plan import main
from xds.ops.comm.fake import FakeGroups, backend_of
from xds.ops.mesh import Mesh
from xds.utils.sizes import size_text
from xds.zero.core.gather import num_kept

HERE = Path(__file__).resolve().parent
KINDS = ("param", "grad", "master", "optimizer")
# norms and flags, batches, shapes, one number for each forward
NOT_PLANNED = {"control", "broadcast", "header", "sequence losses"}


def plan_of(build: str, config: dict[str, Any], world_size: int, ranks_per_host: int = 8) -> Plan:
    model = FunctionModel(f"planned_models:{build}")
    return make_plan(model, parse_config(config), world_size, ranks_per_host)


def planned_for(plan: Plan, rank: int) -> RankPlan:
    at = plan.mesh.coordinates(rank)
    return next(
        each
        for each in plan.ranks
        if each.share.pipe == at.pipe and at.tensor in each.share.tensors
    )


def compare(plan: Plan, found: list[Any], name: str) -> None:
    """Bytes held and sent, kind by kind, on every rank of `found`."""
    for rank, (held, sent) in enumerate(found):
        planned = planned_for(plan, rank)
        states = {kind: planned.states.get(kind, 0) for kind in KINDS}
        assert states == {kind: held[kind] for kind in KINDS}, (name, rank)
        links = {kind: link.total for kind, link in planned.sent.items() if link.total}
        sent = {kind: size for kind, size in sent.items() if size and kind not in NOT_PLANNED}
        assert links == sent, (name, rank)


KEPT = {"keep_in_fp32_modules": ["embed", "up"]}
QUANTIZED = {"zero_quantized_weights": True}
# what it shows: model, config, ranks, notes of the plan
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "stage 0": ("plain", config_of(0, "bf16"), 2, 0),
    "frozen": ("frozen", config_of(3, "bf16", zero={"stage3_param_persistence_threshold": 3000}), 2, 0),
    "frozen and whole": ("frozen", config_of(1, "bf16"), 2, 0),
    "fp32 modules": ("tied", config_of(1, "bf16", pipe=2, tensor=2, count=2, data_types=KEPT), 4, 0),
    "tied stages of slices": ("tied", config_of(1, pipe=2, tensor=2, count=2), 4, 0),
    "slices": ("plain", config_of(3, "bf16", tensor=2, count=2, zero={"max_reuse_distance": 0}), 4, 0),
    "uneven slices": ("plain", config_of(1, tensor=3), 3, 0),
    "replicas": ("plain", config_of(3, "bf16", count=2, zero={"mics_shard_size": 2}), 4, 0),
    "quantized second shards": (
        *("plain", config_of(3, "bf16", count=2, zero={"zero_hpz_partition_size": 2, **QUANTIZED})),
        *(4, 0),
    ),
    "host": (
        *("plain", config_of(2, zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}), 2),
        1,
    ),
    "zbv": (
        *("plain", config_of(1, pipe=2, count=4, pipeline={"schedule": "zbv", "reduce": "micro_batch"})),
        *(4, 0),
    ),
    "Lamb": ("plain", config_of(1, "bf16", optimizer="Lamb"), 2, 0),
    "1-bit": ("plain", config_of(1, optimizer="OneBitAdam"), 2, 1),
    "float8": (
        *("llama", config_of(3, "bf16", float8={"enabled": True, "filter": ["self_attn"]})),
        *(2, 0),
    ),
    "sequences": ("llama", config_of(3, count=2, sequence_parallel_size=2), 2, 0),
    "copied heads": ("llama", config_of(2, tensor_parallel={"tp_size": 4}), 4, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    CASES,
)
@pytest.mark.quick("frozen", "slices", "stage 0", "zbv", "host", "replicas")
def test_bytes_equal_those_of_real_ranks(name: str) -> None:
    build, config, world_size, num_notes = CASES[name]
    if build == "llama":
        pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    plan = plan_of(build, config, world_size)
    compare(plan, run_ranks(run, world_size, build, config), name)
    assert len(plan.notes) == num_notes
    if name == "1-bit":
        assert "After the freeze" in plan.notes[0]
    if name == "frozen and whole":
        assert plan.ranks[0].states["param"] >= 2 * plan.num_parameters  # in bf16
    if name == "uneven slices":  # 64 = 22 + 21 + 21
        assert [each.share.tensors for each in plan.ranks] == [(0,), (1, 2)]


@pytest.mark.parametrize(
    ("build", "size", "more"),
    [
        (
            *("mixture", 2),
            {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"enabled": True}},
        ),
        pytest.param(
            *("mixture", 4, {"bf16": {"enabled": True}, "tensor_parallel": {"tp_size": 2}}),
            marks=pytest.mark.slow,
        ),
        ("listed", 2, {}),
    ],
)
@pytest.mark.quick("listed-2-more2")
def test_experts_on_several_ranks_and_the_expected_messages_of_tokens(
    build: str, size: int, more: dict[str, Any]
) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    section = {"enabled": True, "autoep_size": size, "chunks": size}
    config = config_of(2, count=2, expert_parallel=section) | more
    plan, ranks = plan_of(build, config, 4), run_ranks(run, 4, build, config)
    planned = plan.ranks[0].sent
    mean = sum(sent["experts"] for _, sent in ranks) / 4
    assert planned["experts"].total == pytest.approx(mean, rel=0.03)
    for _, sent in ranks:
        sent["experts"] = planned["experts"].total
    compare(plan, ranks, "experts")
    assert len(plan.notes) == 1
    tokens = 512 * size // plan.mesh.tensor
    assert f"it would get {tokens:,} rows and {2 * tokens:,} pairs" in plan.notes[0]


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "AdamMini", "GaLore", "Apollo"])
@pytest.mark.quick("Muon", "Adafactor")
def test_ranks_hold_states_of_different_sizes_which_a_note_says(name: str) -> None:
    config = config_of(2, "bf16", optimizer=name)
    plan = plan_of("plain", config, 2)
    compare(plan, run_ranks(run, 2, "plain", config)[:1], name)
    assert len(plan.notes) == 1


def test_a_list_of_layers_is_built_stage_by_stage() -> None:
    config = config_of(2, pipe=2, count=2)
    plan = plan_of("layers", config, 2)
    assert plan.num_parameters == 5 * (8 * 8 + 8)
    assert len(plan.notes) == 1 and "stage by stage" in plan.notes[0]
    for rank, (held, _) in enumerate(run_ranks(run, 2, "layers", config)):
        states = planned_for(plan, rank).states
        assert {kind: states.get(kind, 0) for kind in KINDS} == {k: held[k] for k in KINDS}


def test_one_copy_of_the_parameters_for_each_host() -> None:
    config = config_of(1, "bf16", zero={"shared_parameters": True})
    compare(plan_of("plain", config, 2), run_processes(run, 2, "plain", config), "shared")
    plans = [plan_of("plain", one, 4, 2).ranks[0] for one in (config, config_of(1, "bf16"))]
    shared, own = (rank.states["param"] for rank in plans)
    assert own * 0.5 <= shared < own * 0.51  # parameters of one element have a copy in each rank
    gathers = [rank.sent["all_gather"] for rank in plans]
    assert gathers[0].inside == 0 < gathers[0].between == gathers[1].between // 2


def test_gathers_in_two_levels_send_fewer_bytes_between_hosts() -> None:
    """Four ranks of a group on two hosts: a shard goes to one other host once, not to both of its ranks."""
    plans = []
    for is_on in (False, True):
        zero = {"mics_shard_size": 4, "mics_hierarchical_params_gather": is_on}
        plans.append(plan_of("plain", config_of(3, count=2, zero=zero), 8, 2))
    one, two = (plan.ranks[0].sent for plan in plans)
    assert one["all_gather"].total == two["all_gather"].total
    assert one["all_gather"].between == 2 * two["all_gather"].between > 0
    assert one["reduce_scatter"] == two["reduce_scatter"]
    assert one["all_reduce"].inside == 0 and one["all_reduce"] == two["all_reduce"]


def test_activations_are_those_that_autograd_keeps() -> None:
    """A forward on the CPU keeps as many bytes as the plan says, without repeated blocks."""
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


def test_the_links_of_a_group_and_the_units_that_stay() -> None:
    mesh = Mesh(pipe=2, data=2, tensor=4)
    for axes, ranks_per_host, num_near in (
        (("tensor",), 8, 3),
        (("data",), 8, 1),
        (("data",), 4, 0),
        (("data", "tensor"), 6, 5),
    ):
        found = FakeGroups(mesh, ranks_per_host).along(axes)
        assert backend_of(found).num_near == num_near
    assert spread(70, FakeGroups(mesh, 6).along(("data", "tensor"))) == Link(50, 20)
    assert spread(0, FakeGroups(Mesh(1, 1)).along("data")) == Link()
    given = [([5, 5, 5], 0, 100), ([5, 5, 5], 20, 100), ([5, 5, 5], 20, 4), ([], 20, 4)]
    assert [num_kept(*each) for each in given] == [1, 3, 0, 0]


# -- the command ----------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def show(capsys: Any, config: dict[str, Any], model: str, ranks: int, *more: str) -> list[str]:
    command = [json.dumps(config), "--model", model, "--world-size", str(ranks), *more]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line.strip() for line in out.splitlines()]


def test_the_text_names_layers_bytes_the_schedule_and_what_stays_whole(
    here: None, capsys: Any
) -> None:
    config = config_of(1, pipe=2, tensor=2, count=2)
    lines = show(capsys, config, "planned_models:plain", 8, "--ranks-per-host", "4")
    assert lines[0].endswith("parameters on 2 pipe x 2 data x 2 tensor = 8 ranks")
    first = [line for line in lines if line.startswith("stage 0, tensor 0-1 ")]
    assert first and first[0].split()[4:6] == ["4", "blocks.0"] and "embed" in first[0]
    assert any("33.3% if all stages are equally fast" in line for line in lines)
    assert {"Who has what", "Bytes that a rank holds"} <= {*lines} and "Notes" not in lines
    lines = show(capsys, config_of(2), "planned_models:without_batch", 2)
    assert any(line.startswith("activations are not counted: no micro-batch") for line in lines)
    for threshold in (100_000, 0):
        zero = {"stage3_param_persistence_threshold": threshold}
        text = "\n".join(show(capsys, config_of(3, zero=zero), "planned_models:plain", 2))
        told = "gathered: units of at most 100,000 elements stay whole"
        assert (told in text) is (threshold > 0)


def test_what_stays_on_the_device_beside_states_on_the_host(here: None, capsys: Any) -> None:
    for offloaded in (True, False):
        zero = {"offload_optimizer": {"device": "cpu"}} if offloaded else {}
        config = config_of(2, zero=zero)
        lines = show(capsys, config, "planned_models:plain", 2)
        at = next(n for n, line in enumerate(lines) if line.startswith("param "))
        assert lines[at].endswith("on the device") is offloaded
        if offloaded:
            (rank,) = plan_of("plain", config, 2).ranks
            assert lines[at + 1].endswith(size_text(rank.total_bytes - rank.states["host"]))


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ("planned_models:nothing", 2, "has no attribute 'nothing'"),
        ("planned_models:config_of", 2, "missing a required argument"),
        ("no/such/folder", 2, "there is no such folder"),
        (".", 2, "the folder has no config.json"),
        ("planned_models:plain", 3, "no whole number of data ranks"),
        ("planned_models:plain --measured", 2, "compare engine.memory_plan()"),
    ],
)
def test_bad_input_is_one_sentence(
    here: None, capsys: Any, model: str, ranks: int, message: str
) -> None:
    config = json.dumps(config_of(0, pipe=2, count=2))
    assert main([config, "--world-size", str(ranks), "--model", *model.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("xds plan: ") and message in err and err.count("\n") <= 3


def test_a_picture_needs_matplotlib(here: None, capsys: Any, tmp_path: Path) -> None:
    command = [json.dumps(config_of(1)), "--model", "planned_models:plain", "--world-size", "2"]
    code = main([*command, "--png", str(tmp_path / "plan.png")])
    if find_spec("matplotlib") is None:
        assert code == 2 and "--png needs the package matplotlib" in capsys.readouterr().err
    else:
        assert code == 0 and (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


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


def test_code_of_a_folder_runs_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
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
    for one in ({"model_type": "gpt2", "auto_map": {"AutoModelForCausalLM": "own.M"}}, config):
        (model / "config.json").write_text(json.dumps({**one, "vocab_size": 8, "n_layer": 1}))
        capsys.readouterr()
        code = main(words)
        assert not ran.exists()
    told = capsys.readouterr().err
    assert code == 2
    assert told.startswith(f"xds plan: --model {model}: its config.json names code of the folder")
    assert told.count("\n") == 1 and "add --trust-remote-code to run it" in told
    assert main([*words, "--trust-remote-code"]) == 0 and ran.exists()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "null",
        '{"model_type": []}',
        '{"model_type": "gpt2", "architectures": 5}',
        '{"model_type": "gpt2", "n_layer": 1, "vocab_size": -3}',
    ],
)
def test_a_damaged_folder_gets_one_sentence(text: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    (tmp_path / "config.json").write_text(text)
    words = [json.dumps(config_of(0)), "--model", str(tmp_path), "--world-size", "2"]
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith(f"xds plan: --model {tmp_path}: transformers makes no model of it (")
    assert told[-1].endswith("); correct its config.json")


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


@pytest.mark.slow
def test_a_published_layout_within_five_percent(tmp_path: Path) -> None:
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
