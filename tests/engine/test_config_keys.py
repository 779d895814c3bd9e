"""Every key of a config, from the tables of docs/config.md: what it takes and refuses; and anything else."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xds
from xds.engine.config.config import Config, parse_config
from xds.engine.config.optimizer import OPTIMIZERS
from xds.engine.config.scheduler import SCHEDULERS
from xds.launcher.check import main as check
from xds.launcher.command_line.config_docs import MARK, reference
from xds.utils.schema.section import Group, NoEffect, Refused, Section, known_names, subsection

PACKAGE = Path(xds.__file__).resolve().parent
DOCS = Path(__file__).parents[2] / "docs" / "config.md"
SMALL = {"train_batch_size": 8, "gradient_clipping": 0}
LENGTH = {
    "clustering_type": "single_cluster",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "custom",
}
# keys without which a value other than the default is refused, or is not what a config has in the end
BESIDE: dict[str, dict[str, Any]] = {
    "outer.quorum": {"recovery": {"enabled": True}},
    "curriculum_learning.enabled": {
        "curriculum_learning": {
            "min_difficulty": 8,
            "max_difficulty": 64,
            "schedule_type": "custom",
        }
    },
    "data_efficiency.data_routing.random_ltd.enabled": {
        "data_efficiency": {
            "data_routing": {
                "random_ltd": {
                    "total_layer_num": 4,
                    "random_ltd_layer_num": 1,
                    "random_ltd_layer_id": [1],
                    "random_ltd_schedule": {
                        "min_value": 8,
                        "max_value": 16,
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": 1, "seq_per_step": 1},
                    },
                }
            }
        }
    },
    "elasticity.enabled": {
        "train_batch_size": "auto",
        "elasticity": {"max_train_batch_size": 64, "micro_batch_sizes": [2]},
    },
    "data_efficiency.data_sampling.curriculum_learning": {
        "data_efficiency": {
            "data_sampling": {"curriculum_learning": {"curriculum_metrics": {"length": LENGTH}}}
        }
    },
    "data_efficiency.data_sampling.dynamic_batching": {
        "data_efficiency": {"data_sampling": {"dynamic_batching": {"max_tokens": 8}}}
    },
    "zero_optimization.cpu_offload_param": {"zero_optimization": {"stage": 3}},
    "zero_optimization.offload_optimizer": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "/disk"}}
    },
    "zero_optimization.offload_param": {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/disk"}}
    },
    "zero_optimization.shared_parameters": {"zero_optimization": {"stage": 1}},
    "zero_optimization.zero_": {"zero_optimization": {"stage": 3}},
    "zero_optimization.zeropp_loco_param": {
        "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}
    },
}
for _name, _params in (
    ("weight_quantization", {"start_bits": 8, "target_bits": 8}),
    ("activation_quantization", {"bits": 8}),
    *((f"{_kind}_pruning", {"dense_ratio": 0.5}) for _kind in ("sparse", "row", "head", "channel")),
):
    _section: dict[str, Any] = {"different_groups": {"all": {"params": _params}}}
    if _name == "head_pruning":
        _section["shared_parameters"] = {"num_heads": 2}
    BESIDE[f"compression_training.{_name}.shared"] = {"compression_training": {_name: _section}}
BESIDE["compression_training.layer_reduction.enabled"] = {
    "compression_training": {
        "layer_reduction": {"module_name_prefix": "layer", "teacher_layer": [0]}
    }
}
BESIDE["bf16.bf16_master"] = BESIDE["bf16.bf16_optimizer"] = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}
}
BESIDE["fp16.fp16_master"] = {"fp16": {"enabled": True}}
BESIDE["quantize_training.quantize_bits.start_bits"] = {
    "quantize_training": {"quantize_bits": {"target_bits": 1}}
}
# values of keys whose type is more than its JSON schema: right ones, wrong ones
SPECIAL: dict[str, tuple[list[Any], list[Any]]] = {
    "compression_training.layer_reduction.teacher_layer": ([[0, 2], []], [[-1], ["2"], 2]),
    "data_efficiency.data_routing.random_ltd.random_ltd_layer_id": (
        [[1, 2], []],
        [[-1], ["1"], 1],
    ),
    "progressive_layer_drop.theta": ([1, 0.5], [0, 1.5, True, "1"]),
    "elasticity.micro_batch_sizes": ([[2, 4]], [[], [0], ["2"], 2]),
    "aio.block_size": ([4096, 1 << 20], [4097, 0, "1M"]),
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics": (
        [{"length": LENGTH}],
        [3, [LENGTH], "length"],
    ),
    "data_efficiency.data_sampling.dynamic_batching.lr_scaling_method": (
        ["linear", "SQRT", "none"],
        ["cubic", 3, True],
    ),
    "outer.quorum": ([1, 2, None], [0, 1.5, True, "1"]),
    "data_types.param_dtype": (["fp32"], ["bf16", "int8", True]),
    "data_types.keep_in_fp32_modules": (
        [["auto", "norm"], [], ["*.gate"]],
        ["norm", [3], ["("], [""], True],
    ),
    "data_types.fp32_outputs": ([[]], ["norm", [3], ["["], True]),
    "elasticity.version": ([0.1, 0.2], [0.3, "0.2", True]),
    "fp16.loss_scale": ([0, 1e-30, 1e30, 128], [1e-300, 1e300, True, -1, "1"]),
    "fp16.min_loss_scale": ([1e-30, 1e30], [1e39, True, -1]),
    "float8.filter": (["auto", ["mlp", "q_proj$"]], [[], ["("], [1], "mlp", 3]),
    "float8.recipe": (["rowwise", "rowwise_with_gw_hp"], ["mxfp8", "nvfp4", "fast", 8]),
    "flops_profiler.profile_step": ([0, [1, 2]], [[3, 1], [1], -1, "1"]),
    "pipeline.partition": (["uniform", "type:(A|B)$", [0, 3, 7]], ["even", "type:(", 3]),
    "pipeline.schedule": (["gpipe", "zbv", "auto"], ["2f2b", "orders/mine.csv", 3]),
    "sparse_attention.local_window_blocks": ([[4], [1, 2]], [[], [0], ["2"], 2]),
    "sparse_attention.global_block_indices": ([[0], [5, 1]], [[-1], ["a"], 2]),
    "sparse_attention.global_block_end_indices": ([[1], [3, 4]], [[-1], ["a"], 2]),
    "outer.delay": ([0, 1.0, 29], [-1, "2", True, 2.5]),
    "outer.fragments": ([1, 2.0, 30], [0, "2", True, 2.5]),
    "outer.mix": ([0.0, 0.5], [-0.1, 1, "0.5", True]),
    "outer.optimizer.params.momentum": ([0.0, 0.9], [-0.1, 1, "0.5", True]),
    "sparse_attention.num_global_blocks": ([1, 2.0, 4], [0, "2", True, 2.5]),
    "sparse_attention.num_different_global_patterns": ([1, 1.0], [0, "2", True, 2.5]),
    "zero_optimization.mics_shard_size": ([-1, 2], [-2, True, "2"]),
}


class Key(NamedTuple):
    """A key of a file. `what`: the JSON schema of a field, or the entry of a table."""

    path: str
    what: Any

    def config(self, *values: object) -> dict[str, Any]:
        """A right config with a value at this key, or with its section alone."""
        found: dict[str, Any] = dict(SMALL)
        for path, more in BESIDE.items():
            if self.path.startswith(path):
                found |= copy.deepcopy(more)
        inner = found
        *names, last = self.path.split(".")
        for name in names:
            inner = inner.setdefault(name, {})
        inner.pop(last, None)
        for value in values:
            inner[last] = value
        return found


def sections(model: type[Section] = Config, path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """All sections but those of classes with arguments, each with the beginning of its keys' paths."""
    yield path, model
    for name in model.model_fields.keys() - {"optimizer", "scheduler"}:
        inner = subsection(model, name)
        if inner is not None:
            yield from sections(inner, f"{path}{name}.")


