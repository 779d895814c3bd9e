"""What a run tells: timers, rates and memory, lines of printed steps, messages, monitors."""

from __future__ import annotations

import importlib.util
import logging
import mmap
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from helpers import run_new_ranks, run_ranks
from models import build, micro_batch

import xds
import xds.deepspeed as deepspeed
from xds import UsageError
from xds.engine.telemetry.comms import _least_waits, _straggler, _times
from xds.engine.telemetry.monitor import Monitor, build_monitor
from xds.engine.telemetry.timers import Rates, Throughput, Timers, breakdown
from xds.ops.comm.message_log import Key, Row, bus_factor
from xds.ops.device import device_of

CPU = torch.device("cpu")


class HandClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_regions_add_up_and_start_again() -> None:
    clock = HandClock()
    timers = Timers(CPU, enabled=True, clock=clock)
    for seconds in (0.25, 0.5):
        with timers.region("forward"):
            clock.seconds += seconds
    with timers.region("step"):
        clock.seconds += 1.0
        with timers.region("reduce"):
            clock.seconds += 2.0
    assert timers.last_milliseconds() == {"forward": 500.0, "reduce": 2000.0, "step": 1000.0}
    found = timers.take_milliseconds()
    assert found == {"forward": 750.0, "reduce": 2000.0, "step": 1000.0}  # each second counts once
    assert timers.take_milliseconds() == {}
    assert breakdown({**found, "backward": 1500.0}) == {
        "fwd": 750.0,
        "bwd": 3500.0,
        "bwd_inner": 1500.0,
        "bwd_allreduce": 2000.0,
        "step": 1000.0,
    }
    assert breakdown({}) == {}


def test_a_region_that_raises_is_counted_and_does_not_swallow() -> None:
    clock = HandClock()
    timers = Timers(CPU, enabled=True, clock=clock)
    with pytest.raises(ValueError, match="inside"), timers.region("forward"):
        clock.seconds += 1.0
        raise ValueError("inside")
    assert timers.take_milliseconds() == {"forward": 1000.0}


def test_off_measures_nothing() -> None:
    timers = Timers(CPU, enabled=False)
    with timers.region("forward"), timers.region("forward"):
        pass
    assert timers.take_milliseconds() == {}
    throughput = Throughput(CPU, enabled=False, synchronized=True)
    throughput.step(8)
    assert throughput.read() is None


def test_throughput_leaves_out_the_first_two_steps() -> None:
    clock = HandClock()
    throughput = Throughput(CPU, enabled=True, synchronized=True, clock=clock)
    seen = []
    for seconds in (50.0, 50.0, 1.0, 4.0):
        clock.seconds += seconds
        throughput.step(8)
        seen.append(throughput.read())
    assert seen == [None, None, Rates(last=8.0, overall=8.0), Rates(last=2.0, overall=3.2)]
    clock.seconds += 10.0
    assert throughput.read() == seen[-1]  # no step since: the last reading stands


def test_throughput_between_readings() -> None:
    clock = HandClock()
    throughput = Throughput(CPU, enabled=True, synchronized=False, clock=clock)
    for _ in range(6):
        throughput.step(4)
        clock.seconds += 2.0
    assert throughput.read() == Rates(last=1.6, overall=1.6)  # 4 steps of 4 samples in 10 s


def test_memory_of_the_process() -> None:
    before = device_of(CPU).memory()
    block = mmap.mmap(-1, 64 * 2**20)  # malloc might give what it kept of earlier tests
    block.write(bytes(64 * 2**20))
    during = device_of(CPU).memory()
    block.close()
    assert 0 < before.now_bytes <= before.peak_bytes
    assert during.peak_bytes >= during.now_bytes >= before.now_bytes + 32 * 2**20


NUMBER = r"\d+\.\d\d"
TIMES = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
MEMORY = (
    rf" \| MA {NUMBER} GB \| Max_MA {NUMBER} GB \| CA {NUMBER} GB \| Max_CA {NUMBER} GB "
    rf"\| CPU Virtual Memory: used = {NUMBER} GB, percent = \d+\.\d%"
)
BREAKDOWN = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 2,
}


