"""The config as a whole: where it comes from, and every complaint at once with its key path."""

import base64
import copy
import json
import sys

import pytest

import xds
from xds.engine.config.config import Config, parse_config

SMALL = {"train_batch_size": 8}


def complaints(source, **kwargs):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, **kwargs)
    return caught.value.complaints


# ---- sources -------------------------------------------------------------------------------------


def test_a_path_text_base64_and_dict_give_the_same(tmp_path):
    text = json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}})
    path = tmp_path / "config.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    wanted = parse_config(text).as_dict()
    for source in (path, str(path), encoded, json.loads(text)):
        assert parse_config(source).as_dict() == wanted


def test_a_config_is_returned_as_it_is():
    config = Config.load(SMALL)
    assert Config.load(config) is config


def test_comments_are_read():
    text = """
    // first
    { // second
      "train_batch_size": 8, // third, with "quotes"
      "wandb": {"project": "a // b # c, }", "group": "\\"// c"}
    }
    """
    config = parse_config(text)
    assert config.train_batch_size == 8
    assert config.wandb.project == "a // b # c, }"
    assert config.wandb.group == '"// c'


HJSON = """
# a comment
train_batch_size: 8      /* another */
optimizer: {
  type: AdamW
  params: {"lr": 1e-4, betas: [0.9
    0.95],}
}
wandb: {group: 'two words', group: 'again'}
"""


def test_other_forms_need_the_package_hjson(monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    for text in (f"{{{HJSON}}}", '{"train_batch_size": 8,}'):
        assert "pip install hjson" in complaints(text)[0]


def test_hjson_is_read_by_its_package():
    pytest.importorskip("hjson")
    assert complaints(f"{{{HJSON}}}")[0].startswith('wandb.group = "again": appears twice')
    config = parse_config(f"{{{HJSON}}}".replace(", group: 'again'", ""))
    assert config.train_batch_size == 8 and config.wandb.group == "two words"
    assert config.optimizer.params == {"lr": 1e-4, "betas": (0.9, 0.95)}
    assert "line 2, column 5: is not JSON" in complaints("{a: 1\nb: {]}}")[0]


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ('{\n  "train_batch_size": 8,\n  "fp16" {}\n}', 3, 10, "':' delimiter"),
        ("{\n  train_batch_size\n}", 2, 3, "key in double quotes"),
        ("{\n  {}: 8\n}", 2, 3, "key in double quotes"),
        ('{"a": 1, // x\n "b" 2}', 2, 6, "':' delimiter"),
        ('{"fp16": {"enabled": False}}', 1, 22, "False is Python: write false"),
        ('{"a": tru}', 1, 7, "expecting value"),
        ('{"a": 1', 1, 8, "',' delimiter"),
        ('{"a": 1 /* x', 1, 9, "',' delimiter"),
        ("{/*", 1, 2, "key in double quotes"),
    ],
)
def test_malformed_json_names_line_and_column_and_shows_the_line(text, line, column, reason):
    (complaint,) = complaints(text)
    assert complaint.startswith(f"line {line}, column {column}: ")
    first, shown, arrow = complaint.split("\n")
    assert reason in first
    assert shown.strip() == text.split("\n")[line - 1].strip()
    assert arrow.index("^") - 4 == column - 1


def test_duplicate_keys_are_named_with_their_path():
    text = '{"zero_optimization": {"stage": 1, "stage": 2}, "fp16": {}, "fp16": {}}'
    first, second = complaints(text)
    assert first.startswith("zero_optimization.stage = 2: appears twice")
    assert second.startswith("fp16 = {}: appears twice")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (3, "must be a path, JSON text, a dict or a Config, not int"),
        (None, "not NoneType"),
        ("missing.json", "no such file"),
        ("[1, 2]", "must be an object"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nested deeper"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "thousands of digits"),
        ({"train_batch_size": object()}, "must be a JSON value, not a Python object"),
        ({"train_batch_size": 8, 3: 4}, "a key must be text"),
    ],
)
def test_sources_that_cannot_be_read(source, says):
    assert any(says in complaint for complaint in complaints(source))


