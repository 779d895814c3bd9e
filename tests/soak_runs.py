"""Test helper: a training run on four hosts with repeated random failures, until it has finished.

The failures: SIGKILL, SIGSEGV, SIGSTOP, an exit code, and a link that is cut for a while. Between them the open
files, threads and memory of the head and node processes are recorded. At the end only the run's checkpoints and
logs may remain.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real_hosts import HEAD, Hosts

TRAINING = Path(__file__).with_name("soak_training.py")
KINDS = ("kill", "segv", "stop", "exit", "cut")
_SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "exit": signal.SIGUSR2,
}
_TORCHS_OWN = "torchinductor_"  # a cache folder that torch makes in TMPDIR when it is imported
_HEARTBEAT_SECONDS = 3.0
_TIMEOUT_SECONDS = 10.0  # of a collective: what ends a rank that is stopped
_STUCK_SECONDS = 120.0
_END_SECONDS = 10.0
_EXTRA_FILES = 12  # connections of a few more hosts, to two stores
_EXTRA_THREADS = 4
_EXTRA_MIB = 48.0


@dataclass(frozen=True)
class Plan:
    """How long, and how hard.

    seconds: for this long after the first step a hurt comes about every `every_seconds`; then the run may end
        in peace.
    num_steps: what has to be reached. Steps are slowed so that this takes longer than the hurts.
    is_ruthless: now and then hurt a start that has not come to a step.
    longest_cut_seconds: of a link; the longer, the more is trained on fewer hosts.
    """

    seconds: float
    every_seconds: float = 15.0
    num_hosts: int = 4
    stage: int = 3
    seed: int = 0
    num_steps: int = 150
    save_every: int = 1
    step_seconds: float = 0.2
    is_ruthless: bool = False
    longest_cut_seconds: float = 7.5


@dataclass
class Sample:
    """One look at a process."""

    files: int
    threads: int
    mib: float


@dataclass
class Tally:
    """What was done to the run, and what came of it."""

    hurts: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    steps_done: int = 0  # those that were done again included
    world_sizes: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    restart_seconds: list[float] = field(default_factory=list)  # from a hurt to the next step
    final_loss: float = 0.0
    undisturbed: list[float] = field(default_factory=list)
    growth: dict[str, tuple[Sample, Sample]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def soak(plan: Plan, say: Any = None) -> Tally:
    """Do it; `say` hears about each hurt."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name, Hosts(plan.num_hosts) as hosts:
        tally = _Soak(plan, hosts, Path(name), say or (lambda text: None)).run()
    tally.undisturbed = undisturbed(plan)
    low, high = min(tally.undisturbed), max(tally.undisturbed)
    spread = high - low
    if not low - spread <= tally.final_loss <= high + spread:
        seeds = f"{low:.4f} to {high:.4f}"
        tally.problems.append(f"final loss {tally.final_loss:.4f}, undisturbed runs end at {seeds}")
    return tally