def fields() -> Iterator[Key]:
    """The keys that xds reads."""
    for path, model in sections():
        schemas = model.model_json_schema()["properties"]
        for name in model.model_fields.keys() - model.results - {"optimizer", "scheduler"}:
            if subsection(model, name) is None:
                yield Key(path + name, schemas[name])


def entries(table: Any, path: str) -> Iterator[Key]:
    """The other keys that xds knows: without effect, refused, or details of what is refused."""
    for name, each in table.items():
        if not isinstance(each, Group):
            yield Key(path + name, each)
        elif not each.present:
            yield from entries(each.keys, f"{path}{name}.")


FIELDS = sorted(fields(), key=lambda key: key.path)
ENTRIES = [key for path, model in sections() for key in entries(model.others, path)]


def complaints(source: dict[str, Any]) -> list[str]:
    try:
        parse_config(source)
    except xds.ConfigError as error:
        return list(error.complaints)
    return []


# ---- keys that xds reads ---------------------------------------------------------------------------------


def right_values(key: Key) -> list[Any]:
    if key.path in SPECIAL:
        return SPECIAL[key.path][0]
    found: list[Any] = []
    for each in key.what.get("anyOf", [key.what]):
        least, most = each.get("minimum", 0.5), each.get("maximum")
        if "enum" in each or "const" in each:
            found += each.get("enum", [each.get("const")])
            continue
        found += {
            "boolean": [True, False],
            "integer": [least, float(least), 2**40 if most is None else most],
            "number": [least, 1] if most is None else [least, most],
            "string": ["a b", "3"],
            "array": [["a", "b*"], []],
            "object": [{}],
            "null": [],
        }[each["type"]]
    return found


