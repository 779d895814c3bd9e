"""`xds report`: from the lines of a record to the parts of a page; damaged and hostile lines; a real run."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_launcher import ForkedLauncher
from helpers import run_ranks

import xds
from xds.launcher.cli import main
from xds.launcher.reporting.page import page_of
from xds.launcher.reporting.records import FILE, read_run

EVIL = "<script>alert(1)</script>\"'&\x1b[2J\u202e"
START = {
    "kind": "start",
    "time": 100.0,
    "restart": 0,
    "command": f"xds train.py {EVIL}",
    "folder": "/work",
    "ranks": 2,
    "config": {"optimizer": {"type": EVIL}},
    "versions": {"torch": "2.13.0", EVIL: EVIL},
}
SPANS = [["forward", "0F0", 1.0, 3.0], ["backward", "0B0", 3.0, 7.0], ["step", EVIL, 7.0, 9.0]]
TIMED = {"place": [0, 0, 0, 0], "peak_bytes": 10**9, "milliseconds": 10.0, "spans": SPANS}
TIMELINE = {"kind": "timeline", "step": 3, "time": 104.0}
TIMELINE["ranks"] = [TIMED, TIMED | {"place": [1, 0, 0, 0]}]


def step(number: int, loss: Any, time: float, **more: Any) -> dict[str, Any]:
    found = {"kind": "step", "step": number, "time": time, "samples": 8 * number, "lr": 0.1}
    return found | {"loss": loss, "norm": 1.0} | more


def value(name: str, number: Any, samples: int) -> dict[str, Any]:
    return {"kind": "value", "name": name, "value": number, "samples": samples}


USE = {"kind": "use", "time": 1.0, "memory_bytes": 10**9, "peak_bytes": 2 * 10**9, "steps": 3}
USE["sent_bytes"] = {"all_gather": 3 * 10**6, EVIL: 30}
KILLED = [
    START,
    value("tokens_per_sample", 16, 0),
    *(step(number, 5.0 - number, 100.0 + number) for number in range(1, 6)),
    USE,
    TIMELINE,
    value("validation_loss", 9.0, 40),  # after step 5, which was lost
    value(EVIL, 1.0, 8),
    {"kind": "failure", "time": 106.0, "text": f"xds: rank 1 failed\nKeyError: {EVIL}"},
]
RESUMED = [
    START | {"restart": 1},
    step(4, 0.5, 1004.0),
    step(5, float("nan"), 1005.0),
    USE,
    {"kind": "saved", "path": f"out/{EVIL}", "time": 1005.5},
    {"kind": "end", "time": 1006.0},
]


def write(folder: Path, records: list[Any], tail: bytes = b"") -> str:
    lines = [json.dumps(each).encode() if isinstance(each, dict) else each for each in records]
    (folder / FILE).write_bytes(b"\n".join([*lines, tail]))
    return str(folder)


def test_a_run_that_was_killed_and_resumed_is_one_curve(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, [*KILLED, *RESUMED]))
    assert list(run.steps) == [1, 2, 3, 4, 5] and list(run.loss)[:4] == [4.0, 3.0, 2.0, 0.5]
    assert run.breaks == [3] and run.num_starts == 2 and run.damaged == 0
    assert [list(part) for part in run.values["validation_loss"]] == [[], []]
    page = page_of(run, "a run", 1016.0)
    for part in (
        *("The run has ended.", "10.0 s before", "<b>5</b>", "not finite: 1<"),
        # four steps a process: 8 samples of 16 tokens a second, and 1.00 MB a step
        *(
            "<span>tokens/s</span><b>128</b>",
            "<td>3.00 MB<td>1.00 MB a step",
            "restart 1",
            "2.00 GB",
        ),
        *("Pipeline: step 3 in time", "rank 1: stage 1", "forward 0F0: 1.00 to 3.00 ms"),
        *("Gradient norm", "Learning rate", "cd /work\nxds train.py", "2.13.0", "KeyError"),
    ):
        assert part in page, part


def test_text_of_a_record_is_escaped_and_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(read_run(write(tmp_path, [*KILLED, *RESUMED])), EVIL, 1016.0)
    assert page.count("&lt;script&gt;alert(1)") >= 8
    assert not re.search(r"<script|<img|src=|href=|url\(|https?:|@import|[\x1b\u202e]", page)


WRONG: list[Any] = [
    *(b"{", b"\xff\xfe\x00", b"[" * 100_000, b"3", b"null", b'{"kind": []}', b'{"kind": "no"}'),
    *(
        b'{"kind": "step", "step": 1e400, "time": 1}',
        b'{"kind": "step", "step": %s}' % (b"9" * 5000),
    ),
    *(step("7", 1.0, 1.0), step(7, "1", 1.0), step(-1, 1.0, 1.0)),  # type: ignore[arg-type]
    *(step(True, 1.0, 1.0), step(1 << 62, 1.0, 1.0), {"kind": "step", "step": 7}),
    *(value("a", "b", 1), value("a", 1, None), value(3, 1, 1)),  # type: ignore[arg-type]
    *({"kind": "use", "sent_bytes": []}, {"kind": "timeline", "ranks": [{"place": "x"}]}),
    *({"kind": "failure", "time": None, "text": ""}, {"kind": "saved", "time": 1, "path": {}}),
]


def test_damaged_lines_are_counted_and_a_half_written_one_is_not(tmp_path: Path) -> None:
    records = [part for wrong in WRONG for part in (wrong, b"", b"  ")]
    tail = b'{"kind": "step", "step": 6, "ti'
    run = read_run(write(tmp_path, [*KILLED, *records], tail))
    assert run.damaged == len(WRONG) and list(run.steps) == [1, 2, 3, 4, 5]
    assert f"{len(WRONG)} damaged lines" in page_of(run, "a run", 1.0)


def test_values_that_are_strange_but_numbers_make_a_page_and_a_trace(tmp_path: Path) -> None:
    inf, huge = float("inf"), 1e308
    found = [START | {"config": [[]], "versions": 3, "ranks": {}, "folder": 1, "command": None}]
    found += [step(n, x, t) for n, x, t in ((1, inf, inf), (2, huge, -huge), (3, -huge, huge))]
    found += [USE | {"peak_bytes": inf, "sent_bytes": {"a": inf, "b": -1}}]
    odd = TIMED | {"spans": [["a", "", inf, -inf], ["b", "", -1, huge]], "peak_bytes": -inf}
    found += [TIMELINE | {"ranks": [odd | {"milliseconds": n}]} for n in (0, inf, huge, 1e-300)]
    found += [value(f"{number}" * 1000, huge, number) for number in range(40)]
    for count in range(2, len(found) + 1):
        assert main(["report", write(tmp_path, found[:count]), "--trace"]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["traceEvents"]


def trace(folder: Path, records: list[Any]) -> list[dict[str, Any]]:
    assert main(["report", write(folder, records), "--trace"]) == 0
    found: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return found


def test_a_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    """Each event has a row and a time. Slices of a row are nested to the nanosecond."""
    clock = 1.7e9  # seconds since 1970; it is set back in step 4
    times = {1: 0.1, 2: 0.2001, 3: 0.3003, 4: 0.25, 5: 0.5}
    spans = [["forward", "", 1.0, 40.0001], ["reduce", "", 30.0, 40.0002], ["step", "", 41, 39.9]]
    timed = [TIMED | {"place": [n, 0, 0, 0], "spans": spans, "milliseconds": 90.0} for n in (0, 1)]
    records = [START, *(step(n, 1.0, clock + at) for n, at in times.items())]
    early = TIMELINE | {
        "step": 1,
        "time": clock + 0.1,
        "ranks": timed,
    }  # begins before the first step's end
    records += [early, TIMELINE | {"time": clock + 0.31, "ranks": timed[:1]}]
    events = trace(tmp_path, records)
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in events:
        assert each.keys() >= {"ph", "name", "ts", "pid", "tid"} and each["ts"] >= 0, each
        if each["ph"] == "X":
            start, length = (round(1e3 * each[key]) for key in ("ts", "dur"))
            assert length >= 0
            rows.setdefault((each["pid"], each["tid"]), []).append((start, start + length))
    assert [len(rows[row]) for row in ((0, 0), (1, 0), (1, 1))] == [5, 6, 3]
    for row in rows.values():
        for one, two in itertools.combinations(row, 2):
            (_, end), (start, other_end) = sorted([one, two], key=lambda ends: (ends[0], -ends[1]))
            assert end <= start or other_end <= end
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {(0, 0): "steps", (1, 0): "rank 0: stage 0", (1, 1): "rank 1: stage 1"}
    counters = {each["name"] for each in events if each["ph"] == "C"}
    assert counters == {"loss", "norm", "lr"}


def test_of_two_engines_in_a_folder_the_last_that_began_counts(tmp_path: Path) -> None:
    """One after the other, and at the same time: no value of the former one is left."""
    first = [START, *(step(n, 1.0, 100.0 + n) for n in range(1, 6)), value("quality", 1.0, 24)]
    first += [value("tokens_per_sample", 16, 0), value("only here", 1.0, 8)]
    second = [START, value("quality", 2.0, 0), *(step(n, 2.0, 200.0 + n) for n in (1, 2))]
    second += [value("quality", 3.0, 8)]
    one = [each | {"run": "one"} for each in first]
    two = [each | {"run": "two"} for each in second]
    late = [step(6, 1.0, 201.5, run="one"), {"kind": "end", "time": 300.0, "run": "one"}]
    mixed = [*one[:4], *two[:2], *one[4:], *two[2:3], *late, *two[3:]]
    for records, foreign in (([*first, *second], 0), ([*one, *two], 0), (mixed, 6)):
        run = read_run(write(tmp_path, records))
        assert list(run.loss) == [2.0, 2.0] and run.foreign == foreign
        assert [[*part] for part in run.values["quality"]] == [[0.0, 8.0], [2.0, 3.0]]
        assert list(run.values) == ["quality"] and run.num_starts == 2
        page = page_of(run, "a run", 301.0)
        assert ("6 lines of another engine" in page) == bool(foreign)
        assert ("The run goes on" in page) and not run.damaged


def test_many_steps_spans_and_long_texts_stay_below_a_megabyte(tmp_path: Path) -> None:
    """40,000 steps have as many points as a million."""
    spans = [["forward", "0F1", number, number + 1] for number in range(1000)]
    ranks = [TIMED | {"spans": spans, "milliseconds": 1000.0}] * 20
    long = "<" * 10**6
    records = [START | {"command": long, "config": {long: long}}, TIMELINE | {"ranks": ranks}]
    records += [{"kind": "failure", "time": 1.0, "text": long}] * 60
    records += [step(number, number % 97, number * 0.01) for number in range(1, 40_001)]
    records += [value(f"{n}{long[:99]}", n, n) for n in range(30)]
    write(tmp_path, records)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"x" * (5 << 20) + b"\n")  # longer than any line
    run = read_run(str(tmp_path))
    page = page_of(run, "a run", 1.0)
    assert run.damaged == 1 and len(run.steps) == 40_000
    assert len(page.encode()) < 10**6


@pytest.mark.parametrize("how", ["no folder", "nothing", "empty", "a pipe", "a folder", "no place"])
def test_what_cannot_be_read_or_written_is_one_sentence(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, folder = ["report", str(tmp_path)], tmp_path
    if how == "no folder":
        words[1] = str(folder / "\x1b[2Jnone")
    elif how == "empty":
        write(folder, [])
    elif how == "a pipe":
        os.mkfifo(folder / FILE)
    elif how == "a folder":
        (folder / FILE).mkdir()
    elif how == "no place":
        words = ["report", write(folder, KILLED), "--output", str(folder / "none" / "a.html")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("xds report: ") and said.count("\n") == 1 and said[:-1].isprintable()


def train_two(folder: str) -> list[float]:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    config["report_folder"] = folder
    engines = [xds.initialize(torch.nn.Linear(4, 1), config) for _ in range(2)]
    for _ in range(3):
        for number, engine in enumerate(engines):
            engine.monitor.write_events([(f"of engine {number}", 1.0, engine.global_samples)])
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
    for engine in engines:
        engine.destroy()
    return [engines[1].mean_loss()]


def test_two_engines_write_one_record_and_any_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command is bytes: half of a surrogate pair stands for one that is no text."""
    monkeypatch.setenv("XDS_COMMAND", "xds train.py --name \udcff\u2028")
    ((loss,),) = run_ranks(train_two, 1, str(tmp_path))
    run = read_run(str(tmp_path))
    assert run.damaged == 0 and run.start.command == "xds train.py --name ?\u2028"
    assert list(run.steps) == [1, 2, 3] and run.loss[-1] == pytest.approx(loss)
    assert list(run.values) == ["of engine 1"] and run.foreign and run.state == "end"


