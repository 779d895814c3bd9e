"""Configs in Hjson, which DeepSpeed reads: the same values as in JSON, and the place of a mistake."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xds
from xds.engine.config.config import parse_config
from xds.engine.config.hjson import Malformed, read_hjson

FILE = """
# a comment of this kind
train_batch_size: 8      // and of this
optimizer: {
  type: AdamW
  params: {"lr": 1e-4, betas: [0.9
    0.95], eps: 1e-8,} /* and
  of this */
}
'wandb': {
  enabled: false
  project: two words # and no comment
  group:
    '''
    one
      two
    '''
}
bf16: { enabled: true }
steps_per_print: Infinity
"""


def complaints(source):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source)
    return caught.value.complaints


def read(text, levels=40):
    return read_hjson(text, dict, levels)


def test_a_file_in_hjson_is_read_as_deepspeed_reads_it(tmp_path):
    path = tmp_path / "config.hjson"
    path.write_text(FILE)
    config = parse_config(path)
    assert config.train_batch_size == 8
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params == {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
    assert config.wandb.project == "two words # and no comment"
    assert config.wandb.group == "one\n  two"
    assert config.bf16.enabled and config.steps_per_print is None
    assert parse_config(f"{{{FILE}}}").as_dict() == config.as_dict()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: 2", {"a": 1, "b": 2}),
        ("{a: 1, b: 2,}", {"a": 1, "b": 2}),
        ("a:\n1\n", {"a": 1}),
        ("a: [1\n2\n]", {"a": [1, 2]}),
        ("a: [true, null,\n-2.5e1]", {"a": [True, None, -25.0]}),
        ("a: 'it\\'s \"so\"'", {"a": 'it\'s "so"'}),
        ('a: "\\u00e9\\n"', {"a": "é\n"}),
        ("a: auto # c", {"a": "auto # c"}),
        ("a: 1 # c", {"a": 1}),
        ("a: 01", {"a": "01"}),
        ("a: \u2028", {"a": "\u2028"}),
        ("a: ''''''", {"a": ""}),
        ("", {}),
        ("# only a comment", {}),
        ("a: {}\r\nb: []\r\n", {"a": {}, "b": []}),
    ],
)
def test_values(text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ("a: 1\nb: {\n  c: 2\n", 4, 1, 'the "{" in line 2 is not closed'),
        ("{\n  a: x,\n}", 2, 6, "put it in double quotes"),
        ('{\n  a: 1 "b": 2\n}', 2, 6, "put it in double quotes"),
        ("{\n  a: {} b: 2\n}", 2, 9, 'expecting "," between two values'),
        ("{\n  a: 'x\n}", 2, 6, "does not end in its line"),
        ("{\n  a: 'x\\q'\n}", 2, 8, "invalid \\escape"),
        ("{\n  a: '''x\n}", 2, 6, "the text after ''' does not end"),
        ("{\n  a: ,\n}", 2, 6, "a value is missing"),
        ("{\n  a 1\n}", 2, 5, 'expecting ":" after a key'),
        ("{a: 1\n}}", 2, 2, "more text after the end"),
        ('{\n  "a": True\n}', 2, 8, "True is Python: write true"),
        ('{"fp16": {"enabled": False}}', 1, 22, "False is Python: write false"),
        ('{"x": 1, "steps_per_print": None,}', 1, 29, "None is Python: write null"),
    ],
)
def test_a_mistake_has_its_place_in_the_file(text, line, column, says):
    (complaint,) = complaints(text) if text.startswith("{") else [_malformed(text)]
    first = complaint.split("\n")[0]
    assert first.startswith(f"line {line}, column {column}: is not JSON: ")
    assert says in first


def _malformed(text):
    with pytest.raises(Malformed) as caught:
        read(text)
    at = caught.value.position
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return f"line {line}, column {column}: is not JSON: {caught.value}"


def test_a_duplicate_key_and_deep_levels_are_complaints_as_in_json():
    assert "fp16 = {}: appears twice" in complaints("{fp16: {}\nfp16: {}}")[0]
    assert "nested deeper" in complaints("{a: " * 5000)[0]
    assert "thousands of digits" in complaints("{a: " + "9" * 5000 + "}")[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.sampled_from([None, 1, "\t"]))
def test_json_is_hjson(value, indent):
    text = json.dumps(value, indent=indent, allow_nan=True)
    if "Infinity" not in text:
        assert read(text) == value


PIECES = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", "\n", " ", "\r\n", "\\", '"', "'", "'''", "#", "//", "/*"),
        *("*/", "a", "b: 1", "c: {", "true", "null", "1e5", "-", '"k": ', "'x'", "True", "\0"),
        *("\ud800", "\u2028", "é", "auto\n", "zero_optimization: {", "stage: 2\n"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=25), st.booleans())
def test_any_text_is_read_or_refused_with_complaints(pieces, in_braces):
    text = "".join(pieces)
    try:
        parse_config("{" + text + "}" if in_braces else "{" + text)
    except xds.ConfigError as error:
        assert error.complaints
        assert str(error).isprintable() or "\n" in str(error)