def wrong_values(key: Key) -> list[Any]:
    if key.path in SPECIAL:
        return SPECIAL[key.path][1]
    each = key.what.get("anyOf", [key.what])
    kinds = {one.get("type") for one in each if "enum" not in one and "const" not in one}
    is_number = bool(kinds & {"integer", "number"})
    found: list[Any] = [] if "object" in kinds else [{"a": 1}]
    found += [[{}]] if "array" in kinds else [[1]]
    found += [] if "string" in kinds else ["1.0", "true", "nonsense"]
    found += [] if "boolean" in kinds else [True]
    found += [] if is_number or key.path == "zero_allow_untested_optimizer" else [0, 1]
    found += [float("nan"), float("inf")] if "number" in kinds else []
    found += [2.5] if "integer" in kinds and "elements" not in key.what.get("need", "") else []
    for one in each:
        found += [one["minimum"] - 1] if "minimum" in one else []
        found += [one["exclusiveMinimum"]] if "exclusiveMinimum" in one else []
        found += [one["maximum"] + 1] if "maximum" in one else []
    return [value for value in found if key.path != "steps_per_print" or value != float("inf")]


def test_a_right_value_is_read_back() -> None:
    assert len(FIELDS) > 150
    for key in FIELDS:
        for value in right_values(key):
            source = key.config(value)
            before = copy.deepcopy(source)
            found: Any = parse_config(source)
            assert source == before
            for name in key.path.split("."):
                found = getattr(found, name)
            assert (list(found) if isinstance(found, tuple) else found) == value, key.path
            assert type(found) is int or key.what.get("type") != "integer", key.path


def test_a_wrong_value_is_one_sentence_that_names_key_value_and_need() -> None:
    for key in FIELDS:
        for value in wrong_values(key):
            (said,) = complaints(key.config(value)) or [""]
            assert said.startswith(f"{key.path} = ") and ": must be " in said, (key.path, value)
            is_text = isinstance(value, str) and value != "nonsense"
            if is_text and {"boolean": "true", "number": "1.0"}.get(key.what.get("type")) == value:
                assert said.endswith(f"not text: write {value} without quotes"), said


def test_null_is_the_same_as_no_key_and_auto_too_unless_only_an_integration_knows_it() -> None:
    asked = []
    for key in FIELDS:
        if key.path in ("train_batch_size", "gradient_clipping"):  # needed, and another default
            continue
        without = parse_config(key.config()).as_dict()
        assert parse_config(key.config(None)).as_dict() == without, key.path
        found = complaints(key.config("auto"))
        if not found:
            own = key.path.endswith(
                (
                    "schedule",
                    "ratio",
                    "checkpointing.enabled",
                    "autoep_size",
                    "fp32_modules",
                    "t.interval",
                )
            )
            assert (
                own
                or key.what.get("type") == "string"
                or parse_config(key.config("auto")).as_dict() == without
            ), key.path
        elif key.path != "train_micro_batch_size_per_gpu":
            assert found[0].startswith(f'{key.path} = "auto": only an integration can fill it')
            asked.append(key.path)
    assert {"zero_optimization.stage", "fp16.enabled", "bf16.enabled"} <= {*asked}
    for key in ENTRIES:
        assert parse_config(key.config(None)).without_effect == (), key.path


