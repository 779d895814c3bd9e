"""Claim: the CPU optimizers of xds make one pass at memory speed, and are faster than the alternatives.

xds and torch run in one process and share their tensors. DeepSpeedCPUAdam and the measurement of memory speed
(stream.cpp) run in separate processes, because each loads another OpenMP. All alternate after each step, on
commands through a pipe, and wait a little before each step until idle threads have stopped spinning. A row
is the median of the ratios of the turns of one round.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from harness import (  # noqa: E402
    Row,
    Skip,
    Watch,
    finish,
    print_rows,
    wait_until_quiet,
)

STREAM_FLAGS = (
    "-O3 -march=native -fopenmp -ffast-math -fno-tree-loop-distribute-patterns -std=c++17"
)
TRIADS = {"triad": 12, "triad_non_temporal": 12}  # bytes per float; 24 per double
WRITE_ALLOCATE = (
    16  # bytes that a triad with plain stores moves: it reads the line that it overwrites first
)
UPDATE = {"update": 28}
BYTES = {"adamw": 28}  # read four floats, write three; no line is written that was not read
SETTLE_SECONDS = 0.05  # an OpenMP thread spins for some milliseconds after its work
WARMUP = 3


@dataclass(frozen=True)
class Bar:
    """The comparison of a row: the fastest of `peers`, and the required speed-up."""

    label: str
    peers: tuple[str, ...]  # beginnings of contestants' names
    must: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One optimizer, and the other contestants."""

    case: str
    title: str
    bars: tuple[Bar, ...]
    with_stream: bool = False
    with_deepspeed: bool = False


TORCH = Bar("torch", ("torch",))
COMPARISONS = (
    Comparison(
        "adamw",
        "AdamW fp32",
        (Bar("torch fused", ("torch",), 1.0), Bar("DeepSpeedCPUAdam", ("deepspeed",), 1.2)),
        with_stream=True,
        with_deepspeed=True,
    ),
    Comparison(
        "adamw_bf16",
        "AdamW bf16 in and out, norm, unscale, clip",
        (Bar("torch's casts + fused + copy", ("torch",), 1.4),),
    ),
    Comparison("lion", "Lion fp32", (TORCH,)),
    Comparison("adagrad", "Adagrad fp32", (Bar("torch fused", ("torch",)),)),
    Comparison("sgd", "SGD-momentum fp32", (Bar("torch fused", ("torch",)),)),
    Comparison("lamb", "LAMB fp32, 200 parameters", (TORCH,)),
)


@dataclass(frozen=True)
class Settings:
    """The settings of every process."""

    numel: int
    threads: int
    rounds: int
    peer_python: str
    huge_pages: bool
    folder: str

    def environment(self) -> dict[str, str]:
        """The environment of every process; the peer runs as its users run it, outside of this checkout."""
        pages = {"THP_MEM_ALLOC_ENABLE": "1"} if self.huge_pages else {}
        keep = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
        threads = str(self.threads)
        here = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONSAFEPATH": "1"}
        return keep | pages | here | {"DS_ACCELERATOR": "cpu"}


# ---- processes -------------------------------------------------------------------------------


class Process:
    """A process that runs one step of one of its contestants on a command, and returns the seconds."""

    def __init__(self, command: list[str], settings: Settings, first: str = "") -> None:
        environment = settings.environment()
        if first:  # the folder of the interpreter's own tools (ninja)
            environment["PATH"] = f"{first}{os.pathsep}{environment.get('PATH', '')}"
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=settings.folder,
            env=environment,
        )
        self.greeting = self._read()

    def step(self, name: str) -> float:
        """Seconds of one step of `name`."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End it; returns when it has ended."""
        self._process.communicate()
        self._errors.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            lines = [line for line in self._errors.read().split("\n") if line.strip()] or [
                "no word"
            ]
            raise Skip(f"exit {self._process.returncode}: {lines[-1][:160]}")
        return str(line).strip()


def start_worker(case: str, settings: Settings, kind: str) -> tuple[Process, dict[str, Any]]:
    """xds and torch, or the peer, and its first answer."""
    python = settings.peer_python if kind == "deepspeed" else sys.executable
    numbers = [str(settings.numel), str(settings.threads)]
    command = [python, str(HERE / "worker.py"), case, *numbers, kind]
    process = Process(command, settings, first=str(Path(python).parent))
    return process, json.loads(process.greeting)