def undisturbed(plan: Plan, num_seeds: int = 3) -> list[float]:
    """Final losses of that many seeds, each on one rank without a failure."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folders = [Path(name, str(seed)) for seed in range(num_seeds)]
        lines = [f"import sys; sys.path.insert(0, {str(TRAINING.parent)!r})"]
        lines += ["from pathlib import Path; from soak_training import train"]
        for seed, folder in enumerate(folders):
            folder.mkdir()
            words = f"Path({str(folder)!r}), 0, {plan.seed + seed}, {plan.num_steps}, 0, 0.0"
            lines.append(f"train({words})")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            check=True,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        return [float((folder / "final").read_text()) for folder in folders]


class _Soak:
    def __init__(self, plan: Plan, hosts: Hosts, folder: Path, say: Any) -> None:
        self._plan, self._hosts, self._folder, self._say = plan, hosts, folder, say
        self._random = random.Random(plan.seed)
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        self._cut: tuple[str, float] | None = None  # the host, and when it is mended
        self._queue: list[str] = []
        self.tally = Tally()

    def run(self) -> Tally:
        plan, tally = self._plan, self.tally
        begin = time.monotonic()
        said = (self._folder / "said").open("w")
        process = self._hosts.popen(
            self._words(), self._environment(), stdout=said, stderr=said, cwd=self._folder
        )
        try:
            self._hurt_for(process, plan.seconds)
            self._see_it_end(process)
        finally:
            self._mend()
            process.kill()
            said.close()
        tally.seconds = time.monotonic() - begin
        self._look_through(process)
        return tally

    def _words(self) -> list[str]:
        plan = self._plan
        options = ["--hostfile", str(self._hosts.hostfile(1)), "--min-elastic-nodes", "2"]
        settings = (plan.stage, plan.seed, plan.num_steps, plan.save_every, plan.step_seconds)
        words = [sys.executable, "-m", "xds.launcher.cli", *options, "--max-restarts", "100000"]
        return [*words, str(TRAINING), str(self._folder), *map(str, settings)]

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "XDS_HEARTBEAT_SECONDS": str(_HEARTBEAT_SECONDS),
            "XDS_TIMEOUT_SECONDS": str(_TIMEOUT_SECONDS),
            "PYTHONSAFEPATH": "",
        }

    # -- what is done to it -------------------------------------------------------------------------------

    def _hurt_for(self, process: subprocess.Popen[Any], seconds: float) -> None:
        """Wait for steps, hurt, wait for steps, ... until that long after the first step, or the run's end."""
        if not self._wait_for_step(process, 0):
            return
        deadline = time.monotonic() + seconds  # a busy machine takes its time to start
        while time.monotonic() < deadline and process.poll() is None:
            pause = self._random.uniform(0.5, 1.0) * self._plan.every_seconds
            begin, done = time.monotonic(), self._num_steps()
            self._sample(process.pid)
            if not self._hurt():
                return
            hurt_at = time.monotonic()
            if self._plan.is_ruthless and self._random.random() < 0.2:
                time.sleep(self._random.uniform(0.0, 4.0))
                self._hurt()
            if not self._wait_for_step(process, done + 1):
                return
            self.tally.restart_seconds.append(time.monotonic() - hurt_at)
            while time.monotonic() - begin < pause and process.poll() is None:
                self._mend_in_time()
                time.sleep(0.05)

    def _hurt(self) -> bool:
        """One hurt, to a random rank; False where there is none, as the run is at its end."""
        if not self._queue:  # every kind comes as often as the others
            self._queue = list(KINDS)
            self._random.shuffle(self._queue)
        ranks = [
            (name, pid)
            for name in self._hosts.names
            for pid, words in self._hosts.processes(name).items()
            if "worker.py" in words and str(TRAINING) in words
        ]
        if not ranks:
            return (self._folder / "final").exists() is False
        kind, plan = self._queue.pop(), self._plan
        name, pid = self._random.choice(ranks)
        self._say(f"{kind} on {name} at step {self._num_steps()}")
        if kind == "cut":
            self._mend()
            self._hosts.cut(name)
            self._cut = name, time.monotonic() + self._random.uniform(1.5, plan.longest_cut_seconds)
        else:
            try:
                os.kill(pid, _SIGNALS[kind])
            except ProcessLookupError:
                return True
        self.tally.hurts[kind] += 1
        return True

    def _mend_in_time(self) -> None:
        if self._cut is not None and time.monotonic() > self._cut[1]:
            self._mend()

    def _mend(self) -> None:
        if self._cut is not None:
            self._hosts.mend(self._cut[0])
            self._cut = None

    # -- how it does --------------------------------------------------------------------------------------

    def _steps(self) -> list[list[int]]:
        """[step, world_size] of every step that rank 0 did, again and again."""
        path = self._folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [[int(word) for word in line.split()] for line in lines if line.count(" ") == 1]

    def _num_steps(self) -> int:
        return len(self._steps())

    def _wait_for_step(self, process: subprocess.Popen[Any], done: int) -> bool:
        """Until more than `done` steps are done. False when the run ended, or is stuck."""
        begin = time.monotonic()
        while self._num_steps() <= done:
            if process.poll() is not None:
                return False
            if time.monotonic() - begin > _STUCK_SECONDS:
                self.tally.problems.append(f"no step for {_STUCK_SECONDS:.0f} s")
                return False
            self._mend_in_time()
            time.sleep(0.02)
        return True

    def _see_it_end(self, process: subprocess.Popen[Any]) -> None:
        while process.poll() is None and not self.tally.problems:
            if not self._wait_for_step(process, self._num_steps()):
                break
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.tally.problems.append("it does not end")

    def _sample(self, head: int) -> None:
        """Note what the head and the node parts hold. The key holds the pid: another process, another key."""
        found = [("head", head)]
        for name in self._hosts.names:
            for pid, words in self._hosts.processes(name).items():
                if "xds.launcher.remote.node" in words and Path(f"/proc/{pid}/exe").exists():
                    found.append((f"node part on {name}", pid))
        for title, pid in found:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                files = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
            values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if "python" not in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                continue
            mib = int(values["VmRSS"].split()[0]) / 1024
            sample = Sample(files, int(values["Threads"]), mib)
            self._samples[f"{title}, pid {pid}"].append(sample)

    def _look_through(self, process: subprocess.Popen[Any]) -> None:
        """All that must be true in the end."""
        tally, plan = self.tally, self._plan
        steps = self._steps()
        tally.steps_done = len(steps)
        tally.world_sizes = Counter(size for _, size in steps)
        said = (self._folder / "said").read_text()
        tally.starts = 1 + said.count("starting every rank again")
        if process.returncode != 0:
            tally.problems.append(f"exit code {process.returncode}: {said[-2000:]}")
        final = self._folder / "final"
        if final.exists():
            tally.final_loss = float(final.read_text())
        elif not tally.problems:
            tally.problems.append("no final loss")
        missing = sorted(set(range(plan.num_steps)) - {step for step, _ in steps})
        if missing:
            tally.problems.append(f"steps never done: {missing[:10]}")
        self._look_for_rests()
        for title, samples in self._samples.items():
            # the first start also loads what stays: the second look is the one to compare with
            if len(samples) >= 3:
                self._compare(title, samples[1], samples[-1])

    def _look_for_rests(self) -> None:
        try:
            self._hosts.wait_until_empty(_END_SECONDS, [*self._hosts.names, HEAD])
        except AssertionError as left:
            self.tally.problems.append(f"processes {left}")
        for place in [*self._hosts.names, HEAD]:
            files = self._hosts.left_files(place)
            files = [file for file in files if _TORCHS_OWN not in file]
            if files:
                self.tally.problems.append(f"files left on {place}: {files[:10]}")

    def _compare(self, title: str, before: Sample, after: Sample) -> None:
        self.tally.growth[title] = before, after
        if (
            after.files > before.files + _EXTRA_FILES
            or after.threads > before.threads + _EXTRA_THREADS
            or after.mib > before.mib + _EXTRA_MIB
        ):
            self.tally.problems.append(f"{title} grew from {before} to {after}")