def test_other_spellings_mean_the_same_and_two_at_once_are_refused() -> None:
    rights = {key.path: right_values(key)[0] for key in FIELDS}
    for path, model in sections():
        for alias, name in model.aliases.items():
            value = rights.get(path + name, {} if name in model.model_fields else None)
            one, other = (Key(path + each, None).config(value) for each in (alias, name))
            assert parse_config(one).as_dict() == parse_config(other).as_dict(), path + alias
            inner = one
            for part in path.split(".")[:-1]:
                inner = inner[part]
            inner[name] = value
            assert any("sets the same option as" in said for said in complaints(one)), alias


# ---- keys that xds knows and does not read ---------------------------------------------------------------

BY_NEED = {  # the beginning of what a value must be: right values, a wrong one
    "true or false": ([True, False], 1),
    "a whole number": ([1, 3], "1"),
    "a number": ([1, 3], "1"),
    "text": (["dense", "other"], 3),
    "an object": ([{}], 3),
    "a list": ([[]], 3),
    "any value": ([3], None),
}


def test_keys_without_effect_are_named_and_refused_ones_refused_unless_they_change_nothing() -> (
    None
):
    for key in ENTRIES:
        ((rights, wrong),) = (
            each for need, each in BY_NEED.items() if key.what.need.startswith(need)
        )
        for value in rights:
            found, idle = complaints(key.config(value)), ()
            if not found:
                idle = parse_config(key.config(value)).without_effect
            one = (value, type(value) is bool)
            if isinstance(key.what, Refused):
                is_harmless = one in [(each, type(each) is bool) for each in key.what.harmless]
                said = [each for each in found if each.startswith(f"{key.path} = ")]
                assert bool(said) is not is_harmless and idle == (), (key.path, value)
                assert not said or said[0].endswith(f": {key.what.why}")
            elif isinstance(key.what, NoEffect):
                is_same = one in [(each, type(each) is bool) for each in key.what.same]
                assert idle == (() if is_same else ((key.path, key.what.why),)), key.path
            else:
                assert not any(said.startswith(key.path) for said in found), key.path
                assert idle == (), key.path
        if wrong is not None:
            said = [each for each in complaints(key.config(wrong)) if each.startswith(key.path)]
            assert len(said) == 1 and f": must be {key.what.need}" in said[0], key.path


# ---- sections --------------------------------------------------------------------------------------------


def test_each_section_ignores_comments_and_refuses_unknown_keys_and_other_types() -> None:
    for path, _ in sections():
        comment = Key(f"{path}_any", None)
        assert parse_config(comment.config({"stage": 9})).without_effect == (), path
        (said,) = complaints(Key(f"{path}qqqqqq", None).config(1))
        assert said.startswith(f"{path}qqqqqq = 1: unknown key; "), said
        if path:
            (said,) = complaints(Key(path[:-1], None).config(3))
            assert said == f"{path[:-1]} = 3: must be an object {{...}}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"gradient_acumulation_steps": 4}, 'did you mean "gradient_accumulation_steps"?'),
        ({"stage": 2}, 'it belongs to "zero_optimization.stage"'),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, 'did you mean "device"?'),
        ({"notes": []}, "unknown key"),  # of Config, but no key
        ({"max_grad_norm": 1}, 'max_grad_norm = 1: unknown key; did you mean "gradient_clipping"?'),
        ({"lr": 1}, 'it belongs to "optimizer.params.lr"'),
        ({"optimizer": {"type": "Adam", "learning_rate": 1}}, 'mean "optimizer.params.lr"?'),
        ({"mode": "x"}, "unknown key; remove it, or see docs/config.md"),
        ({"zerro": 1}, "unknown key; remove it, or see docs/config.md"),
        ({"zero_optimization": {"gradient_clipping": 1}}, 'it belongs to "gradient_clipping"'),
        (
            {"zero_optimization": {"nvme_path": "/x"}},
            'it belongs to "zero_optimization.offload_optimizer.nvme_path" or '
            '"zero_optimization.offload_param.nvme_path"',
        ),
        ({"bf16": {"enabled": True, "loss_scale": 0}}, "it has no loss scale: remove it"),
        (
            {"zero_optimization.stage": 2},
            'keys are nested, not joined by dots: write "zero_optimization": {"stage": ...}',
        ),
        ({"a.b.c": 1}, 'write "a": {"b": {"c": ...}}'),
        ({"ops": {"required": True}}, 'did you mean "require"?'),
    ],
)
def test_an_unknown_key_gets_a_hint_only_where_one_is_known(
    source: dict[str, Any], says: str
) -> None:
    (said,) = complaints({**SMALL, **source})
    assert says in said