class Lines(logging.Handler):
    """The messages of xds's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @classmethod
    def of_xds(cls) -> Lines:
        lines = cls()
        logging.getLogger("xds").addHandler(lines)
        logging.getLogger("xds").setLevel(logging.INFO)
        return lines


def train(engine: Any, num_steps: int) -> None:
    for step in range(num_steps):
        for micro_step in range(2):
            engine.backward(engine(micro_batch(step, 2 * micro_step + engine.global_rank)))
            engine.step()


def lines_of(more: dict[str, Any]) -> list[str]:
    seen = Lines.of_xds()
    engine = xds.initialize(build("plain"), {**BREAKDOWN, **more})
    seen.lines.clear()  # of the start
    train(engine, 4)
    return seen.lines


def test_lines_of_printed_steps() -> None:
    (plain,) = run_new_ranks(lines_of, 1, {})
    assert [line.partition(",")[0] for line in plain] == ["step 2", "step 4"]
    more = {"wall_clock_breakdown": True, "memory_breakdown": True}
    first, second = run_new_ranks(lines_of, 2, more)
    assert second == []
    points = [
        f"Engine {at} {of}" for of in ("forward", "backward", "step") for at in ("before", "after")
    ]
    want = [
        r"step \d+, .*",
        r"time \(ms\)" + "".join(rf" \| {name}_microstep: {NUMBER}" for name in TIMES),
        r"time \(ms\)" + "".join(rf" \| {name}: {NUMBER}" for name in TIMES),
        *(point + MEMORY for point in points),
    ]
    assert len(first) == 2 * len(want)
    for line, pattern in zip(first, want + want, strict=True):
        assert re.fullmatch(pattern, line), line
    step = dict(part.split(": ") for part in first[2].split(" | ")[1:])
    both = float(step["bwd_inner"]) + float(step["bwd_allreduce"])
    assert float(step["bwd"]) == pytest.approx(both, abs=0.02)


def test_see_memory_usage(caplog: pytest.LogCaptureFixture) -> None:
    see_memory_usage = deepspeed.runtime.utils.see_memory_usage
    with caplog.at_level(logging.INFO, "xds"):
        see_memory_usage("quiet")
        see_memory_usage("after the model", force=True)
    assert [bool(re.search("after the model" + MEMORY, text)) for text in caplog.messages] == [True]


OFF = SimpleNamespace(enabled=False)
WANDB = SimpleNamespace(enabled=True, group="a group", team="a team", project="a project")
COMET = SimpleNamespace(
    **{"enabled": True, "samples_log_interval": 100, "project": "a project"},
    **{"experiment_name": "a name", "workspace": None, "api_key": None},
    **{"experiment_key": None, "online": None, "mode": None},
)


def sections(**given: Any) -> Any:
    names = ("tensorboard", "wandb", "csv_monitor", "comet")
    return SimpleNamespace(**{name: given.get(name, OFF) for name in names})


def into(path: Path | str) -> Any:
    """A section that writes files."""
    return SimpleNamespace(enabled=True, output_path=str(path), job_name="job")


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
    monitor = build_monitor(sections(csv_monitor=into(tmp_path)), rank=0)
    assert monitor.enabled
    monitor.write_events(EVENTS)
    monitor.write_events([("Train/Samples/lr", 0.25, 16), ("a name", 1, 16)])
    monitor.close()
    monitor = build_monitor(sections(csv_monitor=into(tmp_path)), rank=0)  # resumed
    monitor.write_events([("a name", 2, 24)])
    monitor.close()
    contents = {path.name: path.read_text() for path in (tmp_path / "job").iterdir()}
    assert contents == {
        "Train_Samples_lr.csv": "step,lr\n8,0.5\n16,0.25\n",
        "Train_Samples_train_loss.csv": "step,train_loss\n8,2.0\n",
        "a_name.csv": "step,a name\n16,1.0\n24,2.0\n",
    }


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """In a folder that others may write to, as in reports and logs."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "a_name.csv").symlink_to(victim)
    (tmp_path / "run.jsonl").symlink_to(victim)
    monitor = build_monitor(sections(csv_monitor=into(tmp_path)), rank=0)
    with pytest.raises(OSError, match="a link"):
        monitor.write_events([("a name", 1, 16)])
    with pytest.raises(UsageError, match="run.jsonl cannot be written there: it is a link"):
        xds.initialize(torch.nn.Linear(2, 2), runs.config(report_folder=str(tmp_path)))
    assert victim.read_text() == "precious"