def test_folder_and_foreign_encoding(tmp_path):
    assert "cannot be read" in complaints(tmp_path)[0]
    path = tmp_path / "latin.json"
    path.write_bytes(b'{"wandb": {"project": "\xe9"}}')
    assert "not UTF-8" in complaints(path)[0]


def test_the_callers_dict_is_never_changed():
    source = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1, "leaf_module": {"classes": ["Block"]}},
        "activation_checkpointing": {},
        "optimizer": {"type": "adamw", "params": {"lr": "auto", "fused": True}},
    }
    before = copy.deepcopy(source)
    Config.load(source, auto={"optimizer.params.lr": 0.1}, world_size=2)
    assert source == before


# ---- complaints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "need"),
    [
        ("zero_optimization.stage", 4, "must be 0, 1, 2 or 3"),
        ("zero_optimization.stage", True, "must be 0, 1, 2 or 3"),
        ("zero_optimization.overlap_comm", 1, "must be true or false"),
        ("zero_optimization.overlap_comm", "true", "without quotes"),
        ("zero_optimization.contiguous_gradients", "yes", "must be true or false"),
        ("zero_optimization.reduce_bucket_size", -1, "at least 1"),
        ("zero_optimization.units", "Block", "must be a list"),
        ("zero_optimization", 3, "must be an object"),
        ("train_batch_size", 2.5, "must be a whole number, at least 1"),
        ("train_batch_size", 0, "must be a whole number, at least 1"),
        ("train_batch_size", True, "must be a whole number, at least 1"),
        (
            "gradient_clipping",
            "1.0",
            "must be a number, at least 0, not text: write 1.0 without quotes",
        ),
        ("gradient_clipping", float("nan"), "must be a number"),
        ("gradient_clipping", float("inf"), "must be a number"),
        ("gradient_clipping", -1, "at least 0"),
        ("gradient_allreduce_op", "max", 'must be "mean" or "sum"'),
        ("communication_data_type", "int8", 'must be "fp32", "fp16" or "bf16" or null'),
        ("steps_per_print", 0, "must be a whole number, at least 1"),
        ("fp16.loss_scale", True, "must be 0 or a number"),
        ("fp16.loss_scale", 1e-300, "must be 0 or a number, at least 1e-30 and at most 1e+30"),
        ("fp16.loss_scale", 1e300, "must be 0 or a number, at least 1e-30 and at most 1e+30"),
        ("fp16.min_loss_scale", -1, "must be 0 or a number, at least 1e-30 and at most 1e+30"),
        ("fp16.min_loss_scale", 1e39, "at most 1e+30"),
        ("fp16.loss_scale_window", -1, "at least 0"),
        ("fp16.fp16_master_weights_and_grads", True, "not supported yet"),
        ("bf16.bf16_master_weights_and_grads", True, "not supported yet"),
        ("bf16.bf16_optimizer_states", True, "not supported yet"),
        ("data_types.param_dtype", "bf16", "must be fp32"),
        ("torch_autocast.dtype", "fp32", 'must be "bf16" or "fp16"'),
        ("wandb.project", 3, "must be text"),
        ("sparse_gradients", True, "not supported yet"),
        ("sequence_parallel_size", 0, "must be a whole number, at least 1"),
        ("amp.enabled", True, "torch_autocast"),
        ("pipeline.stages", 0, 'must be a whole number, at least 1 (or "auto")'),
        ("tensor_parallel.autotp_size", -1, "must be a whole number, at least 0"),
        ("tensor_parallel.tp.tp_size", 2, "tensor_parallel.tp_size"),
        ("compile.deepcompile", True, "not supported yet"),
        ("autotuning.enabled", True, "not supported yet"),
        ("hybrid_engine.enabled", True, "not supported yet"),
        ("flops_profiler.profile_step", [3, 1], "the first not above the last"),
        ("nebula.enabled", True, "not supported yet"),
        ("progressive_layer_drop.enabled", True, "not supported yet"),
        ("curriculum_learning.enabled", True, "not supported yet"),
        ("data_efficiency.enabled", True, "not supported yet"),
        ("eigenvalue.enabled", True, "not supported yet"),
        ("quantize_training.enabled", True, "not supported yet"),
        ("expert_parallel.enabled", True, "not supported yet"),
        ("compression_training.layer_reduction.enabled", True, "not supported yet"),
        ("ops.native", 1, "must be true or false"),
        ("weight_quantization", {"post_init_quant": {}}, "not part of xds"),
        ("datastates_ckpt", {"host_cache_size": 1}, "only one writer"),
    ],
)
def test_one_wrong_value_gives_one_sentence_with_the_full_path(path, value, need):
    (complaint,) = complaints(nested(path, value))
    assert complaint.startswith(f"{path} = ")
    assert need in complaint