def start_stream(settings: Settings) -> Process:
    """The measurement of memory speed, compiled when first needed."""
    binary = Path(settings.folder, "stream")
    if not binary.exists():
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise Skip(f"no {compiler}")
        command = [compiler, *STREAM_FLAGS.split(), str(HERE / "stream.cpp"), "-o", str(binary)]
        subprocess.run(command, check=True)
    pages = "HUGE" if settings.huge_pages else "SMALL"
    return Process([str(binary), str(settings.numel), pages], settings)


@dataclass
class Team:
    """The contestants' processes, and the reasons why others are missing."""

    members: dict[str, Process]
    missing: dict[str, str]
    about: dict[str, Any]


def assemble(comparison: Comparison, settings: Settings, stack: ExitStack) -> Team:
    """Start every process of a comparison; contestants that cannot run here are reported."""
    team = Team({}, {}, {})
    process, about = start_worker(comparison.case, settings, "native")
    stack.callback(process.close)
    team.members |= dict.fromkeys(about["contestants"], process)
    if about["xds"]:
        team.missing["xds"] = about["xds"]
    if comparison.with_deepspeed:
        try:
            process, about = start_worker(comparison.case, settings, "deepspeed")
            stack.callback(process.close)
            team.members["deepspeed"] = process
            team.about["deepspeed"] = about
        except Skip as reason:
            team.missing["deepspeed"] = str(reason)
    if comparison.with_stream:
        try:
            process = start_stream(settings)
            stack.callback(process.close)
            team.members |= dict.fromkeys([*TRIADS, *UPDATE], process)
        except Skip as reason:
            team.missing["triad"] = str(reason)
    return team