def test_only_rank_0_writes(tmp_path: Path) -> None:
    monitor = build_monitor(sections(csv_monitor=into(tmp_path)), rank=1)
    assert not monitor.enabled
    monitor.write_events(EVENTS)
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_off_and_closed_monitors_do_nothing(tmp_path: Path) -> None:
    build_monitor(sections(), rank=0).write_events(EVENTS)
    Monitor().write_events(EVENTS)
    monitor = build_monitor(sections(csv_monitor=into(tmp_path)), rank=0)
    monitor.close()
    monitor.close()
    monitor.write_events(EVENTS)
    assert list((tmp_path / "job").iterdir()) == []


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monitor = build_monitor(sections(wandb=WANDB), rank=0)
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
    monitor = build_monitor(sections(comet=COMET), rank=0)
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
    config = sections(**{section: SimpleNamespace(enabled=True)})
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
    monitor = build_monitor(sections(tensorboard=into(tmp_path)), rank=0)
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
    config = sections(**{section: into(path.format(tmp_path))})
    with pytest.raises(UsageError, match=rf"^{section}\.output_path = .*; set another path"):
        build_monitor(config, rank=0)


def two_steps(config: dict[str, Any]) -> tuple[xds.Engine, int]:
    """An engine after two steps, and the bytes that it sent."""
    engine = xds.initialize(build("plain"), {"train_micro_batch_size_per_gpu": 4, **config})
    for step in range(2):
        engine.backward(engine(micro_batch(step, engine.global_rank)))
        engine.step()
    return engine, sum(engine.bytes_sent().values())


def summed(config: dict[str, Any]) -> dict[str, Any]:
    engine, sent = two_steps(config)
    summary = engine.comms_summary(show_straggler=True)
    logged = sum(
        row.count * row.size_bytes * bus_factor(row.operation, row.num_ranks)
        for row in summary.rows
        if row.operation != "broadcast" or engine.global_rank == 0
    )
    assert summary.stragglers is not None
    for row, straggler in zip(summary.rows, summary.stragglers, strict=True):
        assert (row.operation, row.size_bytes) == (straggler.operation, straggler.size_bytes)
        assert row.count == straggler.count
        assert straggler.straggler_milliseconds >= 0
    lines = str(summary).splitlines()
    assert (
        lines[0].split()
        == (
            "Comm. Op Message Size Count Total Latency(ms) Avg Latency(ms) tput_avg (Gbps) busbw_avg (Gbps) "
            "Avg Wait(ms)"
        ).split()
    )
    assert lines[1] == "all_gather"
    assert "Breakdown with straggler effect" in lines
    return {"logged": logged, "sent": sent}


def at_several_stages() -> None:
    for zero in ({"stage": 0}, {"stage": 2}, {"stage": 3, "zero_quantized_gradients": True}):
        config = {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "comms_logger": {"enabled": True},
            "zero_optimization": zero,
        }
        found = summed(config)
        assert found["logged"] == found["sent"] > 0, zero
    engine, _ = two_steps({"optimizer": {"type": "SGD"}})
    with pytest.raises(xds.UsageError, match=r"set comms_logger\.enabled to true"):
        engine.comms_summary()


def test_a_straggler_is_the_rank_whose_peers_wait_in_the_same_collectives() -> None:
    """Waits of two ranks from the last collective on, of which one rank keeps one more."""
    rows = {0: [1.0, 1.0, 9.0], 1: [7.0, 2.0, 2.0, 4.0]}
    key, found = Key("all_reduce", "all_reduce", 64, (0, 1)), {}
    for rank, waits in rows.items():
        found[rank] = Row()
        for wait in waits:
            found[rank].add(wait, wait)
        found[rank].count = 4
    table = [[_times(key, row)] for row in found.values()]
    least = _least_waits(table[0], table)[0]
    assert least == [4.0, 1.0, 1.0]
    lost = {rank: _straggler(key, row, least) for rank, row in found.items()}
    assert [lost[rank].straggler_milliseconds for rank in rows] == [5.0, 2.0]
    assert lost[0].total_milliseconds == 6.0


def sent_by_lines(sections: dict[str, Any]) -> list[str]:
    """What each printed line says was sent."""
    seen = Lines.of_xds()
    engine = xds.initialize(
        build("plain"), {**BREAKDOWN, "comms_logger": {"enabled": True}, **sections}
    )
    train(engine, 4)
    engine.destroy()
    logging.getLogger("xds").removeHandler(seen)
    lines = dict.fromkeys(line for line in seen.lines if line.startswith("step "))
    return [re.findall(r"sent [^,]*", line)[0] for line in lines]


def test_a_monitor_takes_no_bytes_from_the_printed_line(tmp_path: Path) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    plain, monitored = (run_ranks(sent_by_lines, 2, sections)[0] for sections in ({}, monitor))
    assert len(plain) == 2 and all("sent nothing" not in line for line in plain)
    assert monitored == plain


def test_the_log_has_every_byte() -> None:
    run_ranks(at_several_stages, 2)
