"""Kills ranks of running trainings, in every phase of a step, and measures how the others go on.

    python benchmarks/recovery/kills.py --minutes 60 --json soak.json     all layouts in turn
    python benchmarks/recovery/kills.py --kills 20 --layout "stage 0"
    python benchmarks/recovery/kills.py --kills 20 --launchers

In each run a rank is killed about every second, and replaced by a spare: by SIGKILL, SIGSEGV, SIGSTOP or an
exception, in each phase of a step, in a save, while others recover, at a random instant, one or two at a time.
In every eighth run `xds` itself is killed. A run fails if it hangs, ends with an error, leaves processes or
files, loses or doubles samples, or has other parameters at its end than a run without kills: by more than 1e-4,
and with one copy of the states by any bit. The last output is JSON.

--launchers: in place of ranks their launcher is killed twice in each run of one copy, and the run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xds.ops.mesh import Mesh
from xds.recovery.decider import STOPPED_SECONDS
from xds.recovery.units import units_of

TRAIN = Path(__file__).with_name("train.py")
PHASES = (
    *("forward", "backward", "before sum", "in sum", "before norm", "after norm"),
    *("before update", "after update", "before write", "after write", "before commit"),
    *("after commit", "outside", "outside", "outside"),
)
WHILE_RECOVERING = ("before group", "after group", "before healing", "after healing")
COPY_PHASES = ("before copy", "after copy")  # of versions: the second leaves one without manifest
SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "exception", "SIGSEGV", "SIGSTOP")
LIMIT_SECONDS = float(os.environ.get("LIMIT_SECONDS", "240"))
GONE_SECONDS = 10.0  # after a kill of the launcher
TOLERANCE = 1e-4
LAUNCHER_EVERY = 8  # runs


@dataclass(frozen=True)
class Layout:
    """ranks: at the start. mics: ranks of a shard group. pipe: stages of a pipeline."""

    ranks: int
    stage: int = 0
    mics: int = 1
    pipe: int = 1
    spares: int = 2

    @property
    def has_one_copy(self) -> bool:
        return self.stage > 0 and self.mics == 1

    @property
    def units(self) -> list[tuple[int, ...]]:
        if self.has_one_copy:
            return [(rank,) for rank in range(self.ranks)]
        return units_of(Mesh(pipe=self.pipe, data=self.ranks // self.pipe), self.mics)

    @property
    def environment(self) -> dict[str, str]:
        found = {"STAGE": str(self.stage), "MICS": str(self.mics), "PIPE": str(self.pipe)}
        return found | ({"ACCUMULATION": "4"} if self.pipe > 1 else {})


LAYOUTS = {
    "stage 0": Layout(3),
    "stage 1, one copy": Layout(2, stage=1),
    "stage 2, one copy": Layout(3, stage=2),
    "stage 3, one copy": Layout(2, stage=3),
    "stage 2, groups of 2": Layout(6, stage=2, mics=2, spares=4),
    "stage 3, groups of 2": Layout(4, stage=3, mics=2),
    "pipelines of 2": Layout(4, pipe=2),
}


def plan_of(
    random_: random.Random, layout: Layout, steps: int, every: int, how: str
) -> list[dict[str, Any]]:
    """What happens to ranks. every: so many steps. how: one signal for all; "": any."""
    phases = (*PHASES, *(COPY_PHASES if layout.has_one_copy else ()))
    units, plan, step = layout.units, list[dict[str, Any]](), 5

    def add(unit: tuple[int, ...], phase: str, **more: Any) -> None:
        name = how or random_.choice(SIGNALS)
        if name == "exception" and phase.endswith(("write", "commit")):
            name = "SIGKILL"  # a save that fails raises on all ranks, with recovery as well
        if layout.has_one_copy and more["is_second"] and plan[-1]["signal"] == "exception":
            name = "SIGKILL"  # where all ranks raise the run ends
        if len(units) == 2 and more["is_second"] and plan[-1]["signal"] == "SIGSTOP":
            name = "SIGKILL"  # where all ranks are stopped the run waits, as for Ctrl-Z
        entry = {"number": len(plan), "unit": random_.choice(unit), "step": step, "phase": phase}
        plan.append({**entry, "signal": name, **more})

    last: int | None = None
    while step < steps - 10:
        # where several units have all states: when all are there, so that one is left
        world = {} if layout.has_one_copy else {"world": layout.ranks}
        phase = random_.choice(phases)
        # the first unit alone has these; an entry that never happens would hold up those after it
        first = units[0] if phase.endswith(("write", "commit")) else random_.choice(units)
        unit = first[:1] if phase.endswith("commit") else first
        add(unit, phase, after=last, is_second=False, **world)
        last = len(plan) - 1
        others = [unit for unit in units if unit != first]
        if random_.random() < 0.25 and (layout.has_one_copy or len(others) > 1):
            in_step = [each for each in PHASES if not each.endswith(("write", "commit"))]
            phase = random_.choice(in_step if random_.random() < 0.4 else WHILE_RECOVERING)
            more = {"world": layout.ranks - len(first)} if world else {}
            add(random_.choice(others), phase, after=last, is_second=True, **more)
        step += random_.randint(every // 2, every * 3 // 2)
    return plan


# -- one run ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What was found. problem: what is wrong, or ""."""

    problem: str = ""
    records: list[Any] = field(default_factory=list)
    launcher_killed: bool = False
    num_launchers: int = 0  # that were killed, beside which others went on


