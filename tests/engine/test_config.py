"""The config as a whole: where it comes from, what it is, and every complaint at once."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import xds
from xds.engine.config.config import Config, parse_config
from xds.engine.telemetry.screen import log_notes

SMALL = {"train_batch_size": 8}


def complaints(source: object, **more: Any) -> list[str]:
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, **more)
    return list(caught.value.complaints)


# ---- sources ---------------------------------------------------------------------------------------------


def test_a_path_text_base64_and_dict_give_the_same(tmp_path: Path) -> None:
    text = json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}})
    path = tmp_path / "config.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    wanted = Config.load(text)
    for source in (path, str(path), encoded, json.loads(text)):
        assert parse_config(source).as_dict() == wanted.as_dict()
    assert Config.load(wanted) is wanted


def test_comments_are_read() -> None:
    text = """
    // first
    { // second
      "train_batch_size": 8, // third, with "quotes"
      "wandb": {"project": "a // b # c, }", "group": "\\"// c"}
    }
    """
    config = parse_config(text)
    assert config.train_batch_size == 8
    assert (config.wandb.project, config.wandb.group) == ("a // b # c, }", '"// c')


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


def test_other_forms_need_the_package_hjson(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    for text in (f"{{{HJSON}}}", '{"train_batch_size": 8,}'):
        assert "pip install hjson" in complaints(text)[0]


def test_hjson_is_read_by_its_package() -> None:
    pytest.importorskip("hjson")
    assert complaints(f"{{{HJSON}}}")[0].startswith('wandb.group = "again": appears twice')
    config = parse_config(f"{{{HJSON}}}".replace(", group: 'again'", ""))
    assert config.train_batch_size == 8 and config.wandb.group == "two words"
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-4, "betas": (0.9, 0.95)}
    assert "line 2, column 5: is not JSON" in complaints("{a: 1\nb: {]}}")[0]


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ('{\n  "train_batch_size": 8,\n  "fp16" {}\n}', 3, 10, "':' delimiter"),
        ("{\n  train_batch_size\n}", 2, 3, "key in double quotes"),
        ('{"fp16": {"enabled": False}}', 1, 22, "False is Python: write false"),
        ('{"a": tru}', 1, 7, "expecting value"),
        ('{"a": 1 /* x', 1, 9, "',' delimiter"),
    ],
)
def test_malformed_json_names_line_and_column_and_shows_the_line(
    text: str, line: int, column: int, reason: str
) -> None:
    (complaint,) = complaints(text)
    assert complaint.startswith(f"line {line}, column {column}: ")
    first, shown, arrow = complaint.split("\n")
    assert reason in first
    assert shown.strip() == text.split("\n")[line - 1].strip()
    assert arrow.index("^") - 4 == column - 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (3, "must be a path, JSON text, a dict or a Config, not int"),
        ("missing.json", "no such file"),
        ("[1, 2]", "must be an object"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nested deeper"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "thousands of digits"),
        ({"train_batch_size": object()}, "must be a JSON value, not a Python object"),
        ({"train_batch_size": 8, 3: 4}, "a key must be text"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "fp16.enabled = false: appears twice"),
    ],
)
def test_sources_that_cannot_be_read(source: object, says: str) -> None:
    assert any(says in complaint for complaint in complaints(source))


def test_folder_and_foreign_encoding(tmp_path: Path) -> None:
    assert "cannot be read" in complaints(tmp_path)[0]
    path = tmp_path / "latin.json"
    path.write_bytes(b'{"wandb": {"project": "\xe9"}}')
    assert "not UTF-8" in complaints(path)[0]


def test_reading_a_config_and_elastic_sizes_import_no_torch() -> None:
    elastic = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2]}
    code = (
        "import sys, xds; from xds.launcher.elasticity import main; "
        "xds.Config.load({'train_batch_size': 8}).resolve(2); "
        f"assert not main([{json.dumps({'elasticity': elastic})!r}]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---- what a config is ------------------------------------------------------------------------------------


def test_a_config_is_frozen_travels_checks_its_types_and_hides_its_secrets() -> None:
    source = {**SMALL, "optimizer": {"type": "AdamW"}, "comet": {"api_key": "abc"}}
    config = parse_config(source, world_size=2)
    with pytest.raises(ValueError, match="frozen"):
        config.train_batch_size = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert (config.comet.api_key, config.as_dict()["comet"]["api_key"]) == ("abc", "***")
    for wrong in ({"stage": "1"}, {"stage": 4}, {"stag": 1}):
        with pytest.raises(ValueError, match="zero_optimization.stag"):
            Config(train_batch_size=8, zero_optimization=wrong)
    assert Config(zero_optimization={"stage": 2.0}).zero_optimization.stage == 2


def test_keys_without_effect_are_named_in_one_line_once_by_rank_0(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {
        **SMALL,
        "prescale_gradients": True,
        "aio": {"thread_count": 2},
        "zero_optimization": {"contiguous_gradients": False, "sub_group_size": 1e9},
    }
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.WARNING, logger="xds"):
        Config.load(source)
        assert not caplog.records
        monkeypatch.delenv("RANK")
        Config.load(source)
        Config.load(source)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("config: 4 keys have no effect (prescale_gradients, aio.thread_count, ")
    assert text.endswith("zero_optimization.sub_group_size); `xds check` says why")


# ---- complaints ------------------------------------------------------------------------------------------


def test_all_wrong_keys_come_at_once_and_then_what_does_not_go_together() -> None:
    source: dict[str, Any] = {
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": "1",
        "zero_optimization": {"stage": 9, "stag": 1},
        "optimizer": {"type": "AdmaW"},
        "nebula": {"enabled": True},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
    }
    wrong = {"gradient_clipping", "zero_optimization.stage", "zero_optimization.stag"}
    found = complaints(source, world_size=2)
    assert {said.split(" = ")[0] for said in found} == wrong | {
        "optimizer.type",
        "nebula.enabled",
    }
    for key in ("gradient_clipping", "zero_optimization", "optimizer", "nebula"):
        del source[key]
    precision, size = complaints(source, world_size=2)
    assert "fp16.enabled and bf16.enabled exclude one another" in precision
    assert size.startswith("train_batch_size = 7: ")


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
def test_a_consequence_of_a_wrong_or_unknown_key_is_no_complaint(
    config: dict[str, Any], says: str
) -> None:
    (complaint,) = complaints(config)
    assert says in complaint


@pytest.mark.parametrize(
    "source",
    [
        {"zero_optimization": {"units": [1] * 300_000}},
        {"optimizer": {"type": "Adam", "params": {"betas": [2] * 300_000}}},
        {"scheduler": {"type": "MultiStepLR", "params": {"milestones": ["x"] * 300_000}}},
        {"wandb": {"project": ["x" * 10_000_000]}},
    ],
    ids=["units", "betas", "milestones", "text"],
)
def test_a_long_value_is_one_sentence(source: dict[str, Any]) -> None:
    (complaint,) = complaints(source)
    assert len(complaint) < 200


def test_a_line_says_what_an_auto_means_that_nothing_has_filled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": "auto",
    }
    caplog.set_level("INFO", "xds")
    for auto, text in (
        ({}, ['config: "auto" that no integration has filled: gradient_clipping is 1.0, ']),
        ({"gradient_clipping": 0.5, "steps_per_print": 7}, []),
    ):
        caplog.clear()
        config = Config.load({**source, "gradient_clipping": "auto"}, auto=auto)
        assert config.gradient_clipping == (0.5 if auto else 1.0)
        log_notes(config, 0)
        assert [record.getMessage()[: len(text[0])] for record in caplog.records] == text
