"""accelerate beside the stand-in: an ignored plugin, its placeholders, and its launch on several machines."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import xds
from xds import deepspeed
from xds.engine.deepspeed import accelerate
from xds.engine.deepspeed.stand_in import AliasFinder

# as accelerate's class does: it asks for the version before it chooses
ACCELERATOR = """
def __init__(ask, cpu, deepspeed_plugins):
    ask()
"""


class Named:
    name = "deepspeed"


def ask() -> None:
    list(AliasFinder().find_distributions(Named()))


@pytest.mark.parametrize(
    ("cpu", "variable", "plugin", "cause"),
    [
        (True, "", "a plugin", "cpu=True"),
        (False, "1", "a plugin", "ACCELERATE_USE_CPU"),
        (False, "", "a plugin", None),
        (True, "1", None, None),
    ],
)
def test_a_plugin_that_accelerate_ignores_is_said_once(
    cpu: bool,
    variable: str,
    plugin: str | None,
    cause: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    accelerate._say_ignored.cache_clear()
    names: dict[str, Any] = {"__name__": "accelerate.accelerator"}
    exec(ACCELERATOR, names)
    with caplog.at_level(logging.WARNING, "xds"):
        for _ in range(2):
            names["__init__"](ask, cpu, plugin)
        ask()  # not from an Accelerator
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (cause is not None)
    assert cause is None or (f"because {cause} is set" in said[0] and "trains with DDP" in said[0])


class DummyOptim:
    """Has the name of accelerate's placeholder."""


class DummyScheduler:
    """Has the name of accelerate's placeholder."""


@pytest.mark.parametrize("given", [{"optimizer": DummyOptim()}, {"lr_scheduler": DummyScheduler()}])
def test_a_placeholder_of_accelerate_outside_prepare_is_one_sentence(given: Any) -> None:
    with pytest.raises(xds.UsageError, match="only goes to accelerator.prepare; leave .* out"):
        deepspeed.initialize(model=nn.Linear(2, 2), config={}, **given)


def test_accelerate_launch_finds_a_command_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in its process, only with the stand-in, and only where there is no such command."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    accelerate.put_command_on_path()
    assert shutil.which("deepspeed") is None
    monkeypatch.setitem(sys.modules, accelerate.LAUNCHED, ModuleType(accelerate.LAUNCHED))
    accelerate.put_command_on_path()
    found = shutil.which("deepspeed")
    assert found is not None
    done = subprocess.run([found, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--hostfile" in done.stdout
    accelerate.put_command_on_path()
    assert shutil.which("deepspeed") == found