def take_turns(team: Team, rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn. The order rotates and reverses, so that the neighbours change."""
    names = list(team.members)
    for name in names * WARMUP:
        team.members[name].step(name)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        order = names[shift:] + names[:shift]
        for name in order if turn % 2 == 0 else reversed(order):
            time.sleep(SETTLE_SECONDS)
            seconds[name].append(team.members[name].step(name))
    return seconds


# ---- rows ------------------------------------------------------------------------------------


def best(seconds: dict[str, list[float]], beginnings: tuple[str, ...]) -> str | None:
    """The name with the smallest median among those with this beginning."""
    names = [name for name in seconds if name.startswith(beginnings)]
    return min(names, key=lambda name: statistics.median(seconds[name]), default=None)


def rate(bytes_per_element: float, numel: int, seconds: list[float]) -> float:
    """GB/s of the median turn."""
    return bytes_per_element * numel / statistics.median(seconds) / 1e9


def speed_row(name: str, ours: list[float], theirs: list[float], weight: float = 1.0) -> Row:
    """The speed relative to the peer's; `weight` is the bytes of xds over those of the peer."""
    ratios = [weight * b / a for a, b in zip(ours, theirs, strict=True)]
    samples = {"ours": [round(s, 6) for s in ours], "theirs": [round(s, 6) for s in theirs]}
    spread = (statistics.median(ratios), min(ratios), max(ratios))
    return Row(name, *spread, more_is_better=True, samples=samples)


def memory_rows(title: str, seconds: dict[str, list[float]], numel: int, who: str) -> Iterator[Row]:
    """Bytes per time of `who`, relative to the triad of the same run."""
    taken = seconds[who]
    counted = {name: rate(size, numel, seconds[name]) for name, size in TRIADS.items()}
    top = max(counted, key=lambda name: counted[name])
    bar = who == "xds"
    row = speed_row(f"{title}: {who} / STREAM triad", taken, seconds[top], 28 / TRIADS[top])
    row.must = 0.85 if bar else None
    shown = ", ".join(f"{name} {value:.1f}" for name, value in counted.items())
    row.note = f"{numel >> 20}M parameters; {rate(28, numel, taken):.1f} GB/s; {shown}"
    yield row
    if not bar:
        return
    plain = seconds["triad"]
    row = speed_row(
        f"{title}: {who} / triad with write-allocate", taken, plain, 28 / WRITE_ALLOCATE
    )
    row.note = f"the plain triad counted as 32 bytes: {rate(WRITE_ALLOCATE, numel, plain):.1f} GB/s"
    yield row
    row = speed_row(f"{title}: {who} / bare update", taken, seconds["update"])
    row.note = f"AdamW's reads and writes, hardly any arithmetic: {rate(28, numel, seconds['update']):.1f} GB/s"
    yield row


def build_rows(
    comparison: Comparison, team: Team, seconds: dict[str, list[float]], settings: Settings
) -> Iterator[Row]:
    """Every row of a comparison."""
    title = f"{comparison.title}, {settings.threads} thread{'s' * (settings.threads > 1)}"
    ours = seconds.get("xds")
    for who in ("xds", "torch fused", "deepspeed") if comparison.with_stream else ():
        if "triad" in team.missing or who not in seconds:
            why = team.missing.get("triad") or team.missing.get(who, "")
            yield Row(f"{title}: {who} / STREAM triad", void="SKIP", note=why)
        else:
            yield from memory_rows(title, seconds, settings.numel, who)
    for bar in comparison.bars:
        name = f"{title}: xds / {bar.label}"
        peer = best(seconds, bar.peers)
        if ours is None or peer is None:
            why = team.missing.get("xds" if ours is None else bar.peers[0], "")
            yield Row(name, must=bar.must, void="SKIP", note=why)
            continue
        row = speed_row(name, ours, seconds[peer])
        row.must = bar.must
        row.note = note(comparison, peer, seconds, team)
        yield row


def note(comparison: Comparison, peer: str, seconds: dict[str, list[float]], team: Team) -> str:
    """Milliseconds of both, and the variant that was the peer."""

    def ms(name: str) -> str:
        return f"{statistics.median(seconds[name]) * 1e3:.0f}"

    text = f"{ms('xds')} / {ms(peer)} ms"
    variants = [name for name in seconds if name.startswith("torch")]
    if peer in variants and len(variants) > 1:
        text += f"; best of {', '.join(f'{name[6:]} {ms(name)}' for name in variants)}"
    if peer == "deepspeed":
        about = team.about["deepspeed"]
        text += f"; DeepSpeed {about['deepspeed']}, torch {about['torch']}"
    return text


# ---- the command -----------------------------------------------------------------------------


def huge_pages_here() -> str:
    """The kernel's setting of transparent huge pages."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return text.split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "unknown"


def run(comparison: Comparison, settings: Settings, patience: float) -> tuple[list[Row], Team]:
    """One comparison at one number of threads."""
    wait_until_quiet(patience)
    with Watch() as watch:
        with ExitStack() as stack:
            team = assemble(comparison, settings, stack)
            seconds = take_turns(team, settings.rounds)
    rows = list(build_rows(comparison, team, seconds, settings))
    for row in rows:
        row.others_busy = watch.others
    return rows, team


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--numel", type=int, default=1 << 28, help="parameters (2^28)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant")
    parser.add_argument(
        "--only", default="*", help="cases, as a pattern: adamw, adamw_bf16, lion ..."
    )
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with DeepSpeed")
    parser.add_argument(
        "--huge-pages", action="store_true", help="transparent, for all; keeps nothing"
    )
    parser.add_argument("--patience", type=float, default=0, help="minutes to wait for quiet")
    parser.add_argument("--rough", action="store_true", help="keeps nothing")
    parser.add_argument(
        "--quick", action="store_true", help="4M parameters, few turns; keeps nothing"
    )
    return parser.parse_args()


def main() -> int:
    """Run the comparisons; 1 if a row fails."""
    chosen = options()
    numel, rounds = (1 << 22, 3) if chosen.quick else (chosen.numel, chosen.rounds)
    peers: dict[str, Any] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for comparison in COMPARISONS:
            if not fnmatch.fnmatch(comparison.case, chosen.only):
                continue
            for threads in chosen.threads:
                settings = Settings(
                    numel, threads, rounds, chosen.peer_python, chosen.huge_pages, folder
                )
                fresh, team = run(comparison, settings, chosen.patience)
                peers |= team.about
                print_rows(fresh)
                rows += fresh
    keeps = not (chosen.quick or chosen.rough or chosen.huge_pages)
    return finish(__file__, rows, keeps=keeps, numel=numel, pages=huge_pages_here(), peers=peers)


if __name__ == "__main__":
    raise SystemExit(main())