def train_without_end(folder: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"}}
    engine = xds.initialize(torch.nn.Linear(8, 8), config | {"report_folder": folder})
    engine.backward(engine(torch.ones(4, 8)).sum())
    engine.step()
    del engine
    gc.collect()


def test_a_run_without_destroy_has_ended_unless_an_exception_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys, "last_type", raising=False)
    for name, said in (("ended", "The run has ended"), ("raised", "or was killed")):
        run_ranks(train_without_end, 1, str(tmp_path / name))
        run = read_run(str(tmp_path / name))
        assert list(run.steps) == [1] and said in page_of(run, name, run.last_time)
        monkeypatch.setattr(sys, "last_type", ValueError, raising=False)  # as after an exception


FAILS_ONCE = """
import os, torch, xds
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "report_folder": "out"}
engine = xds.initialize(torch.nn.Linear(8, 8), config)
engine.load_checkpoint("saved") if os.path.exists("saved") else None
while engine.global_steps < 6:
    engine.backward(engine(torch.ones(4, 8)).sum())
    engine.step()
    if engine.global_steps == 3:
        engine.save_checkpoint("saved")
    if engine.global_steps == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        engine.no_such_thing
engine.destroy()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="of the launcher")
def test_the_launcher_adds_why_ranks_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "train.py"]
    env = os.environ | {"XDS_BACKEND": "gloo"}
    launcher = ForkedLauncher(words, tmp_path, env)
    out, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, out + err
    assert "xds: a page of this run: xds report out\n" in err
    run = read_run(str(tmp_path / "out"))
    kinds = [each.kind for each in run.events]
    assert kinds == ["start", "saved", "failure", "start", "end"] and run.damaged == 0
    assert list(run.steps) == [1, 2, 3, 4, 5, 6] and run.breaks == [3]
    page = page_of(run, "a run", run.last_time)
    assert "no_such_thing" in page and "failed on" in page and "restart 1" in page
    assert "xds --nproc-per-node 2 --max-restarts 1 train.py" in page


# -- the ledger of time -------------------------------------------------------------------------------------


def spent(**seconds: float) -> dict[str, Any]:
    return {"spent": seconds}


def test_time_of_a_killed_and_resumed_run_adds_up_to_the_wall_clock(tmp_path: Path) -> None:
    first = [
        START,
        step(1, 1.0, 107.0, since=100.0, **spent(start=5.0, step=2.0)),
        step(2, 1.0, 110.0, **spent(step=2.0, save=0.75, other=0.25)),
        step(3, 1.0, 112.0, **spent(step=1.5, data=0.5)),
        {"kind": "failure", "time": 113.0, "text": "rank 1 failed\nwhy"},  # 1 s of step 4 is lost
    ]
    again = START | {"restart": 1, "time": 118.0}
    second = [step(3, 1.0, 123.0, since=117.0, **spent(start=4.0, step=2.0))]
    second += [{"kind": "recovered", "time": 124.0, "text": "2 go on", "seconds": {"stall": 0.25}}]
    second += [step(4, 1.0, 125.0, **spent(step=1.0, stall=0.25, repeated=0.75))]
    second += [{"kind": "end", "time": 125.5, **spent(other=0.5)}]
    run = read_run(write(tmp_path, [*first, again, *second]))
    assert {name: seconds for name, seconds in run.ledger.items() if seconds} == {
        **{"start": 9.0, "step": 7.0, "data": 0.5, "save": 0.75, "stall": 0.25},
        **{"repeated": 1.5 + 1.0 + 0.75, "restart": 4.0, "other": 0.75},
    }
    assert sum(run.ledger.values()) == 125.5 - 100.0 and run.damaged == 0
    costs = [each.seconds for each in run.failures]
    assert costs == [{"repeated": 2.5, "restart": 4.0, "start": 4.0}, {"stall": 0.25}]
    page = page_of(run, "a run", 126.0)
    for part in ("<span>goodput</span><b>27.5%", "<th>restart<", "<td>10.50 s<td>repeated 2.50 s"):
        assert part in page, part
    # a later run in the same folder
    later = [START, step(1, 1.0, 300.0, since=200.0, **spent(start=99.0, step=1.0))]
    run = read_run(write(tmp_path, [*first, again, *second, *later]))
    assert run.ledger["step"] == 1.0 and sum(run.ledger.values()) == 100.0 and not run.failures


def test_a_failure_after_which_a_new_process_writes_costs_the_time_between(tmp_path: Path) -> None:
    """Rank 0 is replaced, and the run goes back from step 2 to step 1."""
    lines = [
        START,
        step(1, 1.0, 107.0, since=100.0, **spent(start=5.0, step=2.0)),
        step(2, 1.0, 110.0, **spent(step=3.0)),
        {"kind": "recovered", "time": 115.0, "text": "0, 1 go on", "seconds": {}},
        step(2, 1.0, 118.0, since=115.0, **spent(step=2.5, data=0.5)),
        step(3, 1.0, 120.0, **spent(step=2.0)),
    ]
    run = read_run(write(tmp_path, lines))
    assert list(run.steps) == [1, 2, 3]
    assert [each.seconds for each in run.failures] == [{"repeated": 3.0, "stall": 5.0}]
    spent_in = {name: seconds for name, seconds in run.ledger.items() if seconds}
    assert spent_in == {"start": 5.0, "step": 6.5, "data": 0.5, "stall": 5.0, "repeated": 3.0}
    assert sum(run.ledger.values()) == 20.0


def train_in_classes(folder: str) -> tuple[float, float]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    began = time.time()
    data = [torch.ones(4) for _ in range(8)]
    config |= {"report_folder": f"{folder}/report", "gradient_accumulation_steps": 2}
    engine = xds.initialize(torch.nn.Linear(4, 1), config, training_data=data)
    for number, batch in enumerate(engine.training_dataloader):
        engine.backward(engine(batch).square().mean())
        engine.step()
        if number == 3:
            engine.save_checkpoint(f"{folder}/saved")
            with torch.no_grad():
                engine(batch)
    engine.destroy()
    return began, time.time()


def test_every_second_of_a_process_is_in_a_class(tmp_path: Path) -> None:
    ((began, ended),) = run_ranks(train_in_classes, 1, str(tmp_path))
    run = read_run(str(tmp_path / "report"))
    found = {name for name, seconds in run.ledger.items() if seconds}
    assert found == {"start", "step", "data", "evaluation", "save", "other"}
    lines = [json.loads(line) for line in (tmp_path / "report" / FILE).read_text().splitlines()]
    spent = [line["spent"] for line in lines if "spent" in line]
    assert (
        len(spent) == 5 and ["save" in each for each in spent] == [False] * 2 + [True] + [False] * 2
    )
    (since,) = (line["since"] for line in lines if "since" in line)
    assert since < began < since + sum(run.ledger.values()) < ended + 0.01
