"""A PartialState that counted one rank before accelerate knew of DeepSpeed, and runs that never told it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from xds.engine.deepspeed import accelerate as unused
from xds.engine.deepspeed.stand_in import AliasFinder

# as accelerate's class does: it asks for the version before it makes its state
ACCELERATOR = """
def __init__(ask, cpu, deepspeed_plugins):
    ask()
"""


class Named:
    name = "deepspeed"


def ask() -> None:
    list(AliasFinder().find_distributions(Named()))


@pytest.mark.parametrize(
    ("num_counted", "later", "plugin", "cpu", "world_size", "counts_again"),
    [
        (1, {}, "a plugin", False, "2", True),
        (1, {}, {"teacher": "a plugin"}, False, "2", True),
        (2, {}, "a plugin", False, "2", False),
        (1, {"num_processes": 1}, "a plugin", False, "2", False),
        (1, {}, None, False, "2", False),
        (1, {}, "a plugin", True, "2", False),
        (1, {}, "a plugin", False, "1", False),
    ],
)
def test_ranks_are_counted_again_for_an_accelerator_with_a_plugin(
    num_counted: int,
    later: dict[str, Any],
    plugin: Any,
    cpu: bool,
    world_size: str,
    counts_again: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The dictionary that all PartialStates share is emptied: accelerate fills it again."""
    shared = {"num_processes": num_counted, "backend": None}
    state: Any = ModuleType("accelerate.state")
    state.PartialState = type("PartialState", (), {"_shared_state": shared})
    state.AcceleratorState = type("AcceleratorState", (), {"_shared_state": later})
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    for name, value in (("USE_DEEPSPEED", "true"), ("USE_CPU", "")):
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("RANK", "0")
    names: dict[str, Any] = {"__name__": "accelerate.accelerator"}
    exec(ACCELERATOR, names)
    with caplog.at_level(logging.WARNING, "xds"):
        names["__init__"](ask, cpu, plugin)
    assert (shared == {}) is counts_again
    assert ("counts 2 from here on" in caplog.text) is counts_again


@pytest.mark.parametrize(
    ("kind", "world_size", "rank", "said"),
    [
        ("NO", "2", "0", "each rank alone"),
        ("MULTI_GPU", "2", "0", "MULTI_GPU"),
        ("DEEPSPEED", "2", "0", ""),
        ("NO", "1", "0", ""),
        ("NO", "2", "1", ""),
        (None, "2", "0", ""),
    ],
)
def test_a_run_that_trained_without_deepspeed_is_told_at_its_end(
    kind: str | None,
    world_size: str,
    rank: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state: Any = ModuleType("accelerate.state")
    shared = {} if kind is None else {"distributed_type": SimpleNamespace(name=kind)}
    state.AcceleratorState = type("AcceleratorState", (), {"_shared_state": shared})
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.WARNING, "xds"):
        unused.warn_of_unused()
    assert bool(caplog.records) is bool(said)
    assert said in caplog.text


ENDS = """
import sys
from types import ModuleType, SimpleNamespace
from xds.engine.deepspeed import stand_in

stand_in.activate()
state = sys.modules["accelerate.state"] = ModuleType("accelerate.state")
state.AcceleratorState = SimpleNamespace(_shared_state={"distributed_type": SimpleNamespace(name="NO")})
if sys.argv[1] == "used":
    stand_in.engine_was_made()
"""


@pytest.mark.parametrize("how", ["used", "unused"])
def test_a_run_that_made_an_engine_is_not_told(how: str) -> None:
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    command = [sys.executable, "-c", ENDS, how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ("each rank alone" in done.stderr) == (how == "unused")