def test_native_ops_cannot_be_required_and_switched_off():
    (complaint,) = complaints({**SMALL, "ops": {"native": False, "require": True}})
    assert (
        complaint.startswith("ops.require = true: ops.native = false") and "drop one" in complaint
    )


def nested(path, value):
    """{"train_batch_size": 8, ...} with `value` at `path`."""
    source = dict(SMALL)
    *sections, key = path.split(".")
    inner = source
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return source


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("gradient_acumulation_steps", 4, 'did you mean "gradient_accumulation_steps"?'),
        ("zero_optimzation", {"stage": 2}, 'did you mean "zero_optimization"?'),
        ("bf166", {}, 'did you mean "bf16"?'),
        ("stage", 2, 'it belongs to "zero_optimization.stage"'),
        ("zero_optimization.stge", 2, 'did you mean "stage"?'),
        ("zero_optimization.offload_param.devise", "cpu", 'did you mean "device"?'),
        ("elasticity.min_gpu", 3, 'did you mean "min_gpus"?'),
        ("optimizer.parms", {}, 'did you mean "params"?'),
        (
            "compression_training.row_pruning.shared_parameters.metod",
            "l1",
            'did you mean "method"?',
        ),
        ("zzz", 1, "remove it"),
        ("notes", [], "unknown key"),
        ("ops.required", True, 'did you mean "require"?'),
    ],
)
def test_unknown_keys_get_the_nearest_name(path, value, hint):
    assert any(
        complaint.startswith(f"{path} = ") and hint in complaint
        for complaint in complaints(nested(path, value))
    )


def test_all_wrong_keys_come_at_once_and_then_what_does_not_go_together():
    source = {
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": "1",
        "zero_optimization": {"stage": 9, "stag": 1},
        "optimizer": {"type": "AdmaW"},
        "autotuning": {"enabled": True},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
    }
    found = complaints(source, world_size=2)
    starts = [complaint.split(" = ")[0] for complaint in found]
    assert sorted(starts) == sorted(
        [
            "gradient_clipping",
            "zero_optimization.stage",
            "zero_optimization.stag",
            "optimizer.type",
            "autotuning.enabled",
        ]
    )
    for key in ("gradient_clipping", "zero_optimization", "optimizer", "autotuning"):
        del source[key]
    found = complaints(source, world_size=2)
    assert [one.split(" = ")[0] for one in found] == ["fp16.enabled", "train_batch_size"]


def test_two_precisions_name_each_other():
    (complaint,) = complaints({**SMALL, "fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "fp16.enabled and bf16.enabled exclude one another" in complaint


def test_two_spellings_of_one_key():
    (complaint,) = complaints({**SMALL, "bf16": {"enabled": True}, "bfloat16": {"enabled": True}})
    assert "sets the same option as bf16" in complaint


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"train_batch_size": "8"}, "not text: write 8 without quotes"),
        ({"train_batch_size": 8, "optimizer": []}, "must be an object {...}"),
        ({"train_batch_size": 8, "optimizer": {"typ": "Adam"}}, 'did you mean "type"?'),
        ({"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": 3}}, "an object"),
        ({"batch_size": 8}, 'did you mean "train_batch_size"?'),
        ({"train_batch_size": 8, "fp16": {"enabled": "auto"}}, "only an integration"),
    ],
)
def test_a_consequence_of_a_wrong_or_unknown_key_is_no_complaint(config, says):
    (complaint,) = complaints(config)
    assert says in complaint