# ---- the page and the code -------------------------------------------------------------------------------


def test_the_page_is_current_and_names_every_key() -> None:
    text = reference()
    assert DOCS.read_text().partition(MARK)[2] == "\n" + text, (
        "run: python -m xds.launcher.command_line.config_docs docs/config.md"
    )
    assert all(f"`{key.path.rpartition('.')[2]}`" in text for key in [*FIELDS, *ENTRIES])


def test_every_key_that_is_called_supported_is_read_by_some_code() -> None:
    folders = (
        *"engine zero offload pipe tensor experts recovery outer compression ops launcher".split(),
        "deepspeed",
    )
    files = [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    read = {name for path in files for name in re.findall(r"\.(\w+)", path.read_text())}
    assert not [key.path for key in FIELDS if key.path.rpartition(".")[2] not in read]


# ---- anything --------------------------------------------------------------------------------------------

HOSTILE = ["\0", "\x1b[31m", "\ud800", "\u2028", "\u202e", "é", "'''", '"', "\\", "\r", "/*", "#"]
TYPES = [*OPTIMIZERS.built_in, *OPTIMIZERS.from_torch, *SCHEDULERS.built_in, *SCHEDULERS.from_torch]
OWN = {path: sorted(known_names(model)) for path, model in sections()}
NAMES = sorted({*sum(OWN.values(), []), *TYPES, "_comment", "a.b", "stag", "", ".", "_", *HOSTILE})
KEYS = st.sampled_from(NAMES) | st.text(max_size=8)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.integers(),
    st.floats(),
    st.sampled_from(
        [*TYPES, *HOSTILE, "auto", "AUTO", "cpu", "nvme", "none", "bf16", "1e5", "inf"]
    ),
    st.text(max_size=8),
    st.binary(max_size=3),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)
