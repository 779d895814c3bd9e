"""Hostile configs: whatever is thrown at the reader, it reads it or raises one printable ConfigError."""

import contextlib
import io
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xds
from xds.engine.config.config import Config, parse_config
from xds.engine.config.optimizer import OPTIMIZERS
from xds.engine.config.scheduler import SCHEDULERS
from xds.launcher.check import main
from xds.utils.schema.section import Section, known_names, subsection

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
HOSTILE = [
    "\0",
    "\x1b[31m",
    "\ud800",
    "\u2028",
    "\u202e",
    "é",
    "'''",
    '"',
    "\\",
    "\r",
    "/*",
    "*/",
    "#",
]


def all_names(model: type[Section]) -> set[str]:
    found = set(known_names(model))
    for name in model.model_fields:
        inner = subsection(model, name)
        if inner is not None:
            found |= all_names(inner)
    return found


NAMES = sorted(
    {
        *all_names(Config),
        *(name for classes in (OPTIMIZERS, SCHEDULERS) for name in classes.from_torch),
        *(
            key
            for classes in (OPTIMIZERS, SCHEDULERS)
            for each in classes.built_in.values()
            for key in each
        ),
        *(
            "_comment",
            "a.b",
            "zero_optimization.stage",
            "stag",
            "max_grad_norm",
            "",
            ".",
            "_",
            *HOSTILE,
        ),
    }
)
TYPES = [*OPTIMIZERS.built_in, *OPTIMIZERS.from_torch, *SCHEDULERS.built_in, *SCHEDULERS.from_torch]
KEYS = st.sampled_from(NAMES) | st.text(max_size=8)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.integers(),
    st.floats(),
    st.sampled_from([*TYPES, "auto", "AUTO", "cpu", "nvme", "none", "bf16", "True", "1e5", "inf"]),
    st.sampled_from(HOSTILE),
    st.text(max_size=8),
    st.binary(max_size=3),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)
SECTIONS = [name for name in Config.model_fields if subsection(Config, name) is not None]


@st.composite
def configs(draw: st.DrawFn) -> dict:
    """A dict whose sections mostly hold keys that belong there."""
    config = draw(st.dictionaries(KEYS, VALUES, max_size=3))
    for section in draw(st.lists(st.sampled_from(SECTIONS), max_size=4)):
        own = sorted(known_names(subsection(Config, section)))
        config[section] = draw(st.dictionaries(st.sampled_from(own) | KEYS, VALUES, max_size=5))
    if draw(st.booleans()):
        kind = draw(st.sampled_from(TYPES))
        params = draw(st.dictionaries(KEYS, VALUES, max_size=4))
        config["optimizer"] = {"type": kind, "params": params}
        config["scheduler"] = {"type": kind, "params": draw(VALUES)}
    return config


def paths_of(model: type[Section], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key that xds knows."""
    found = []
    for name in sorted(known_names(model)):
        field = model.aliases.get(name, name)
        inner = subsection(model, field) if field in model.model_fields else None
        found += [(*path, name)] if inner is None else paths_of(inner, (*path, name))
    return found


PLAUSIBLE = st.one_of(
    st.booleans(),
    st.sampled_from(
        [None, 0, 1, 2, 3, 0.5, 1e9, "auto", "cpu", "nvme", "bf16", "mean", "a", [], {}]
    ),
)


@st.composite
def nearly_right(draw: st.DrawFn) -> dict:
    """A right config with some known keys set to values that they may take."""
    config: dict = {"train_batch_size": 8, "optimizer": {"type": draw(st.sampled_from(TYPES[:8]))}}
    for path in draw(st.lists(st.sampled_from(paths_of(Config)), max_size=3)):
        inner = config
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = draw(PLAUSIBLE)
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


SLOW = settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])


@SLOW
@given(configs() | nearly_right())
def test_any_dict(source):
    before = repr(source)
    config = read(source)
    assert repr(source) == before
    if config is not None:
        again = read(config.as_dict())
        assert again is not None and again.as_dict() == config.as_dict()


def mutated(text: str, draw: random.Random) -> str:
    """The text with some characters dropped, doubled, swapped or replaced."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + draw.choice((0, 1, 1, 2, 9, 40)))
        piece = draw.choice(
            ("", text[at:end] * 2, text[at:end][::-1], *HOSTILE, ",", "}", ":", "True")
        )
        text = text[:at] + piece + text[end:]
    return text


@pytest.mark.parametrize("seed", range(20))
def test_files_with_mistakes(seed, tmp_path):
    draw = random.Random(seed)
    for number in range(50):
        text = mutated(FILE, draw)
        path = tmp_path / f"{number}.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        read(path)
        read(text)


@pytest.mark.parametrize(
    "source",
    [
        {"zero_optimization": {"units": [1] * 300_000}},
        {"elasticity": {"micro_batch_sizes": [0] * 300_000}},
        {"optimizer": {"type": "Adam", "params": {"betas": [2] * 300_000}}},
        {"scheduler": {"type": "MultiStepLR", "params": {"milestones": ["x"] * 300_000}}},
        {"wandb": {"project": ["x" * 10_000_000]}},
    ],
    ids=["units", "sizes", "betas", "milestones", "text"],
)
def test_a_long_value_is_one_sentence(source):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source)
    (complaint,) = caught.value.complaints
    assert len(complaint) < 200


class Unprintable:
    def __repr__(self):
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
def test_one_mistake_is_one_complaint(source, world_size, said):
    source = {"train_micro_batch_size_per_gpu": 2, **source}
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, world_size=world_size)
    (complaint,) = caught.value.complaints
    assert complaint.startswith(said)


def test_what_as_dict_gives_before_the_ranks_are_known_is_read_back():
    config = parse_config({"train_micro_batch_size_per_gpu": 2})
    assert parse_config(config.as_dict()).as_dict() == config.as_dict()


@SLOW
@given(configs() | nearly_right())
def test_check_prints_or_refuses(source):
    try:
        text = json.dumps(source)
    except (TypeError, ValueError):
        return
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([text])
    assert code in (0, 2)
    assert (code == 0) is bool(out.getvalue()) and (code == 2) is bool(err.getvalue())