def run(
    out: Path,
    layout: Layout,
    plan: list[dict[str, Any]],
    steps: int,
    kill_at: float,
    num_launchers: int = 0,
) -> Run:
    """Run once.

    kill_at: xds is killed so many seconds after the first step; 0: it is not. num_launchers: so many times the
    launcher below it is killed, beside which another one goes on.
    """
    out.mkdir()
    inside = [entry for entry in plan if entry["phase"] != "outside"]
    environ = {**os.environ, **layout.environment, "OUT": str(out), "STEPS": str(steps)}
    environ |= {"PLAN": json.dumps(inside), "OMP_NUM_THREADS": "1"}
    launcher = Path(sys.executable).with_name("xds")
    words = [str(launcher), "--recover", "--nproc-per-node", str(layout.ranks)]
    words += ["--spares", str(layout.spares), "--log-dir", str(out / "logs"), str(TRAIN)]
    with open(out / "output.txt", "w") as output:
        process = subprocess.Popen(
            words, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    outside = [entry for entry in plan if entry["phase"] == "outside"]
    deadline, first_step = time.monotonic() + LIMIT_SECONDS, 0.0
    killed: list[int] = []
    while process.poll() is None and time.monotonic() < deadline:
        if len(killed) < num_launchers:
            killed += kill_one_launcher(out, killed)
        outside = [entry for entry in outside if not kill_outside(out, entry)]
        if kill_at and not first_step and any(out.glob("done*")):
            first_step = time.monotonic()
        if first_step and time.monotonic() - first_step > kill_at:
            return kill_launcher(out, process)
        time.sleep(0.002 if outside else 0.05)
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Run("hang", records(out))
    found = records(out)
    left: list[Any] = [pid for pid in pids(found) if is_alive(pid)]
    left += files_of(found)
    problem = f"exit code {process.returncode}" if process.returncode else ""
    problem = problem or (f"processes or files left: {left}" if left else "")
    return Run(problem, found, num_launchers=len(killed))


def kill_launcher(out: Path, process: subprocess.Popen[bytes]) -> Run:
    process.kill()
    process.wait()
    deadline, found = time.monotonic() + GONE_SECONDS, records(out)
    while time.monotonic() < deadline:
        left = [pid for pid in pids(found) if is_alive(pid)]
        files = files_of(found)
        if not left and not files:
            return Run("", found, launcher_killed=True)
        time.sleep(0.1)
    return Run(f"launcher killed, left: {left} {files}", found, launcher_killed=True)


def kill_one_launcher(out: Path, killed: list[int]) -> list[int]:
    """Kill the newest launcher if its ranks have taken steps. Returns its process id, or nothing."""
    found = records(out)
    starts = [record for record in found if "start" in record]
    if not starts or starts[-1]["launcher"] in killed:
        return []
    if sum("world" in record for record in found if record["seconds"] > starts[-1]["seconds"]) < 60:
        return []
    time.sleep(random.random())
    pid: int = starts[-1]["launcher"]
    os.kill(pid, signal.SIGKILL)
    return [pid]


def kill_outside(out: Path, entry: dict[str, Any]) -> bool:
    """Kill the unit at a random instant once it has done the step. Returns whether it did."""
    done = None if entry["after"] is None else out / f"done{entry['after']}"
    if done is not None and not done.exists():
        return False
    path = out / f"unit{entry['unit']}.jsonl"
    lines = whole_lines(path) if path.exists() else []
    found = [json.loads(line) for line in lines[-40:]]
    steps = [line for line in found if "world" in line]
    starts = [json.loads(line) for line in lines if '"start"' in line]
    if not steps or steps[-1]["step"] < entry["step"] or not is_alive(starts[-1]["start"]):
        return False
    is_new = steps[-1]["seconds"] < starts[-1]["seconds"]  # it has taken no step yet
    if is_new or steps[-1]["world"] < entry.get("world", 0):
        return False
    before = -2 if done is None else int(done.read_text() or -2)
    generation = steps[-1]["generation"]
    if (generation > before + 1) if entry["is_second"] else (generation <= before):
        return False
    time.sleep(random.random() * 0.03)
    name = "SIGKILL" if entry["signal"] == "exception" else entry["signal"]
    record = {"seconds": time.time(), "kill": "outside", "unit": entry["unit"], "how": name}
    with open(out / "outside.jsonl", "a") as file:
        file.write(json.dumps({**record, "generation": generation}) + "\n")
    os.kill(starts[-1]["start"], getattr(signal, name))
    (out / f"done{entry['number']}").write_text(str(generation))
    return True


def whole_lines(path: Path) -> list[str]:
    """Without the last one, if it is half written."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def records(out: Path) -> list[Any]:
    found = []
    for path in sorted(out.glob("*.jsonl")):
        for line in whole_lines(path):
            unit = {"unit": int(path.stem[4:])} if path.stem != "outside" else {}
            found.append({**unit, **json.loads(line)})
    return sorted(found, key=lambda record: record["seconds"])


def pids(found: list[Any]) -> list[int]:
    return [record["start"] for record in found if "start" in record]


def files_of(found: list[Any]) -> list[str]:
    """Names of what the launchers of these ranks have left in shared memory."""
    launchers = {record["launcher"] for record in found if "start" in record}
    patterns = [f"xds-states-{pid}-*" for pid in launchers]
    return [path.name for pattern in patterns for path in Path("/dev/shm").glob(pattern)]


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    try:
        return path.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- what was found -----------------------------------------------------------------------------------------


def compare(layout: Layout, found: Run, reference: list[Any], steps: int) -> str:
    """What differs from a run without kills; "": nothing."""
    if found.problem or found.launcher_killed:
        return found.problem
    checks = next(record["checks"] for record in reference if "end" in record)
    ends = [record for record in found.records if "end" in record]
    if len(ends) < len(layout.units[0]):
        return "no unit has ended"
    for end in ends:
        pairs = zip(end["checks"], checks, strict=True)
        differs = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
        tolerance = 0.0 if layout.has_one_copy else TOLERANCE
        if not differs <= tolerance or end["end"] != steps:
            return f"differs by {differs:.1e} after {end['end']} steps"
    return samples_wrong(layout, found.records, reference)


def samples_wrong(layout: Layout, found: list[Any], reference: list[Any]) -> str:
    """Samples that no step has had, or two. A rank that was killed in a step may not have said what it read."""
    wanted, had = samples_of(layout, reference), samples_of(layout, found)
    unsure = {record["step"] for record in found if "kill" in record and "step" in record}
    unsure |= {step + 1 for step in unsure}
    outside = [record["seconds"] for record in found if record.get("kill") == "outside"]
    for step, numbers in wanted.items():
        doubled = Counter(had[step]) - Counter(numbers)
        lost = Counter(numbers) - Counter(had[step])
        if doubled:
            return f"step {step} had other samples: {dict(doubled)}"
        at = [record["seconds"] for record in found if record.get("step") == step]
        is_beside = any(abs(a - b) < 3.0 for a in at for b in outside)
        if lost and step not in unsure and not is_beside:
            return f"step {step} lost samples: {dict(lost)}"
    return ""


def samples_of(layout: Layout, found: list[Any]) -> dict[int, list[int]]:
    """By step, what all ranks read that take part in it: a step that is taken again replaces the first."""
    last: dict[tuple[int, int], list[int]] = {}
    for record in found:
        if "samples" in record and record["unit"] < layout.ranks // layout.pipe:
            if "step" in record:
                last[record["step"], record["unit"]] = record["samples"]
    result: dict[int, list[int]] = defaultdict(list)
    for (step, _), numbers in last.items():
        result[step] += numbers
    return result


@dataclass
class Figures:
    """Of all runs. seconds: of each kill, by kind."""

    runs: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    launchers_killed: int = 0
    steps_back: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    slowest: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, layout: Layout, found: Run) -> None:
        self.runs[name] += 1
        self.launchers_killed += found.launcher_killed + found.num_launchers
        killed = [record for record in found.records if "kill" in record]
        self.kills.update(record["kill"] for record in killed)
        self.signals.update(record["how"] for record in killed)
        for rank in range(layout.ranks):
            self._add_steps(
                [each for each in found.records if each["unit"] == rank and "world" in each]
            )
        for record in killed:
            self._add_waits(record, layout, found.records)

    def _add_steps(self, steps: list[Any]) -> None:
        """By how many steps a rank went back that had taken them."""
        for before, after in zip(steps, steps[1:], strict=False):
            if after["step"] <= before["step"]:
                self.steps_back[before["step"] - after["step"] + 1] += 1

    def _add_waits(self, kill: Any, layout: Layout, found: list[Any]) -> None:
        later = [each for each in found if each["seconds"] > kill["seconds"]]
        newer = [each for each in later if each.get("generation", 0) > kill["generation"]]
        steps = [each for each in newer if "world" in each]
        own = [each for each in steps if each["unit"] == kill["unit"]]
        others = [each for each in steps if each["unit"] != kill["unit"]]
        # a rank that fails beside it, before the others have taken a step, holds them up as well: where one is
        # stopped in the recovery from another that was stopped, they wait for the threshold twice
        until = others[0]["seconds"] if others else kill["seconds"]
        since = kill["seconds"] - STOPPED_SECONDS
        failures = [each for each in found if "kill" in each and each is not kill]
        beside = [each for each in failures if since < each["seconds"] < until]
        is_stop = any(each["how"] == "SIGSTOP" for each in (kill, *beside))
        kind = ("SIGSTOP beside another" if beside else "SIGSTOP") if is_stop else "others"
        if others and not layout.has_one_copy:
            waited = others[0]["seconds"] - kill["seconds"]
            self.seconds[f"survivors, {kind}"].append(waited)
            what = f"{kill['how']}, {kill['kill']}, generation {kill['generation']}"
            slowest = self.slowest[kind]
            slowest.append((round(waited, 3), f"{what}, at {kill['seconds']:.3f}"))
            self.slowest[kind] = sorted(slowest, reverse=True)[:5]
        starts = [each for each in later if "start" in each and each["unit"] == kill["unit"]]
        if own and starts:
            copy = "one copy" if layout.has_one_copy else "replicas"
            warm = "spare" if starts[0].get("warm") else "cold"
            kind = f"new process, {copy}, {warm}, {kind}"
            self.seconds[kind].append(own[0]["seconds"] - kill["seconds"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "kills": self.kills.total(),
            "launchers killed": self.launchers_killed,
            "runs": dict(self.runs),
            "problems": self.problems,
            "hangs": sum(problem.startswith("hang") for problem in self.problems),
            "steps that ranks went back": {str(k): v for k, v in sorted(self.steps_back.items())},
            "by signal": dict(self.signals),
            "by phase": dict(sorted(self.kills.items())),
            "slowest": self.slowest,
            "seconds": {kind: summary(found) for kind, found in sorted(self.seconds.items())},
        }


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.99))
    named = {"p50": p50, "p99": p99, "longest": ordered[-1]}
    return {"count": len(ordered), **{name: round(value, 3) for name, value in named.items()}}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="end after the run that lasts longer"
    )
    parser.add_argument("--kills", type=int, default=0, help="end after so many; default 60")
    parser.add_argument("--layout", action="append", choices=sorted(LAYOUTS), help="only this one")
    parser.add_argument("--steps", type=int, default=400, help="of a run")
    parser.add_argument("--every", type=int, default=25, help="steps between kills")
    parser.add_argument("--signal", default="", help="this one only")
    parser.add_argument("--launchers", action="store_true", help="launchers in place of ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="also the folders of good runs")
    parser.add_argument("--json", default="", help="figures so far, after each run")
    args = parser.parse_args()
    args.kills = args.kills or (10**9 if args.minutes else 60)
    return args


def main() -> None:
    args = options()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    names = args.layout or list(LAYOUTS)
    if args.launchers:
        names = [name for name in names if LAYOUTS[name].has_one_copy]
    num_launchers = 2 if args.launchers else 0
    references: dict[str, list[Any]] = {}
    random_, figures, number = random.Random(args.seed), Figures(), 0
    began = time.monotonic()
    while figures.kills.total() + figures.launchers_killed < args.kills:
        name = names[number % len(names)]
        layout, number = LAYOUTS[name], number + 1
        if name not in references:
            whole = run(folder / f"reference{number}", layout, [], args.steps, 0.0)
            assert not whole.problem, f"{whole.problem}: {folder}"
            references[name] = whole.records
        plan = plan_of(random_, layout, args.steps, args.every, args.signal)
        plan = [] if args.launchers else plan
        is_last = number % LAUNCHER_EVERY == 0 and not args.launchers
        kill_at = random_.uniform(0.1, 5.0) if is_last else 0.0
        out = folder / f"run{number}"
        found = run(out, layout, plan, args.steps, kill_at, num_launchers)
        problem = compare(layout, found, references[name], args.steps)
        figures.add(name, layout, found)
        if problem:
            figures.problems.append(f"{problem}: {name}: {out}")
            print(figures.problems[-1], flush=True)
        elif not args.keep:
            shutil.rmtree(out)
        result = figures.as_dict()
        result["minutes"] = round((time.monotonic() - began) / 60, 1)
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
        print(
            f"{name}: {figures.kills.total()} kills, {len(figures.problems)} problems", flush=True
        )
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            break
    print(json.dumps(result, indent=2))
    sys.exit(bool(figures.problems))


if __name__ == "__main__":
    main()
