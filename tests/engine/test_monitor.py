"""Monitors: what lands in files, what reaches a service, who writes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xds import UsageError
from xds.engine.telemetry.monitor import Monitor, build_monitor


@dataclass
class Off:
    enabled: bool = False


@dataclass
class FileConfig:
    output_path: str
    enabled: bool = True
    job_name: str = "job"


@dataclass
class WandbConfig:
    enabled: bool = True
    group: str | None = "a group"
    team: str | None = "a team"
    project: str = "a project"


@dataclass
class CometConfig:
    enabled: bool = True
    samples_log_interval: int = 100
    project: str | None = "a project"
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = "a name"
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


@dataclass
class Config:
    tensorboard: Any = field(default_factory=Off)
    wandb: Any = field(default_factory=Off)
    csv_monitor: Any = field(default_factory=Off)
    comet: Any = field(default_factory=Off)


class Recorder:
    """Stands for a service's module and run: notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def note(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return note


EVENTS = [("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", torch.tensor(2.0), 8)]


def test_csv_has_one_file_for_each_name(tmp_path: Path) -> None:
    monitor = build_monitor(Config(csv_monitor=FileConfig(str(tmp_path))), rank=0)
    assert monitor.enabled
    monitor.write_events(EVENTS)
    monitor.write_events([("Train/Samples/lr", 0.25, 16), ("a name", 1, 16)])
    monitor.close()
    monitor = build_monitor(Config(csv_monitor=FileConfig(str(tmp_path))), rank=0)  # resumed
    monitor.write_events([("a name", 2, 24)])
    monitor.close()
    contents = {path.name: path.read_text() for path in (tmp_path / "job").iterdir()}
    assert contents == {
        "Train_Samples_lr.csv": "step,lr\n8,0.5\n16,0.25\n",
        "Train_Samples_train_loss.csv": "step,train_loss\n8,2.0\n",
        "a_name.csv": "step,a name\n16,1.0\n24,2.0\n",
    }


def test_only_rank_0_writes(tmp_path: Path) -> None:
    monitor = build_monitor(Config(csv_monitor=FileConfig(str(tmp_path))), rank=1)
    assert not monitor.enabled
    monitor.write_events(EVENTS)
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_off_and_closed_monitors_do_nothing(tmp_path: Path) -> None:
    build_monitor(Config(), rank=0).write_events(EVENTS)
    Monitor().write_events(EVENTS)
    monitor = build_monitor(Config(csv_monitor=FileConfig(str(tmp_path))), rank=0)
    monitor.close()
    monitor.close()
    monitor.write_events(EVENTS)
    assert list((tmp_path / "job").iterdir()) == []


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monitor = build_monitor(Config(wandb=WandbConfig()), rank=0)
    monitor.write_events(EVENTS)
    monitor.close()
    assert wandb.calls == [
        ("init", (), {"project": "a project", "group": "a group", "entity": "a team"}),
        ("log", ({"Train/Samples/lr": 0.5, "Train/Samples/train_loss": 2.0},), {"step": 8}),
        ("finish", (), {}),
    ]


def test_comet_sends_once_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    comet = Recorder()
    monkeypatch.setitem(sys.modules, "comet_ml", comet)  # type: ignore[arg-type]
    monitor = build_monitor(Config(comet=CometConfig()), rank=0)
    for num_samples in (1, 50, 101, 150, 201):
        monitor.write_events([("loss", 1.0, num_samples)])
    monitor.close()
    names = [name for name, _, _ in comet.calls]
    assert names == ["start", "set_name", "log_metric", "log_metric", "log_metric", "end"]
    assert [kwargs["step"] for name, _, kwargs in comet.calls if name == "log_metric"] == [
        1,
        101,
        201,
    ]


@pytest.mark.parametrize(
    ("section", "package"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")],
)
def test_missing_package_is_named_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, section: str, package: str
) -> None:
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr("xds.engine.telemetry.monitor.find_spec", lambda name: None)
    config = Config(**{section: SimpleNamespace(enabled=True)})
    with pytest.raises(UsageError) as caught:
        build_monitor(config, rank=1)
    message = str(caught.value)
    assert f"{section}.enabled" in message
    assert f'pip install -e ".[{section}]"' in message


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_writes_an_event_file(tmp_path: Path) -> None:
    monitor = build_monitor(Config(tensorboard=FileConfig(str(tmp_path))), rank=0)
    monitor.write_events(EVENTS)
    monitor.close()
    (path,) = (tmp_path / "job").iterdir()
    assert path.name.startswith("events.out.tfevents")
    assert b"Train/Samples/lr" in path.read_bytes()


@pytest.mark.parametrize("section", ["csv_monitor", "tensorboard"])
@pytest.mark.parametrize("path", ["{}/file", "a\0b"])
def test_a_folder_that_cannot_be_written(section: str, path: str, tmp_path: Path) -> None:
    if section == "tensorboard":
        pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    config = Config(**{section: FileConfig(path.format(tmp_path))})
    with pytest.raises(UsageError, match=rf"^{section}\.output_path = .*; set another path"):
        build_monitor(config, rank=0)