PLAUSIBLE = st.sampled_from(
    [True, False, None, 0, 1, 2, 3, 0.5, 1e9, "auto", "cpu", "nvme", "bf16", "a", [], {}]
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Known sections with keys that mostly belong there, and values of any kind."""
    config = draw(st.dictionaries(KEYS, VALUES, max_size=3))
    for path in draw(st.lists(st.sampled_from([path for path in OWN if path]), max_size=4)):
        keys = st.sampled_from(OWN[path]) | KEYS
        config[path.partition(".")[0]] = draw(st.dictionaries(keys, VALUES, max_size=5))
    if draw(st.booleans()):
        kind = draw(st.sampled_from(TYPES))
        params = draw(st.dictionaries(KEYS, VALUES, max_size=4))
        config["optimizer"] = {"type": kind, "params": params}
        config["scheduler"] = {"type": kind, "params": draw(VALUES)}
    return config


@st.composite
def nearly_right(draw: st.DrawFn) -> dict[str, Any]:
    """A right config with some known keys set to values that they may take."""
    config: dict[str, Any] = {"optimizer": {"type": draw(st.sampled_from(TYPES[:8]))}}
    for key in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        config |= key.config(draw(PLAUSIBLE))
    return config


def read(source: object) -> Config | None:
    """The config, or None where it is refused as it should be."""
    try:
        return parse_config(source, auto={"optimizer.params.lr": 1}, world_size=2)
    except xds.ConfigError as error:
        assert error.complaints
        for line in str(error).split("\n"):
            assert line.isprintable(), line
        return None


@settings(max_examples=100, deadline=None, suppress_health_check=[*HealthCheck])
@given(configs() | nearly_right())
@pytest.mark.slow
def test_any_dict_is_read_or_refused_and_shown_by_check(source: dict[str, Any]) -> None:
    before = repr(source)
    config = read(source)
    assert repr(source) == before
    if config is not None and not config.elasticity.enabled:  # it sets the batch sizes anew
        again = read(config.as_dict())
        assert again is not None and again.as_dict() == config.as_dict()
    try:
        text = json.dumps(source)
    except (TypeError, ValueError):
        return
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = check([text])
    assert (code == 0) is bool(out.getvalue()) and (code == 2) is bool(err.getvalue())
    assert code in (0, 2)


def test_a_config_that_is_read_from_all_its_keys_does_not_quantize() -> None:
    """null of quantize_training.enabled means: where quantize_bits is given."""
    config = parse_config({"train_batch_size": 8})
    assert parse_config(config.as_dict()).as_dict()["quantize_training"]["enabled"] is False
    given = parse_config(
        {"train_batch_size": 8, "quantize_training": {"quantize_bits": {"start_bits": 8}}}
    )
    assert given.as_dict()["quantize_training"]["enabled"] is True


FILE = """{
  // a comment
  "train_batch_size": 8, "_comment": "x",
  "fp16": {"enabled": true, "loss_scale": 0},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
  "zero_optimization": {
    "stage": 2, "reduce_bucket_size": 5e8, // elements
    "offload_optimizer": {"device": "cpu"}
  },
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
}
"""


def mutated(text: str, draw: random.Random) -> str:
    """The text with some characters dropped, doubled, swapped or replaced."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + draw.choice((0, 1, 1, 2, 9, 40)))
        changes = ("", text[at:end] * 2, text[at:end][::-1], *HOSTILE, ",", "}", ":", "True")
        text = text[:at] + draw.choice(changes) + text[end:]
    return text


def test_files_with_mistakes(tmp_path: Path) -> None:
    assert read(FILE) is not None
    draw, path = random.Random(0), tmp_path / "config.json"
    for number in range(250):
        text = mutated(FILE, draw)
        if number % 10 == 0:
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            read(path)
        read(text)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("source", "world_size", "said"),
    [
        ({"bogus": Unprintable()}, None, "bogus = a Python Unprintable: must be a JSON value"),
        ({"train_batch_size": 1e300}, None, "train_batch_size = 1e+300: must be a whole number b"),
        ({"zero_optimization": {"zenflow": {"a": 1}}}, None, "zero_optimization.zenflow = "),
        ({"comet": {"api_key": ["k"]}}, None, 'comet.api_key = "***": must be text'),
        ({"wall.clock_breakdown": True}, None, "wall.clock_breakdown = true: unknown key; did "),
        ({"checkpoint": {"preemption_seconds": 1e300}}, None, "checkpoint.preemption_seconds = "),
        ({}, "8", 'world size = "8": must be a whole number, at least 1'),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 7}},
            10**12,
            "zero_optimization.mics_shard_size = 7: must divide",
        ),
    ],
)
def test_one_mistake_is_one_complaint(source: dict[str, Any], world_size: Any, said: str) -> None:
    source = {"train_micro_batch_size_per_gpu": 2, **source}
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, world_size=world_size)
    (complaint,) = caught.value.complaints
    assert complaint.startswith(said)


@pytest.mark.parametrize(
    ("params", "auto", "said"),
    [
        ({"lrr": "auto"}, {}, 'lrr = "auto": unknown key; did you mean "lr"?'),
        ({"lr": {"enabled": "auto"}}, {}, 'lr = {"enabled": "auto"}: must be a number, at least'),
        ({"bias_correction": "auto"}, {}, 'bias_correction = "auto": only an integration can fill'),
        ({"lr": "auto"}, {"optimizer.params.lr": "auto"}, 'lr = "auto": only an integration can'),
    ],
)
def test_auto_for_an_argument_is_one_complaint_that_fits_it(
    params: dict[str, Any], auto: dict[str, Any], said: str
) -> None:
    source = {"train_batch_size": 8, "optimizer": {"type": "adamw", "params": params}}
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, auto=auto)
    (complaint,) = caught.value.complaints
    assert complaint.startswith(f"optimizer.params.{said}")
    assert ("write true or false" in complaint) is ("bias_correction" in params)
